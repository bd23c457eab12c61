"""Encode events in Avro, for whole batches of the change frame.

A value has the form that deserializers of Confluent's registry expect ("Schema Registry", "Wire
format"): a byte 0, the id of the schema in four bytes, and the record. The encoder does not know
the id, because the registry assigns it to a subject, which depends on the destination. So the four
bytes are 0 until the message is sent, and a column names the schema of each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.kernels.avro_bytes import (
    NULL,
    UNION,
    EncodedColumn,
    FixedPiece,
    LongPiece,
    Piece,
    SlicePiece,
    encode,
    text,
    varint,
)
from deltaforge_dagster.kernels.message_text import Mask, Values, layout
from deltaforge_dagster.processors.messages import expansion
from deltaforge_dagster.processors.messages.avro.rows import EncodedRows, encoded_rows
from deltaforge_dagster.processors.messages.avro.schema import AvroTable, is_number
from deltaforge_dagster.processors.messages.envelope import (
    EventOrigin,
    is_snapshot,
    position_values,
    raw_payloads,
    wire_op,
)
from deltaforge_dagster.sources.registry import PositionField
from deltaforge_dagster.typed_rows.tables import VersionName, table_versions

OF_NO_TABLE = 0
"""The number of the schema for events that belong to no registered table version."""

NO_ID = b"\x00" * 5
"""A byte 0, and four bytes that the sender replaces by the id of the schema."""

MESSAGES_TYPE = pa.struct([("value", pa.binary()), ("schema", pa.int32()), ("unfit", pa.string())])
"""Messages in Avro.

