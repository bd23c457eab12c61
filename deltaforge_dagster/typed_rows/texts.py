"""Kernels: texts and bytes, one after the other as in Arrow's arrays of strings."""

# ruff: noqa: PLR0917 - kernels take many arrays, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_fields import blank, string_end
from deltaforge_dagster.kernels.json_strings import BASE64_VALUES, is_utf_8, write_plain
from deltaforge_dagster.kernels.json_text import BASE64_OPEN
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    COLON,
    EQUALS,
    OPEN_BRACE,
    QUOTE,
    Bytes,
    copy,
    kernel,
)
from deltaforge_dagster.typed_rows.cells import FITS, NOT_OF_TYPE, NOT_UNICODE, VALUE, Ints

_ZERO_DIGIT = ord("A")
"""The digit of Base64 that stands for 0."""


@kernel
def _write_characters(source: Bytes, at: int, stop: int, out: Bytes, out_at: int) -> int:
    """Write the characters of the string between the quotes; return the offset after them.

    Returns -1 if a character cannot be written in UTF-8, as half of a surrogate pair.
    """
    escaped = np.uint8(0)
    for i in range(at, stop):  # no branch, so it is vectorized
        escaped |= np.uint8(source[i] == BACKSLASH)
    if escaped == 0:
        return copy(source, at, stop, out, out_at)
    end = write_plain(source, at, stop, out, out_at)
    return end if is_utf_8(out, out_at, end) else -1


@kernel
def read_texts(
    source: Bytes, starts: Ints, stops: Ints, status: Bytes, out: Bytes, ends: Ints
) -> None:
    """Write the characters of strings, and other values as their JSON text.

    `ends` is where the text of each row ends, after a 0.
    """
    out_at = int(np.int64(0))
    for row in range(status.size):
        if status[row] == VALUE:
            at, stop = int(starts[row]), int(stops[row])
            if source[at] == QUOTE:
                end = _write_characters(source, at + 1, stop - 1, out, out_at)
            else:
                end = copy(source, at, stop, out, out_at)
            status[row] = NOT_UNICODE if end < 0 else FITS
            out_at = max(out_at, end)
        ends[row + 1] = out_at


@kernel
def _skip_blanks(source: Bytes, at: int, stop: int) -> int:
    """Return the offset after white space."""
    while at < stop and blank(source[at]):
        at += 1
    return at


@kernel
def _base64_start(source: Bytes, at: int, stop: int) -> int:
    """Return where the text in `{"_base64":"..."}` begins; -1 for any other value."""
    # The name in the middle of `BASE64_OPEN`, between its brace and its colon; white space may be
    # around it.
    at = _skip_blanks(source, at + 1, stop)
    for i in range(1, BASE64_OPEN.size - 2):
        if at == stop or source[at] != BASE64_OPEN[i]:
            return -1
        at += 1
    at = _skip_blanks(source, at, stop)
    if at == stop or source[at] != COLON:
        return -1
    at = _skip_blanks(source, at + 1, stop)
    return at + 1 if at < stop and source[at] == QUOTE else -1


@kernel
def _write_bytes(source: Bytes, at: int, stop: int, out: Bytes, out_at: int) -> int:
    """Write the bytes of the Base64 text `source[at:stop]` (RFC 4648, padded); -1 if it is none."""
    size = stop - at
    if size % 4 != 0:
        return -1
    padding = 0
    if size > 0 and source[stop - 1] == EQUALS:
        padding = 2 if source[stop - 2] == EQUALS else 1
    for i in range(size - padding):
        digit = source[at + i]
        if BASE64_VALUES[digit] == 0 and digit != _ZERO_DIGIT:
            return -1
    for group in range(at, stop, 4):
        bits = np.int64(0)
        for i in range(4):
            bits = bits << 6 | np.int64(BASE64_VALUES[source[group + i]])
        count = 3 - padding if group + 4 == stop else 3
        for i in range(count):
            out[out_at + i] = bits >> (16 - 8 * i) & 255
        out_at += count
    return out_at


@kernel
def read_bytes(
    source: Bytes,
    starts: Ints,
    stops: Ints,
    status: Bytes,
    has_texts: bool,
    out: Bytes,
    ends: Ints,
) -> None:
    """Write the bytes of `{"_base64":"..."}`; with `has_texts`, those of strings in UTF-8, too.

    `ends` is as for `read_texts`.
    """
    out_at = int(np.int64(0))
    for row in range(status.size):
        if status[row] == VALUE:
            at, stop = int(starts[row]), int(stops[row])
            end, failure = -1, NOT_OF_TYPE
            if source[at] == QUOTE and has_texts:
                end = _write_characters(source, at + 1, stop - 1, out, out_at)
                failure = NOT_UNICODE
            elif source[at] == OPEN_BRACE:
                first = _base64_start(source, at, stop)
                closed = -1 if first < 0 else string_end(source, first - 1, stop)
                if closed >= 0 and source[_skip_blanks(source, closed, stop - 1)] == CLOSE_BRACE:
                    end = _write_bytes(source, first, closed - 1, out, out_at)
            status[row] = failure if end < 0 else FITS
            out_at = max(out_at, end)
        ends[row + 1] = out_at
