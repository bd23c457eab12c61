"""How many segments one Spark job takes."""

from __future__ import annotations

from collections.abc import Sequence

from deltaforge_dagster.state.records import SegmentRow


def first_together(rows: Sequence[SegmentRow], most: int, max_bytes: int) -> Sequence[SegmentRow]:
    """Return the first segments, those that one job takes.

    Args:
        rows: Segments in order.
        most: So many at most.
        max_bytes: Bytes of their files at most, unless the first one alone has more.
    """
    total = 0
    for count, row in enumerate(rows[:most]):
        total += row.bytes
        if count and total > max_bytes:
            return rows[:count]
    return rows[:most]
