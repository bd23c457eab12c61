"""How long to wait before the next attempt: doubling, with jitter, up to a limit."""

from __future__ import annotations

import random


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
