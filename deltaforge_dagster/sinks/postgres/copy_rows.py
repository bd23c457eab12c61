"""Rows in the binary format of COPY, made of Arrow columns.

The manual describes the format ("COPY", section "Binary Format"). A row is a number of fields, 16
bits, and for each field its length, 32 bits, and its bytes; the length of a null is -1. Numbers are
big-endian. What bytes a type has is in its `send` function in the server: dates are days since
2000, timestamps and times microseconds. Decimals and arrays are sent as text, which the server
reads as the column's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.kernels.runtime import Bytes, Longs, copy, kernel, read_only

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""What the rows begin with: signature, flags, and the length of an extension."""

TRAILER = b"\xff\xff"
"""What follows the last row."""

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Offsets: TypeAlias = npt.NDArray[np.int32]

_EPOCH_DAYS = 10_957  # from 1970-01-01 to 2000-01-01
_EPOCH_US = _EPOCH_DAYS * 86_400_000_000
_LENGTH = 4  # bytes before each value in COPY's binary format
_ALL = np.empty(0, np.bool_)
_ALL.flags.writeable = False


@kernel
def _put_length(out: Bytes, at: int, size: int) -> int:
    """Write a field's length and return the index after it."""
    out[at] = (size >> 24) & 255
    out[at + 1] = (size >> 16) & 255
    out[at + 2] = (size >> 8) & 255
    out[at + 3] = size & 255
    return at + 4


@kernel
def _put_fixed(values: Bytes, width: int, valid: _Mask, places: Longs, out: Bytes) -> int:
    """Write a field with `width` bytes into each row, and advance the rows' write positions.

    Args:
        values: The values of all rows.
        width: Bytes of one value.
        valid: Which values are not null; empty if all are valid.
        places: For each row, the index in `out` at which its next field begins.
        out: The rows.

    Returns:
        0, or -1 at the first field for which `out` has no room.
    """
    for row in range(len(places)):
        at = places[row]
        null = len(valid) > 0 and not valid[row]
        if at + 4 + (0 if null else width) > len(out):
            return -1
        if null:
            places[row] = _put_length(out, at, -1)
        else:
            at = _put_length(out, at, width)
            for byte in range(width):
                out[at + byte] = values[row * width + byte]
            places[row] = at + width
    return 0


@kernel
def _put_slices(data: Bytes, offsets: _Offsets, valid: _Mask, places: Longs, out: Bytes) -> int:
    """Write the field `data[offsets[row]:offsets[row + 1]]` into each row; else as `_put_fixed`."""
    for row in range(len(places)):
        at = places[row]
        null = len(valid) > 0 and not valid[row]
        start = int(offsets[row])
        size = 0 if null else int(offsets[row + 1]) - start
        if size < 0 or start + size > len(data) or at + 4 + size > len(out):
            return -1
        if null:
            places[row] = _put_length(out, at, -1)
        else:
            places[row] = copy(data, start, start + size, out, _put_length(out, at, size))
    return 0


