"""The limits of the machine, measured in the same invocation.

A rate alone says little on a machine that is fast today and slow tomorrow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_WRITE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The limits of the machine; see docs/benchmarks.md.

    Attributes:
        raw_read_per_second: Rows per second when a client receives and discards the source's log.
        raw_write_per_second: Messages per second that the sink's client writes from memory, or rows
            of a table that a plain client does.
        read_ratio: `events_per_second / raw_read_per_second`.
        write_ratio: `events_per_second / raw_write_per_second`.
    """

    raw_read_per_second: int
    raw_write_per_second: int
    read_ratio: float
    write_ratio: float

    @classmethod
    def of(cls, events_per_second: float, *, raw_read: float, raw_write: float) -> Self:
        """Return the limits, with the ratios of a measured rate to them; all are per second."""
        return cls(
            raw_read_per_second=round(raw_read),
            raw_write_per_second=round(raw_write),
            read_ratio=round(events_per_second / raw_read, 3),
            write_ratio=round(events_per_second / raw_write, 3),
        )

    def lines(self) -> dict[str, str]:
        """Return them as lines of a table."""
        return {
            "raw read per second": f"{self.raw_read_per_second:,} (ratio {self.read_ratio:.2f})",
            "raw write per second": f"{self.raw_write_per_second:,} (ratio {self.write_ratio:.2f})",
        }


def raw_write_rate(write: Callable[[], int]) -> float:
    """Return how many messages or rows per second are written.

    Args:
        write: Writes some, and returns how many. It is called again and again for two seconds, at
            least once.
    """
    written = 0
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < _WRITE_SECONDS:
        written += write()
    return written / seconds
