"""The buffer between a log stream and its decoder.

A decoder consumes what is whole, and the rest stays for its next call. The buffer normally has one size; it
grows for a row that is larger, and shrinks again after it.
"""

from __future__ import annotations

from collections.abc import Callable

BUFFER_BYTES = 4 << 20
"""The most that one call of a decoder usually gets, so that other threads run in between."""

_LEAST_BUFFER_BYTES = 64 << 10


class ReadBuffer:
    """Bytes of a log: those a decoder has left over, and new ones behind them.

    Args:
        max_bytes: Wanted size of the buffer; bounded on both sides.

    Attributes:
        data: The bytes; only the first `length` mean something.
        length: How many there are.
    """

    def __init__(self, max_bytes: int) -> None:
        self._usual = min(BUFFER_BYTES, max(max_bytes, _LEAST_BUFFER_BYTES))
        self.data = bytearray(self._usual)
        self.length = 0

    def fill(self, receive: Callable[[memoryview, float], int], seconds: float) -> bool:
        """Receive behind what is there, waiting at most `seconds`; say whether anything came."""
        if self.length == len(self.data):  # one row larger than the buffer
            self.data = self.data.ljust(2 * self.length, b"\0")
        with memoryview(self.data) as view:
            count = receive(view[self.length :], seconds)
        self.length += count
        return bool(count)

    def drop(self, consumed: int) -> None:
        """Forget the first bytes; the rest moves to the start."""
        held = self.length - consumed
        if held < self._usual < len(self.data):
            self.data = self.data[consumed : self.length].ljust(self._usual, b"\0")
        elif consumed:
            self.data[:held] = self.data[consumed : self.length]
        self.length = held
