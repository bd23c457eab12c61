"""Events that stand in another event, or were kept from earlier: a stream within the stream."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.sources.mysql.events.binlog import HEADER


class NestedEvents:
    """Whole events out of pieces that are cut anywhere.

    Args:
        pieces: Events one directly behind the other, without checksums.
        end: What to do behind the last of them.
    """

    def __init__(self, pieces: Iterator[bytes], end: Callable[[], None] = lambda: None) -> None:
        self._pieces = pieces
        self._rest = b""
        self.end = end

    def next(self) -> Bytes | None:
        """Return what was left over and more, at least one whole event; None behind the last.

        Raises:
            CorruptLog: The pieces end inside an event, or an event is shorter than its header.
        """
        parts, held = [self._rest], len(self._rest)
        needed = _size(self._rest)
        self._rest = b""
        for piece in self._pieces:
            parts.append(piece)
            held += len(piece)
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
        """Take back what was not used of the last piece."""
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


def events(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield one event after the other, header included.

    Raises:
        CorruptLog: The pieces end inside an event, or an event is shorter than its header.
    """
    inner = NestedEvents(pieces)
    while (piece := inner.next()) is not None:
        at = 0
        while piece.size - at >= HEADER:
            size = int.from_bytes(piece[at + 9 : at + 13].tobytes(), "little")
            if size < HEADER:
                raise CorruptLog("an event that is shorter than its header")
            if piece.size - at < size:
                break
            yield piece[at : at + size].tobytes()
            at += size
        inner.keep(piece[at:])
