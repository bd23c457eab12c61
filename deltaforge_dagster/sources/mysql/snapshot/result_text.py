"""Kernels that convert the texts of a result set to the same JSON as the log's binary values.

Each value is copied, or parsed here and written by the kernel that also writes the log's values of
its type (`values.scalars`, `values.texts`, `values.floats`). `selected` decides which expressions
are selected.

Each cell of a result has one line in `bounds`, row after row of the result::

    bounds[n] = (start, end)    text of column n % columns in row n // columns: source[start:end]
                (-1, ..)        the value is null
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0917, PLR1714, SIM109 - kernels are long flat loops over
# bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_text import INVALID, write_json_value, write_null
from deltaforge_dagster.kernels.runtime import (
    CLOSE_BRACE,
    COMMA,
    DOT,
    MINUS,
    NINE,
    OPEN_BRACE,
    QUOTE,
    SPACE,
    UPPER_T,
    UPPER_Z,
    ZERO,
    Bytes,
    Longs,
    copy,
    kernel,
)
from deltaforge_dagster.sources.mysql.decode.layout import (
    COLUMN_FIRST,
    COLUMN_KEY,
    COLUMN_KIND,
    COLUMN_NAME,
    COLUMN_NAME_END,
    COLUMN_SECOND,
    COLUMN_SIZE,
)
from deltaforge_dagster.sources.mysql.values.floats import write_float, write_vector
from deltaforge_dagster.sources.mysql.values.numbers import read_8
from deltaforge_dagster.sources.mysql.values.scalars import write_unsigned
from deltaforge_dagster.sources.mysql.values.texts import CodePoints, write_set, write_text
from deltaforge_dagster.sources.mysql.values.types import (
    BIT,
    BLOB,
    BYTES,
    DATE,
    DATETIME,
    DECIMAL,
    ENUM,
    FLOAT,
    INET4,
    INET6,
    JSON,
    MICROS,
    PADDED_BYTES,
    SET,
    SIGNED,
    TIME,
    TIMESTAMP,
    UNSIGNED,
    UTF_8_TEXT,
    UUID,
    VECTOR,
    YEAR,
)

_BAD = np.uint64(0xFFFFFFFFFFFFFFFF)
_TEN = np.uint64(10)


@kernel
def gather(source: Bytes, bounds: Longs, out: Bytes) -> None:
    """Write the texts at `bounds`, one after another."""
    offset = 0
    for line in range(bounds.shape[0]):
        offset = copy(source, bounds[line, 0], bounds[line, 1], out, offset)


@kernel
def _integer(source: Bytes, start: int, end: int) -> np.uint64:
    """Parse decimal digits; return `_BAD` if the text is anything else."""
    value = np.uint64(0)
    if start == end or end - start > 255:
        return _BAD
    for at in range(start, end):
        if source[at] < ZERO or source[at] > NINE:
            return _BAD
        value = value * _TEN + np.uint64(source[at] - ZERO)
    return value


@kernel
def _is_digits(source: Bytes, start: int, end: int) -> bool:
    """Return whether the text consists of digits, with at most one point between them."""
    points = 0
    for at in range(start, end):
        if source[at] == DOT and start < at < end - 1:
            points += 1
        elif source[at] < ZERO or source[at] > NINE:
            return False
    return start < end and points < 2


@kernel
def _write_number(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write a decimal number without leading zeros, as ZEROFILL adds them."""
    if start < end and source[start] == MINUS:
        out[offset] = MINUS
        offset += 1
        start += 1
    if not _is_digits(source, start, end):
        return INVALID
    while end - start > 1 and source[start] == ZERO and source[start + 1] != DOT:
        start += 1
    return copy(source, start, end, out, offset)


