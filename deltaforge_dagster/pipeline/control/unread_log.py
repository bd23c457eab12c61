"""The source's log around a pipeline's positions: measure and record it, and watch its head.

Ticks and runs record how much log is unread. One measurement is a look. Few looks are kept: the
older a look is, the further it is from the next one, so that times are accurate to a quarter of
their age. They show since when a position is not the log's end, and how fast the log grows.

A tick that finds nothing to do watches the head for the rest of its time, so that a change need not
wait for the next tick (`HeadWatch`): it asks five times a second where the log ends, which costs
the server next to nothing, and looks for changes only when the log has grown. No slot is held and
no log is read meanwhile. The log of a server whose other tables are busy grows all the time, so
looks that find nothing are a second apart at least, and take at most a tenth of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import MeasuredSource, RetainedLog, Source, WatchableSource
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import LogLook, SourceLog
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.2
_PAUSE_SECONDS = 1.0  # at least, after a look that found no change
_PAUSE_FACTOR = 9.0  # times the duration of that look, so that looks take a tenth of the time
_PATIENCE = 2.0
"""How much longer than the watch its connection may last.

This covers connecting, and a server that does not answer.
"""


_SPACING = 1 / 8
"""The minimum distance between two looks, as a fraction of their age."""

_WINDOW = 120.0
"""Seconds over which growth is measured."""

_SHORTEST = 10.0
"""Fewest seconds over which growth is measured."""


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
    """Return `seen` with the sizes that the source measured, and the growth over earlier looks."""
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


def kept_looks(
    looks: Sequence[LogLook], new: LogLook, positions: Sequence[Position]
) -> list[LogLook]:
    """Return the looks from which growth and age of the unread log can still be told, in order.

    Args:
        looks: The looks kept so far.
        new: A later look.
        positions: The positions for which `behind_since` will be called.
    """
    passed = [
        number
        for number, look in enumerate(looks)
        if all(parse_position(look.end) <= position for position in positions)
    ]
    first = passed[-1] if passed else 0
    kept = [new]
    for number in range(len(looks) - 1, -1, -1):
        look = looks[number]
        age = new.at - look.at
        if number < first and age > _WINDOW:
            break
        if kept[-1].at - look.at >= _SPACING * age or number in {0, first}:
            kept.append(look)
    return kept[::-1]


def behind_since(looks: Sequence[LogLook], position: Position) -> float | None:
    """Return since when, at the earliest, there has been log after a position.

    Returns None if there is no such log.
    """
    since = None
    for look in reversed(looks):
        end: Position = parse_position(look.end)
        if end <= position:
            return None if since is None else look.at
        since = look.at
    return since


def growth(looks: Sequence[LogLook]) -> float | None:
    """Return by how many bytes a second the log that the server retains grows; None if it does not.

    A server frees log in steps, so the amount goes up and down also while all is well. What counts
    is the least amount: that of the later half of the time compared with that of the earlier half.
    """
    recent = [
        (look.at, look.retained)
        for look in looks
        if look.retained is not None and look.at >= looks[-1].at - _WINDOW
    ]
    if len(recent) < 2 or recent[-1][0] - recent[0][0] < _SHORTEST:
        return None
    middle = (recent[0][0] + recent[-1][0]) / 2
    earlier = [(at, size) for at, size in recent if at < middle]
    later = [(at, size) for at, size in recent if at >= middle]
    grown = min(size for _, size in later) - min(size for _, size in earlier)
    return grown / (later[0][0] - earlier[0][0]) if grown > 0 else None


class HeadWatch:
    """Watches one source; a context manager, which connects on entry and disconnects on exit.

    Enter it before the tick looks for changes: then nothing is missed between that look and the
    watch. An error of the source only ends the watch: the next tick meets it, too, and reports it.

    Attributes:
        until: When to stop watching, by the monotonic clock.

    Args:
        build_source: Creates the source.
        until: As above.
    """

    def __init__(self, build_source: Callable[[], Source], until: float) -> None:
        self._build_source = build_source
        self.until = until
        self._source: Source | None = None
        self._ends: Generator[object] | None = None
        self._seen: object = None

    def __enter__(self) -> Self:
        seconds = self.until - time.monotonic()
        try:
            self._source = self._build_source()
            if isinstance(self._source, WatchableSource) and seconds > 0:
                ends = self._source.log_ends(seconds + _PATIENCE)
                self._seen = next(ends)
                self._ends = ends
        except (DeltaforgeError, StopIteration) as error:
            logger.debug("not watched: %s", error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ends is not None:
            self._ends.close()
        if self._source is not None:
            self._source.close()

    def sees_changes(self, after: Position) -> bool:
        """Return True once the source has changes after a position, False once the time is up."""
        if self._ends is None or self._source is None:
            return False
        look_at = 0.0
        try:
            for end in self._ends:
                began = time.monotonic()
                if end != self._seen and began >= look_at:
                    if self._source.has_changes(after):
                        return True
                    self._seen = end
                    now = time.monotonic()
                    look_at = now + max(_PAUSE_SECONDS, _PAUSE_FACTOR * (now - began))
                if time.monotonic() + _ASK_SECONDS >= self.until:
                    break
                time.sleep(_ASK_SECONDS)
        except DeltaforgeError as error:
            logger.debug("watched no longer: %s", error)
        return False
