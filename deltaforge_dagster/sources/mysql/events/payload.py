"""Compressed transactions: a TRANSACTION_PAYLOAD event holds the events of a transaction.

MySQL 8.0.20 and later, `binlog_transaction_compression=ON`; `Transaction_payload_event` in the
server's `control_events.h`. Numbers are length-encoded integers::

    for each field: type | size of the value | value; then type 0, and the payload until the end
      1 size of the payload   2 compression: 0 zstd, 255 none   3 size without compression

    payload: events one directly behind the other, as in the file, but without checksums, and with
    positions that mean nothing: they stand where the event around them stands
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.stream.read_buffer import BUFFER_BYTES

_END, _SIZE, _COMPRESSION, _WHOLE_SIZE = range(4)
_ZSTD, _NONE = 0, 255


def payload_blocks(body: bytes) -> Iterator[bytes]:
    """Return the events in a TRANSACTION_PAYLOAD event's body, in blocks cut anywhere.

    A block has 4 MiB at most, however large the transaction is.

    Raises:
        CorruptLog: The body does not follow the format.
        UnsupportedEvent: It is compressed in another way.
    """
    fields: dict[int, int] = {}
    kind, at = _packed(body, 0)
    while kind != _END:
        size, at = _packed(body, at)
        fields[kind], _ = _packed(body[at : at + size], 0)
        kind, at = _packed(body, at + size)
    payload = memoryview(body)[at:]
    if fields.get(_SIZE, len(payload)) != len(payload):
        raise CorruptLog("a TRANSACTION_PAYLOAD event that differs from its size")
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


def _packed(data: bytes, at: int) -> tuple[int, int]:
    """Return the length-encoded integer at `at`, and the place after it."""
    first = data[at] if at < len(data) else 255
    size = {252: 2, 253: 3, 254: 8}.get(first, 0)
    if first in (251, 255) or at + 1 + size > len(data):
        raise CorruptLog("a TRANSACTION_PAYLOAD event that does not follow its format")
    return int.from_bytes(data[at + 1 : at + 1 + size], "little") if size else first, at + 1 + size
