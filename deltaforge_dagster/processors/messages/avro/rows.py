"""Row images as records in Avro's binary encoding.

Typed columns (`typed_rows`) become the pieces of records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.kernels.avro_bytes import (
    NULL,
    UNION,
    DecimalPiece,
    EncodedColumn,
    FixedPiece,
    LongPiece,
    Piece,
    SlicePiece,
    encode,
    text,
    varint,
)
from deltaforge_dagster.kernels.message_text import Mask, layout
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.processors.messages.avro.schema import AvroColumn, AvroTable
from deltaforge_dagster.sources.rows.images import members
from deltaforge_dagster.sources.value_types import Kind, ValueType
from deltaforge_dagster.typed_rows.tables import TypedRows, typed_rows

_UUID_TEXT = 36
_DASHES = (8, 13, 18, 23)
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Row images as records.

    Attributes:
        records: The bytes of each record.
        missing: For each row the names of the fields that its image lacks, as an Avro array; None
            if no row lacks any.
        misfits: The reasons why rows cannot be written, by row number. The bytes of such a row are
            meaningless.
    """

    records: EncodedColumn
    missing: SlicePiece | None
    misfits: Mapping[int, str]


def encoded_rows(images: pa.StringArray, table: AvroTable) -> EncodedRows:
    """Return row images as records of a table version.

    Args:
        images: The images; none is null.
        table: How rows are written.

    Raises:
        CorruptLog: An image is not valid JSON.
        UnsupportedEvent: The records need more than 2 GiB.
    """
    if table.rows is None:
        ends, data = layout(images)
        whole = SlicePiece(data, ends[:-1], ends[1:], sized=True, before=UNION)
        return EncodedRows(encode(len(images), [whole]), None, {})
    typed = typed_rows(images, table.rows)
    misfits: dict[int, str] = {}
    for misfit in typed.misfits:
        subject = "its row" if misfit.column is None else f"its column {misfit.column!r}"
        misfits.setdefault(misfit.row, f"{subject} does not fit: {misfit.reason}")
    pieces = [
        _column(column, typed.batch.column(number), misfits)
        for number, column in enumerate(table.columns)
    ]
    other_texts = _other_fields(images, table, typed)
    if table.other_fields:
        pieces.append(_texts(other_texts, UNION, NULL))
    else:
        for row in np.flatnonzero(other_texts.is_valid()).tolist():
            misfits.setdefault(row, "its row has a field that its table does not have")
    return EncodedRows(encode(len(images), pieces), _missing(table, typed), misfits)


def _column(column: AvroColumn, values: pa.Array[Any], misfits: dict[int, str]) -> Piece:
    """Return the piece of a column, a union of null and its type; note which values do not fit."""
    if not column.symbols:
        return _PIECES[column.type.kind](values, column.type, UNION, NULL)
    places = pc.index_in(values, pa.array(column.symbols))
    for row in np.flatnonzero(pc.and_(places.is_null(), values.is_valid())).tolist():
        misfits.setdefault(
            row, f"its column {column.name!r} does not fit: it is not one of the enum's labels"
        )
    return LongPiece(_numbers(places), _valid(places), UNION, NULL)


def _valid(values: pa.Array[Any]) -> Mask | None:
    """Return which values are not null; None if all are."""
    if not values.null_count:
        return None
    return cast("Mask", values.is_valid().to_numpy(zero_copy_only=False))


def _numbers(values: pa.Array[Any]) -> npt.NDArray[np.int64]:
    """Return integers, dates or times as numbers; 0 for null."""
    if pa.types.is_date32(values.type):
        values = values.cast(pa.int32())
    numbers = values.cast(pa.int64())
    return (numbers.fill_null(0) if numbers.null_count else numbers).to_numpy()


def _buffer(values: pa.Array[Any], width: int) -> Bytes:
    """Return the bytes of values of a fixed width."""
    data = cast("pa.Buffer", values.buffers()[1])
    start = values.offset * width
    return np.frombuffer(memoryview(data), np.uint8)[start : start + len(values) * width]


def _booleans(values: pa.Array[Any], _type: ValueType, before: bytes, otherwise: bytes) -> Piece:
    filled = values.fill_null(False)
    data = filled.to_numpy(zero_copy_only=False).astype(np.uint8)
    return FixedPiece(data, 1, _valid(values), before, otherwise)


def _longs(values: pa.Array[Any], _type: ValueType, before: bytes, otherwise: bytes) -> Piece:
    return LongPiece(_numbers(values), _valid(values), before, otherwise)


def _floats(values: pa.Array[Any], type_: ValueType, before: bytes, otherwise: bytes) -> Piece:
    width = type_.bits // 8
    return FixedPiece(_buffer(values, width), width, _valid(values), before, otherwise)


