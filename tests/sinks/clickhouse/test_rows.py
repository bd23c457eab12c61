"""Tests of the versions of rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.sinks.clickhouse.rows import (
    SegmentPlace,
    VersionMaker,
    VersionSpan,
    has_version,
    place_schema,
    version_column,
)
from deltaforge_dagster.sinks.tables.staged import ChangePlace

PLACES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 10_000_000), st.integers(0, 4 * 10**15)),
    min_size=1,
    max_size=20,
)


def maker(*ends: int, by_time: bool = False) -> VersionMaker:
    """Return what makes versions of segments that end at these positions."""
    segments = {
        number: SegmentPlace(end - 1, end, 1_700_000_000 + number)
        for number, end in enumerate(ends)
    }
    return VersionMaker(segments, by_time)


def rows(places: list[tuple[int, int, int]]) -> pa.RecordBatch:
    """Return rows at these places: segment, ordinal, time."""
    schema = place_schema()
    columns = [[one[at] for one in places] for at in range(3)]
    arrays: list[pa.Array[Any]] = [
        pa.array(column, pa.int64()).cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@given(PLACES, st.booleans())
def test_columns_and_single_versions_agree(
    places: list[tuple[int, int, int]], by_time: bool
) -> None:
    """A version is the same number however it is made, and their span is that of the numbers."""
    versions = maker(5, 2**64 - 1, 2**63, 7, by_time=by_time)
    made = versions.versions(rows(places))
    expected = [versions.version(ChangePlace(one[0], one[1]), one[2]) for one in places]
    found: list[Any] = version_column(made).to_pylist()
    assert [int.from_bytes(one, "little") for one in found] == expected
    span = VersionSpan()
    span.add_all(made)
    assert (span.first, span.last) == (min(expected), max(expected))
    assert has_version(made, expected[-1])
    assert not has_version(made, max(expected) + 1)


@given(PLACES)
def test_they_are_in_the_order_of_the_journal(places: list[tuple[int, int, int]]) -> None:
    """By segment, also if several end at one position, and by place in it, also if there are more than four million."""
    versions = maker(5, 5, 5, 9)
    ordered = sorted({(one[0], one[1]) for one in places})
    made = [versions.version(ChangePlace(*one), 0) for one in ordered]
    assert made == sorted(set(made))
    span = VersionSpan()
    span.add_all(versions.versions(rows(places)))
    assert versions.floor(span) <= made[0]


def test_what_is_before_all_versions_of_a_commit() -> None:
    """The end of the segment before it is; what was added there without reading the log is not."""
    before = maker(5).version(ChangePlace(0, 1000), 0)
    log = VersionMaker({0: SegmentPlace(5, 9, 1_700_000_009.0)}, by_time=False)
    read = VersionMaker({0: SegmentPlace(5, 5, 1_700_000_009.0)}, by_time=False)
    for versions in (log, read):
        assert before < versions.floor(VersionSpan()) <= versions.version(ChangePlace(0, 0), 0)
