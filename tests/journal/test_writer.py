"""The summary of a segment agrees with its rows."""

from __future__ import annotations

import pyarrow as pa

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.journal.writer import Summary
from tests.journal.changes import Change, batch, change


def summary(*groups: list[Change]) -> Summary:
    """Return the summary of row groups."""
    result = Summary()
    start = 0
    for group in groups:
        rows = pa.Table.from_batches([batch(group)])
        numbers = pa.array(range(start, start + len(group)))
        synthetic = pa.nulls(len(group), FRAME.field("synthetic").type)
        columns = [pa.array([1] * len(group)), numbers, *rows.columns, synthetic]
        result.add(pa.Table.from_arrays(columns, schema=FRAME))
        start += len(group)
    return result


def test_counts_per_table_and_op() -> None:
    """Changes are counted per full table name and op, over all row groups."""
    found = summary(
        [change(0, table="a", op="c"), change(1, table="a", op="u"), change(2, table="b", op="c")],
        [change(3, table="a", op="c"), change(4, table="a", op="t")],
    )

    assert found.counts == {"public.a": {"c": 2, "u": 1, "t": 1}, "public.b": {"c": 1}}


def test_full_name_without_a_schema() -> None:
    """If a source has no schemas, the database qualifies the table."""
    found = summary([change(0, db="shop", schema=None, table="a", op="c")])

    assert found.counts == {"shop.a": {"c": 1}}


def test_schema_versions() -> None:
    """If a table is altered within the segment, all versions of its rows are listed, the last one last."""
    found = summary(
        [change(0, table="a", schema_version="v2"), change(1, table="b", schema_version="v9")],
        [change(2, table="a", schema_version="v3"), change(3, table="a", schema_version="v1")],
        [change(4, table="b", schema_version=None), change(5, table="c", schema_version=None)],
    )

    assert found.schema_versions == {"public.a": ["v2", "v3", "v1"], "public.b": "v9"}


def test_times_are_the_extremes() -> None:
    """Event times need not be ascending: the earliest and the latest are kept."""
    found = summary([change(0, ts_us=50), change(1, ts_us=20)], [change(2, ts_us=90)])

    assert (found.first_ts_us, found.last_ts_us) == (20, 90)