def _decimals(values: pa.Array[Any], _type: ValueType, before: bytes, otherwise: bytes) -> Piece:
    return DecimalPiece(_buffer(values, 16), _valid(values), before, otherwise)


def _bytes(values: pa.Array[Any], _type: ValueType, before: bytes, otherwise: bytes) -> Piece:
    return _texts(values, before, otherwise)


def _texts(values: pa.Array[Any], before: bytes, otherwise: bytes) -> Piece:
    ends, data = layout(cast("pa.StringArray", values))
    return SlicePiece(
        data,
        ends[:-1],
        ends[1:],
        sized=True,
        valid=_valid(values),
        before=before,
        otherwise=otherwise,
    )


def _uuids(values: pa.Array[Any], _type: ValueType, before: bytes, otherwise: bytes) -> Piece:
    stored = cast("pa.ExtensionArray[Any]", values).storage
    raw = _buffer(stored, 16).reshape(len(values), 16)
    digits = np.empty((len(values), 32), np.uint8)
    digits[:, ::2], digits[:, 1::2] = _DIGITS[raw >> 4], _DIGITS[raw & 15]
    out = np.full((len(values), _UUID_TEXT), ord("-"), np.uint8)
    places = [index for index in range(_UUID_TEXT) if index not in _DASHES]
    out[:, places] = digits
    return FixedPiece(
        out.reshape(-1), _UUID_TEXT, _valid(values), before + varint(_UUID_TEXT), otherwise
    )


def _lists(values: pa.Array[Any], type_: ValueType, before: bytes, otherwise: bytes) -> Piece:
    """Return the piece with arrays: a block with the count and the elements, then an empty block.

    An empty array consists of the empty block alone.
    """
    assert type_.element is not None
    lists = cast("pa.ListArray[Any]", values)
    ends = lists.offsets.to_numpy()
    elements = lists.values
    written = encode(
        len(elements), [_PIECES[type_.element.kind](elements, type_.element, UNION, NULL)]
    )
    counts = np.diff(ends).astype(np.int64)
    filled = counts > 0
    arrays = encode(
        len(values),
        [
            LongPiece(counts, filled),
            SlicePiece(
                written.data,
                written.ends[ends[:-1]],
                written.ends[ends[1:]],
                sized=False,
                valid=filled,
            ),
            NULL,
        ],
    )
    return SlicePiece(
        arrays.data,
        arrays.ends[:-1],
        arrays.ends[1:],
        sized=False,
        valid=_valid(values),
        before=before,
        otherwise=otherwise,
    )


_PIECES: Mapping[Kind, Callable[[pa.Array[Any], ValueType, bytes, bytes], Piece]] = {
    "boolean": _booleans,
    "integer": _longs,
    "float": _floats,
    "decimal": _decimals,
    "text": _bytes,
    "json": _bytes,
    "binary": _bytes,
    "geometry": _bytes,
    "uuid": _uuids,
    "date": _longs,
    "time": _longs,
    "timestamp": _longs,
    "list": _lists,
}


def _other_fields(images: pa.StringArray, table: AvroTable, typed: TypedRows) -> pa.StringArray:
    """Return each row's fields that its table does not have, as a JSON object; null for none."""
    added = typed.schema.columns[len(table.columns) :]
    if not added:
        return pa.nulls(len(images), pa.string())
    has_other = np.zeros(len(images), np.bool_)
    for column in added:
        present = typed.present.get(column.name)
        has_other |= True if present is None else present.to_numpy(zero_copy_only=False)
    own = {column.name for column in table.columns}
    texts: list[str | None] = [None] * len(images)
    for row in np.flatnonzero(has_other).tolist():
        fields = members(images[row].as_py()).items()
        others = [f"{name}:{value}" for name, value in fields if json.loads(name) not in own]
        texts[row] = f"{{{','.join(others)}}}"
    return pa.array(texts, pa.string())


def _missing(table: AvroTable, typed: TypedRows) -> SlicePiece | None:
    """Return the names of the fields that each row's image lacks; None if no row can lack any."""
    columns = [column for column in table.columns if column.name in typed.present]
    if not columns:
        return None
    absent = ~np.stack(
        [typed.present[column.name].to_numpy(zero_copy_only=False) for column in columns], axis=1
    )
    patterns, codes = np.unique(absent, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    arrays = []
    for pattern in patterns:
        names = [column.field for column, lacks in zip(columns, pattern, strict=True) if lacks]
        arrays.append(varint(len(names)) + b"".join(map(text, names)) + NULL if names else b"")
    ends = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    data = np.frombuffer(b"".join(arrays), np.uint8)
    valid = cast("Mask", absent.any(axis=1))
    starts, stops = ends[:-1][codes], ends[1:][codes]
    return SlicePiece(data, starts, stops, sized=False, valid=valid, before=UNION, otherwise=NULL)
