from __future__ import annotations

import pytest

from deltaforge_dagster.sources.postgres.warm import detached_decoder
from deltaforge_lab.bench.decode import LogKind, bench_decode
from deltaforge_lab.synthetic import postgres_type_families as type_families


@pytest.mark.parametrize(("source", "size"), [(LogKind.POSTGRES, 175), (LogKind.MYSQL, 87)])
def test_measures_what_it_decodes(source: LogKind, size: int) -> None:
    """The benchmark decodes its whole stream and returns positive numbers."""
    measured = bench_decode(source, rows=1000, repeats=1)

    assert measured["rows"] == 1000
    assert abs(measured["log_bytes_per_row"] - size) < 25
    assert all(number > 0 for number in measured.values())


@pytest.mark.parametrize("family", type_families.NAMES)
def test_measures_each_family(family: str) -> None:
    """Every type family is decoded to its end without an error."""
    stream = type_families.stream(family, 100)
    decoded = detached_decoder().feed(stream, len(stream))

    assert (decoded.error, decoded.consumed) == (None, len(stream))
    assert bench_decode(LogKind.POSTGRES, rows=100, repeats=1, family=family)["rows"] == 100
