"""Kernels that write MySQL's binary JSON, the format of JSON columns in the log, as JSON text.

The layout is that of `json_binary.h` in the server's sources; numbers are little-endian::

    document    Byte1 type | value
    type        0 object, 2 array: 16-bit sizes and offsets; 1, 3: 32-bit;
                 4 literal: 0 null, 1 true, 2 false; 5, 6 Int16 signed, unsigned; 7, 8 Int32;
                 9, 10 Int64; 11 double; 12 string; 15 a value of a column type
    object      number of members | bytes | per member: offset of key, Int16 its size
                | per member: Byte1 type, offset of value | keys | values
    array       number of elements | bytes | per element: Byte1 type, offset of value | values
                  Offsets count from the number on. Literals and 16-bit numbers (with 32-bit
                  offsets also 32-bit numbers) stand in place of their offset.
    string      size, 7 bits a byte, lowest first, 0x80: more follow | UTF-8
    15          Byte1 column type | size as a string's | bytes
                  NEWDECIMAL 246: its digits, its scale, and as in a row. DATE 10, TIME 11,
                  DATETIME 12, TIMESTAMP 7: Int64, 24 bits of it microseconds, above them 6 bits s,
                  6 min, 10 (5) h, 5 day, and year * 13 + month; TIME negative as a whole

Documents are written as MySQL prints them (`SELECT CAST(j AS CHAR)`), but without white space:
DECIMAL as a number with its digits, dates and times as strings, other column types as
`"base64:typeN:..."`, with a line break after 76 characters.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0917, PLR1714, SIM109 - kernels are long flat loops over
# bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_strings import write_utf_8
from deltaforge_dagster.kernels.json_text import (
    INVALID,
    NULL,
    STRING_GROWTH,
    equals,
    write_false,
    write_group,
    write_null,
    write_null_document,
    write_true,
)
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COLON,
    COMMA,
    LOWER_N,
    MINUS,
    OPEN_BRACE,
    OPEN_BRACKET,
    QUOTE,
    SPACE,
    Bytes,
    Longs,
    copy,
    kernel,
)
from deltaforge_dagster.sources.mysql.values.floats import write_float
from deltaforge_dagster.sources.mysql.values.numbers import (
    read_8,
    read_64,
    read_size,
    read_unsigned,
)
from deltaforge_dagster.sources.mysql.values.scalars import (
    decimal_size,
    write_clock,
    write_day,
    write_number,
    write_signed,
    write_unsigned,
)

DOCUMENT_ROOM = 512
"""Room in bytes that a document needs in addition to `STRING_GROWTH` for each of its bytes."""
_MARGIN = 256
"""Bytes of room checked before each write: enough for any number, or 128 closing brackets."""

MAX_DEPTH = 128
"""The deepest nesting that is read; MySQL allows 100 levels."""
FRAME_WIDTH = 6
"""Numbers per level in `stack`."""

_START, _END, _COUNT, _INDEX, _IS_OBJECT, _WIDTH = range(6)
"""Fields of a level: where the container starts and ends, number of members, index of the next
member, 1 for an object, bytes of an offset.
"""

_LITERAL, _INT16, _UINT16, _INT32, _UINT32, _INT64, _UINT64, _DOUBLE, _STRING, _COLUMN = (
    4, 5, 6, 7, 8, 9, 10, 11, 12, 15,
)  # fmt: skip
_TIMESTAMP, _DATE, _TIME, _DATETIME, _NEWDECIMAL = 7, 10, 11, 12, 246
_LINE = 57
"""Bytes that one line of Base64 encodes."""

_PREFIX = np.frombuffer(b'"base64:type', np.uint8).copy()


@kernel
def _sized(source: Bytes, at: int, end: int) -> tuple[int, int]:
    """Read the variable-length size at `at`; return the offset of the bytes after it, and the size.

    The offset is `INVALID` if the size or the bytes do not end before `end`.
    """
    size = 0
    for index in range(5):
        if at + index >= end:
            return INVALID, 0
        byte = read_8(source, at + index)
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            start = at + index + 1
            return (start, size) if size <= end - start else (INVALID, 0)
    return INVALID, 0


@kernel
def _write_lines(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write Base64 (RFC 4648) with an escaped line break between lines of 76 characters."""
    for at in range(start, end, 3):
        if at > start and (at - start) % _LINE == 0:
            out[offset] = BACKSLASH
            out[offset + 1] = LOWER_N
            offset += 2
        group, count = np.int64(0), min(3, end - at)
        for i in range(count):
            group |= np.int64(source[at + i]) << (16 - 8 * i)
        offset = write_group(group, count, out, offset)
    return offset


