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

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
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
    COLUMN_KEY,
    COLUMN_KIND,
    COLUMN_NAME,
    COLUMN_NAME_END,
    COLUMN_SECOND,
    COLUMN_SIZE,
)
from deltaforge_dagster.sources.mysql.numbers import read_8
from deltaforge_dagster.sources.mysql.result_rows import Rows, split_rows
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

MAX_TEXT = (1 << 31) - 1
"""Arrow's string arrays end here."""

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

    Args:
        columns: The columns, in the table's order.
        key: Names of the key columns.

    Attributes:
        expressions: What to ask for, in this order.
    """

    def __init__(self, columns: Sequence[SelectedColumn], key: Collection[str] = ()) -> None:
        self._columns = columns
        self._keyed = bool(key)
        self._layout = ColumnLayout()
        self._room = 2 + sum(
            self._layout.add(column.name, column.type, column.labels, is_key=column.name in key)
            for column in columns
        )
        self._stack = np.empty(TEXT_DEPTH, np.uint8)
        self._spans = np.empty((len(columns), 2), np.int64)
        self.expressions = tuple(expression(column) for column in columns)

    def write(self, rows: Rows) -> tuple[pa.Array[Any], pa.Array[Any]]:
        """Return the rows' JSON text, as `after` of the change frame has it, and their keys.

        Raises:
            CorruptLog: A value is not of its type; the session or the statement is another.
            UnsupportedEvent: A row is too large.
        """
        source, bounds = self._with_floats(rows)
        count = len(bounds) // len(self._columns)
        growth = max(STRING_GROWTH, VECTOR_GROWTH)
        values = int(np.sum(bounds[:, 1] - bounds[:, 0]))
        room = count * self._room + growth * values
        out, key = np.empty(room, np.uint8), np.empty(room, np.uint8)
        ends = np.empty((2, count), np.int64)
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
                key,
                ends,
                self._spans,
                self._stack,
            )
        if bad >= 0:
            column = self._columns[bad % len(self._columns)]
            raise CorruptLog(f"a value of column {column.name} that is no {column.type.name}")
        if count and ends[0, -1] > MAX_TEXT:
            if count == 1:
                raise UnsupportedEvent("a row is larger than 2 GiB as JSON")
            half = count // 2 * len(self._columns)
            parts = [self.write(Rows(source, part)) for part in (bounds[:half], bounds[half:])]
            return pa.concat_arrays([p[0] for p in parts]), pa.concat_arrays([p[1] for p in parts])
        valid = np.ones(count, np.uint8)
        return (
            text_column(out, ends[0], valid),
            text_column(key, ends[1], valid if self._keyed else np.zeros(count, np.uint8)),
        )

    def _with_floats(self, rows: Rows) -> tuple[Bytes, Longs]:
        """Return what the kernel reads: of floating point numbers their bits."""
        source, bounds, count = rows.source, rows.bounds, len(self._columns)
        for place, column in enumerate(self._columns):
            if column.type.kind != FLOAT:
                continue
            if bounds is rows.bounds:
                bounds = bounds.copy()
            mine = bounds[place::count]
            known = mine[:, 0] >= 0
            numbers = _numbers(source, mine[known], column)
            bits = numbers.astype("<f4" if column.type.size == 4 else "<f8").view(np.uint8)
            starts = source.size + column.type.size * np.arange(len(numbers))
            mine[known, 0], mine[known, 1] = starts, starts + column.type.size
            source = read_only(np.concatenate([source, bits]))
        return source, bounds


def _numbers(source: Bytes, bounds: Longs, column: SelectedColumn) -> npt.NDArray[np.float64]:
    """Return the numbers whose texts stand there."""
    ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
    out = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    gather(source, bounds, out)
    try:
        texts = text_column(out, ends, np.ones(len(ends), np.uint8))
        return texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise CorruptLog(f"a value of column {column.name} that is no {column.type.name}") from None


def warm() -> None:
    """Compile the kernels of rows that are selected, or load them from the cache."""
    columns = [
        SelectedColumn("id", ValueType("int", SIGNED, 4)),
        SelectedColumn("f", ValueType("double", FLOAT, 8)),
    ]
    bounds, state = np.empty((2, 2), np.int64), np.zeros(3, np.int64)
    source = read_only(b"\4\0\0\1\0011\0011")  # a packet with two values
    split_rows(source, source.size, 2, bounds, state)
    SelectedRows(columns, ("id",)).write(Rows(source, bounds))


def expression(column: SelectedColumn) -> str:
    """Return what to ask for, so that the whole value comes as text."""
    name = column.type.name.partition("(")[0].partition(" ")[0]
    return _EXPRESSIONS.get(name, "{}").format(quoted(column.name))


def quoted(name: str) -> str:
    """Return a name as statements have it."""
    return "`" + name.replace("`", "``") + "`"


@kernel
def gather(source: Bytes, bounds: Longs, out: Bytes) -> None:
    """Write the texts that `bounds` tells one after the other."""
    place = 0
    for line in range(bounds.shape[0]):
        place = copy(source, bounds[line, 0], bounds[line, 1], out, place)


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
    elif kind == UUID or kind == INET4 or kind == INET6:
        kind = UTF_8_TEXT
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
    key: Bytes,
    ends: Longs,
    spans: Longs,
    stack: Bytes,
) -> int:
    """Write rows whose cells `bounds` tells: start and end in `source`, start -1 for null.

    Returns the number of a cell that is not of its type, -1 when all are. `ends` gets where the
    rows end in `out`, and their keys in `key`, which have the room that all of them need. `spans` is
    scratch, two for each column; `stack` is that of `json_text`.
    """
    count = columns.shape[0]
    place, key_place = 0, 0
    for cell in range(bounds.shape[0]):
        index = cell % count
        column = columns[index]
        out[place] = OPEN_BRACE if index == 0 else COMMA
        spans[index, 0] = place + 1
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
        spans[index, 1] = place
        if index == count - 1:
            out[place] = CLOSE_BRACE
            place += 1
            ends[0, cell // count] = place
            opening = OPEN_BRACE
            for one in range(count):
                if columns[one, COLUMN_KEY] != 0:
                    key[key_place] = opening
                    opening = COMMA
                    key_place = copy(out, spans[one, 0], spans[one, 1], key, key_place + 1)
            if opening == COMMA:
                key[key_place] = CLOSE_BRACE
                key_place += 1
            ends[1, cell // count] = key_place
    return -1
