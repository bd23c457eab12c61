"""Write the rows of a SELECT as JSON text, identical to the images that the log's rows become.

The server sends the values of a SELECT as text, and kernels convert it to the same JSON as the
log's binary values (`result_text`). The session must have run the statements in `SESSION`, and the
SELECT must ask for `MysqlSelectedRows.expressions`, so that no value is rounded, padded, shifted by
a time zone or converted to another character set.

==============  =======================================  ==================================
type            selected as                              because
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
