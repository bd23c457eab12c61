"""Rows of a SELECT as the JSON text that the log's image of the same rows has.

A type has one form, whether its value comes from the log or is asked for. What the server sends in
answer to a SELECT is text: each value goes through the kernel that writes that type from the log
(`scalars`, `texts`, `floats`), behind a few lines here that read the text, or stands as it is. The
session must have run `SESSION`, and the statement must ask for `SelectedRows.expressions`: then
nothing is rounded, padded, shifted by a time zone or converted to another character set.

==============  =======================================  ==================================
type            asked for as                             because
==============  =======================================  ==================================
`FLOAT` ...     `c * 1e0`                                FLOAT is shown with six digits only
`BIT`           `c + 0`                                  the value itself is bytes
`ENUM`, `SET`   `CAST(c AS UNSIGNED)`                    labels may hold commas
others          `c`
==============  =======================================  ==================================
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0917, PLR1714, SIM109 - kernels are long flat loops over bytes, see `sources.kernel`

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.arrays import text_column
from deltaforge_dagster.sources.characters import (
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
)
from deltaforge_dagster.sources.json_text import (
    INVALID,
    STRING_GROWTH,
    write_document,
    write_null,
)
from deltaforge_dagster.sources.json_text import MAX_DEPTH as TEXT_DEPTH
from deltaforge_dagster.sources.kernel import Bytes, Longs, copy, kernel, read_only
from deltaforge_dagster.sources.mysql.column_layout import ColumnLayout
from deltaforge_dagster.sources.mysql.floats import VECTOR_GROWTH, write_float, write_vector
from deltaforge_dagster.sources.mysql.layout import (
    COLUMN_FIRST,
    COLUMN_KIND,
    COLUMN_NAME,
    COLUMN_NAME_END,
    COLUMN_SECOND,
    COLUMN_SIZE,
)
from deltaforge_dagster.sources.mysql.numbers import read_8
from deltaforge_dagster.sources.mysql.scalars import write_unsigned
from deltaforge_dagster.sources.mysql.texts import CodePoints, write_set, write_text
from deltaforge_dagster.sources.mysql.values import (
    BIT,
    BLOB,
    BYTES,
    DATE,
    DATETIME,
    DECIMAL,
    ENUM,
    FLOAT,
    JSON,
    MICROS,
    PADDED_BYTES,
    SET,
    SIGNED,
    TIME,
    TIMESTAMP,
    UNSIGNED,
    VECTOR,
    YEAR,
    ValueType,
)

SESSION = (
    "SET time_zone = '+00:00'",
    "SET sql_mode = ''",
    "SET character_set_results = NULL",
)
"""Statements before the first SELECT: what a text depends on besides the value."""

_EXPRESSIONS = {
    "float": "{} * 1e0",
    "double": "{} * 1e0",
    "bit": "{} + 0",
    "enum": "CAST({} AS UNSIGNED)",
    "set": "CAST({} AS UNSIGNED)",
}
_FLOATS = {4: struct.Struct("<f"), 8: struct.Struct("<d")}

_BAD = np.uint64(0xFFFFFFFFFFFFFFFF)
_TEN = np.uint64(10)


@dataclass(frozen=True, slots=True)
class SelectedColumn:
    """A column to ask for: its name, type, and the labels of an ENUM or SET."""

    name: str
    type: ValueType
    labels: tuple[str, ...] = ()


class SelectedRows:
    """Writes rows of one table.

    Attributes:
        expressions: What to ask for, in this order.
    """

    def __init__(self, columns: Sequence[SelectedColumn]) -> None:
        self._columns = columns
        self._layout = ColumnLayout()
        self._room = 2 + sum(
            self._layout.add(column.name, column.type, column.labels, is_key=False)
            for column in columns
        )
        self._stack = np.empty(TEXT_DEPTH, np.uint8)
        self.expressions = tuple(
            _EXPRESSIONS.get(column.type.name.partition("(")[0].partition(" ")[0], "{}").format(
                "`" + column.name.replace("`", "``") + "`"
            )
            for column in columns
        )

    def write(self, rows: Sequence[Sequence[bytes | None]]) -> pa.Array[Any]:
        """Return the rows' JSON text, as `after` of the change frame has it.

        Raises:
            CorruptLog: A value is not of its type; the session or the statement is another.
        """
        cells = [self._cell(place, cell) for row in rows for place, cell in enumerate(row)]
        sizes = np.array([0 if cell is None else len(cell) for cell in cells], np.int64)
        bounds = np.empty((len(cells), 2), np.int64)
        bounds[:, 1] = np.cumsum(sizes)
        bounds[:, 0] = bounds[:, 1] - sizes
        bounds[[cell is None for cell in cells], 0] = -1
        source = read_only(b"".join(cell for cell in cells if cell is not None))
        growth = max(STRING_GROWTH, VECTOR_GROWTH)
        out = np.empty(len(rows) * self._room + growth * source.size, np.uint8)
        ends = np.empty(len(rows), np.int64)
        layout = self._layout
        with np.errstate(over="ignore"):
            bad = write_selected(
                source,
                bounds,
                layout.columns,
                layout.labels,
                layout.names,
                layout.characters,
                out,
                ends,
                self._stack,
            )
        if bad >= 0:
            column = self._columns[bad % len(self._columns)]
            raise CorruptLog(f"a value of column {column.name} that is no {column.type.name}")
        return text_column(out, ends, np.ones(len(rows), np.uint8))

    def _cell(self, place: int, cell: bytes | None) -> bytes | None:
        """Return what the kernel reads: of floating point numbers their bits."""
        type_ = self._columns[place].type
        if cell is None or type_.kind != FLOAT:
            return cell
        return _FLOATS[type_.size].pack(float(cell))


@kernel
def _integer(source: Bytes, start: int, end: int) -> np.uint64:
    """Return the number that digits stand for, `_BAD` for something else."""
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
    """Say whether there are digits, and nothing else but one point between them."""
    points = 0
    for at in range(start, end):
        if source[at] == DOT and start < at < end - 1:
            points += 1
        elif source[at] < ZERO or source[at] > NINE:
            return False
    return start < end and points < 2


@kernel
def _write_number(source: Bytes, start: int, end: int, out: Bytes, place: int) -> int:
    """Write a decimal number without the zeros that ZEROFILL put before it."""
    if start < end and source[start] == MINUS:
        out[place] = MINUS
        place += 1
        start += 1
    if not _is_digits(source, start, end):
        return INVALID
    while end - start > 1 and source[start] == ZERO and source[start + 1] != DOT:
        start += 1
    return copy(source, start, end, out, place)


@kernel
def _write_moment(kind: int, source: Bytes, start: int, end: int, out: Bytes, place: int) -> int:
    """Write a date, a time or both, always with six digits of the second's fraction."""
    out[place] = QUOTE
    place += 1
    whole = end
    for at in range(start, end):
        if source[at] == DOT:
            whole = at
    if whole - start > 19 or whole - start < 8 or end - whole > 7:
        return INVALID
    first = place
    place = copy(source, start, whole, out, place)
    if kind != DATE:
        place = copy(source, whole, end, out, place)
        if whole == end:
            out[place] = DOT
            place += 1
            whole = end - 1
        for _ in range(7 - (end - whole)):
            out[place] = ZERO
            place += 1
    if kind == TIMESTAMP:
        if whole - start < 18:
            return INVALID
        out[first + 10] = UPPER_T
        out[place] = UPPER_Z
        place += 1
    elif kind == DATETIME and out[first + 10] != SPACE:
        return INVALID
    out[place] = QUOTE
    return place + 1


