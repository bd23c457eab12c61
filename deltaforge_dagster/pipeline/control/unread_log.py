"""Measure the source's log around a pipeline's positions, and record it; for ticks and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltaforge_dagster.pipeline.control.unread_log import behind_since, growth, kept_looks
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import MeasuredSource, RetainedLog, Source
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import LogLook, SourceLog
from deltaforge_dagster.state.store import StateStore

_NOTED_EVERY = 15.0
"""Seconds after which an unchanged measurement is recorded again."""

_CALM = 0.1
"""Below this part of its limit, a slot's log goes up and down by itself: while the captured tables
are quiet, a run confirms what others write only every 64 MiB.
"""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """What a run has read of the log, and not captured yet.

    Attributes:
        passed: A position after the captured one, up to which there is nothing to capture; None
            without one.
        rows: Rows of the transaction that is being received, so far; 0 if none is.
        since: When the first rows of that transaction arrived, in seconds since 1970.
    """

    passed: Position | None = None
    rows: int = 0
    since: float | None = None


NOTHING = ReadAhead()


def note_unread_log(
    store: StateStore, name: str, source: Source, received: ReadAhead = NOTHING
) -> None:
    """Measure how much log there is around the pipeline's positions, and record it.

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
    if row is None or text is None:
        return
    position: Position = parse_position(text)
    if received.passed is not None:
        position = max(position, received.passed)
    start = row.confirmed_position or row.start_position
    confirmed: Position | None = None if start is None else parse_position(start)
    retained = (
        source.retained_log(position, confirmed) if isinstance(source, MeasuredSource) else None
    )
    before, now = store.pipelines.source_log(name), store.now()
    if retained is None and received is NOTHING:
        return  # a tick records only whether there are changes (`note_unread_changes`)
    seen = SourceLog(now, receiving_rows=received.rows, receiving_since=received.since)
    looks = None
    if retained is not None:
        look = LogLook(now, retained.end.to_json(), retained.retained)
        positions = [position] if confirmed is None else [position, confirmed]
        looks = kept_looks(store.pipelines.log_looks(name), look, positions)
        seen = measured_log(seen, retained, looks, position, confirmed)
    if before is not None and before.bytes is not None and seen.bytes is not None:
        if seen.bytes > before.bytes:
            seen = replace(seen, growing_since=before.growing_since or before.seen_at)
        elif seen.bytes == before.bytes:
            since = before.growing_since if seen.bytes else None
            seen = replace(seen, growing_since=since, unread=before.unread)
    if (
        before is None
        or replace(before, seen_at=now, seconds_left=seen.seconds_left) != seen
        or now - before.seen_at > _NOTED_EVERY
    ):
        store.pipelines.note_source_log(name, seen, looks)


def measured_log(
    seen: SourceLog,
    retained: RetainedLog,
    looks: Sequence[LogLook],
    captured: Position,
    confirmed: Position | None,
) -> SourceLog:
    """Return `seen` completed with the source's measurement and the trend of the looks."""
    seen = replace(
        seen,
        bytes=retained.bytes,
        retained=retained.retained,
        unread_since=behind_since(looks, captured),
        unconfirmed=retained.unconfirmed,
        unconfirmed_since=None if confirmed is None else behind_since(looks, confirmed),
        limit=retained.limit,
        room=retained.room,
        kept_seconds=retained.kept_seconds,
        limited_by=retained.limited_by,
        growth=growth(looks),
    )
    return replace(seen, seconds_left=_seconds_left(seen))


def _seconds_left(seen: SourceLog) -> float | None:
    """Return after how many seconds the server will discard needed log; None if it will not."""
    if seen.limit is not None and seen.retained is not None:
        if seen.retained >= seen.limit:
            return 0.0
        if seen.growth is None or seen.retained < _CALM * seen.limit:
            return None
        return (seen.limit - seen.retained) / seen.growth
    if seen.kept_seconds is not None and seen.unread_since is not None:
        return max(0.0, seen.kept_seconds - (seen.seen_at - seen.unread_since))
    return None


def note_unread_changes(store: StateStore, name: str, *, unread: bool) -> None:
    """Record whether the log that is not captured yet has changes to capture."""
    now = store.now()
    before = store.pipelines.source_log(name) or SourceLog(0.0)
    if before.unread != unread or now - before.seen_at > _NOTED_EVERY:
        store.pipelines.note_source_log(name, replace(before, seen_at=now, unread=unread))
