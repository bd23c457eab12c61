"""Write the rows of a SELECT as JSON text, identical to the images that the log's rows become.

The server sends the values of a SELECT as text. Kernels convert it to the same JSON as the log's
binary values: each value is copied, or parsed here and written by the kernel that also writes the
log's values of its type (`values.scalars`, `values.texts`, `values.numbers`). The session must have
run the statements in `SESSION`, and the SELECT must ask for `MysqlSelectedRows.expressions`, so
that no value is rounded, padded, shifted by a time zone or converted to another character set.

==============  =======================================  ==================================
type            selected as                              because
==============  =======================================  ==================================
`FLOAT` ...     `c * 1e0`                                FLOAT is shown with six digits only
`BIT`           `c + 0`                                  the value itself is bytes
`ENUM`, `SET`   `CAST(c AS UNSIGNED)`                    labels may hold commas
others          `c`
==============  =======================================  ==================================

Each cell of a result has one line in `bounds`, row after row of the result::

    bounds[n] = (start, end)    text of column n % columns in row n // columns: source[start:end]
                (-1, ..)        the value is null
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0917, PLR1714, SIM109 - kernels are long flat loops over
# bytes, see `kernels.runtime`

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.json_text import (
    INVALID,
    STRING_GROWTH,
    write_json_value,
    write_null,
)
from deltaforge_dagster.kernels.json_text import MAX_DEPTH as TEXT_DEPTH
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
    read_only,
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
from deltaforge_dagster.sources.mysql.schema.versions import ColumnLayout
from deltaforge_dagster.sources.mysql.snapshot.result_rows import Rows, split_rows
from deltaforge_dagster.sources.mysql.values.numbers import (
    VECTOR_GROWTH,
    read_8,
    write_float,
    write_vector,
)
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
    MysqlValueType,
)
from deltaforge_dagster.sources.rows.arrays import text_column

SESSION = (
    "SET time_zone = '+00:00'",
    "SET sql_mode = ''",
    "SET character_set_results = NULL",
)
"""Statements to run before the first SELECT: settings on which the text of a value depends."""

_EXPRESSIONS = {
    "float": "{} * 1e0",
    "double": "{} * 1e0",
    "bit": "{} + 0",
    "enum": "CAST({} AS UNSIGNED)",
    "set": "CAST({} AS UNSIGNED)",
}

MAX_TEXT = (1 << 31) - 1
"""The most bytes that an Arrow string array can contain."""


@dataclass(frozen=True, slots=True)
class SelectedColumn:
    """A column to select: its name, type, and the labels of an ENUM or SET."""

    name: str
    type: MysqlValueType
    labels: tuple[str, ...] = ()


class MysqlSelectedRows:
    """Writes selected rows of one table as JSON text.

    Args:
        columns: The columns, in the table's order.
        key: Names of the key columns.

    Attributes:
        expressions: The expressions to select, in this order.
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
        """Return the rows' images, as in `after` of the change frame, and keys; null without a key.

        Raises:
            CorruptLog: A value does not match its type, as if session or statement were wrong.
            UnsupportedEvent: A row is larger than 2 GiB as JSON.
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
        """Return source and bounds for the kernel, with floating point texts as IEEE 754 bytes."""
        source, bounds, count = rows.source, rows.bounds, len(self._columns)
        for index, column in enumerate(self._columns):
            if column.type.kind != FLOAT:
                continue
            if bounds is rows.bounds:
                bounds = bounds.copy()
            cells = bounds[index::count]
            present = cells[:, 0] >= 0
            numbers = _numbers(source, cells[present], column)
            bits = numbers.astype("<f4" if column.type.size == 4 else "<f8").view(np.uint8)
            starts = source.size + column.type.size * np.arange(len(numbers))
            cells[present, 0], cells[present, 1] = starts, starts + column.type.size
            source = read_only(np.concatenate([source, bits]))
        return source, bounds


def _numbers(source: Bytes, bounds: Longs, column: SelectedColumn) -> npt.NDArray[np.float64]:
    """Parse the floating point texts at these bounds."""
    ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
    out = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    gather(source, bounds, out)
    try:
        texts = text_column(out, ends, np.ones(len(ends), np.uint8))
        return texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise CorruptLog(f"a value of column {column.name} that is no {column.type.name}") from None


def warm() -> None:
    """Compile the kernels for selected rows, or load them from the cache."""
    columns = [
        SelectedColumn("id", MysqlValueType("int", SIGNED, 4)),
        SelectedColumn("f", MysqlValueType("double", FLOAT, 8)),
    ]
    bounds, state = np.empty((2, 2), np.int64), np.zeros(3, np.int64)
    source = read_only(b"\4\0\0\1\0011\0011")  # a packet with two values
    split_rows(source, source.size, 2, bounds, state)
    MysqlSelectedRows(columns, ("id",)).write(Rows(source, bounds))


def expression(column: SelectedColumn) -> str:
    """Return the expression to select, so that the server sends the exact value as text."""
    name = column.type.name.partition("(")[0].partition(" ")[0]
    return _EXPRESSIONS.get(name, "{}").format(quoted(column.name))


def quoted(name: str) -> str:
    """Return a name in backticks, for a statement."""
    return "`" + name.replace("`", "``") + "`"


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
    seconds = (era * 146_097 + of_era - 719_468) * 86_400  # as in `scalars`
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
