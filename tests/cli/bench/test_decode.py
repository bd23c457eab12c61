from __future__ import annotations

from deltaforge_dagster.cli.bench.decode import bench_decode


def test_measures_what_it_decodes() -> None:
    """The benchmark decodes its whole stream and returns plain positive numbers."""
    measured = bench_decode(rows=1000, repeats=1)

    assert measured["rows"] == 1000
    assert 150 < measured["log_bytes_per_row"] < 200
    assert all(number > 0 for number in measured.values())
