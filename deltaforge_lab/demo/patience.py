"""How long the demo waits for changes to arrive, and what it reports while it waits."""

from __future__ import annotations

from collections.abc import Mapping

from deltaforge_dagster.cli.installation.dagster_processes import ANSWER_SECONDS
from deltaforge_dagster.pipeline.plural import duration

STUCK_SECONDS = 120.0
"""A working run delivers something within this time."""

START_SECONDS = ANSWER_SECONDS + STUCK_SECONDS
"""A run begins to work within this time: one tick to request it, and its process's start."""

_QUIET_SECONDS = 10.0
"""After this time without an arrival the demo reports what it waits for."""


class Patience:
    """Limits the wait for deliveries: first for a run to start, then for what the run delivers.

    All times are of a monotonic clock. A new run restarts the limit for its delivery; while no run
    works, the time since the last arrival counts, however many runs have come and gone.

    Args:
        now: The current time.
    """

    def __init__(self, now: float) -> None:
        self._arrived: Mapping[str, int] | None = None
        self._moved = now
        self._run: str | None = None
        self._since = now
        self._reported: str | None = None

    def poll(
        self, now: float, arrived: Mapping[str, int], run: str | None, *, writing: bool
    ) -> str | None:
        """Record the current state; return a message to report, or None.

        Args:
            now: The current time.
            arrived: How many changes each sink has.
            run: The run that holds the lease now, None without one.
            writing: Whether changes are still being written.
        """
        if writing or arrived != self._arrived:
            self._arrived, self._moved, self._reported = dict(arrived), now, None
        if run != self._run:
            self._run, self._since = run, now
        what = self._awaited()
        if what == self._reported or now - max(self._moved, self._since) < _QUIET_SECONDS:
            return None
        self._reported = what
        return f"waiting for {what}"

    def over(self, now: float) -> str | None:
        """Return why waiting longer is pointless, or None while it is not."""
        nothing = now - self._moved
        if self._run is None:
            over, why = nothing > START_SECONDS, "and no run works"
        else:
            over = min(nothing, now - self._since) > STUCK_SECONDS
            why = f"though run {self._run} works"
        return f"nothing has arrived for {duration(nothing)}, {why}" if over else None

    def _awaited(self) -> str:
        if self._run is None:
            return f"a run: its process may take {duration(ANSWER_SECONDS)} to start"
        return f"what run {self._run} delivers"
