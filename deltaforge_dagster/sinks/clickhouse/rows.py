"""Converts staged rows to rows for INSERT: exactly the columns of the table, in Arrow's types."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.clickhouse.rows import VersionMaker, version_column
from deltaforge_dagster.sinks.clickhouse.target import (
    DELETED,
    EVENT,
    OP,
    TIME,
    VERSION,
    column_type,
    is_nullable,
)
from deltaforge_dagster.sinks.tables.staged import META, OLD_KEY, StagedTable, lacking
from deltaforge_dagster.typed_rows.schema import TypedColumn

ABSENT = "_absent"
"""In rows that are not inserted into the table itself: the names of the columns that they lack."""

INSERT_ROWS = 500_000
INSERT_BYTES = 64 << 20
"""Most rows, and bytes in memory, of one INSERT.

They are few enough for ClickHouse to make one block of them, which is added at once.
"""

_FIRST, _LAST = dt.date(1900, 1, 1), dt.date(2299, 12, 31)
_EPOCH = dt.date(1970, 1, 1)
_DAYS = range((_FIRST - _EPOCH).days, (_LAST - _EPOCH).days + 1)
_MICROS = range(_DAYS.start * 86_400_000_000, _DAYS.stop * 86_400_000_000)
"""The range of `Date32` and `DateTime64`; the server would silently change other values."""

_PLACE_COLUMNS = ("df_segment", "df_ordinal", "df_event_time")
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")

Mask = npt.NDArray[np.bool_]


def place_schema() -> pa.Schema:
    """Return the columns of staged rows that decide their versions."""
    return pa.schema([META.field(name) for name in _PLACE_COLUMNS])


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes the rows of one table.

    Args:
        label: What messages call the table.
        table: The changes.
        mode: What the table holds.
        types: The types of the table's columns, by name.
        versions: Makes the rows' versions.
    """

    label: str
    table: StagedTable
    mode: str
    types: Mapping[str, str]
    versions: VersionMaker

    def staged_schema(self, *, rekey: bool) -> pa.Schema:
        """Return the columns of staged rows that are needed, with their types."""
        fields = [column.field for column in self.table.columns.columns]
        names = [
            "df_op",
            *_PLACE_COLUMNS,
            "df_absent",
            *(["df_event_id"] if self.mode == "changelog" else []),
        ]
        fields += [META.field(name) for name in names]
        if rekey:
            keys = {column.name: column for column in self.table.columns.columns}
            fields += [keys[name].field.with_name(OLD_KEY + name) for name in self.table.key]
        return pa.schema(fields)

    def made(self, rows: pa.RecordBatch, *, partial: bool = False) -> pa.RecordBatch:
        """Return rows as they are inserted.

        Args:
            rows: Staged rows, with the columns of `staged_schema`.
            partial: Whether the rows lack values, so that `Staging` completes them before they are
                inserted into the table. They then have the column `ABSENT`, and perhaps old keys.

        Raises:
            TableRejected: The table cannot have a value.
        """
        ops = rows.column("df_op")
        deleted = _numpy(pc.equal(ops, pa.scalar("d")))
        blank = deleted if self.mode == "current" else _numpy(pc.equal(ops, pa.scalar("t")))
        columns: dict[str, pa.Array[Any]] = {}
        for column in self.table.columns.columns:
            columns[column.name] = self._column(column, rows, blank)
            if partial and OLD_KEY + column.name in rows.schema.names:
                columns[OLD_KEY + column.name] = _without_extension(
                    rows.column(OLD_KEY + column.name)
                )
        columns[OP] = ops
        columns[VERSION] = version_column(self.versions.versions(rows))
        columns[DELETED] = pa.array(deleted.astype(np.uint8))
        columns[TIME] = rows.column("df_event_time")
        if self.mode == "changelog":
            columns[EVENT] = rows.column("df_event_id")
        if partial:
            columns[ABSENT] = pc.if_else(
                pc.is_null(rows.column("df_absent")), _NONE, rows.column("df_absent")
            )
        return pa.RecordBatch.from_pydict(columns)

    def _column(self, column: TypedColumn, rows: pa.RecordBatch, blank: Mask) -> pa.Array[Any]:
        """Return the values of a column; those of blank rows, which have none, may be anything."""
        values = _without_extension(rows.column(column.name))
        self._check_range(column, values)
        if not values.null_count:
            return values
        if pa.types.is_list(values.type):
            return self._arrays(
                column, values, blank | lacking(rows.column("df_absent"), column.name)
            )
        if not is_nullable(self.types[column.name]) and blank.any():
            return cast(
                "pa.Array[Any]",
                pc.if_else(pa.array(blank), values.fill_null(_placeholder(values.type)), values),
            )
        return values

    def _arrays(self, column: TypedColumn, values: pa.Array[Any], blank: Mask) -> pa.Array[Any]:
        nulls = _numpy(values.is_null())
        if (nulls & ~blank).any():
            raise TableRejected(
                f"{self.label}: a value of column {column.name} is null, which arrays in "
                "ClickHouse cannot be; declare the column's type as json under the sink's `types`, "
                "and have the table loaded again"
            )
        empty = pa.scalar([], values.type)
        return cast("pa.Array[Any]", pc.if_else(pa.array(nulls), empty, values))

    def _check_range(self, column: TypedColumn, values: pa.Array[Any]) -> None:
        while pa.types.is_list(values.type):
            values = cast("pa.ListArray[Any]", values).flatten()
        if pa.types.is_date32(values.type):
            values, held = values.cast(pa.int32()), _DAYS
        elif pa.types.is_timestamp(values.type):
            values, held = values.cast(pa.int64()), _MICROS
        else:
            return
        ends = cast("dict[str, int | None]", pc.min_max(values).as_py())
        if any(end is not None and end not in held for end in ends.values()):
            raise TableRejected(
                f"{self.label}: a value of column {column.name} is outside of {_FIRST} to {_LAST}, "
                f"which is what {column_type(column.type)} holds; declare the column's type as "
                "text under the sink's `types`, and have the table loaded again"
            )


