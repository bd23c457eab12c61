"""Rows of a SELECT as the JSON text that the log's image of the same rows has.

A type has one form, whether its value comes from the log or is asked for. What the server sends in
answer to a SELECT is text, which kernels write as they write the log's values (`result_text`). The
session must have run `SESSION`, and the statement must ask for `MysqlSelectedRows.expressions`: then
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

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.json_text import MAX_DEPTH as TEXT_DEPTH
from deltaforge_dagster.kernels.json_text import STRING_GROWTH
from deltaforge_dagster.kernels.runtime import Bytes, Longs, read_only
from deltaforge_dagster.sources.mysql.schema.versions import ColumnLayout
from deltaforge_dagster.sources.mysql.snapshot.result_rows import Rows, split_rows
from deltaforge_dagster.sources.mysql.snapshot.result_text import gather, write_selected
from deltaforge_dagster.sources.mysql.values.floats import VECTOR_GROWTH
from deltaforge_dagster.sources.mysql.values.types import FLOAT, SIGNED, MysqlValueType
from deltaforge_dagster.sources.rows.arrays import text_column

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


@dataclass(frozen=True, slots=True)
class SelectedColumn:
    """A column to ask for: its name, type, and the labels of an ENUM or SET."""

    name: str
    type: MysqlValueType
    labels: tuple[str, ...] = ()


class MysqlSelectedRows:
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
        SelectedColumn("id", MysqlValueType("int", SIGNED, 4)),
        SelectedColumn("f", MysqlValueType("double", FLOAT, 8)),
    ]
    bounds, state = np.empty((2, 2), np.int64), np.zeros(3, np.int64)
    source = read_only(b"\4\0\0\1\0011\0011")  # a packet with two values
    split_rows(source, source.size, 2, bounds, state)
    MysqlSelectedRows(columns, ("id",)).write(Rows(source, bounds))


def expression(column: SelectedColumn) -> str:
    """Return what to ask for, so that the whole value comes as text."""
    name = column.type.name.partition("(")[0].partition(" ")[0]
    return _EXPRESSIONS.get(name, "{}").format(quoted(column.name))


def quoted(name: str) -> str:
    """Return a name as statements have it."""
    return "`" + name.replace("`", "``") + "`"
