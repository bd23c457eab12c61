"""Text columns of messages as kernels read them, and helpers shared by the packing kernels.

The layout is Arrow's ("Arrow Columnar Format", "Variable-size Binary Layout"): the text of row r is
`data[offsets[r]:offsets[r + 1]]`, and it is null when bit r, counted from `first_bit`, of `valid`
is 0; an empty `valid` means that no row is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.kernels.message_text import layout
from deltaforge_dagster.kernels.runtime import Bytes, kernel, read_only

_Offsets: TypeAlias = npt.NDArray[np.int32]

_EMPTY = read_only(b"")


class _TextColumn(NamedTuple):
    """The Arrow buffers of one column; the module's docstring describes the layout."""

    offsets: _Offsets
    data: Bytes
    valid: Bytes
    first_bit: int


class TextColumns(NamedTuple):
    """The Arrow buffers of several message columns, one tuple element per column.

    Only key and headers may be null: `valid` and `first_bit` hold the values of these two columns.
    """

    offsets: tuple[_Offsets, ...]
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
