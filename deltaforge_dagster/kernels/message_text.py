"""Texts of messages: build those of envelopes, destinations and keys, read those of columns.

The text of a row is a sequence of pieces. Most pieces are constants, or a value between two
constants: `"op":"` + op + `",`. `concat` takes such pieces for a whole batch and returns one Arrow
column. Values that are the same in all rows are merged into the constants around them, so that only
a few block copies per row remain, which a Numba kernel makes.

Kernels of sinks, which pack messages into commands, read a column as `text_columns` returns it. The
layout is Arrow's ("Arrow Columnar Format", "Variable-size Binary Layout"): the text of row r is
`data[offsets[r]:offsets[r + 1]]`, and it is null when bit r, counted from `first_bit`, of `valid`
is 0; an empty `valid` means that no row is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import SinkRejected, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, Longs, copy, kernel, read_only

Mask: TypeAlias = npt.NDArray[np.bool_]
_Ints: TypeAlias = npt.NDArray[np.int32]

_EMPTY = read_only(b"")
_CHUNK = 1024
"""How many rows are written together, so that the output stays in the processor's cache."""
MAX_BYTES = (1 << 31) - 1
"""The maximum size of an Arrow string array, whose offsets are 32-bit."""
_DECIMAL = 20
_LSN = 17
_TIME = 27
"""Sizes of the longest decimal, LSN and time in bytes; the year of an int64 time has up to six
digits and a sign.
"""


@dataclass(frozen=True, slots=True)
class Values:
    """One text per row, located in `data`: row r is `data[starts[r]:stops[r]]`.

    `valid` is empty if no row is null. `constant` is the text of all rows if they are known
    to be the same; the arrays are then empty.
    """

    data: Bytes
    starts: _Ints
    stops: _Ints
    valid: Mask
    constant: bytes | None = None

    def where(self, mask: Mask) -> Values:
        """Return the values, with null where `mask` is false."""
        if self.constant is not None:
            text = np.frombuffer(self.constant, np.uint8)
            starts = np.zeros(len(mask), np.int32)
            return _values(text, starts, np.full(len(mask), len(text), np.int32), mask.copy())
        valid = mask & self.valid if len(self.valid) else mask.copy()
        return _values(self.data, self.starts, self.stops, valid)


@dataclass(frozen=True, slots=True)
class Optional:
    """A value with text before and after it; for a null value only `otherwise` is written."""

    before: str
    values: Values | None
    after: str = ""
    otherwise: str = ""


Piece: TypeAlias = str | Optional

_NO_BYTES = np.empty(0, np.uint8)
_NO_INTS = np.empty(0, np.int32)
_NO_MASK = np.empty(0, np.bool_)


def _values(data: Bytes, starts: _Ints, stops: _Ints, valid: Mask) -> Values:
    for array in (data, starts, stops, valid):
        array.flags.writeable = (
            False  # one array type for all inputs: Numba compiles a single kernel
        )
    return Values(data, starts, stops, valid)


def constant(text: str) -> Values:
    """Return the same text for every row."""
    return Values(_NO_BYTES, _NO_INTS, _NO_INTS, _NO_MASK, text.encode())


def flags(mask: Mask) -> Values | None:
    """Return the text `true` where the mask is true, null elsewhere; None if it is true nowhere."""
    return constant("true").where(mask) if mask.any() else None


def values_of(column: pa.Array[Any]) -> Values | None:
    """Return the texts of a string or dictionary column; None when all rows are null."""
    if column.null_count == len(column):
        return None
    valid = _NO_MASK.copy()
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    if isinstance(column, pa.DictionaryArray):
        codes = column.indices.fill_null(0).to_numpy() if len(valid) else column.indices.to_numpy()
        ends, data = layout(cast("pa.StringArray", column.dictionary))
        if not len(valid) and (codes == codes[0]).all():
            return constant(column.dictionary[int(codes[0])].as_py())
        return _values(data, ends[codes], ends[1:][codes], valid)
    ends, data = layout(cast("pa.StringArray", column))
    return _values(data, ends[:-1], ends[1:], valid)


def layout(texts: pa.StringArray) -> tuple[_Ints, Bytes]:
    """Return the offsets and bytes of a column.

    See Arrow Columnar Format, "Variable-size Binary Layout".
    """
    _, ends, data = texts.buffers()
    bounds = np.frombuffer(memoryview(ends), np.int32) if ends else np.zeros(1, np.int32)
    bounds = bounds[texts.offset : texts.offset + len(texts) + 1]
    bounds.flags.writeable = False  # for the same reason as in `read_only`
    return bounds, read_only(memoryview(data)) if data is not None and data.size else _NO_BYTES


