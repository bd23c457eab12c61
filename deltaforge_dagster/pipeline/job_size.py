"""How many segments one Spark job covers."""

from __future__ import annotations

from collections.abc import Sequence

from deltaforge_dagster.state.records import SegmentRow


def first_together(rows: Sequence[SegmentRow], most: int, max_bytes: int) -> Sequence[SegmentRow]:
    """Return the leading segments that one job covers.

    Args:
        rows: Segments in order.
        most: Maximum number of segments.
        max_bytes: Maximum bytes of their files; the first segment may exceed it.
    """
    total = 0
    for count, row in enumerate(rows[:most]):
        total += row.bytes
        if count and total > max_bytes:
            return rows[:count]
    return rows[:most]
