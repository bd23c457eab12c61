"""The segments that are ready to be delivered to sinks.

Without processors this is every segment of the journal. With processors a segment is ready once the
chain has processed it, in journal order, and sinks get the processed segment. A segment that some
sink had begun to receive before processors were added to the file is delivered to all sinks as
captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore


class Segments(Protocol):
    """Provides segments by number."""

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last`, both included, as they must be sent."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A fixed list of segments.

    Attributes:
        rows: The segments as they must be sent, by ascending number.
    """

    rows: Sequence[SegmentRow]

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last`, both included."""
        rows = (row for row in self.rows if first is None or row.segment >= first)
        return [row for row in rows if last is None or row.segment <= last][:limit]


class PendingSegments:
    """The segments of one pipeline that are ready to be delivered.

    Args:
        store: Lists the segments.
        pipeline: Name of the pipeline.
        chained: Whether the pipeline has processors.
    """

    def __init__(self, store: StateStore, pipeline: str, *, chained: bool) -> None:
        self._store = store
        self._pipeline = pipeline
        self._chained = chained

    def segment(self, number: int) -> SegmentRow | None:
        """Return a segment, None if it does not exist or is not ready."""
        rows = self.segments(first=number, last=number)
        return rows[0] if rows else None

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last`, both included.

        The list ends before the first segment that is not ready.
        """
        rows = self._store.segments.read(self._pipeline, first=first, last=last, limit=limit)
        if self._chained:
            rows = list(takewhile(lambda row: row.chain_hash is not None, rows))
        return [row.delivered for row in rows]

    def reached(self, captured: str) -> str:
        """Return the position up to which segments are ready.

        This is the captured position, or the start of the first segment that is not ready.
        """
        if self._chained:
            for row in self._store.segments.read(self._pipeline):
                if row.chain_hash is None:
                    return row.start_position
        return captured
