"""Nested events: events inside another event, or kept from earlier, as a stream within the stream.

A TRANSACTION_PAYLOAD event contains the events of a compressed transaction (MySQL 8.0.20 and later,
`binlog_transaction_compression=ON`; `Transaction_payload_event` in the server's
`control_events.h`). Numbers are packed (`binlog`)::

    for each field: type | size of the value | value; then type 0, and the payload until the end
      1 size of the payload   2 compression: 0 zstd, 255 none   3 size without compression

    payload: consecutive events, as in the file, but without checksums, and with meaningless
    positions: each has the position of the event that contains it
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.sources.mysql.events.binlog import HEADER, FieldReader
from deltaforge_dagster.sources.stream import BUFFER_BYTES


class NestedEvents:
    """Reassembles events from blocks that may be cut anywhere.

    Args:
        blocks: Consecutive events, without checksums.
        end: Called by the decoder after the last event.
    """

    def __init__(self, blocks: Iterator[bytes], end: Callable[[], None] = lambda: None) -> None:
        self._blocks = blocks
        self._rest = b""
        self.end = end

    def next(self) -> Bytes | None:
        """Return the rest of the last block and more, at least one complete event; None at the end.

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
        """Take back the unused rest of the last block; `next` returns it again."""
        self._rest = rest.tobytes()


def _size(data: bytes) -> int:
    """Return the size of the first event in `data`.

    If not even its header is complete, that is the size of a header.
    """
    if len(data) < HEADER:
        return HEADER
    (size,) = struct.unpack_from("<I", data, 9)
    if size < HEADER:
        raise CorruptLog("an event that is shorter than its header")
    return int(size)


def without_checksum(event: bytes) -> bytes:
    """Return an event whose checksum was cut off, with the size in its header corrected."""
    return event[:9] + len(event).to_bytes(4, "little") + event[13:]


def events(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the single events, with headers, from blocks that may be cut anywhere.

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


_NAME = "a TRANSACTION_PAYLOAD event"
_END, _SIZE, _COMPRESSION, _WHOLE_SIZE = range(4)
_ZSTD, _NONE = 0, 255


def payload_blocks(body: bytes) -> Iterator[bytes]:
    """Decompress the body of a TRANSACTION_PAYLOAD event; return blocks of consecutive events.

    A block may begin and end inside an event. It has at most 4 MiB, however large the transaction
    is.

    Raises:
        CorruptLog: The body does not follow the format.
        UnsupportedEvent: The compression algorithm is unknown.
    """
    fields: dict[int, int] = {}
    reader = FieldReader(body, _NAME)
    while (kind := reader.packed()) != _END:
        fields[kind] = FieldReader(reader.read(reader.packed()), _NAME).packed()
    payload = memoryview(body)[reader.at :]
    if fields.get(_SIZE, len(payload)) != len(payload):
        raise CorruptLog(f"{_NAME} that differs from its size")
    compression = fields.get(_COMPRESSION, _NONE)
    if compression not in (_ZSTD, _NONE):
        raise UnsupportedEvent(f"a transaction compressed in an unknown way, {compression}")
    stream: pa.NativeFile = pa.BufferReader(payload)
    if compression == _ZSTD:
        stream = pa.CompressedInputStream(stream, "zstd")
    return _blocks(stream, fields.get(_WHOLE_SIZE))


def _blocks(stream: pa.NativeFile, whole: int | None) -> Iterator[bytes]:
    size = 0
    try:
        while block := stream.read(BUFFER_BYTES):
            size += len(block)
            yield block
    except (OSError, pa.ArrowException) as error:
        raise CorruptLog("a compressed transaction that cannot be decompressed") from error
    if whole is not None and size != whole:
        raise CorruptLog("a compressed transaction that differs from its size")
