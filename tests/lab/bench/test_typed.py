from __future__ import annotations

import pytest

from deltaforge_lab.bench.decode import LogKind
from deltaforge_lab.bench.typed import bench_typed


@pytest.mark.parametrize("source", list(LogKind))
def test_measures_every_row(source: LogKind) -> None:
    """The benchmark reads all rows of the source's log, with the columns of orders6, and returns positive numbers."""
    measured = bench_typed(source, rows=1000, repeats=1)

    assert (measured["rows"], measured["columns"]) == (1000, 6)
    assert 150 < measured["json_bytes_per_row"] < 190
    assert all(number > 0 for number in measured.values())
