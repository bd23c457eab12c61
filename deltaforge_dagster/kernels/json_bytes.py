"""Kernels that write raw bytes as JSON text (RFC 8259); shared by sources whose log is binary.

They extend `json_text`, whose kernels expect valid text: these check that the bytes are UTF-8. Each
writes `source[start:end]` into `out` from `at` on and returns the offset after it. The caller must
provide the room that the docstring states, for n bytes of input.
"""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_text import BASE64, BASE64_OPEN, INVALID, write_string
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    EQUALS,
    QUOTE,
    Bytes,
    copy,
    kernel,
)


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
