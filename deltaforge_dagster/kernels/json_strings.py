r"""Kernels for strings in JSON text (RFC 8259): raw bytes written as one, and one read.

`json_text` writes valid text. The kernels that write here check that the bytes are UTF-8, for
sources whose log is binary: each writes `source[start:end]` into `out` from `at` on and returns the
offset after it. The caller must provide the room that the docstring states, for n bytes of input.

Read are characters without escapes, and bytes in Base64. A character is a code point, however it is
written: a surrogate pair of two `\u` escapes counts once.
"""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_text import (
    BASE64,
    BASE64_OPEN,
    HEX_VALUES,
    INVALID,
    write_string,
)
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    EQUALS,
    LOWER_U,
    QUOTE,
    Bytes,
    copy,
    kernel,
)

BASE64_VALUES = np.zeros(256, np.uint8)
"""The number that a digit of Base64 stands for, 0 for other bytes."""
for _value, _digit in enumerate(bytes(BASE64)):
    BASE64_VALUES[_digit] = _value
_ESCAPED = np.zeros(256, np.uint8)
_ESCAPED[:] = np.arange(256)
for _letter, _plain in zip(b"bfnrt", b"\b\f\n\r\t", strict=True):
    _ESCAPED[_letter] = _plain


@kernel
def is_utf_8(source: Bytes, start: int, end: int) -> bool:
    """Return whether `source[start:end]` is UTF-8 (RFC 3629: shortest form, no surrogates)."""
    at = start
    while at < end:
        byte = source[at]
        at += 1
        if byte < 0x80:
            continue
        if byte < 0xC2 or byte > 0xF4:
            return False
        more = 1 if byte < 0xE0 else (2 if byte < 0xF0 else 3)
        if end - at < more:
            return False
        following = source[at]
        if (
            (byte == 0xE0 and following < 0xA0)
            or (byte == 0xED and following > 0x9F)
            or (byte == 0xF0 and following < 0x90)
            or (byte == 0xF4 and following > 0x8F)
        ):
            return False
        for _ in range(more):
            if source[at] & 0xC0 != 0x80:
                return False
            at += 1
    return True


@kernel
def write_utf_8(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write a JSON string; at most 6 n + 2 bytes. Returns `INVALID` if the bytes are not UTF-8."""
    size = end - start
    # Most texts need no escapes: this loop has no branch, so it is vectorized.
    odd = np.uint8(0)
    for i in range(size):
        byte = source[start + i]
        out[at + 1 + i] = byte
        odd |= np.uint8((byte < 32) | (byte == QUOTE) | (byte == BACKSLASH) | (byte > 127))
    if odd != 0:
        if not is_utf_8(source, start, end):
            return INVALID
        return write_string(source, start, end, out, at)
    out[at] = QUOTE
    out[at + 1 + size] = QUOTE
    return at + size + 2


@kernel
def write_base64(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Write `{"_base64":"..."}` (RFC 4648, with padding); at most 2 n + 18 bytes."""
    at = copy(BASE64_OPEN, 0, BASE64_OPEN.size, out, at)
    position = start
    while position < end:
        count = min(3, end - position)
        group = np.int64(0)
        for i in range(3):
            group <<= 8
            if i < count:
                group |= np.int64(source[position + i])
        for digit in range(4):
            if digit <= count:
                out[at + digit] = BASE64[(group >> (18 - 6 * digit)) & 63]
            else:
                out[at + digit] = EQUALS
        position += 3
        at += 4
    out[at] = QUOTE
    out[at + 1] = CLOSE_BRACE
    return at + 2


@kernel
def write_code_point(code_point: int, out: Bytes, at: int) -> int:
    """Write a code point in UTF-8, without escapes; at most 4 bytes."""
    if code_point < 0x80:
        out[at] = code_point
        return at + 1
    if code_point < 0x800:
        out[at] = 0xC0 | code_point >> 6
        out[at + 1] = 0x80 | code_point & 63
        return at + 2
    if code_point < 0x10000:
        out[at] = 0xE0 | code_point >> 12
        out[at + 1] = 0x80 | code_point >> 6 & 63
        out[at + 2] = 0x80 | code_point & 63
        return at + 3
    out[at] = 0xF0 | code_point >> 18
    out[at + 1] = 0x80 | code_point >> 12 & 63
    out[at + 2] = 0x80 | code_point >> 6 & 63
    out[at + 3] = 0x80 | code_point & 63
    return at + 4


@kernel
def code_unit(source: Bytes, at: int, end: int) -> int:
    r"""Return the UTF-16 code unit of the `\uXXXX` at `at`; -1 if there is no such escape."""
    if end - at < 6 or source[at] != BACKSLASH or source[at + 1] != LOWER_U:
        return -1
    unit = np.int64(0)
    for i in range(2, 6):
        unit = unit << 4 | np.int64(HEX_VALUES[source[at + i]] & 15)
    return int(unit)


@kernel
def character_end(source: Bytes, at: int, end: int) -> int:
    """Return the offset after the character at `at` in a JSON string that ends at `end`."""
    if source[at] == BACKSLASH:
        unit = code_unit(source, at, end)
        if unit < 0:
            return min(at + 2, end)
        after = at + 6
        if 0xD800 <= unit < 0xDC00 and 0xDC00 <= code_unit(source, after, end) < 0xE000:
            return after + 6
        return after
    at += 1
    while at < end and source[at] & 0xC0 == 0x80:
        at += 1
    return at


@kernel
def write_plain(source: Bytes, at: int, end: int, out: Bytes, out_at: int) -> int:
    """Write a JSON string's characters in UTF-8, unescaped; never more bytes than the input."""
    while at < end:
        if source[at] != BACKSLASH:
            out[out_at] = source[at]
            out_at += 1
            at += 1
            continue
        unit = code_unit(source, at, end)
        after = character_end(source, at, end)
        if unit < 0:
            out[out_at] = _ESCAPED[source[min(at + 1, end - 1)]]
            out_at += 1
        else:
            if after - at > 6:
                low = code_unit(source, at + 6, end)
                unit = 0x10000 + ((unit - 0xD800) << 10 | (low - 0xDC00))
            out_at = write_code_point(unit, out, out_at)
        at = after
    return out_at