@kernel
def _write_moment(kind: int, packed: int, out: Bytes, offset: int) -> int:
    """Write a packed date, time or both as a JSON string."""
    out[offset] = QUOTE
    offset += 1
    if packed < 0:
        if kind != _TIME:
            return INVALID
        out[offset] = MINUS
        offset += 1
        packed = -packed
    micros, whole = packed & 0xFFFFFF, packed >> 24
    if micros > 999_999 or whole < 0:
        return INVALID
    hour = whole >> 12 & 0x3FF
    if kind != _TIME:
        months = whole >> 22
        if months // 13 > 9999:
            return INVALID
        offset = write_day(months // 13, months % 13, whole >> 17 & 31, out, offset)
        hour &= 31
        if kind != _DATE:
            out[offset] = SPACE
            offset += 1
    if kind != _DATE:
        offset = write_clock(hour, whole >> 6 & 63, whole & 63, micros, out, offset)
    out[offset] = QUOTE
    return offset + 1


@kernel
def _write_column_value(
    source: Bytes, at: int, end: int, out: Bytes, offset: int, limit: int
) -> int:
    """Write a value of a column type (type 15); the column type's code is at `at`."""
    if at >= end:
        return INVALID
    kind = read_8(source, at)
    start, size = _sized(source, at + 1, end)
    if start < 0:
        return INVALID
    if kind == _NEWDECIMAL:
        if size < 3:
            return INVALID
        digits, scale = read_8(source, start), read_8(source, start + 1)
        if scale > digits or digits > 65 or decimal_size(digits, scale) != size - 2:
            return INVALID
        return write_number(source, start + 2, digits, scale, out, offset)
    if kind == _DATE or kind == _TIME or kind == _DATETIME or kind == _TIMESTAMP:
        if size != 8:
            return INVALID
        return _write_moment(kind, read_64(source, start), out, offset)
    if 2 * size + _MARGIN > limit - offset:
        return INVALID
    offset = copy(_PREFIX, 0, _PREFIX.size, out, offset)
    offset = write_unsigned(np.uint64(kind), out, offset)
    out[offset] = COLON
    offset = _write_lines(source, start, start + size, out, offset + 1)
    out[offset] = QUOTE
    return offset + 1


@kernel
def _write_scalar(
    kind: int, source: Bytes, at: int, end: int, out: Bytes, offset: int, limit: int
) -> int:
    """Write a value that is neither object nor array."""
    if kind == _STRING:
        start, size = _sized(source, at, end)
        if start < 0 or STRING_GROWTH * size + _MARGIN > limit - offset:
            return INVALID
        return write_utf_8(source, start, start + size, out, offset)
    if kind == _COLUMN:
        return _write_column_value(source, at, end, out, offset, limit)
    size = 8
    if kind == _LITERAL:
        size = 1
    elif kind == _INT16 or kind == _UINT16:
        size = 2
    elif kind == _INT32 or kind == _UINT32:
        size = 4
    elif not (kind == _INT64 or kind == _UINT64 or kind == _DOUBLE):
        return INVALID
    if end - at < size:
        return INVALID
    if kind == _LITERAL:
        literal = read_8(source, at)
        if literal == 0:
            return write_null(out, offset)
        if literal == 1:
            return write_true(out, offset)
        return write_false(out, offset) if literal == 2 else INVALID
    if kind == _DOUBLE:
        return write_float(source, at, 8, out, offset)
    if kind == _INT16 or kind == _INT32 or kind == _INT64:
        return write_signed(source, at, size, out, offset)
    return write_unsigned(read_unsigned(source, at, size), out, offset)


@kernel
def _open(kind: int, source: Bytes, at: int, end: int, frame: Longs) -> bool:
    """Store the object or array at `at` in `frame`, a stack level; return whether it is valid."""
    width = 4 if kind & 1 != 0 else 2
    if end - at < 2 * width:
        return False
    count, size = read_size(source, at, width), read_size(source, at + width, width)
    is_object = 1 if kind < 2 else 0
    entries = count * (1 + width + is_object * (width + 2))
    if size > end - at or 2 * width + entries > size:
        return False
    frame[_START], frame[_END], frame[_COUNT] = at, at + size, count
    frame[_INDEX], frame[_IS_OBJECT], frame[_WIDTH] = 0, is_object, width
    return True


@kernel
def write_json(source: Bytes, start: int, end: int, out: Bytes, offset: int, stack: Longs) -> int:
    """Write the document `source[start:end]`.

    An empty document is `null`, as MySQL reads it (`write_null_document`). Writes at most
    `STRING_GROWTH` n + `DOCUMENT_ROOM` bytes for n bytes. A document could be larger only if
    several offsets pointed to one value, which no server writes. `stack` is scratch of shape
    (`MAX_DEPTH`, `FRAME_WIDTH`). Returns `INVALID` if the bytes are not a document.
    """
    if start == end:
        return write_null_document(out, offset)
    first = offset
    limit = offset + STRING_GROWTH * (end - start) + DOCUMENT_ROOM
    kind, at = read_8(source, start), start + 1
    depth = 0
    while True:
        if limit - offset < _MARGIN:
            return INVALID
        if kind > 3:
            offset = _write_scalar(kind, source, at, end, out, offset, limit)
            if offset == INVALID:
                return INVALID
        elif depth == MAX_DEPTH or not _open(kind, source, at, end, stack[depth]):
            return INVALID
        else:
            out[offset] = OPEN_BRACE if stack[depth, _IS_OBJECT] != 0 else OPEN_BRACKET
            offset += 1
            depth += 1
        while depth > 0 and stack[depth - 1, _INDEX] == stack[depth - 1, _COUNT]:
            depth -= 1
            out[offset] = CLOSE_BRACE if stack[depth, _IS_OBJECT] != 0 else CLOSE_BRACKET
            offset += 1
        if depth == 0:
            is_null = equals(out, first, offset, NULL)
            return write_null_document(out, first) if is_null else offset
        frame = stack[depth - 1]
        base, width, index = frame[_START], frame[_WIDTH], frame[_INDEX]
        end = frame[_END]
        frame[_INDEX] = index + 1
        if index > 0:
            out[offset] = COMMA
            offset += 1
        value_entry = base + 2 * width + index * (1 + width)
        if frame[_IS_OBJECT] != 0:
            value_entry += frame[_COUNT] * (width + 2)
            key_entry = base + 2 * width + index * (width + 2)
            key_start = base + read_size(source, key_entry, width)
            size = read_size(source, key_entry + width, 2)
            if size > end - key_start or STRING_GROWTH * size + _MARGIN > limit - offset:
                return INVALID
            offset = write_utf_8(source, key_start, key_start + size, out, offset)
            if offset == INVALID:
                return INVALID
            out[offset] = COLON
            offset += 1
        kind = read_8(source, value_entry)
        if (_LITERAL <= kind <= _UINT16) or (width == 4 and (kind == _INT32 or kind == _UINT32)):
            at = value_entry + 1
        else:
            at = base + read_size(source, value_entry + 1, width)
            if at > end:
                return INVALID