class _Field(Protocol):
    """A field of all rows."""

    def sizes(self) -> Longs | int:
        """Return how many bytes the field takes in each row, including the length before it."""
        ...

    def put(self, places: Longs, out: Bytes) -> int:
        """Write the field into each row, and advance `places`; see `_put_fixed`."""
        ...


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Values that all have `width` bytes."""

    values: Bytes
    width: int
    valid: _Mask

    def sizes(self) -> Longs | int:
        """See `_Field`."""
        return _LENGTH + (self.valid * np.int64(self.width) if len(self.valid) else self.width)

    def put(self, places: Longs, out: Bytes) -> int:
        """See `_Field`."""
        return _put_fixed(self.values, self.width, self.valid, places, out)


@dataclass(frozen=True, slots=True)
class _Slices:
    """Values of any length, one after the other."""

    data: Bytes
    offsets: _Offsets
    valid: _Mask

    def sizes(self) -> Longs | int:
        """See `_Field`."""
        sizes = np.diff(self.offsets).astype(np.int64)
        return _LENGTH + (sizes * self.valid if len(self.valid) else sizes)

    def put(self, places: Longs, out: Bytes) -> int:
        """See `_Field`."""
        return _put_slices(self.data, self.offsets, self.valid, places, out)


def copy_rows(columns: Sequence[pa.Array[Any]]) -> memoryview:
    """Return rows with these columns in the binary format, without header and trailer.

    The columns have equal lengths.
    """
    rows = len(columns[0])
    fields = [_field(column) for column in columns]
    sizes = np.full(rows, 2, np.int64)
    for field in fields:
        sizes += field.sizes()
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]) if rows else 0, np.uint8)
    places = ends - sizes
    out[places], out[places + 1] = len(fields) >> 8, len(fields) & 255
    places += 2
    for field in fields:
        if field.put(places, out) < 0:
            raise AssertionError("a field is longer than its size")
    return out.data


def wire(column: pa.Array[Any]) -> pa.Array[Any]:
    """Return a column in the form in which it is sent.

    Decimals and arrays are sent as text, everything else as it is.
    """
    if pa.types.is_decimal(column.type):
        return column.cast(pa.string())
    if pa.types.is_list(column.type):
        return _array_texts(cast("pa.ListArray[Any]", column))
    if pa.types.is_dictionary(column.type):
        return cast("pa.DictionaryArray[Any, Any]", column).dictionary_decode()
    return column


def has_nul(column: pa.Array[Any]) -> bool:
    """Return whether a text of a column has the character NUL, which PostgreSQL cannot store."""
    if not pa.types.is_string(column.type):
        return False
    slices = _slices(column)
    start, end = int(slices.offsets[0]), int(slices.offsets[-1])
    if slices.data[start:end].all():
        return False
    # Bytes of nulls do not count.
    return bool(pc.any(pc.match_substring(column, "\0")).as_py())


def _field(column: pa.Array[Any]) -> _Field:
    if isinstance(column, pa.ExtensionArray):
        return _field(column.storage)
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return _slices(column)
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        values = _buffer(column, f"V{width}")
    else:
        values = _numbers(column)
        width = values.itemsize
    return _Fixed(read_only(values.tobytes()), width, _valid(column))


def _numbers(column: pa.Array[Any]) -> npt.NDArray[Any]:
    """Return the numbers that stand for the values, big-endian; anything where a value is null."""
    type_ = column.type
    if pa.types.is_boolean(type_):
        return _buffer(column.cast(pa.uint8()), "u1")
    if pa.types.is_date32(type_):
        return (_buffer(column, "i4") - np.int32(_EPOCH_DAYS)).astype(">i4")
    if pa.types.is_timestamp(type_):
        return (_buffer(column, "i8") - np.int64(_EPOCH_US)).astype(">i8")
    size = type_.bit_width // 8
    if pa.types.is_floating(type_):
        return _buffer(column, f"f{size}").astype(f">f{size}")
    # PostgreSQL has no integers of one byte: they are sent as smallint.
    return _buffer(column, f"i{size}").astype(f">i{max(size, 2)}")


def _buffer(column: pa.Array[Any], dtype: str) -> npt.NDArray[Any]:
    """Return a column's values as they are in memory."""
    if not len(column):
        return np.empty(0, dtype)
    numbers = np.frombuffer(memoryview(cast("pa.Buffer", column.buffers()[1])), dtype)
    return numbers[column.offset : column.offset + len(column)]


def _slices(column: pa.Array[Any]) -> _Slices:
    _, ends, data = column.buffers()
    offsets = np.frombuffer(memoryview(ends), np.int32) if ends else np.zeros(1, np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    offsets.flags.writeable = False
    content = read_only(memoryview(data)) if data is not None and data.size else read_only(b"")
    return _Slices(content, offsets, _valid(column))


def _valid(column: pa.Array[Any]) -> _Mask:
    """Return a mask of the values that are not null; it is empty if no value is null."""
    if not column.null_count:
        return _ALL
    mask = cast("_Mask", column.is_valid().to_numpy(zero_copy_only=False))
    mask.flags.writeable = False
    return mask


def _array_texts(column: pa.ListArray[Any]) -> pa.Array[Any]:
    """Return arrays as text (manual: "Arrays", section "Array Input and Output Syntax")."""
    elements = [_element_text(element) for element in _texts(column.flatten())]
    counts = column.value_lengths().to_pylist()
    texts: list[str | None] = []
    at = 0
    for count in counts:
        if count is None:
            texts.append(None)
        else:
            texts.append("{" + ",".join(elements[at : at + count]) + "}")
            at += count
    return pa.array(texts, pa.string())


def _texts(elements: pa.Array[Any]) -> list[str | _Literal | None]:
    """Return the elements of arrays as the server reads them."""
    if pa.types.is_list(elements.type):
        inner = _array_texts(cast("pa.ListArray[Any]", elements)).to_pylist()
        return [None if text is None else _Literal(text) for text in inner]
    if pa.types.is_binary(elements.type):
        return [
            None if element is None else f"\\x{element.hex()}" for element in elements.to_pylist()
        ]
    if isinstance(elements, pa.ExtensionArray):
        return [
            None if element is None else str(element)
            for element in cast("pa.Array[Any]", elements).to_pylist()
        ]
    return [*elements.cast(pa.string()).to_pylist()]


class _Literal(str):
    """An element that is an array, whose text is not quoted."""

    __slots__ = ()


def _element_text(element: str | None) -> str:
    if element is None:
        return "NULL"
    if isinstance(element, _Literal):
        return element
    escaped = element.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def warm() -> None:
    """Compile the kernels, or load them from the cache."""
    copy_rows([pa.array([1, None]), pa.array(["a", None])])
