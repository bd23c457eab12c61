r"""Kernels that read strings in JSON text: characters without escapes, and bytes in Base64.

A character is a code point, however it is written: a surrogate pair of two `\u` escapes counts
once.
"""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_strings import write_code_point
from deltaforge_dagster.kernels.json_text import BASE64, HEX_VALUES
from deltaforge_dagster.kernels.runtime import BACKSLASH, LOWER_U, Bytes, kernel

BASE64_VALUES = np.zeros(256, np.uint8)
"""The number that a digit of Base64 stands for, 0 for other bytes."""
for _value, _digit in enumerate(bytes(BASE64)):
    BASE64_VALUES[_digit] = _value
_ESCAPED = np.zeros(256, np.uint8)
_ESCAPED[:] = np.arange(256)
for _letter, _plain in zip(b"bfnrt", b"\b\f\n\r\t", strict=True):
    _ESCAPED[_letter] = _plain


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
