"""How many segments one Spark job takes."""

from __future__ import annotations

from dataclasses import asdict

import hypothesis.strategies as st
from hypothesis import given

from deltaforge_dagster.pipeline.run_context import first_together
from deltaforge_dagster.state.records import SegmentRow
from tests.state.make import new_segment


def rows_of(sizes: list[int]) -> list[SegmentRow]:
    """Return segments with files of these sizes."""
    return [
        SegmentRow(**asdict(new_segment(number, bytes=size)), range=1, epoch=1, created_at=0.0)
        for number, size in enumerate(sizes, 1)
    ]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 5), st.integers(0, 20))
def test_a_job_takes_what_fits_and_always_one(sizes: list[int], most: int, room: int) -> None:
    """It takes the first segments, one more would be too many, and a large one goes alone."""
    rows = rows_of(sizes)

    taken = first_together(rows, most, room)

    count = len(taken)
    assert [*taken] == rows[:count]
    assert min(1, len(rows)) <= count <= most
    assert count <= 1 or sum(sizes[:count]) <= room
    assert count in {most, len(rows)} or sum(sizes[: count + 1]) > room
