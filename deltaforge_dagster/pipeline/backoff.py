"""How long to wait before the next attempt: doubling, with jitter, up to a limit.

And whether a run waits for that attempt.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from deltaforge_dagster.errors import DeltaforgeError, Retryable

PATIENCE = 5.0
"""Seconds for which a run waits at most for what fails."""

ASKED_PATIENCE = 30.0
"""Seconds for which it waits at most if a server has said when to try again."""


class Backoff:
    """Delays 1, 2, 4 ... seconds, each off by up to a fifth, never above `maximum`."""

    def __init__(self, initial: float = 1.0, maximum: float = 60.0, failures: int = 0) -> None:
        self._initial = initial
        self._maximum = maximum
        self._failures = failures

    def next_delay(self) -> float:
        """Return the seconds to wait after one more failure."""
        delay = min(self._initial * 2.0 ** min(self._failures, 30), self._maximum)
        self._failures += 1
        return delay * random.uniform(0.8, 1.2)  # noqa: S311 - spreads retries, keeps no secret

    def reset(self) -> None:
        """Start over after a success."""
        self._failures = 0


class RetryPatience:
    """Whether a run waits for what fails: until an attempt that comes soon after the failures began.

    Args:
        seconds: The longest time from the first failure in a row, or from progress after it, to such an attempt.
            At most `PATIENCE`, but `ASKED_PATIENCE` if a server has said when to try again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, PATIENCE)
        self._failing: _Failing | None = None

    def failed(self, error: DeltaforgeError, delay: float) -> None:
        """Note a failure, and that the next attempt is made after so many seconds."""
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
