"""Compressed events, and nested ones: inside another event, or kept from earlier.

A TRANSACTION_PAYLOAD event contains the events of a compressed transaction (MySQL 8.0.20 and later,
`binlog_transaction_compression=ON`; `Transaction_payload_event` in the server's
`control_events.h`). Numbers are packed (`binlog`)::

    for each field: type | size of the value | value; then type 0, and the payload until the end
      1 size of the payload   2 compression: 0 zstd, 255 none   3 size without compression

    payload: consecutive events, as in the file, but without checksums, and with meaningless
    positions: each has the position of the event that contains it

`NestedEvents` reassembles them, and events that were kept, as a stream within the stream.

MariaDB compresses single events (MariaDB's manual, "Replication Protocol"); little-endian, except
for the sizes before compression::

    type and body
    165 QUERY_COMPRESSED    QUERY, its statement compressed
    166-168, 169-171        WRITE, UPDATE and DELETE_ROWS of versions 1 and 2; everything after the
    ..._ROWS_COMPRESSED     bitmaps is compressed (`log_bin_compress`)

    compressed              Int8 0x80 + 16 * algorithm (0: zlib) + n | n bytes, big-endian:
                            size before compression | zlib stream
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.sources.mysql.events.binlog import (
    DELETE_ROWS_1,
    DELETE_ROWS_2,
    DELETE_ROWS_COMPRESSED_1,
    DELETE_ROWS_COMPRESSED_2,
    HEADER,
    QUERY,
    QUERY_COMPRESSED,
    UPDATE_ROWS_1,
    UPDATE_ROWS_2,
    UPDATE_ROWS_COMPRESSED_1,
    UPDATE_ROWS_COMPRESSED_2,
    WRITE_ROWS_1,
    WRITE_ROWS_2,
    WRITE_ROWS_COMPRESSED_1,
    WRITE_ROWS_COMPRESSED_2,
    FieldReader,
)
from deltaforge_dagster.sources.stream import BUFFER_BYTES

_PLAIN = {
    QUERY_COMPRESSED: QUERY,
    WRITE_ROWS_COMPRESSED_1: WRITE_ROWS_1,
    UPDATE_ROWS_COMPRESSED_1: UPDATE_ROWS_1,
    DELETE_ROWS_COMPRESSED_1: DELETE_ROWS_1,
    WRITE_ROWS_COMPRESSED_2: WRITE_ROWS_2,
    UPDATE_ROWS_COMPRESSED_2: UPDATE_ROWS_2,
    DELETE_ROWS_COMPRESSED_2: DELETE_ROWS_2,
}
_FIXED_ROWS = 8
"""Bytes of a rows event's body before the column count (version 1) or extra data (version 2)."""


def decompressed(event: bytes) -> bytes:
    """Return the decompressed event, with header, without checksum.

    Args:
        event: The compressed event, with header, without checksum.

    Raises:
        CorruptLog: The event does not follow the format.
        UnsupportedEvent: The compression algorithm is unknown.
    """
    body = event[HEADER:]
    kind = _PLAIN[event[4]]
    try:
        begin = _statement(body) if kind == QUERY else _rows(body, kind)
        content = _decompress(body[begin:])
    except (struct.error, IndexError):
        raise CorruptLog("a compressed event that is too short") from None
    size = HEADER + begin + len(content)
    header = event[:4] + bytes([kind]) + event[5:9] + struct.pack("<I", size) + event[13:HEADER]
    return header + body[:begin] + content


def _statement(body: bytes) -> int:
    """Return the offset of the statement in the body of a QUERY event."""
    database, _, variables = struct.unpack_from("<BHH", body, 8)
    return 13 + int(variables) + int(database) + 1


def _rows(body: bytes, kind: int) -> int:
    """Return the offset of the rows in the body of a rows event."""
    at = _FIXED_ROWS
    if kind >= WRITE_ROWS_2:
        at += int.from_bytes(body[at : at + 2], "little")
    columns = body[at]
    at += 1
    if columns == 252:
        (columns,) = struct.unpack_from("<H", body, at)
        at += 2
    bitmaps = 2 if kind in (UPDATE_ROWS_1, UPDATE_ROWS_2) else 1
    return at + bitmaps * ((columns + 7) >> 3)


def _decompress(content: bytes) -> bytes:
    first = content[0]
    algorithm, width = first >> 4 & 7, first & 7
    if not first & 0x80 or algorithm:
        raise UnsupportedEvent(f"an event that is compressed in an unknown way, {first}")
    size = int.from_bytes(content[1 : 1 + width], "big")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(content[1 + width :], size + 1)  # allocated as data comes
    except zlib.error:
        raise CorruptLog("a compressed event that cannot be decompressed") from None
    if len(plain) != size or not stream.eof:
        raise CorruptLog("a compressed event that differs from its size")
    return plain


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
        parts, size = [self._rest], len(self._rest)
        needed = _size(self._rest)
        self._rest = b""
        for block in self._blocks:
            parts.append(block)
            size += len(block)
            if needed == HEADER <= size:
                needed = _size(b"".join(parts))
            if size >= needed:
                break
        if not size:
            return None
        if size < needed:
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
