"""Events that stand in another event, or were kept from earlier: a stream within the stream."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.sources.mysql.events.binlog import HEADER


class NestedEvents:
    """Whole events out of blocks that are cut anywhere.

    Args:
        blocks: Events one directly behind the other, without checksums.
        end: What to do behind the last of them.
    """

    def __init__(self, blocks: Iterator[bytes], end: Callable[[], None] = lambda: None) -> None:
        self._blocks = blocks
        self._rest = b""
        self.end = end

    def next(self) -> Bytes | None:
        """Return what was left over and more, at least one whole event; None behind the last.

        Raises:
            CorruptLog: The blocks end inside an event, or an event is shorter than its header.
        """
        parts, held = [self._rest], len(self._rest)
        needed = _size(self._rest)
        self._rest = b""
        for block in self._blocks:
            parts.append(block)
            held += len(block)
            if needed == HEADER <= held:
                needed = _size(b"".join(parts))
            if held >= needed:
                break
        if not held:
            return None
        if held < needed:
            raise CorruptLog("events that end too early")
        return read_only(b"".join(parts))

    def keep(self, rest: Bytes) -> None:
        """Take back what was not used of the last block."""
        self._rest = rest.tobytes()


def _size(data: bytes) -> int:
    """Return the size of the event that `data` begins with, that of a header where it is cut."""
    if len(data) < HEADER:
        return HEADER
    (size,) = struct.unpack_from("<I", data, 9)
    if size < HEADER:
        raise CorruptLog("an event that is shorter than its header")
    return int(size)


def without_checksum(event: bytes) -> bytes:
    """Return an event, header included, with the size that it has without its checksum."""
    return event[:9] + len(event).to_bytes(4, "little") + event[13:]


def events(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield one event after the other, header included.

    Raises:
        CorruptLog: The blocks end inside an event, or an event is shorter than its header.
    """
    nested = NestedEvents(blocks)
    while (block := nested.next()) is not None:
        at = 0
        while block.size - at >= HEADER:
            size = int.from_bytes(block[at + 9 : at + 13].tobytes(), "little")
            if size < HEADER:
                raise CorruptLog("an event that is shorter than its header")
            if block.size - at < size:
                break
            yield block[at : at + size].tobytes()
            at += size
        nested.keep(block[at:])