def insert_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield rows in parts for one INSERT each. The same batches always make the same parts."""
    rows = size = 0
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        if pending and (rows + batch.num_rows > INSERT_ROWS or size + batch.nbytes > INSERT_BYTES):
            yield pa.Table.from_batches(pending)
            pending, rows, size = [], 0, 0
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if pending:
        yield pa.Table.from_batches(pending)


def arrow_stream(rows: pa.Table) -> bytes:
    """Return rows as ClickHouse's format `ArrowStream` has them, compressed."""
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, rows.schema, options=_COMPRESSED) as writer:
        writer.write_table(rows)
    return file.getvalue().to_pybytes()


def is_partial(rows: pa.RecordBatch) -> Mask:
    """Return which staged rows lack values."""
    return _numpy(rows.column("df_absent").is_valid())


_NONE = pa.scalar([], pa.list_(pa.string()))


def _without_extension(values: pa.Array[Any]) -> pa.Array[Any]:
    """Return values without extension types: UUIDs as 16 bytes."""
    if isinstance(values, pa.ExtensionArray):
        return cast("pa.Array[Any]", values.storage)
    if pa.types.is_list(values.type):
        lists = cast("pa.ListArray[Any]", values)
        inner = _without_extension(lists.values)
        if inner.type != lists.values.type:
            mask = lists.is_null() if lists.null_count else None
            return pa.ListArray.from_arrays(lists.offsets, inner, mask=mask)
    return values


def _placeholder(type_: pa.DataType) -> pa.Scalar[Any]:
    """Return the value that stands for a missing one in a column that cannot be null."""
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        return pa.scalar(b"", pa.binary()).cast(type_)
    if pa.types.is_fixed_size_binary(type_):
        return pa.scalar(bytes(16), type_)
    if pa.types.is_boolean(type_):
        return pa.scalar(False)
    if pa.types.is_date32(type_):
        return pa.scalar(_EPOCH, type_)
    if pa.types.is_decimal(type_):
        return pa.scalar(Decimal(0), type_)
    return pa.scalar(0, pa.int64()).cast(type_)


def _numpy(mask: pa.Array[Any]) -> Mask:
    return cast("Mask", mask.to_numpy(zero_copy_only=False))
