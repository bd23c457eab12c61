"""Values and rows of SQLite: as JSON text, for all modes and snapshots, and in SQLite's records.

INTEGER and REAL are numbers, TEXT a string, NULL null, a BLOB `{"_base64":"..."}`, as is TEXT that
is not UTF-8; infinite numbers, which JSON lacks, are the strings `Infinity` and `-Infinity`. `-0.0`
becomes `0.0`, as in every text form of SQLite; the two are equal, even as keys.

Turso's change table has rows before and after a change as records ("Database File Format" of
sqlite.org, section 2.1): a header, its size and one serial type per column as varints, then the
values one after another, big-endian::

    0 NULL   1..6 integers of 1, 2, 3, 4, 6, 8 bytes   7 IEEE 754 of 8 bytes
    8, 9 the integers 0, 1   even from 12: blob of (n - 12) / 2 bytes
    odd from 13: text of (n - 13) / 2 bytes

A varint has 7 bits a byte, the highest first, while the top bit is set; a ninth byte counts whole.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.turso.connection import Value


def json_value(value: Value) -> Any:
    """Return the JSON value for a value of SQLite."""
    match value:
        case bytes():
            return {"_base64": base64.b64encode(value).decode()}
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case float():
            return value + 0.0
        case _:
            return value


def image(row: Mapping[str, Any]) -> str:
    """Return a row of values from `json_value` as JSON text."""
    return orjson.dumps(row).decode()


def row_image(row: Mapping[str, Value]) -> str:
    """Return a row of SQLite's values as JSON text."""
    return image({name: json_value(value) for name, value in row.items()})


def key_of(row: Mapping[str, Any], key: Sequence[str]) -> dict[str, Any] | None:
    """Return the key columns of a row; None without a key, or if the row lacks a key column."""
    if not key or any(name not in row for name in key):
        return None
    return {name: row[name] for name in key}


_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_REAL, _ZERO, _ONE, _FIRST_SIZED = 7, 8, 9, 12
_DOUBLE = struct.Struct(">d")


def decode_record(record: bytes) -> list[Value]:
    """Return the values of a record; text that is not UTF-8 is returned as bytes.

    Raises:
        CorruptLog: The bytes are not a record; the message contains no value.
    """
    try:
        size, at = _varint(record, 0)
        serials = []
        while at < size:
            serial, at = _varint(record, at)
            serials.append(serial)
        if at != size:
            raise CorruptLog("a record whose header does not end where it says")
        values = []
        for serial in serials:
            value, at = _value(record, at, serial)
            values.append(value)
    except (IndexError, struct.error):
        raise CorruptLog("a record that ends too early") from None
    if at != len(record):
        raise CorruptLog("a record with more bytes than values")
    return values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at offset `at`, and the offset after it."""
    number = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        number = number << 7 | byte & 0x7F
        if byte < 0x80:
            return number, at
    return number << 8 | data[at], at + 1


def _value(data: bytes, at: int, serial: int) -> tuple[Value, int]:
    if serial >= _FIRST_SIZED:
        end = at + (serial - _FIRST_SIZED) // 2
        piece = data[at:end]
        if end > len(data):
            raise IndexError
        return (_text(piece) if serial % 2 else piece), end
    if size := _INTEGER_BYTES.get(serial):
        if at + size > len(data):
            raise IndexError
        return int.from_bytes(data[at : at + size], "big", signed=True), at + size
    if serial == _REAL:
        (real,) = _DOUBLE.unpack_from(data, at)
        return (None if math.isnan(real) else real), at + _DOUBLE.size
    if serial in {0, _ZERO, _ONE}:
        return (None if serial == 0 else serial - _ZERO), at
    raise CorruptLog(f"a record with a value of serial type {serial}, which SQLite reserves")


def _text(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece
