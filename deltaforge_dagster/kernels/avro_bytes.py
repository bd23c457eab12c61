"""Build records in Avro's binary encoding for whole batches.

The encoding (Apache Avro Specification, "Binary Encoding") of a record is its fields one after
another, without names or separators. So the bytes of a row are a sequence of pieces, as in
`message_text`: constants, and the values of one column, each written for all rows of a block at a
time. `encode` measures the pieces of every row, and then writes each row to its place.

A value that is null is replaced by other bytes: in a union of null and one other type, `before` is
the number of the type and `otherwise` that of null (`UNION` and `NULL` below).
"""

# ruff: noqa: PLR0917 - kernels take plain arrays, see `kernels.runtime`

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.kernels.message_text import Mask, row_ends
from deltaforge_dagster.kernels.runtime import Bytes, Longs, copy, kernel, read_only

_Ints: TypeAlias = npt.NDArray[np.int32]

NULL = b"\x00"
"""In a union whose first type is null: the value is null."""
UNION = b"\x02"
"""In a union whose first type is null: a value of the second type follows."""

_CHUNK = 1024
"""How many rows are written together, so that the output stays in the processor's cache."""
_SHORT = 16
"""Up to this many bytes, a loop is faster than memcpy."""
_LONGEST_ONE_BYTE = 127

_NO_MASK = np.empty(0, np.bool_)
_NO_MASK.flags.writeable = False


@dataclass(frozen=True, slots=True)
class LongPiece:
    """An int or long per row. None as `valid` means that no row is null."""

    values: Longs
    valid: Mask | None = None
    before: bytes = b""
    otherwise: bytes = b""


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """Bytes per row: row r is `data[starts[r]:stops[r]]`.

    With `sized` their number is written before them.
    """

    data: Bytes
    starts: _Ints
    stops: _Ints
    sized: bool
    valid: Mask | None = None
    before: bytes = b""
    otherwise: bytes = b""

    def spread(self, rows: Mask) -> SlicePiece:
        """Return a piece for all rows: these values where `rows` is true, null elsewhere.

        Args:
            rows: The mask of all rows; it is true for as many rows as there are values.
        """
        if rows.all():
            return self
        indices = np.cumsum(rows) - 1
        indices[~rows] = 0
        valid = rows if self.valid is None else rows & self.valid[indices]
        return replace(self, starts=self.starts[indices], stops=self.stops[indices], valid=valid)


@dataclass(frozen=True, slots=True)
class FixedPiece:
    """Equally many bytes per row: row r is `data[r * width:(r + 1) * width]`."""

    data: Bytes
    width: int
    valid: Mask | None = None
    before: bytes = b""
    otherwise: bytes = b""


@dataclass(frozen=True, slots=True)
class DecimalPiece:
    """The unscaled value of a decimal per row, as in Arrow: 16 bytes, little-endian."""

    data: Bytes
    valid: Mask | None = None
    before: bytes = b""
    otherwise: bytes = b""


Piece: TypeAlias = bytes | LongPiece | SlicePiece | FixedPiece | DecimalPiece


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """Bytes per row: row r is `data[ends[r]:ends[r + 1]]`."""

    ends: _Ints
    data: Bytes

    def array(self) -> pa.Array[Any]:
        """Return the bytes as an Arrow array."""
        buffers = [None, pa.py_buffer(self.ends.data), pa.py_buffer(self.data.data)]
        return pa.Array.from_buffers(pa.binary(), len(self.ends) - 1, buffers)

    def piece(self, before: bytes = b"", otherwise: bytes = b"") -> SlicePiece:
        """Return a piece of these bytes as they are."""
        ends = self.ends
        return SlicePiece(
            self.data, ends[:-1], ends[1:], sized=False, before=before, otherwise=otherwise
        )


def varint(number: int) -> bytes:
    """Return an int or long: zigzag, then seven bits per byte, the least significant first."""
    coded = (number << 1) ^ (number >> 63)
    encoded = bytearray()
    while coded > _LONGEST_ONE_BYTE:
        encoded.append(coded & 127 | 128)
        coded >>= 7
    return bytes([*encoded, coded])


def text(value: str) -> bytes:
    """Return a string: the number of its bytes, and these."""
    content = value.encode()
    return varint(len(content)) + content


