"""The segments that sinks may get, as they get them.

Without processors that is every segment of the journal. With processors a segment is given to sinks
once the chain has run over it, in the journal's order, and they get what the chain has made of it;
a segment that some sink had begun before the file named processors stays as it was captured, for
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore


class Segments(Protocol):
    """Segments that somebody may send, by number."""

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return segments from `first` to `last`, both included, as they are to be sent."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """Segments at hand, in order of their numbers.

    Attributes:
        rows: As they are to be sent.
    """

    rows: Sequence[SegmentRow]

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return those from `first` to `last`, both included."""
        found = (row for row in self.rows if first is None or row.segment >= first)
        return [row for row in found if last is None or row.segment <= last][:limit]


class Deliverable:
    """The segments of one pipeline that sinks may get.

    Args:
        store: Where segments are listed.
        pipeline: Name of the pipeline.
        chained: Whether the pipeline has processors.
    """

    def __init__(self, store: StateStore, pipeline: str, *, chained: bool) -> None:
        self._store = store
        self._pipeline = pipeline
        self._chained = chained

    def segment(self, number: int) -> SegmentRow | None:
        """Return a segment, None when there is none, or not yet."""
        found = self.segments(first=number, last=number)
        return found[0] if found else None

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return segments by number, from `first` to `last` (both included), up to one that waits."""
        rows = self._store.segments(self._pipeline, first=first, last=last, limit=limit)
        if self._chained:
            rows = list(takewhile(lambda row: row.chain_hash is not None, rows))
        return [row.delivered for row in rows]

    def reached(self, captured: str) -> str:
        """Return up to where they reach: the captured position, or where the first that waits begins."""
        if self._chained:
            for row in self._store.segments(self._pipeline):
                if row.chain_hash is None:
                    return row.start_position
        return captured
