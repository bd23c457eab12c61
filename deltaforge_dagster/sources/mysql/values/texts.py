r"""Kernels that write text in MySQL's character sets, and bytes, as JSON.

Each kernel writes the value `source[start:end]` into `out` from `offset` on, and returns the offset
after it, or `INVALID` if the bytes are not valid in the character set. Text takes at most 6 bytes
per byte of input, plus two quotes.
"""

# ruff: noqa: PLR0917, PLR1714, SIM109 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.json_strings import write_base64, write_code_point, write_utf_8
from deltaforge_dagster.kernels.json_text import ESCAPES, HEX_DIGITS, INVALID
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    COMMA,
    LOWER_U,
    QUOTE,
    ZERO,
    Bytes,
    Longs,
    copy,
    kernel,
)
from deltaforge_dagster.sources.mysql.values.charsets import GB18030_BMP, PLANE, SINGLES
from deltaforge_dagster.sources.mysql.values.numbers import read_8, read_big
from deltaforge_dagster.sources.mysql.values.types import (
    BLOB,
    BYTES,
    MULTI_TEXT,
    SINGLE_TEXT,
    UTF_8_TEXT,
    UTF_16_TEXT,
    UTF_32_TEXT,
)

CodePoints: TypeAlias = npt.NDArray[np.uint16]

_ESCAPED_ZERO = np.frombuffer(b"\\u0000", np.uint8).copy()


@kernel
def _write_character(code_point: int, out: Bytes, offset: int) -> int:
    """Write one character of a string, escaped if JSON requires it; at most 6 bytes."""
    if code_point >= 0x80 or ESCAPES[code_point] == 0:
        return write_code_point(code_point, out, offset)
    letter = ESCAPES[code_point]
    out[offset] = BACKSLASH
    out[offset + 1] = letter
    if letter != LOWER_U:
        return offset + 2
    out[offset + 2] = ZERO
    out[offset + 3] = ZERO
    out[offset + 4] = HEX_DIGITS[code_point >> 4]
    out[offset + 5] = HEX_DIGITS[code_point & 15]
    return offset + 6


@kernel
def _write_single(source: Bytes, start: int, end: int, line: int, out: Bytes, offset: int) -> int:
    """Write a text in the single-byte character set whose table is `SINGLES[line]`."""
    out[offset] = QUOTE
    offset += 1
    for at in range(start, end):
        byte = source[at]
        size = read_8(SINGLES[line, byte], 0)
        if size == 0:
            return INVALID
        for i in range(size):
            out[offset + i] = SINGLES[line, byte, 1 + i]
        offset += size
    out[offset] = QUOTE
    return offset + 1


@kernel
def _write_multi(
    source: Bytes,
    start: int,
    end: int,
    table: int,
    width: int,
    characters: CodePoints,
    out: Bytes,
    offset: int,
) -> int:
    """Write a text in a character set of 1 to `width` bytes per character.

    The character set's table (`charsets.code_points`) starts at `characters[table]`.
    """
    out[offset] = QUOTE
    offset += 1
    at = start
    while at < end:
        lead = read_8(source, at)
        code_point = int(characters[table + lead])
        size = 1
        if code_point == 0 and lead >= 0x80 and end - at >= 2:
            trail = read_8(source, at + 1)
            code_point = int(characters[table + (lead << 8 | trail)])
            size = 2
            # 0x8F (single shift 3) begins a code of three bytes in `ujis` and `eucjpms`.
            if code_point == 0 and width == 3 and lead == 0x8F and end - at >= 3:
                code_point = int(characters[table + PLANE + (trail << 8 | read_8(source, at + 2))])
                size = 3
            elif code_point == 0 and width == 4 and end - at >= 4:
                size = 4
                second, third, fourth = trail - 0x30, read_8(source, at + 2), read_8(source, at + 3)
                third -= 0x81
                fourth -= 0x30
                if not (0 <= second < 10 and 0 <= third < 126 and 0 <= fourth < 10):
                    return INVALID
                if lead < 0x81:
                    return INVALID
                number = (((lead - 0x81) * 10 + second) * 126 + third) * 10 + fourth
                if number < GB18030_BMP:
                    code_point = int(characters[table + PLANE + number])
                elif 189_000 <= number < 189_000 + 0x100000:
                    # The codes from 90 30 81 30 on are U+10000 and up, in order.
                    code_point = number - 189_000 + 0x10000
        if code_point == 0 and lead != 0:
            return INVALID
        offset = _write_character(code_point, out, offset)
        at += size
    out[offset] = QUOTE
    return offset + 1


