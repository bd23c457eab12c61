"""Arrow columns from the texts of values: a function per type, and kernels for the usual forms."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.kernels.message_text import slices
from deltaforge_dagster.kernels.runtime import MINUS, NINE, QUOTE
from deltaforge_dagster.sources.value_types import Kind, ValueType
from deltaforge_dagster.typed_rows.cells import (
    FITS,
    NOT_OF_TYPE,
    OUT_OF_RANGE,
    RARE,
    VALUE,
    ColumnCells,
    Ints,
    NoFitError,
    locate_elements,
)
from deltaforge_dagster.typed_rows.numbers import (
    floating,
    integer,
    read_booleans,
    read_decimals,
    read_integers,
    scaled,
)
from deltaforge_dagster.typed_rows.schema import arrow_type
from deltaforge_dagster.typed_rows.texts import read_bytes, read_texts
from deltaforge_dagster.typed_rows.times import (
    read_dates,
    read_times,
    read_timestamps,
    read_uuids,
)

_UUID_BYTES = 16
_LONGEST_ZERO = 4
"""Bytes of `-0.0`: a longer number that was read as 0 may be another one."""
_SRID_FLAG = 1 << 29
"""In the type of a geometry in WKB: an SRID follows (PostGIS, "EWKB")."""
_SRID, _WKB_HEADER = 4, 5
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})*")
_EMPTY = np.empty(0, np.int32)
_NO_BYTES = np.empty(0, np.uint8)


def _array(cells: ColumnCells, type_: pa.DataType, *buffers: npt.NDArray[Any]) -> pa.Array[Any]:
    """Return an array of the values that fit."""
    fits = cells.status == FITS
    nulls = len(fits) - int(np.count_nonzero(fits))
    bitmap = pa.py_buffer(np.packbits(fits, bitorder="little").data) if nulls else None
    data = [bitmap, *(pa.py_buffer(buffer.data) for buffer in buffers)]
    return pa.Array.from_buffers(type_, len(fits), data, nulls)


def _booleans(cells: ColumnCells, _type: ValueType) -> pa.Array[Any]:
    out = np.zeros(cells.status.size, np.uint8)
    read_booleans(cells.source, cells.starts, cells.status, out)
    return _array(cells, pa.bool_(), np.packbits(out, bitorder="little"))


def _integers(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    bits = type_.bits - type_.signed
    least = np.uint64(1 << bits if type_.signed else 0)
    out = np.zeros(cells.status.size, np.uint64)
    read_integers(
        cells.source,
        cells.starts,
        cells.stops,
        cells.status,
        least,
        np.uint64((1 << bits) - 1),
        out,
    )
    read = partial(integer, bits=type_.bits, signed=type_.signed)
    for row, value in cells.read_rare(read):
        out[row] = value % (1 << 64)
    words = out.astype(f"<u{type_.bits // 8}")
    return _array(cells, arrow_type(type_), words)


def _decimals(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    out = np.zeros((cells.status.size, 2), np.uint64)
    read_decimals(
        cells.source, cells.starts, cells.stops, cells.status, type_.precision, type_.scale, out
    )
    read = partial(scaled, precision=type_.precision, scale=type_.scale)
    for row, value in cells.read_rare(read):
        out[row] = value % (1 << 64), (value >> 64) % (1 << 64)
    return _array(cells, arrow_type(type_), out)


def _floats(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    """Return floats: Arrow reads all numbers at once, to the nearest; the few in quotes follow."""
    values = np.flatnonzero(cells.status == VALUE)
    first = cells.source[cells.starts[values]]
    is_number = (first == MINUS) | (first <= NINE) & (first != QUOTE)
    cells.status[values] = np.where(first == QUOTE, RARE, np.where(is_number, FITS, NOT_OF_TYPE))
    numbers = cells.status == FITS
    texts = slices(cells.source, cells.starts, cells.stops, numbers)
    read_at_once = texts.cast(arrow_type(type_)).to_numpy(zero_copy_only=False)
    out = np.where(numbers, read_at_once, 0)
    cells.status[np.isinf(out)] = OUT_OF_RANGE
    sizes = cells.stops - cells.starts
    cells.status[numbers & (out == 0) & (sizes > _LONGEST_ZERO)] = RARE
    read = partial(floating, bits=type_.bits, not_finite=type_.form != "finite")
    for row, value in cells.read_rare(read):
        out[row] = value
    return _array(cells, arrow_type(type_), out)


def _times(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    out = np.zeros(cells.status.size, np.int64)
    texts = cells.source, cells.starts, cells.stops, cells.status
    if type_.kind == "date":
        read_dates(*texts, out)
        return _array(cells, pa.date32(), out.astype(np.int32))
    if type_.kind == "time":
        read_times(*texts, out)
    else:
        read_timestamps(*texts, type_.zone, type_.form == "micros", out)
    return _array(cells, arrow_type(type_), out)


def _uuids(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    out = np.zeros(_UUID_BYTES * cells.status.size, np.uint8)
    read_uuids(cells.source, cells.starts, cells.stops, cells.status, out)
    stored = _array(cells, pa.binary(_UUID_BYTES), out)
    return pa.ExtensionArray.from_storage(cast("Any", arrow_type(type_)), stored)


def _texts(cells: ColumnCells, _type: ValueType) -> pa.Array[Any]:
    out, ends = _text_buffers(cells)
    read_texts(cells.source, cells.starts, cells.stops, cells.status, out, ends)
    return _array(cells, pa.string(), ends, out[: ends[-1]])


def _bytes(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    out, ends = _text_buffers(cells)
    read_bytes(
        cells.source, cells.starts, cells.stops, cells.status, type_.form == "text", out, ends
    )
    return _array(cells, pa.binary(), ends, out[: ends[-1]])


def _text_buffers(cells: ColumnCells) -> tuple[npt.NDArray[np.uint8], Ints]:
    """Return memory for texts, which are no longer than in JSON, and for where they end."""
    return np.empty(cells.size(), np.uint8), np.zeros(cells.status.size + 1, np.int32)


def _documents(cells: ColumnCells, _type: ValueType) -> pa.Array[Any]:
    cells.status[cells.status == VALUE] = FITS
    return slices(cells.source, cells.starts, cells.stops, cells.status == FITS)


def _geometries(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    """Return geometries in WKB, one by one: they are rare, or large where they are frequent."""
    stored = _bytes(cells, type_) if type_.form == "srid" else _texts(cells, type_)
    convert: Callable[[Any], bytes] = _from_srid if type_.form == "srid" else _from_hex
    geometries: list[bytes | None] = []
    for row, value in enumerate(stored.to_pylist()):
        try:
            geometries.append(None if value is None else convert(value))
        except NoFitError as error:
            cells.status[row] = error.status
            geometries.append(None)
    return pa.array(geometries, pa.binary())


def _from_srid(value: bytes) -> bytes:
    """Return WKB from an SRID and WKB; an SRID other than 0 is written into the WKB ("EWKB")."""
    srid, wkb = value[:_SRID], value[_SRID:]
    if len(wkb) < _WKB_HEADER or wkb[0] > 1:
        raise NoFitError(NOT_OF_TYPE)
    if not any(srid):
        return wkb
    order = "<" if wkb[0] else ">"
    (number,), (kind,) = struct.unpack("<I", srid), struct.unpack_from(f"{order}I", wkb, 1)
    return wkb[:1] + struct.pack(f"{order}II", kind | _SRID_FLAG, number) + wkb[_WKB_HEADER:]


def _from_hex(text: str) -> bytes:
    """Return the bytes of a WKB in hexadecimal digits."""
    if len(text) < 2 * _WKB_HEADER or not _HEX.fullmatch(text):
        raise NoFitError(NOT_OF_TYPE)
    return bytes.fromhex(text)


def _lists(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    """Return lists; a list with elements that do not fit gets the status of the first of them."""
    assert type_.element is not None
    ends = np.zeros(cells.status.size + 1, np.int32)
    texts = cells.source, cells.starts, cells.stops, cells.status
    count = locate_elements(*texts, ends, _EMPTY, _EMPTY, _NO_BYTES)
    elements = ColumnCells(
        cells.source,
        np.empty(count, np.int32),
        np.empty(count, np.int32),
        np.empty(count, np.uint8),
    )
    if count:
        locate_elements(*texts, ends, elements.starts, elements.stops, elements.status)
    if type_.element.kind == "json":
        elements.find_null_documents()
    values = typed_column(elements, type_.element)
    cells.status[cells.status == VALUE] = FITS
    # Backwards, so that of several elements in a list that do not fit, the first one decides.
    failed = np.flatnonzero(elements.status > FITS)[::-1]
    cells.status[np.searchsorted(ends, failed, side="right") - 1] = elements.status[failed]
    fits = cells.status == FITS
    bitmap = pa.py_buffer(np.packbits(fits, bitorder="little").data)
    return pa.Array.from_buffers(
        arrow_type(type_), len(fits), [bitmap, pa.py_buffer(ends.data)], children=[values]
    )


_READERS: Mapping[Kind, Callable[[ColumnCells, ValueType], pa.Array[Any]]] = {
    "boolean": _booleans,
    "integer": _integers,
    "float": _floats,
    "decimal": _decimals,
    "text": _texts,
    "json": _documents,
    "binary": _bytes,
    "geometry": _geometries,
    "uuid": _uuids,
    "date": _times,
    "time": _times,
    "timestamp": _times,
    "list": _lists,
}


def typed_column(cells: ColumnCells, type_: ValueType) -> pa.Array[Any]:
    """Return the values of a column; null where there is none, and where it does not fit.

    Args:
        cells: The texts of the values; their status says afterwards which fit.
        type_: The type of the column.
    """
    return _READERS[type_.kind](cells, type_)
