"""Events that only MariaDB writes.

MariaDB's manual, "Replication Protocol"; little-endian, except for the sizes before compression::

    type and body
    160 ANNOTATE_ROWS, 161 BINLOG_CHECKPOINT, 163 GTID_LIST: no change, skipped
    164 START_ENCRYPTION    the file is encrypted, but the dump stream is not: skipped
    162 GTID                Int64 number | Int32 domain | Int8 flags | 2: Int64 group of commits
                            | 64, 128: Int32 format, Int8 size of gtrid, Int8 of bqual, gtrid, bqual
                            | Int8 more flags | ... ; the server is that of the event's header
        flags               1 standalone: a statement follows, such as DDL or XA COMMIT; otherwise
                            a transaction follows, without QUERY `BEGIN`
                            64 an XA transaction, without QUERY `XA START`; 128 one that ends it
        more flags          2 ALTER TABLE begins, 4 and 8 it ends or fails (binlog_alter_two_phase)
    165 QUERY_COMPRESSED    QUERY, its statement compressed
    166-168, 169-171        WRITE, UPDATE and DELETE_ROWS of versions 1 and 2; everything after the
    ..._ROWS_COMPRESSED     bitmaps is compressed (`log_bin_compress`)

    compressed              Int8 0x80 + 16 * algorithm (0: zlib) + n | n bytes, big-endian:
                            size before compression | zlib stream

Inside a transaction events have no end position.
"""

from __future__ import annotations

import struct
import zlib

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
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
)

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