@kernel
def _write_utf_16(
    source: Bytes, start: int, end: int, little: int, pairs: int, out: Bytes, offset: int
) -> int:
    """Write UTF-16, little-endian if `little` is 1.

    If `pairs` is 0, the text is UCS-2, which has no surrogates.
    """
    if (end - start) & 1 != 0:
        return INVALID
    out[offset] = QUOTE
    offset += 1
    at = start
    while at < end:
        unit = read_8(source, at + little) << 8 | read_8(source, at + 1 - little)
        at += 2
        if unit & 0xF800 == 0xD800:
            if pairs == 0 or unit >= 0xDC00 or at == end:
                return INVALID
            low = read_8(source, at + little) << 8 | read_8(source, at + 1 - little)
            at += 2
            if low & 0xFC00 != 0xDC00:
                return INVALID
            unit = 0x10000 + ((unit & 0x3FF) << 10 | low & 0x3FF)
        offset = _write_character(unit, out, offset)
    out[offset] = QUOTE
    return offset + 1


@kernel
def _write_utf_32(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write UTF-32, big-endian."""
    if (end - start) & 3 != 0:
        return INVALID
    out[offset] = QUOTE
    offset += 1
    for at in range(start, end, 4):
        code_point = read_big(source, at, 4)
        if code_point > 0x10FFFF or code_point & 0x1FF800 == 0xD800:
            return INVALID
        offset = _write_character(code_point, out, offset)
    out[offset] = QUOTE
    return offset + 1


@kernel
def write_text(
    kind: int,
    source: Bytes,
    start: int,
    end: int,
    first: int,
    second: int,
    characters: CodePoints,
    out: Bytes,
    offset: int,
) -> int:
    """Write text or bytes.

    Bytes that are not valid in their character set become `{"_base64":"..."}`. `first` and `second`
    are as in `types.MysqlValueType`. Writes at most 6 n + 32 bytes for n bytes. Returns `INVALID`
    for a kind that is neither text nor bytes.
    """
    if kind == UTF_8_TEXT or kind == BYTES:
        after = write_utf_8(source, start, end, out, offset)
    elif kind == SINGLE_TEXT:
        after = _write_single(source, start, end, first, out, offset)
    elif kind == MULTI_TEXT:
        after = _write_multi(source, start, end, first, second, characters, out, offset)
    elif kind == UTF_16_TEXT:
        after = _write_utf_16(source, start, end, first, second, out, offset)
    elif kind == UTF_32_TEXT:
        after = _write_utf_32(source, start, end, out, offset)
    elif kind == BLOB:
        after = INVALID
    else:
        return INVALID
    return write_base64(source, start, end, out, offset) if after == INVALID else after


@kernel
def write_padded(
    source: Bytes, start: int, end: int, size: int, text: int, out: Bytes, offset: int
) -> int:
    """Write a `BINARY(size)` value, with the trailing zero bytes that the log omits.

    If `text` is not 0 and the bytes are UTF-8, the value is written as a string, otherwise as
    Base64. Writes at most 6 `size` + 32 bytes.
    """
    missing = size - (end - start)
    if missing < 0:
        return INVALID
    after = write_utf_8(source, start, end, out, offset) if text != 0 else INVALID
    if after != INVALID:
        offset = after - 1
        for _ in range(missing):
            offset = copy(_ESCAPED_ZERO, 0, 6, out, offset)
        out[offset] = QUOTE
        return offset + 1
    # Base64 needs the value and its zeros as contiguous bytes. They are assembled at the end of
    # `out`, which has room for them and for the text.
    bare = out.size - size
    copy(source, start, end, out, bare)
    for i in range(missing):
        out[bare + end - start + i] = 0
    return write_base64(out, bare, bare + size, out, offset)


@kernel
def write_set(
    bits: np.uint64, first: int, count: int, labels: Longs, names: Bytes, out: Bytes, offset: int
) -> int:
    """Write the labels of a SET as a string, separated by commas.

    Returns `INVALID` if a bit has no label.
    """
    if count < 64 and bits >> np.uint64(count) != 0:
        return INVALID
    out[offset] = QUOTE
    offset += 1
    shown = False
    for label in range(count):
        if (bits >> np.uint64(label)) & np.uint64(1) != 0:
            if shown:
                out[offset] = COMMA
                offset += 1
            offset = copy(names, labels[first + label, 0], labels[first + label, 1], out, offset)
            shown = True
    out[offset] = QUOTE
    return offset + 1
