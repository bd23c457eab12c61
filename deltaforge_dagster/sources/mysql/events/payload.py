"""Compressed transactions: a TRANSACTION_PAYLOAD event holds the events of a transaction.

MySQL 8.0.20 and later, `binlog_transaction_compression=ON`; `Transaction_payload_event` in the
server's `control_events.h`. Numbers are packed (`binlog`)::

    for each field: type | size of the value | value; then type 0, and the payload until the end
      1 size of the payload   2 compression: 0 zstd, 255 none   3 size without compression

    payload: events one directly behind the other, as in the file, but without checksums, and with
    positions that mean nothing: they stand where the event around them stands
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.binlog import FieldReader
from deltaforge_dagster.sources.stream.read_buffer import PIECE_BYTES

_NAME = "a TRANSACTION_PAYLOAD event"
_END, _SIZE, _COMPRESSION, _WHOLE_SIZE = range(4)
_ZSTD, _NONE = 0, 255


def payload_pieces(body: bytes) -> Iterator[bytes]:
    """Return the events in a TRANSACTION_PAYLOAD event's body, in pieces cut anywhere.

    A piece has 4 MiB at most, however large the transaction is.

    Raises:
        CorruptLog: The body does not follow the format.
        UnsupportedEvent: It is compressed in another way.
    """
    fields: dict[int, int] = {}
    reader = FieldReader(body, _NAME)
    while (kind := reader.packed()) != _END:
        fields[kind] = FieldReader(reader.take(reader.packed()), _NAME).packed()
    payload = memoryview(body)[reader.at :]
    if fields.get(_SIZE, len(payload)) != len(payload):
        raise CorruptLog(f"{_NAME} that differs from its size")
    compression = fields.get(_COMPRESSION, _NONE)
    if compression not in (_ZSTD, _NONE):
        raise UnsupportedEvent(f"a transaction compressed in an unknown way, {compression}")
    stream: pa.NativeFile = pa.BufferReader(payload)
    if compression == _ZSTD:
        stream = pa.CompressedInputStream(stream, "zstd")
    return _pieces(stream, fields.get(_WHOLE_SIZE))


def _pieces(stream: pa.NativeFile, whole: int | None) -> Iterator[bytes]:
    size = 0
    try:
        while piece := stream.read(PIECE_BYTES):
            size += len(piece)
            yield piece
    except (OSError, pa.ArrowException) as error:
        raise CorruptLog("a compressed transaction that cannot be decompressed") from error
    if whole is not None and size != whole:
        raise CorruptLog("a compressed transaction that differs from its size")
