"""How much of the source's log is not captured yet: measured by ticks and runs, recorded in the state store."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import MeasuredSource, Source
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import SourceLog
from deltaforge_dagster.state.store import StateStore

_NOTED_EVERY = 15.0
"""Seconds after which an unchanged measurement is recorded again."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """What a run has read of the log, and not captured yet.

    Attributes:
        passed: A position behind the captured one, up to which there is nothing to capture; None without one.
        rows: Rows of the transaction that is being received, so far; 0 if none is.
        since: When its first rows came, in seconds since 1970.
    """

    passed: Position | None = None
    rows: int = 0
    since: float | None = None


NOTHING = ReadAhead()


def note_unread_log(
    store: StateStore, name: str, source: Source, received: ReadAhead = NOTHING
) -> None:
    """Measure how much log there is that is not captured, and record it.

    Args:
        store: Where it is recorded.
        name: The pipeline.
        source: Its source; one that cannot measure its log is asked nothing.
        received: What a run has read beyond the captured position.

    Raises:
        DeltaforgeError: The server or the store cannot be reached.
    """
    row = store.pipelines.get(name)
    text = None if row is None else row.captured_position or row.start_position
    if text is None:
        return
    position: Position = parse_position(text)
    if received.passed is not None:
        position = max(position, received.passed)
    found = source.unread_log(position) if isinstance(source, MeasuredSource) else None
    before, now = store.pipelines.source_log(name), store.now()
    if found is None and received is NOTHING:
        return  # what a tick knows of it is whether there are changes
    seen = SourceLog(
        now,
        None if found is None else found.bytes,
        retained=None if found is None else found.retained,
        receiving_rows=received.rows,
        receiving_since=received.since,
    )
    if before is not None and before.bytes is not None and seen.bytes is not None:
        if seen.bytes > before.bytes:
            seen = replace(seen, growing_since=before.growing_since or before.seen_at)
        elif seen.bytes == before.bytes:
            since = before.growing_since if seen.bytes else None
            seen = replace(seen, growing_since=since, unread=before.unread)
    if (
        before is None
        or replace(before, seen_at=now) != seen
        or now - before.seen_at > _NOTED_EVERY
    ):
        store.pipelines.note_source_log(name, seen)


def note_unread_changes(store: StateStore, name: str, *, unread: bool) -> None:
    """Record whether the log that is not captured has changes that are to be captured."""
    now = store.now()
    before = store.pipelines.source_log(name) or SourceLog(0.0)
    if before.unread != unread or now - before.seen_at > _NOTED_EVERY:
        store.pipelines.note_source_log(name, replace(before, seen_at=now, unread=unread))