@kernel
def _write_moment(kind: int, source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write a date, a time or both as a JSON string; times always with six fractional digits."""
    out[offset] = QUOTE
    offset += 1
    whole = end
    for at in range(start, end):
        if source[at] == DOT:
            whole = at
    if whole - start > 19 or whole - start < 8 or end - whole > 7:
        return INVALID
    first = offset
    offset = copy(source, start, whole, out, offset)
    if kind != DATE:
        offset = copy(source, whole, end, out, offset)
        if whole == end:
            out[offset] = DOT
            offset += 1
            whole = end - 1
        for _ in range(7 - (end - whole)):
            out[offset] = ZERO
            offset += 1
    if kind == TIMESTAMP:
        if whole - start < 18:
            return INVALID
        out[first + 10] = UPPER_T
        out[offset] = UPPER_Z
        offset += 1
    elif kind == DATETIME and out[first + 10] != SPACE:
        return INVALID
    out[offset] = QUOTE
    return offset + 1


@kernel
def _pair(source: Bytes, at: int) -> int:
    """Return the number that the two digits at `at` form."""
    return (read_8(source, at) - ZERO) * 10 + read_8(source, at + 1) - ZERO


@kernel
def _write_micros(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write `YYYY-MM-DD hh:mm:ss.ffffff` as microseconds since 1970; 0 for the zero date."""
    if end - start < 19:
        return INVALID
    year = _pair(source, start) * 100 + _pair(source, start + 2)
    month, day = _pair(source, start + 5), _pair(source, start + 8)
    if year == 0:
        return write_unsigned(np.uint64(0), out, offset)
    # Days since 1970, by eras of 400 years that begin with a March 1.
    if month <= 2:
        year -= 1
    era = year // 400
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    of_era = (year - era * 400) * 365 + year % 400 // 4 - year % 400 // 100 + of_year
    seconds = (era * 146_097 + of_era - 719_468) * 86_400
    seconds += _pair(source, start + 11) * 3600 + _pair(source, start + 14) * 60
    micros = (seconds + _pair(source, start + 17)) * 1_000_000
    unit = 100_000
    for at in range(start + 20, end):
        micros += (read_8(source, at) - ZERO) * unit
        unit //= 10
    return write_unsigned(np.uint64(micros), out, offset)


@kernel
def _write_cell(
    source: Bytes,
    start: int,
    end: int,
    column: Longs,
    labels: Longs,
    names: Bytes,
    characters: CodePoints,
    out: Bytes,
    offset: int,
    stack: Bytes,
) -> int:
    """Write one value as JSON, by its column's kind; return the offset after it, or `INVALID`."""
    kind, first, second = column[COLUMN_KIND], column[COLUMN_FIRST], column[COLUMN_SECOND]
    if kind == SIGNED:
        return _write_number(source, start, end, out, offset)
    if kind == UNSIGNED or kind == YEAR or kind == BIT:
        return _write_number(source, start, end, out, offset)
    if kind == DECIMAL:
        out[offset] = QUOTE
        offset = _write_number(source, start, end, out, offset + 1)
        if offset != INVALID:
            out[offset] = QUOTE
            offset += 1
        return offset
    if kind == DATE or kind == DATETIME or kind == TIMESTAMP or kind == TIME:
        return _write_moment(kind, source, start, end, out, offset)
    if kind == MICROS:
        return _write_micros(source, start, end, out, offset)
    if kind == FLOAT:
        return write_float(source, start, column[COLUMN_SIZE], out, offset)
    if kind == VECTOR:
        return write_vector(source, start, end, out, offset)
    if kind == JSON:
        return write_json_value(source, start, end, out, offset, stack)
    if kind == ENUM or kind == SET:
        number = _integer(source, start, end)
        if kind == SET:
            return write_set(number, first, second, labels, names, out, offset)
        if number > np.uint64(second):
            return INVALID
        out[offset] = QUOTE
        offset += 1
        if number != np.uint64(0):
            line = first + np.int64(number) - 1
            offset = copy(names, labels[line, 0], labels[line, 1], out, offset)
        out[offset] = QUOTE
        return offset + 1
    if kind == PADDED_BYTES:
        kind = BYTES if second != 0 else BLOB
    elif kind == UUID or kind == INET4 or kind == INET6:
        kind = UTF_8_TEXT
    return write_text(kind, source, start, end, first, second, characters, out, offset)


@kernel
def write_selected(
    source: Bytes,
    bounds: Longs,
    columns: Longs,
    labels: Longs,
    names: Bytes,
    characters: CodePoints,
    out: Bytes,
    key: Bytes,
    ends: Longs,
    spans: Longs,
    stack: Bytes,
) -> int:
    """Write the rows whose cells are at `bounds` (start and end in `source`; start -1 for null).

    Returns the number of the first cell that does not match its type, or -1. `ends[0]` receives
    where each row's image ends in `out`, `ends[1]` where its key ends in `key`; both must be large
    enough. `spans` is scratch, two numbers per column; `stack` is the scratch of
    `kernels.json_text`.
    """
    count = columns.shape[0]
    offset, key_offset = 0, 0
    for cell in range(bounds.shape[0]):
        index = cell % count
        column = columns[index]
        out[offset] = OPEN_BRACE if index == 0 else COMMA
        spans[index, 0] = offset + 1
        offset = copy(names, column[COLUMN_NAME], column[COLUMN_NAME_END], out, offset + 1)
        if bounds[cell, 0] < 0:
            offset = write_null(out, offset)
        else:
            offset = _write_cell(
                source, bounds[cell, 0], bounds[cell, 1], column, labels, names, characters,
                out, offset, stack,
            )  # fmt: skip
            if offset < 0:
                return cell
        spans[index, 1] = offset
        if index == count - 1:
            out[offset] = CLOSE_BRACE
            offset += 1
            ends[0, cell // count] = offset
            opening = OPEN_BRACE
            for number in range(count):
                if columns[number, COLUMN_KEY] != 0:
                    key[key_offset] = opening
                    opening = COMMA
                    key_offset = copy(out, spans[number, 0], spans[number, 1], key, key_offset + 1)
            if opening == COMMA:
                key[key_offset] = CLOSE_BRACE
                key_offset += 1
            ends[1, cell // count] = key_offset
    return -1