def encode(rows: int, pieces: Sequence[Piece]) -> EncodedColumn:
    """Return the pieces of each row, one after another.

    Raises:
        UnsupportedEvent: They need more than 2 GiB.
    """
    parts, last = _merged(pieces)
    sizes = np.full(rows, len(last), np.int64)
    for part in parts:
        part.measure(sizes)
    ends = row_ends(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    cursors = ends[:-1].copy()
    for start in range(0, rows, _CHUNK):
        stop = min(start + _CHUNK, rows)
        for part in parts:
            part.write(start, stop, out, cursors)
        if len(last):
            _write_constant(last, start, stop, out, cursors)
    out.flags.writeable = False
    offsets = ends.astype(np.int32)
    offsets.flags.writeable = False
    return EncodedColumn(offsets, out)


_Varying: TypeAlias = LongPiece | SlicePiece | FixedPiece | DecimalPiece


@dataclass(frozen=True, slots=True)
class _PieceKernels:
    """The kernels of a piece, with its arrays."""

    measure: Callable[[Longs], None]
    write: Callable[[int, int, Bytes, Longs], None]


def _merged(pieces: Sequence[Piece]) -> tuple[list[_PieceKernels], Bytes]:
    """Merge constants into the pieces that follow them; return those, and the last constant."""
    parts = []
    constant = b""
    for piece in pieces:
        if isinstance(piece, bytes):
            constant += piece
        elif piece.valid is not None and not piece.valid.any():
            constant += piece.otherwise
        else:
            parts.append(_piece_kernels(piece, constant + piece.before, constant + piece.otherwise))
            constant = b""
    return parts, read_only(constant)


def _piece_kernels(piece: _Varying, before: bytes, otherwise: bytes) -> _PieceKernels:
    valid = _NO_MASK if piece.valid is None else _frozen(piece.valid)
    sizes: tuple[Any, ...] = (valid, len(before), len(otherwise))
    texts: tuple[Any, ...] = (valid, read_only(before), read_only(otherwise))
    match piece:
        case LongPiece():
            values = _frozen(piece.values)
            return _PieceKernels(
                partial(_measure_longs, values, *sizes), partial(_write_longs, values, *texts)
            )
        case SlicePiece():
            where: tuple[Any, ...] = (_frozen(piece.starts), _frozen(piece.stops), int(piece.sized))
            return _PieceKernels(
                partial(_measure_slices, *where, *sizes),
                partial(_write_slices, _frozen(piece.data), *where, *texts),
            )
        case FixedPiece():
            data: tuple[Any, ...] = (_frozen(piece.data), piece.width)
            return _PieceKernels(
                partial(_measure_fixed, piece.width, *sizes), partial(_write_fixed, *data, *texts)
            )
        case DecimalPiece():
            digits = _frozen(piece.data)
            return _PieceKernels(
                partial(_measure_decimals, digits, *sizes), partial(_write_decimals, digits, *texts)
            )


def _frozen(array: Any) -> Any:
    """Return an array that is contiguous and read-only, so that Numba compiles a single kernel."""
    frozen = np.ascontiguousarray(array)
    if frozen.flags.writeable:
        frozen = frozen.view()
        frozen.flags.writeable = False
    return frozen


@kernel
def _long_size(number: int) -> int:
    coded = (number << 1) ^ (number >> 63)
    size = 1
    while coded & -128 != 0:
        coded = (coded >> 7) & 0x01FFFFFFFFFFFFFF  # no sign bits are shifted in
        size += 1
    return size


@kernel
def _put_long(number: int, out: Bytes, at: int) -> int:
    """Write an int or long; return the offset after it."""
    coded = (number << 1) ^ (number >> 63)
    while coded & -128 != 0:
        out[at] = (coded & 127) | 128
        coded = (coded >> 7) & 0x01FFFFFFFFFFFFFF  # no sign bits are shifted in
        at += 1
    out[at] = coded
    return at + 1


@kernel
def _put(source: Bytes, out: Bytes, at: int) -> int:
    """Write all bytes of `source`; return the offset after them."""
    if len(source) > _SHORT:
        return copy(source, 0, len(source), out, at)
    for byte in source:
        out[at] = byte
        at += 1
    return at


@kernel
def _measure_longs(values: Longs, valid: Mask, before: int, otherwise: int, sizes: Longs) -> None:
    for row in range(len(sizes)):
        if len(valid) > 0 and not valid[row]:
            sizes[row] += otherwise
        else:
            sizes[row] += before + _long_size(values[row])


@kernel
def _write_longs(
    values: Longs,
    valid: Mask,
    before: Bytes,
    otherwise: Bytes,
    start: int,
    stop: int,
    out: Bytes,
    cursors: Longs,
) -> None:
    for row in range(start, stop):
        at = cursors[row]
        if len(valid) > 0 and not valid[row]:
            at = _put(otherwise, out, at)
        else:
            at = _put_long(values[row], out, _put(before, out, at))
        cursors[row] = at


@kernel
def _measure_slices(
    starts: _Ints,
    stops: _Ints,
    sized: int,
    valid: Mask,
    before: int,
    otherwise: int,
    sizes: Longs,
) -> None:
    for row in range(len(sizes)):
        if len(valid) > 0 and not valid[row]:
            sizes[row] += otherwise
        else:
            size = int(np.int64(stops[row]) - np.int64(starts[row]))
            sizes[row] += before + size
            if sized == 1:
                sizes[row] += _long_size(size)


@kernel
def _write_slices(
    data: Bytes,
    starts: _Ints,
    stops: _Ints,
    sized: int,
    valid: Mask,
    before: Bytes,
    otherwise: Bytes,
    start: int,
    stop: int,
    out: Bytes,
    cursors: Longs,
) -> None:
    for row in range(start, stop):
        at = cursors[row]
        if len(valid) > 0 and not valid[row]:
            at = _put(otherwise, out, at)
        else:
            at = _put(before, out, at)
            begin, end = int(np.int64(starts[row])), int(np.int64(stops[row]))
            if sized == 1:
                at = _put_long(end - begin, out, at)
            at = copy(data, begin, end, out, at)
        cursors[row] = at


@kernel
def _measure_fixed(width: int, valid: Mask, before: int, otherwise: int, sizes: Longs) -> None:
    for row in range(len(sizes)):
        if len(valid) > 0 and not valid[row]:
            sizes[row] += otherwise
        else:
            sizes[row] += before + width


@kernel
def _write_fixed(
    data: Bytes,
    width: int,
    valid: Mask,
    before: Bytes,
    otherwise: Bytes,
    start: int,
    stop: int,
    out: Bytes,
    cursors: Longs,
) -> None:
    for row in range(start, stop):
        at = cursors[row]
        if len(valid) > 0 and not valid[row]:
            at = _put(otherwise, out, at)
        else:
            at = _put(before, out, at)
            for byte in range(row * width, (row + 1) * width):
                out[at] = data[byte]
                at += 1
        cursors[row] = at


@kernel
def _decimal_size(data: Bytes, first: int) -> int:
    """Return how many of a decimal's 16 bytes are needed; the higher ones only repeat the sign."""
    top = np.int64(data[first + 15])
    sign = 255 if top & 128 != 0 else 0
    size = 16
    while size > 1:
        if data[first + size - 1] != sign or (np.int64(data[first + size - 2]) ^ sign) & 128 != 0:
            break
        size -= 1
    return size


@kernel
def _measure_decimals(data: Bytes, valid: Mask, before: int, otherwise: int, sizes: Longs) -> None:
    for row in range(len(sizes)):
        if len(valid) > 0 and not valid[row]:
            sizes[row] += otherwise
        else:
            sizes[row] += before + 1 + _decimal_size(data, row * 16)


@kernel
def _write_decimals(
    data: Bytes,
    valid: Mask,
    before: Bytes,
    otherwise: Bytes,
    start: int,
    stop: int,
    out: Bytes,
    cursors: Longs,
) -> None:
    for row in range(start, stop):
        at = cursors[row]
        if len(valid) > 0 and not valid[row]:
            at = _put(otherwise, out, at)
        else:
            at = _put(before, out, at)
            size = _decimal_size(data, row * 16)
            out[at] = size << 1
            for byte in range(size):
                out[at + 1 + byte] = data[row * 16 + size - 1 - byte]
            at += 1 + size
        cursors[row] = at


@kernel
def _write_constant(constant: Bytes, start: int, stop: int, out: Bytes, cursors: Longs) -> None:
    for row in range(start, stop):
        cursors[row] = _put(constant, out, cursors[row])


@kernel
def put_schema_ids(out: Bytes, ends: _Ints, numbers: _Ints, ids: Longs) -> None:
    """Write the id of each row's schema over the row's bytes 1 to 4 (from 0), big-endian.

    Args:
        out: The rows' bytes.
        ends: Row r is between `ends[r]` and `ends[r + 1]`.
        numbers: For each row an index into `ids`; negative for rows that have no schema.
        ids: The ids.
    """
    for row in range(len(numbers)):
        if numbers[row] >= 0:
            number = ids[numbers[row]]
            at = np.int64(ends[row])
            for byte in range(4):
                out[at + 1 + byte] = (number >> (8 * (3 - byte))) & 255


def warm() -> None:
    """Compile every kernel, or load it from the cache."""
    number, ends = np.zeros(1, np.int64), np.array([0, 1], np.int32)
    bits = np.zeros(16, np.uint8)
    pieces: list[Piece] = [
        LongPiece(number),
        SlicePiece(bits, ends[:-1], ends[1:], sized=True),
        FixedPiece(bits, 1),
        DecimalPiece(bits),
        b"-",
    ]
    encoded = encode(1, pieces)
    put_schema_ids(np.zeros(5, np.uint8), encoded.ends.copy(), np.array([0], np.int32), number)