`value` holds the bytes, null for a tombstone; `schema` is the number of their schema, null if they
are not Avro (a raw payload); `unfit` says why the change cannot be encoded, null if it can.
"""


@dataclass(frozen=True, slots=True)
class AvroEnvelope:
    """Makes the messages of a change frame.

    Attributes:
        origin: Where the events come from.
        tables: The schemas; messages name them by their index in this tuple. The first is
            `OF_NO_TABLE`.
        numbers: The index of the schema of each table version.
    """

    origin: EventOrigin
    tables: tuple[AvroTable, ...]
    numbers: Mapping[VersionName, int] = field(default_factory=dict)

    def __call__(self, frame: pa.RecordBatch) -> pa.StructArray:
        """Return the message of each row, of `MESSAGES_TYPE`.

        Raises:
            UnsupportedEvent: They need more than 2 GiB.
        """
        rows = frame.num_rows
        raw = frame.column("raw_payload").to_numpy(zero_copy_only=False)
        without_value = (
            expansion.tombstones(frame)
            if "role" in frame.schema.names
            else np.zeros(rows, np.bool_)
        )
        numbers = np.full(rows, -1, np.int32)
        unfit: dict[int, str] = {}
        parts: list[pa.Array[Any]] = []
        order: list[npt.NDArray[np.int64]] = []
        for version, places in table_versions(frame, ~raw & ~without_value):
            number = self.numbers.get(version, OF_NO_TABLE)
            whole = len(places) == rows
            events, misfits = self._events(frame if whole else frame.take(places), number)
            numbers[places] = number
            unfit |= {int(places[row]): reason for row, reason in misfits.items()}
            parts.append(events.array())
            order.append(places)
        if raw.any():
            places = np.flatnonzero(raw & ~without_value)
            parts.append(raw_payloads(frame.take(places)).cast(pa.binary()))
            order.append(places)
        values = _in_order(rows, parts, order)
        for row in unfit:
            numbers[row] = -1
        return pa.StructArray.from_arrays(
            [
                _without(values, unfit),
                pa.array(numbers, pa.int32(), mask=numbers < 0),
                pa.array([unfit.get(row) for row in range(rows)], pa.string())
                if unfit else pa.nulls(rows, pa.string()),
            ],
            fields=list(MESSAGES_TYPE),
        )  # fmt: skip

    def _events(
        self, frame: pa.RecordBatch, number: int
    ) -> tuple[EncodedColumn, Mapping[int, str]]:
        """Return the events of rows of one table version, and the rows that cannot be written.

        The latter are row numbers in the frame, each with the reason.
        """
        table = self.tables[number]
        images, misfits = [], dict[int, str]()
        for name in ("before", "after"):
            column = cast("pa.StringArray", frame.column(name))
            present = column.is_valid().to_numpy(zero_copy_only=False)
            records = encoded_rows(column.drop_null(), table) if present.any() else None
            images.append((records, present))
            if records is not None and records.misfits:
                places = np.flatnonzero(present)
                for row, reason in records.misfits.items():
                    misfits.setdefault(int(places[row]), reason)
        pieces: list[Piece] = [
            NO_ID,
            *(_image(records, present) for records, present in images),
            *self._source(frame),
            _text(wire_op(frame)),
            _millis(frame.column("ts_us")),
            _optional(frame.column("event_id")),
            _optional(frame.column("schema_version")),
            _optional(frame.column("tx_id")),
            UNION + text(self.origin.tenant),
            _long(frame.column("schema_sequence")),
            *(_optional(frame.column(name)) for name in ("ddl", "tags", "synthetic")),
            _true(frame.column("tx_end")),
            *(_missing(records, present) for records, present in images),
        ]  # fmt: skip
        return encode(frame.num_rows, pieces), misfits

    def _source(self, frame: pa.RecordBatch) -> list[Piece]:
        origin = self.origin
        snapshot = is_snapshot(frame)
        return [
            text(origin.version) + text(origin.connector) + text(origin.name),
            _millis(frame.column("ts_us")),
            _required(frame.column("db")),
            _optional(frame.column("schema")),
            _required(frame.column("table")),
            _constant(UNION + text("true"), snapshot),
            self._position(frame, snapshot),
        ]

    def _position(self, frame: pa.RecordBatch, snapshot: Mask) -> Piece:
        """Return the log positions; null for a row that was read by a snapshot."""
        if snapshot.all():
            return NULL
        streamed = ~snapshot
        changes = frame.filter(pa.array(streamed)) if snapshot.any() else frame
        pieces = [_position_field(field, changes) for field in self.origin.position_fields]
        encoded = encode(changes.num_rows, pieces).piece(UNION, NULL)
        return encoded.spread(streamed)


def _image(rows: EncodedRows | None, has: Mask) -> Piece:
    return NULL if rows is None else rows.records.piece(UNION, NULL).spread(has)


def _missing(rows: EncodedRows | None, has: Mask) -> Piece:
    return NULL if rows is None or rows.missing is None else rows.missing.spread(has)


def _position_field(position: PositionField, frame: pa.RecordBatch) -> Piece:
    if position.column is None:
        constant = position.constant
        return NULL if constant is None else UNION + varint(int(constant))
    column = frame.column(position.column)
    if not is_number(position):
        return _text(position_values(position, frame), UNION, NULL)
    if position.form == "number":
        return _long(column)
    return _long(column.cast(pa.string()).cast(pa.int64()))


def _required(column: pa.Array[Any]) -> Piece:
    return _texts(column, b"", b"")


def _optional(column: pa.Array[Any]) -> Piece:
    return _texts(column, UNION, NULL)


def _texts(column: pa.Array[Any], before: bytes, otherwise: bytes) -> Piece:
    """Return the piece with the texts of a column; those of a dictionary are stored only once."""
    if column.null_count == len(column):
        return otherwise
    valid = _valid(column)
    if isinstance(column, pa.DictionaryArray):
        codes = column.indices.fill_null(0).to_numpy()
        if valid is None and (codes == codes[0]).all():
            return before + text(column.dictionary[int(codes[0])].as_py())
        ends, data = layout(cast("pa.StringArray", column.dictionary))
        starts, stops = ends[codes], ends[1:][codes]
    else:
        ends, data = layout(cast("pa.StringArray", column))
        starts, stops = ends[:-1], ends[1:]
    return SlicePiece(
        data, starts, stops, sized=True, valid=valid, before=before, otherwise=otherwise
    )


def _text(values: Values | None, before: bytes = b"", otherwise: bytes = b"") -> Piece:
    """Return the piece with texts in the form of `kernels.message_text`."""
    if values is None:
        return otherwise
    if values.constant is not None:
        return before + varint(len(values.constant)) + values.constant
    return SlicePiece(
        values.data, values.starts, values.stops, sized=True,
        valid=values.valid if len(values.valid) else None, before=before, otherwise=otherwise,
    )  # fmt: skip


def _millis(column: pa.Array[Any]) -> Piece:
    millis = column.to_numpy() // 1000
    return varint(int(millis[0])) if (millis == millis[0]).all() else LongPiece(millis)


def _valid(column: pa.Array[Any]) -> Mask | None:
    """Return which values are not null; None if all are."""
    if not column.null_count:
        return None
    return cast("Mask", column.is_valid().to_numpy(zero_copy_only=False))


def _long(column: pa.Array[Any]) -> Piece:
    if column.null_count == len(column):
        return NULL
    valid = _valid(column)
    values = column.fill_null(0).to_numpy()
    if valid is None and (values == values[0]).all():
        return UNION + varint(int(values[0]))
    return LongPiece(values, valid, UNION, NULL)


def _true(column: pa.Array[Any]) -> Piece:
    """Return the piece that is true where the column is true, and null elsewhere."""
    return _constant(UNION + b"\x01", column.to_numpy(zero_copy_only=False))


def _constant(value: bytes, where: Mask) -> Piece:
    """Return the piece with the same bytes in the rows of `where`, and null in the others."""
    if not where.any():
        return NULL
    return value if where.all() else FixedPiece(np.empty(0, np.uint8), 0, where, value, NULL)


def _in_order(
    rows: int, parts: Sequence[pa.Array[Any]], order: Sequence[npt.NDArray[np.int64]]
) -> pa.Array[Any]:
    """Combine values of disjoint sets of rows into one column; null for rows without a value.

    `order` has, for each array in `parts`, the row numbers of its values.
    """
    if len(parts) == 1 and len(parts[0]) == rows:
        return parts[0]
    if not parts:
        return pa.nulls(rows, pa.binary())
    values = pa.concat_arrays(parts)
    places = np.full(rows, -1, np.int64)
    places[np.concatenate(order)] = np.arange(len(values))
    return values.take(pa.array(places, pa.int64(), mask=places < 0))


def _without(values: pa.Array[Any], rows: Mapping[int, str]) -> pa.Array[Any]:
    if not rows:
        return values
    dropped = np.zeros(len(values), np.bool_)
    dropped[list(rows)] = True
    kept: pa.Array[Any] = pc.if_else(pa.array(dropped), pa.scalar(None, pa.binary()), values)
    return kept
