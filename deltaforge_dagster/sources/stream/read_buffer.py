"""The buffer between a log stream and its decoder.

A decoder consumes complete events; the rest stays for its next call. The buffer normally has a
fixed size. It grows for a larger row, and shrinks again afterwards. It is filled a little at first,
then more with each call, so that the first changes of a backlog are decoded, and on their way,
before megabytes have been received.
"""

from __future__ import annotations

from collections.abc import Callable

BUFFER_BYTES = 4 << 20
"""The most bytes that one call of a decoder usually gets, so that other threads run in between."""

_LEAST_BUFFER_BYTES = 64 << 10


class ReadBuffer:
    """Bytes of a log: those that the decoder has not consumed yet, followed by newly received ones.

    Args:
        max_bytes: Desired size of the buffer; at least 64 KiB and at most `BUFFER_BYTES` are used.

    Attributes:
        data: The memory; only the first `length` bytes are valid.
        length: Number of valid bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._usual_bytes = min(BUFFER_BYTES, max(max_bytes, _LEAST_BUFFER_BYTES))
        self.data = bytearray(self._usual_bytes)
        self.length = 0
        self._receive_bytes = _LEAST_BUFFER_BYTES

    def fill(self, receive: Callable[[memoryview, float], int], seconds: float) -> bool:
        """Append received bytes, waiting up to `seconds` for the first; return whether any came."""
        if self.length == len(self.data):  # one row larger than the buffer
            self.data = self.data.ljust(2 * self.length, b"\0")
        with memoryview(self.data) as view:
            count = receive(view[self.length : self.length + self._receive_bytes], seconds)
        if count == self._receive_bytes:
            self._receive_bytes *= 2
        self.length += count
        return bool(count)

    def drop(self, consumed: int) -> None:
        """Remove the first `consumed` bytes; the rest moves to the start."""
        held = self.length - consumed
        if held < self._usual_bytes < len(self.data):
            self.data = self.data[consumed : self.length].ljust(self._usual_bytes, b"\0")
        elif consumed:
            self.data[:held] = self.data[consumed : self.length]
        self.length = held
