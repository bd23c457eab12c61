"""How long the demo waits for changes to arrive, and what it says that it waits for."""

from __future__ import annotations

from collections.abc import Mapping

from deltaforge_dagster.cli.dagster_processes import ANSWER_SECONDS
from deltaforge_dagster.cli.output import duration

STUCK_SECONDS = 120.0
"""A run that works delivers something within that time."""

START_SECONDS = ANSWER_SECONDS + STUCK_SECONDS
"""A run has begun to work by then: a tick has asked for it, and its process has had its time."""

_QUIET_SECONDS = 10.0
"""After so long without an arrival it is said what is waited for."""


class Patience:
    """Waiting for deliveries: for a run to start, while there is none, then for what it delivers.

    Times are those of a clock that never goes back. Runs that come and go do not make the waiting for
    one arrival longer than a start and a delivery may take.

    Args:
        now: The time now.
    """

    def __init__(self, now: float) -> None:
        self._arrived: Mapping[str, int] | None = None
        self._moved = now
        self._run: str | None = None
        self._since = now
        self._said: str | None = None

    def look(
        self, now: float, arrived: Mapping[str, int], run: str | None, *, writing: bool
    ) -> str | None:
        """Take note of a moment; return what there is to say of it.

        Args:
            now: The time.
            arrived: How many changes each sink has.
            run: The run that works now.
            writing: Changes are still written.
        """
        if writing or arrived != self._arrived:
            self._arrived, self._moved, self._said = dict(arrived), now, None
        if run != self._run:
            self._run, self._since = run, now
        what = self._awaited()
        if what == self._said or now - max(self._moved, self._since) < _QUIET_SECONDS:
            return None
        self._said = what
        return f"waiting for {what}"

    def over(self, now: float) -> str | None:
        """Say why there is nothing more to wait for; None while there is."""
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