@kernel
def _pair(source: Bytes, at: int) -> int:
    """Return the two digits at `at`."""
    return (read_8(source, at) - ZERO) * 10 + read_8(source, at + 1) - ZERO


@kernel
def _write_micros(source: Bytes, start: int, end: int, out: Bytes, place: int) -> int:
    """Write `YYYY-MM-DD hh:mm:ss.ffffff` as microseconds since 1970; 0 for the zero value."""
    if end - start < 19:
        return INVALID
    year = _pair(source, start) * 100 + _pair(source, start + 2)
    month, day = _pair(source, start + 5), _pair(source, start + 8)
    if year == 0:
        return write_unsigned(np.uint64(0), out, place)
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
    return write_unsigned(np.uint64(micros), out, place)


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
    place: int,
    stack: Bytes,
) -> int:
    """Write one value."""
    kind, first, second = column[COLUMN_KIND], column[COLUMN_FIRST], column[COLUMN_SECOND]
    if kind == SIGNED:
        return _write_number(source, start, end, out, place)
    if kind == UNSIGNED or kind == YEAR or kind == BIT:
        return _write_number(source, start, end, out, place)
    if kind == DECIMAL:
        out[place] = QUOTE
        place = _write_number(source, start, end, out, place + 1)
        if place != INVALID:
            out[place] = QUOTE
            place += 1
        return place
    if kind == DATE or kind == DATETIME or kind == TIMESTAMP or kind == TIME:
        return _write_moment(kind, source, start, end, out, place)
    if kind == MICROS:
        return _write_micros(source, start, end, out, place)
    if kind == FLOAT:
        return write_float(source, start, column[COLUMN_SIZE], out, place)
    if kind == VECTOR:
        return write_vector(source, start, end, out, place)
    if kind == JSON:
        return write_document(source, start, end, out, place, stack)
    if kind == ENUM or kind == SET:
        number = _integer(source, start, end)
        if kind == SET:
            return write_set(number, first, second, labels, names, out, place)
        if number > np.uint64(second):
            return INVALID
        out[place] = QUOTE
        place += 1
        if number != np.uint64(0):
            line = first + np.int64(number) - 1
            place = copy(names, labels[line, 0], labels[line, 1], out, place)
        out[place] = QUOTE
        return place + 1
    if kind == PADDED_BYTES:
        kind = BYTES if second != 0 else BLOB
    return write_text(kind, source, start, end, first, second, characters, out, place)


@kernel
def write_selected(
    source: Bytes,
    bounds: Longs,
    columns: Longs,
    labels: Longs,
    names: Bytes,
    characters: CodePoints,
    out: Bytes,
    ends: Longs,
    stack: Bytes,
) -> int:
    """Write rows whose cells `bounds` tells: start and end in `source`, start -1 for null.

    Returns the number of a cell that is not of its type, -1 when all are. `ends` gets where the
    rows end in `out`, which has the room that all of them need. `stack` is that of `json_text`.
    """
    count = columns.shape[0]
    place = 0
    for cell in range(bounds.shape[0]):
        index = cell % count
        column = columns[index]
        out[place] = OPEN_BRACE if index == 0 else COMMA
        place = copy(names, column[COLUMN_NAME], column[COLUMN_NAME_END], out, place + 1)
        if bounds[cell, 0] < 0:
            place = write_null(out, place)
        else:
            place = _write_cell(
                source, bounds[cell, 0], bounds[cell, 1], column, labels, names, characters,
                out, place, stack,
            )  # fmt: skip
            if place < 0:
                return cell
        if index == count - 1:
            out[place] = CLOSE_BRACE
            place += 1
            ends[cell // count] = place
    return -1
