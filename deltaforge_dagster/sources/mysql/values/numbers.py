"""Kernels that read integers from the binary log."""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.runtime import Bytes, kernel


@kernel
def read_8(source: Bytes, at: int) -> int:
    """Return the byte at `at` as a 64-bit integer, so that calculations with it do not overflow."""
    return np.int64(source[at])  # type: ignore[return-value]


@kernel
def read_16(source: Bytes, at: int) -> int:
    """Return the little-endian Int16 at `at`, unsigned."""
    return read_8(source, at) | read_8(source, at + 1) << 8


@kernel
def read_24(source: Bytes, at: int) -> int:
    """Return the little-endian Int24 at `at`, unsigned."""
    return read_16(source, at) | read_8(source, at + 2) << 16


@kernel
def read_32(source: Bytes, at: int) -> int:
    """Return the little-endian Int32 at `at`, unsigned."""
    return read_16(source, at) | read_16(source, at + 2) << 16


@kernel
def read_48(source: Bytes, at: int) -> int:
    """Return the little-endian Int48 at `at`, unsigned."""
    return read_32(source, at) | read_16(source, at + 4) << 32


@kernel
def read_56(source: Bytes, at: int) -> int:
    """Return the little-endian Int56 at `at`, unsigned."""
    return read_48(source, at) | read_8(source, at + 6) << 48


@kernel
def read_64(source: Bytes, at: int) -> int:
    """Return the little-endian Int64 at `at`, signed."""
    return read_32(source, at) | read_32(source, at + 4) << 32


@kernel
def read_size(source: Bytes, at: int, size: int) -> int:
    """Return the little-endian unsigned number of 1 to 4 bytes."""
    if size == 1:
        return read_8(source, at)
    if size == 2:
        return read_16(source, at)
    return read_24(source, at) if size == 3 else read_32(source, at)


@kernel
def read_big(source: Bytes, at: int, size: int) -> int:
    """Return the big-endian number of at most 8 bytes; it is signed if it has 8, else unsigned."""
    value = read_8(source, at) if size > 0 else 0
    for i in range(1, size):
        value = value << 8 | read_8(source, at + i)
    return value


@kernel
def read_unsigned(source: Bytes, at: int, size: int) -> np.uint64:
    """Return the little-endian unsigned number of at most 8 bytes."""
    if size == 8:
        return np.uint64(read_64(source, at))
    if size == 4:
        return np.uint64(read_32(source, at))
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(source[at + i]) << np.uint64(8 * i)
    return value
