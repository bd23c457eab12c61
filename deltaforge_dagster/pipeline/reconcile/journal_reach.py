"""Up to which segment the journal certainly has everything that a read of the source saw."""

from __future__ import annotations

from dataclasses import dataclass

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore

_MEASURING_SECONDS = 2.0
"""How long a look at the source's log takes at most (`MeasuredSource.retained_log`).

Its time is that of its end; what it has seen may be older.
"""


@dataclass(frozen=True, slots=True)
class JournalReach:
    """Answers for one pipeline.

    Attributes:
        store: The state store.
        pipeline: Name of the pipeline.
        source: Asked for changes while no run is at work.
    """

    store: StateStore
    pipeline: str
    source: Source

    def through(self, position: Position, read_at: float) -> int | None:
        """Return a segment up to which the journal has all changes before a position.

        A log that has no changes of captured tables makes no segments, so the captured position
        may stay before `position` for ever. Then what counts is that somebody has looked since and
        found nothing more: the run at work, or else the source itself.

        Args:
            position: The position of a read.
            read_at: When the read had begun, by the store's clock.

        Returns:
            The segment; None while that is not certain.
        """
        for certain in (self._captured, self._read_to_its_end, self._has_no_more):
            if certain(position, read_at):
                row = self.store.pipelines.get(self.pipeline)
                assert row is not None
                return row.next_segment - 1
        return None

    def _captured(self, position: Position, read_at: float) -> bool:  # noqa: ARG002
        return not self._end() < position

    def _read_to_its_end(self, position: Position, read_at: float) -> bool:  # noqa: ARG002
        """Return whether somebody has found all log captured that there was at the read."""
        log = self.store.pipelines.source_log(self.pipeline)
        # Not `log.seen_at`: a tick that only looks for changes moves it, and measures nothing.
        looks = self.store.pipelines.log_looks(self.pipeline)
        since = read_at + _MEASURING_SECONDS
        if log is None or log.bytes is None or not looks or looks[-1].at < since:
            return False
        return log.unread_since is None or log.unread_since >= since

    def _has_no_more(self, position: Position, read_at: float) -> bool:  # noqa: ARG002
        """Return whether no run is at work, and the source has no changes to capture."""
        return not self._lease_is_active() and not self.source.has_changes(self._end())

    def _lease_is_active(self) -> bool:
        lease = self.store.leases.get(self.pipeline)
        return lease is not None and lease.active_at(self.store.now())

    def _end(self) -> Position:
        """Return the end of the journal."""
        row = self.store.pipelines.get(self.pipeline)
        assert row is not None
        position = row.captured_position or row.start_position
        assert position is not None, "a table that a sink has was captured"
        end: Position = parse_position(position)
        return end
