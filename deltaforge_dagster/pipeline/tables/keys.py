"""Hashes and compares the keys of rows, column by column.

The hash of a key is the same in every task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.kernels.message_text import layout
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel

Words = npt.NDArray[np.uint64]

_BASIS, _PRIME = 0xCBF29CE484222325, 0x100000001B3
"""Offset basis and prime of the hash FNV-1a with 64 bits (RFC 9923)."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Multipliers of the finalizer of SplitMix64."""
_WORD = 8  # bytes that are hashed at a time


def key_hashes(columns: Sequence[pa.Array[Any]]) -> Words:
    """Return a hash of each row's key, which depends only on the values of the key columns."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = _mixed(hashes * np.uint64(31) + _hashes(column))
    return hashes


def key_codes(columns: Sequence[pa.Array[Any]]) -> Longs:
    """Return a number for each row, equal for rows with the same key and different for others."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = normal(column).dictionary_encode()
        of_column = encoded.indices.to_numpy().astype(np.int64)
        if codes.any():
            _, of_column = np.unique(
                codes * len(encoded.dictionary) + of_column, return_inverse=True
            )
        codes = of_column
    return codes


def normal(column: pa.Array[Any]) -> pa.Array[Any]:
    """Return a key column as values that are equal exactly if the keys are equal.

    Databases take 0.0 and -0.0 for the same key, and every NaN for one key.

    UUIDs become bytes, because Arrow can neither compare nor hash its own UUID type.
    """
    if isinstance(column, pa.ExtensionArray):
        return cast("pa.Array[Any]", column.storage)
    if pa.types.is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False) + 0.0
        values[np.isnan(values)] = np.nan
        return cast("pa.Array[Any]", pa.array(values.view(f"i{values.itemsize}")))
    return column


def _hashes(column: pa.Array[Any]) -> Words:
    type_ = column.type
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        ends, source = layout(cast("pa.StringArray", column))
        out = np.empty(len(column), np.uint64)
        _hash_texts(source, ends, out)
        return out
    if pa.types.is_boolean(type_):
        column = column.cast(pa.int8())
    column = normal(column)
    width = column.type.bit_width // 8
    _, data = column.buffers()
    assert data is not None
    start, stop = column.offset * width, (column.offset + len(column)) * width
    values = np.frombuffer(memoryview(data)[start:stop], np.uint8).reshape(-1, width)
    words = np.zeros((len(column), -(-width // _WORD) * _WORD), np.uint8)
    words[:, :width] = values
    hashes = np.zeros(len(column), np.uint64)
    for word in words.view(np.uint64).T:
        hashes = _mixed(hashes + word)
    return hashes


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return cast("Words", words ^ (words >> np.uint64(31)))


@kernel
def _hash_texts(source: Bytes, ends: npt.NDArray[np.int32], out: Words) -> None:
    """Hash texts with FNV-1a."""
    for row in range(out.size):
        hashed = np.uint64(_BASIS)
        for offset in range(ends[row], ends[row + 1]):
            hashed = (hashed ^ np.uint64(source[offset])) * np.uint64(_PRIME)
        out[row] = hashed


def warm() -> None:
    """Compile the kernel, or load it from the cache."""
    key_hashes([pa.array(["a"])])
