"""Converts staged rows to rows for INSERT: the table's columns, in Arrow's types, and versions.

The version of a row is a number of 128 bits that grows in the order of the source's log:

======  ===========================================================================================
bits
======  ===========================================================================================
127-64  position in the source's log at which the segment of the change ends
        (`SourceType.position_number`)
63-22   when the segment was added to the journal, in milliseconds since 1970
21-0    place of the change in the segment; that of a later one than 4,194,303 runs over into the
        milliseconds
======  ===========================================================================================

A segment ends between two transactions, and all of its changes have committed up to there: so
versions are in the order of commits, and within a transaction in that of its changes. PostgreSQL's
log alone has no such number, because transactions are interleaved in it. If two segments end at the
same position, one has changes that were read from the log, and the other was added after it without
reading the log: snapshot rows or released changes.

The version of a change depends on how the log is cut into segments, which is not the same if it is
captured again (a rebuilt journal, another state store). But the newest change of a row has the
greatest version whatever was delivered before. Let `a` be delivered from a segment that ends at
`A`, and let `b` be a later change of the row, now in a segment that ends at `B`. If `B` is below
`A`, the segment of `a` had `b` in it as well, and so its commit has delivered `b` already, after
`a`. Otherwise the version of `b` is greater.

With `version_source: ts_ms` the upper half is the time of the change in milliseconds.
"""

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
from deltaforge_dagster.sinks.clickhouse.target import (
    DELETED,
    EVENT,
    OP,
    TIME,
    VERSION,
    column_type,
    is_nullable,
)
from deltaforge_dagster.sinks.tables.staged import (
    META,
    OLD_KEY,
    ChangePlace,
    StagedSegment,
    StagedTable,
    lacking,
)
from deltaforge_dagster.sources.registry import identify_position
from deltaforge_dagster.typed_rows.schema import TypedColumn

# Of the lower half, 42 bits are milliseconds, which suffice until 2109. A larger ordinal adds to
# them, and the changes of a segment stay in order.
_PLACE_BITS = 22
_HALF = 64
_WORDS = np.dtype([("low", "<u8"), ("high", "<u8")])

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

_NONE = pa.scalar([], pa.list_(pa.string()))


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
            values, limits = values.cast(pa.int32()), _DAYS
        elif pa.types.is_timestamp(values.type):
            values, limits = values.cast(pa.int64()), _MICROS
        else:
            return
        ends = cast("dict[str, int | None]", pc.min_max(values).as_py())
        if any(end is not None and end not in limits for end in ends.values()):
            raise TableRejected(
                f"{self.label}: a value of column {column.name} is outside of {_FIRST} to {_LAST}, "
                f"which is what {column_type(column.type)} holds; declare the column's type as "
                "text under the sink's `types`, and have the table loaded again"
            )


def place_schema() -> pa.Schema:
    """Return the columns of staged rows that decide their versions."""
    return pa.schema([META.field(name) for name in _PLACE_COLUMNS])


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


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where a segment is in the source's log.

    Attributes:
        start, position: Numbers of the positions at which it starts and ends; None if they have
            none.
        created_at: See `StagedSegment`.
    """

    start: int | None
    position: int | None
    created_at: float


def segment_place(segment: StagedSegment) -> SegmentPlace:
    """Return where a segment is in the source's log."""
    start, end = (_number(text) for text in (segment.start, segment.end))
    return SegmentPlace(start, end, segment.created_at)


def _number(text: str) -> int | None:
    kind, position = identify_position(text)
    return kind.position_number(position)


@dataclass(frozen=True, slots=True)
class VersionMaker:
    """Makes the versions of the changes of a commit.

    Args:
        segments: The segments of the commit.
        by_time: Whether the upper half is the time of the change.
    """

    segments: Mapping[int, SegmentPlace]
    by_time: bool

    @property
    def unknown(self) -> bool:
        """Whether a segment ends at a position without a number, so that there are no versions."""
        if self.by_time:
            return False
        return any(None in {segment.start, segment.position} for segment in self.segments.values())

    def floor(self, span: VersionSpan) -> int:
        """Return a lower bound of the versions that the commit's changes have had in any delivery.

        It holds however the log was cut into segments when they were delivered before.

        Args:
            span: The versions of the changes.
        """
        if self.by_time:
            return span.first >> _HALF << _HALF
        return min(_lowest(segment) for segment in self.segments.values())

    def version(self, change: ChangePlace, time_us: int) -> int:
        """Return the version of one change."""
        segment = self.segments[change.segment]
        high = time_us // 1000 if self.by_time else segment.position
        assert high is not None
        return (high << _HALF) + (_milliseconds(segment) << _PLACE_BITS) + change.ordinal

    def versions(self, rows: pa.RecordBatch) -> npt.NDArray[Any]:
        """Return the versions of rows, in low and high words.

        The rows have the columns `df_segment`, `df_ordinal` and `df_event_time`.
        """
        numbers = rows.column("df_segment").to_numpy()
        distinct, inverse = np.unique(numbers, return_inverse=True)
        ordinals = rows.column("df_ordinal").to_numpy().astype(np.uint64)
        segments = [self.segments[number] for number in distinct.tolist()]
        bases = np.array([_milliseconds(segment) << _PLACE_BITS for segment in segments], np.uint64)
        words = np.empty(len(numbers), _WORDS)
        words["low"] = bases[inverse] + ordinals
        if self.by_time:
            times = rows.column("df_event_time").cast(pa.int64()).to_numpy()
            words["high"] = np.maximum(times // 1000, 0)
        else:
            positions = np.array([segment.position for segment in segments], np.uint64)
            words["high"] = positions[inverse]
        return words


def version_column(versions: npt.NDArray[Any]) -> pa.Array[Any]:
    """Return versions as 16 bytes each, which ClickHouse reads as `UInt128`."""
    data = pa.py_buffer(versions.tobytes())
    return pa.Array.from_buffers(pa.binary(16), len(versions), [None, data])


@dataclass(slots=True)
class VersionSpan:
    """The smallest and the greatest of some versions."""

    first: int = (1 << 128) - 1
    last: int = 0

    def add(self, version: int) -> None:
        """Include a version."""
        self.first, self.last = min(self.first, version), max(self.last, version)

    def add_all(self, versions: npt.NDArray[Any]) -> None:
        """Include versions."""
        for high, pick in ((versions["high"].min(), min), (versions["high"].max(), max)):
            low = pick(versions["low"][versions["high"] == high].tolist())
            self.add((int(high) << _HALF) + low)


def has_version(versions: npt.NDArray[Any], version: int) -> bool:
    """Return whether `version` is among `versions`."""
    low, high = version & ((1 << _HALF) - 1), version >> _HALF
    return bool(((versions["low"] == low) & (versions["high"] == high)).any())


def _lowest(segment: SegmentPlace) -> int:
    assert segment.start is not None
    assert segment.position is not None
    if segment.start == segment.position:  # nothing was read from the log
        return (segment.position << _HALF) + (_milliseconds(segment) << _PLACE_BITS)
    return segment.start + 1 << _HALF


def _milliseconds(segment: SegmentPlace) -> int:
    return int(segment.created_at * 1000)
