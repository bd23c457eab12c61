"""Delays between attempts, and whether a run waits for the next attempt.

Delays double, with jitter, up to a limit.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from deltaforge_dagster.errors import DeltaforgeError, Retryable

PATIENCE = 5.0
"""How many seconds a run waits at most for a sink or a processor that fails."""

ASKED_PATIENCE = 30.0
"""The same if the server has said when to try again (`Retryable.retry_after`)."""


class Backoff:
    """Delays of 1, 2, 4 ... up to `maximum` seconds, each varied at random by up to a fifth."""

    def __init__(self, initial: float = 1.0, maximum: float = 60.0, failures: int = 0) -> None:
        self._initial = initial
        self._maximum = maximum
        self._failures = failures

    def next_delay(self) -> float:
        """Return the seconds to wait after one more failure."""
        # After so many doublings every maximum is reached; the power must not overflow.
        delay = min(self._initial * 2.0 ** min(self._failures, 30), self._maximum)
        self._failures += 1
        return delay * random.uniform(0.8, 1.2)  # noqa: S311 - spreads retries, keeps no secret

    def reset(self) -> None:
        """Start over after a success."""
        self._failures = 0


class RetryPatience:
    """Decides whether a run waits for something that fails.

    It waits if the next attempt comes soon after the first failure in a row.

    Args:
        seconds: The longest time from the first failure in a row, or from progress after it, to
            such an attempt. At most `PATIENCE`, but `ASKED_PATIENCE` if a server has said when to
            try again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, PATIENCE)
        self._failing: _Failing | None = None

    def failed(self, error: DeltaforgeError, delay: float) -> None:
        """Record a failure; the next attempt follows after `delay` seconds."""
        if not isinstance(error, Retryable):
            self._failing = None
            return
        now = time.monotonic()
        since = now if self._failing is None else self._failing.since
        asked = error.retry_after is not None
        seconds = ASKED_PATIENCE if asked else self._seconds
        self._failing = _Failing(since, now + delay, seconds)

    def succeeded(self) -> None:
        """Forget the failures before."""
        self._failing = None

    def lasts(self, moved_at: float = 0.0) -> bool:
        """Return whether a run waits for the next attempt; may be called by another thread.

        Args:
            moved_at: Monotonic time of the last progress.
        """
        failing = self._failing
        if failing is None:
            return False
        since = max(failing.since, moved_at)
        near = failing.attempt_at - since <= failing.seconds
        return near and time.monotonic() - failing.attempt_at <= failing.seconds


@dataclass(frozen=True, slots=True)
class _Failing:
    since: float
    attempt_at: float
    seconds: float