def slices(
    data: Bytes, starts: _Ints | Longs, stops: _Ints | Longs, valid: Mask | None = None
) -> pa.StringArray:
    """Return the slices `data[starts:stops]` as a column, null where `valid` is false."""
    sizes = stops - starts if valid is None else np.where(valid, stops - starts, 0)
    ends = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(sizes, out=ends[1:])
    out = np.empty(int(ends[-1]), np.uint8)
    _gather(data, starts, ends, out)
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little").data)
    return pa.StringArray.from_buffers(
        len(starts), pa.py_buffer(ends.data), pa.py_buffer(out.data), bitmap
    )


def decimals(column: pa.Array[Any], divisor: int = 1) -> Values | None:
    """Return an int64 column, divided by `divisor`, as decimal text; None if all rows are null."""
    numbers, valid = _numbers(column)
    if numbers is None:
        return None
    if not len(valid) and (numbers == numbers[0]).all():
        return constant(str(int(numbers[0]) // divisor))
    if divisor != 1:
        numbers = numbers // divisor
    return _formatted(_write_decimals, numbers, _DECIMAL, valid)


def lsns(column: pa.Array[Any]) -> Values | None:
    """Return an int64 column as PostgreSQL LSNs, `0/016B6C50`; None if all rows are null."""
    numbers, valid = _numbers(column)
    return None if numbers is None else _formatted(_write_lsns, numbers, _LSN, valid)


def times(column: pa.Array[Any]) -> Values | None:
    """Return microseconds since 1970 as `2025-01-02T03:04:05.006Z` (RFC 3339).

    They are truncated to milliseconds. None if all rows are null.
    """
    numbers, valid = _numbers(column)
    return None if numbers is None else _formatted(_write_times, numbers, _TIME, valid)


def _numbers(column: pa.Array[Any]) -> tuple[Longs | None, Mask]:
    if column.null_count == len(column):
        return None, _NO_MASK
    if column.null_count:
        return (
            column.fill_null(0).to_numpy(),
            column.is_valid().to_numpy(zero_copy_only=False),
        )
    return column.to_numpy(), _NO_MASK.copy()


def _formatted(write: Any, numbers: Longs, width: int, valid: Mask) -> Values:
    data = np.empty(len(numbers) * width, np.uint8)
    starts = np.arange(0, len(data), width, dtype=np.int32)
    stops = np.empty(len(numbers), np.int32)
    write(numbers, data, starts, stops)
    return _values(data, starts, stops, valid)


def concat(rows: int, pieces: Sequence[Piece]) -> pa.StringArray:
    """Concatenate the pieces of each row; return a column of `rows` texts.

    Raises:
        UnsupportedEvent: The texts need more than 2 GiB.
    """
    parts, last = _merged(pieces)
    sizes = np.full(rows, len(last), np.int64)
    for before, values, after, otherwise in parts:
        _measure(values.starts, values.stops, values.valid, len(before) + len(after),
                 len(otherwise), sizes)  # fmt: skip
    ends = row_ends(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    cursors = ends[:-1].copy()
    for start in range(0, rows, _CHUNK):
        stop = min(start + _CHUNK, rows)
        for before, values, after, otherwise in parts:
            _append(start, stop, before, values.data, values.starts, values.stops, values.valid,
                    after, otherwise, out, cursors)  # fmt: skip
        if len(last):
            _append_constant(start, stop, last, out, cursors)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(ends.astype(np.int32).data), pa.py_buffer(out.data)
    )


def row_ends(sizes: Longs) -> Longs:
    """Return where rows of these sizes end in one column, after 0.

    Raises:
        UnsupportedEvent: They need more than 2 GiB, which is Arrow's limit.
    """
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    if ends[-1] > MAX_BYTES:
        raise UnsupportedEvent("the messages of one change frame need more than 2 GiB")
    return ends


def _merged(pieces: Sequence[Piece]) -> tuple[list[tuple[Bytes, Values, Bytes, Bytes]], Bytes]:
    """Merge constants; return each varying piece with the text before it, and the last constant."""
    parts = []
    text = b""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece.encode()
        elif piece.values is None:
            text += piece.otherwise.encode()
        elif piece.values.constant is not None:
            text += piece.before.encode() + piece.values.constant + piece.after.encode()
        else:
            before = text + piece.before.encode()
            otherwise = text + piece.otherwise.encode()
            parts.append(
                (_bytes(before), piece.values, _bytes(piece.after.encode()), _bytes(otherwise))
            )
            text = b""
    return parts, _bytes(text)


def _bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8) if text else _NO_BYTES


for _empty in (_NO_BYTES, _NO_INTS, _NO_MASK):
    _empty.flags.writeable = False


@kernel
def _gather(source: Bytes, starts: _Ints | Longs, ends: _Ints, out: Bytes) -> None:
    """Write the texts at `starts` one after another; `ends` are their bounds in `out`."""
    for row in range(len(starts)):
        at, out_at = int(starts[row]), int(ends[row])
        copy(source, at, at + int(ends[row + 1]) - out_at, out, out_at)


@kernel
def _measure(  # noqa: PLR0917 - a kernel takes plain arrays
    starts: _Ints, stops: _Ints, valid: Mask, fixed: int, otherwise: int, sizes: Longs
) -> None:
    """Add the size of each row's piece to `sizes`."""
    for row in range(len(sizes)):
        if len(valid) > 0 and not valid[row]:
            sizes[row] += otherwise
        else:
            sizes[row] += fixed + stops[row] - starts[row]


@kernel
def _append(  # noqa: PLR0917 - a kernel takes plain arrays
    first: int,
    last: int,
    before: Bytes,
    data: Bytes,
    starts: _Ints,
    stops: _Ints,
    valid: Mask,
    after: Bytes,
    otherwise: Bytes,
    out: Bytes,
    cursors: Longs,
) -> None:
    """Write one piece of the rows `first` to `last` at their cursors, and advance the cursors."""
    for row in range(first, last):
        at = cursors[row]
        if len(valid) > 0 and not valid[row]:
            at = copy(otherwise, 0, len(otherwise), out, at)
        else:
            at = copy(before, 0, len(before), out, at)
            at = copy(data, starts[row], stops[row], out, at)
            at = copy(after, 0, len(after), out, at)
        cursors[row] = at


@kernel
def _append_constant(first: int, last: int, text: Bytes, out: Bytes, cursors: Longs) -> None:
    for row in range(first, last):
        cursors[row] = copy(text, 0, len(text), out, cursors[row])


@kernel
def _write_decimals(numbers: Longs, out: Bytes, starts: _Ints, stops: _Ints) -> None:
    """Write each number in decimal from `starts` on; 20 bytes are enough."""
    for row in range(len(numbers)):
        number = numbers[row]
        at = np.int64(starts[row])
        if number < 0:
            out[at] = 45  # -
            at += 1
        digits = 1
        # Negative numbers are not negated first: -2**63 has no positive counterpart in 64 bits.
        rest = number // 10 if number >= 0 else -(number // -10)
        while rest != 0:
            rest = rest // 10 if rest >= 0 else -(rest // -10)
            digits += 1
        rest = number
        for position in range(at + digits - 1, at - 1, -1):
            quotient = rest // 10 if rest >= 0 else -(rest // -10)
            digit = rest - quotient * 10
            out[position] = 48 + (digit if digit >= 0 else -digit)
            rest = quotient
        stops[row] = at + digits


@kernel
def _write_lsns(numbers: Longs, out: Bytes, starts: _Ints, stops: _Ints) -> None:
    """Write each LSN: the upper half without leading zeros, `/`, eight digits; at most 17 bytes."""
    for row in range(len(numbers)):
        number = numbers[row]
        at = np.int64(starts[row])
        shift = 60
        while shift > 32 and (number >> shift) & 15 == 0:
            shift -= 4
        while shift >= 0:
            digit = (number >> shift) & 15
            out[at] = 48 + digit if digit < 10 else 55 + digit  # 55 + 10 is `A`
            at += 1
            if shift == 32:
                out[at] = 47  # /
                at += 1
            shift -= 4
        stops[row] = at


# A time with a year of four digits; a longer or negative year shifts the rest:
#
#   0   4  5  7  8  10 11 13 14 16 17 19 20  23
#   2025 - 01 -  02 T  03 :  04 :  05 .  006 Z


@kernel
def _write_times(micros: Longs, out: Bytes, starts: _Ints, stops: _Ints) -> None:
    """Write each time from `starts` on; 27 bytes are enough."""
    for row in range(len(micros)):
        at = int(starts[row])
        if row > 0 and micros[row] == micros[row - 1]:  # changes of a transaction share their time
            stops[row] = copy(out, int(starts[row - 1]), int(stops[row - 1]), out, at)
            continue
        millis = int(micros[row]) // 1000
        days = millis // 86_400_000
        millis -= days * 86_400_000
        # Convert days to a date of the Gregorian calendar: years start in March, and 400 years have
        # 146,097 days (Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
        days += 719_468
        era = days // 146_097
        day = days - era * 146_097
        year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
        day -= 365 * year + year // 4 - year // 100
        month = (5 * day + 2) // 153
        day -= (153 * month + 2) // 5
        month += 3 if month < 10 else -9
        year += era * 400 + (1 if month <= 2 else 0)
        if year < 0:
            out[at] = 45  # -
            at += 1
            year = -year
        width = 4
        while year >= 10**width:
            width += 1
        at = _write_padded(out, at, year, width)
        out[at] = 45  # -
        at = _write_padded(out, at + 1, month, 2)
        out[at] = 45
        at = _write_padded(out, at + 1, day + 1, 2)
        out[at] = 84  # T
        at = _write_padded(out, at + 1, millis // 3_600_000, 2)
        out[at] = 58  # :
        at = _write_padded(out, at + 1, millis // 60_000 % 60, 2)
        out[at] = 58
        at = _write_padded(out, at + 1, millis // 1000 % 60, 2)
        out[at] = 46  # .
        at = _write_padded(out, at + 1, millis % 1000, 3)
        out[at] = 90  # Z
        stops[row] = at + 1


@kernel
def _write_padded(out: Bytes, at: int, number: int, width: int) -> int:
    """Write a number with leading zeros; return the position after it."""
    for position in range(at + width - 1, at - 1, -1):
        out[position] = 48 + number % 10
        number //= 10
    return at + width


class _TextColumn(NamedTuple):
    """The Arrow buffers of one column; the module's docstring describes the layout."""

    offsets: _Ints
    data: Bytes
    valid: Bytes
    first_bit: int


class TextColumns(NamedTuple):
    """The Arrow buffers of several message columns, one tuple element per column.

    Only key and headers may be null: `valid` and `first_bit` hold the values of these two columns.
    """

    offsets: tuple[_Ints, ...]
    data: tuple[Bytes, ...]
    valid: tuple[Bytes, Bytes]
    first_bit: tuple[int, int]


def text_columns(columns: Mapping[str, pa.Array[Any]]) -> TextColumns:
    """Return the buffers of message columns in the given order.

    `key` and `headers` must be included.

    Raises:
        SinkRejected: A text is null in a column that must not have nulls.
    """
    nullable = ("key", "headers")
    buffers = {n: _text_column(n, column, nullable=n in nullable) for n, column in columns.items()}
    key, headers = (buffers[name] for name in nullable)
    return TextColumns(
        tuple(column.offsets for column in buffers.values()),
        tuple(column.data for column in buffers.values()),
        (key.valid, headers.valid),
        (key.first_bit, headers.first_bit),
    )


def _text_column(name: str, column: pa.Array[Any], *, nullable: bool) -> _TextColumn:
    if column.null_count and not nullable:
        raise SinkRejected(f"{column.null_count} of {len(column)} messages have no {name}")
    bitmap = column.buffers()[0] if column.null_count else None
    valid = _EMPTY if bitmap is None else read_only(memoryview(bitmap))
    return _TextColumn(*layout(cast("pa.StringArray", column)), valid, column.offset)


@kernel
def is_null(valid: Bytes, bit: int) -> bool:
    """Return whether the row of this bit of the validity bitmap is null."""
    return len(valid) > 0 and (valid[bit >> 3] >> (bit & 7)) & 1 == 0


@kernel
def digits_of(number: int) -> int:
    """Return the number of decimal digits of a non-negative number."""
    digits = 1
    while number >= 10:
        number //= 10
        digits += 1
    return digits


@kernel
def put_number(out: Bytes, at: int, number: int) -> int:
    """Write a non-negative number in decimal at index `at` and return the index after it."""
    digits = digits_of(number)
    for position in range(at + digits - 1, at - 1, -1):
        out[position] = 48 + number % 10
        number //= 10
    return at + digits
