"""MySQL's binary JSON: the form in which JSON columns stand in the log.

The layout is that of `json_binary.h` in the server's sources; numbers are little-endian::

    document    Byte1 type | value
    type        0 object, 2 array: 16-bit sizes and offsets; 1, 3: 32-bit; 4 literal: 0 null, 1 true,
                2 false; 5, 6 Int16 signed, unsigned; 7, 8 Int32; 9, 10 Int64; 11 double; 12 string;
                15 a value of a column type
    object      number of members | bytes | per member: offset of key, Int16 its size
                | per member: Byte1 type, offset of value | keys | values
    array       number of elements | bytes | per element: Byte1 type, offset of value | values
                  Offsets count from the number on. Literals and 16-bit numbers (with 32-bit
                  offsets also 32-bit numbers) stand in place of their offset.
    string      size, 7 bits a byte, lowest first, 0x80: more follow | UTF-8
    15          Byte1 column type | size as a string's | bytes

Values are written as MySQL prints them: DECIMAL as a number with its digits, dates and times as
strings, other column types as `"base64:typeN:..."`. Documents are shorter and rarer than other
values, so this is ordinary Python.
"""

from __future__ import annotations

import base64
import json
import math
import struct

from deltaforge_dagster.errors import CorruptLog

_MAX_DEPTH = 128
"""MySQL allows 100 levels."""

_LITERALS = {0: "null", 1: "true", 2: "false"}
_NUMBERS = {5: "<h", 6: "<H", 7: "<i", 8: "<I", 9: "<q", 10: "<Q", 11: "<d"}
_DECIMAL_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
_TIMESTAMP, _DATE, _TIME, _DATETIME, _NEWDECIMAL = 7, 10, 11, 12, 246


def json_text(content: bytes) -> str:
    """Return a document as JSON text without white space; an empty one is `null`, as MySQL reads it.

    Raises:
        CorruptLog: The bytes are not a document.
    """
    if not content:
        return "null"
    try:
        return _value(content[0], content[1:], 0)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise CorruptLog("a JSON value that does not follow its format") from error


def _value(kind: int, data: bytes, depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise ValueError
    if kind <= 3:
        return _container(kind, data, depth)
    if kind == 4:
        return _LITERALS[data[0]]
    if kind == 12:
        return json.dumps(_sized(data).decode(), ensure_ascii=False)
    if kind == 15:
        return _column_value(data[0], _sized(data[1:]))
    (number,) = struct.unpack_from(_NUMBERS[kind], data)
    if not math.isfinite(number):
        raise ValueError
    return repr(number)


def _container(kind: int, data: bytes, depth: int) -> str:
    large, is_object = kind & 1, kind < 2
    width, number = (4, "<I") if large else (2, "<H")
    count, size = (struct.unpack_from(number, data, at)[0] for at in (0, width))
    if size > len(data):
        raise ValueError
    data = data[:size]
    keys = 2 * width
    values = keys + (count * (width + 2) if is_object else 0)
    inlined = (4, 5, 6, 7, 8) if large else (4, 5, 6)
    parts = []
    for place in range(count):
        entry = values + place * (1 + width)
        value_kind = data[entry]
        if value_kind in inlined:
            start = entry + 1
        else:
            (start,) = struct.unpack_from(number, data, entry + 1)
        text = _value(value_kind, data[start:], depth + 1)
        if is_object:
            at = keys + place * (width + 2)
            (start,) = struct.unpack_from(number, data, at)
            (length,) = struct.unpack_from("<H", data, at + width)
            if start + length > size:
                raise ValueError
            key = data[start : start + length].decode()
            text = f"{json.dumps(key, ensure_ascii=False)}:{text}"
        parts.append(text)
    return ("{%s}" if is_object else "[%s]") % ",".join(parts)


def _sized(data: bytes) -> bytes:
    """Return the bytes after the size that `data` starts with."""
    size = 0
    for place in range(5):
        size |= (data[place] & 0x7F) << (7 * place)
        if data[place] < 0x80:
            content = data[place + 1 : place + 1 + size]
            if len(content) < size:
                raise ValueError
            return content
    raise ValueError


def _column_value(kind: int, data: bytes) -> str:
    if kind == _NEWDECIMAL:
        return _decimal(data[2:], data[0], data[1])
    if kind not in (_DATE, _TIME, _DATETIME, _TIMESTAMP):
        return f'"base64:type{kind}:{base64.b64encode(data).decode()}"'
    (packed,) = struct.unpack("<q", data)
    sign = "-" if packed < 0 else ""
    whole, micros = divmod(abs(packed), 1 << 24)
    hour, minute, second = whole >> 12 & 0x3FF, whole >> 6 & 63, whole & 63
    if kind == _TIME:
        return f'"{sign}{hour:02}:{minute:02}:{second:02}.{micros:06}"'
    year, month = divmod(whole >> 22, 13)
    day = f"{year:04}-{month:02}-{whole >> 17 & 31:02}"
    if kind == _DATE:
        return f'"{day}"'
    return f'"{day} {hour & 31:02}:{minute:02}:{second:02}.{micros:06}"'


def _decimal(data: bytes, digits: int, scale: int) -> str:
    """Return a NEWDECIMAL, whose layout `scalars` draws."""
    negative = data[0] & 0x80 == 0
    raw = bytes([data[0] ^ 0x80]) + data[1:]
    if negative:
        raw = bytes(byte ^ 0xFF for byte in raw)
    whole = digits - scale
    groups = [whole % 9] + [9] * (whole // 9) + [9] * (scale // 9) + [scale % 9]
    text = ""
    at = 0
    for group in groups:
        size = _DECIMAL_BYTES[group]
        if group:
            text += str(int.from_bytes(raw[at : at + size])).zfill(group)
        at += size
    if at != len(data):
        raise ValueError
    shown = text[:whole].lstrip("0") or "0"
    return ("-" if negative else "") + shown + ("." + text[whole:] if scale else "")
