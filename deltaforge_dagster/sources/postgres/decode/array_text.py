"""Kernel that converts PostgreSQL's array text to a JSON array.

The output of `array_out` is (manual, section "Array Input and Output Syntax")::

    [lower:upper]...=        only if a lower bound is not 1; skipped, since JSON arrays have
                             no bounds
    {element,element,...}    an element is NULL, or unquoted text, or
                             "text" with a backslash before each " and each backslash
    {{...},{...}}            more dimensions nest

The comma is the element type's delimiter (`pg_type.typdelim`): of PostgreSQL's built-in types
only `box` has another, a semicolon.

`array_out` quotes every element that is empty, looks like NULL, or contains braces, delimiters,
quotes, backslashes or white space; so nothing outside quotes needs escaping.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM109 - kernels are long flat
# loops over bytes, see `kernels.runtime`

from __future__ import annotations

from deltaforge_dagster.kernels.json_text import INVALID, STRING_GROWTH, write_null, write_scalar
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COLON,
    COMMA,
    EQUALS,
    MINUS,
    NINE,
    OPEN_BRACE,
    OPEN_BRACKET,
    QUOTE,
    UPPER_L,
    UPPER_N,
    UPPER_U,
    ZERO,
    Bytes,
    kernel,
)

ARRAY_GROWTH = 10
"""An array text of n bytes needs room for `ARRAY_GROWTH` n + `ARRAY_OVERHEAD` bytes: two bytes,
`a,`, may become the 19 bytes `{"_base64":"YQ=="},`.
"""
ARRAY_OVERHEAD = 128

_FIRST, _NEXT, _AFTER = range(3)
"""States of the parser: element, brace or end may follow; element or brace; comma or end."""


@kernel
def _bounds_end(source: Bytes, start: int, end: int) -> int:
    """Return the offset after `[lower:upper]...=`, `start` if there are no bounds, or `INVALID`."""
    if start >= end or source[start] != OPEN_BRACKET:
        return start
    for position in range(start, end):
        byte = source[position]
        if byte == EQUALS:
            return position + 1 if source[position - 1] == CLOSE_BRACKET else INVALID
        if not (
            ZERO <= byte <= NINE
            or byte == OPEN_BRACKET
            or byte == CLOSE_BRACKET
            or byte == COLON
            or byte == MINUS
        ):
            return INVALID
    return INVALID


@kernel
def _is_null(source: Bytes, start: int, end: int) -> bool:
    """Return whether the unquoted element is `NULL`."""
    return (
        end - start == 4
        and source[start] == UPPER_N
        and source[start + 1] == UPPER_U
        and source[start + 2] == UPPER_L
        and source[start + 3] == UPPER_L
    )


@kernel
def write_array(
    element: int,
    delimiter: int,
    source: Bytes,
    start: int,
    end: int,
    out: Bytes,
    at: int,
    stack: Bytes,
) -> int:
    """Write the array text `source[start:end]` as JSON; `element` is its elements' scalar kind.

    Returns the offset after it, or a negative code of `kernels.json_text`. `out` needs room for
    `ARRAY_GROWTH` n + `ARRAY_OVERHEAD` bytes: an element with backslashes is first unescaped into
    that room, beyond the most that the element itself may take.
    """
    position = _bounds_end(source, start, end)
    if position == INVALID or position >= end or source[position] != OPEN_BRACE:
        return INVALID
    depth = 0
    state = _NEXT
    while position < end:
        byte = source[position]
        if byte == OPEN_BRACE and state != _AFTER:
            out[at] = OPEN_BRACKET
            at += 1
            position += 1
            depth += 1
            state = _FIRST
        elif byte == CLOSE_BRACE and state != _NEXT and depth > 0:
            out[at] = CLOSE_BRACKET
            at += 1
            position += 1
            depth -= 1
            state = _AFTER
            if depth == 0:
                return at if position == end else INVALID
        elif byte == delimiter and state == _AFTER:
            out[at] = COMMA
            at += 1
            position += 1
            state = _NEXT
        elif state == _AFTER:
            return INVALID
        elif byte == QUOTE:
            first = position + 1
            position = first
            escaped = 0
            while position < end and source[position] != QUOTE:
                if source[position] == BACKSLASH:
                    escaped += 1
                    position += 1
                position += 1
            if position >= end:
                return INVALID
            if escaped == 0:
                at = write_scalar(element, source, first, position, out, at, stack)
            else:
                plain = at + STRING_GROWTH * (position - first) + ARRAY_OVERHEAD // 2
                size = 0
                i = first
                while i < position:
                    if source[i] == BACKSLASH:
                        i += 1
                    out[plain + size] = source[i]
                    size += 1
                    i += 1
                at = write_scalar(element, out, plain, plain + size, out, at, stack)
            if at < 0:
                return at
            position += 1
            state = _AFTER
        else:
            first = position
            while (
                position < end and source[position] != delimiter and source[position] != CLOSE_BRACE
            ):
                byte = source[position]
                if byte == OPEN_BRACE or byte == QUOTE or byte == BACKSLASH:
                    return INVALID
                position += 1
            if position == first:
                return INVALID
            if _is_null(source, first, position):
                at = write_null(out, at)
            else:
                at = write_scalar(element, source, first, position, out, at, stack)
            if at < 0:
                return at
            state = _AFTER
    return INVALID
