"""Watch the queue of dead letters during a run: warn when it fills up, drop entries by age."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.pipeline.run_context import HeldLease
from deltaforge_dagster.state.records import DeadLetterDepth
from deltaforge_dagster.state.store import StateStore

_FIRST_SECONDS = 5.0
_EVERY_SECONDS = 60.0

_WARNING, _ERROR = 0.8, 0.95
"""Shares of `max_entries` from which a queue's size is a warning, and an error."""

Level = Literal["warning", "error"]


def saturation(depth: DeadLetterDepth, max_entries: int) -> tuple[Level, str] | None:
    """Return the severity of a queue's fill level and a sentence; None if there is enough room."""
    share = depth.entries / max_entries
    if share < _WARNING:
        return None
    level: Level = "error" if share >= _ERROR else "warning"
    return level, f"the dead letters are {share:.0%} full, {depth.entries} of {max_entries} entries"


class DeadLetterWatch:
    """Watches the queue of one pipeline during a run.

    Args:
        spec: The pipeline.
        store: Where the entries are.
        lease: The run's lease; fences the removal of old entries.
        warn: Called when the queue gets full, and when its limits have removed entries.
    """

    def __init__(
        self, spec: PipelineSpec, store: StateStore, lease: HeldLease, warn: Callable[[str], None]
    ) -> None:
        self._pipeline = spec.metadata.name
        self._options = spec.spec.journal
        self._store = store
        self._lease = lease
        self._warn = warn
        self._next_look = time.monotonic() + _FIRST_SECONDS
        self._warned_level: Level | None = None
        self._lost: int | None = None

    def poll(self) -> None:
        """Drop entries that are too old, and warn if the queue is full; acts once a minute."""
        if not self._options.enabled or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _EVERY_SECONDS
        if age := self._options.dlq.max_age_secs:
            self._lease.write(lambda writer: writer.dead_letters.expire(age))
        depth = self._store.dead_letters.depth(self._pipeline)
        full = saturation(depth, self._options.dlq.max_entries)
        if full is not None and full[0] != self._warned_level:
            self._warn(f"{self._pipeline}: {full[1]} ({full[0]})")
        self._warned_level = None if full is None else full[0]
        lost = depth.evicted + depth.rejected + depth.expired
        if self._lost is not None and lost > self._lost:
            self._warn(
                f"{self._pipeline}: {lost - self._lost} dead letters were lost to the queue's "
                f"limits lately; so far {depth.evicted} were dropped for newer ones, "
                f"{depth.rejected} rejected, {depth.expired} dropped for their age"
            )
        self._lost = lost
