"""The kernel for the checksum of binary log events: CRC-32 of IEEE 802.3, as zlib computes it.

Eight bytes at a time ("slicing by eight"): table `n` says what a byte becomes by the time that `n`
more have passed.
"""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
from deltaforge_dagster.sources.mysql.values.numbers import read_8, read_32


def _crc_tables() -> Longs:
    """Return the tables of CRC-32 (IEEE 802.3), for eight bytes at a time."""
    tables = np.zeros((8, 256), np.int64)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        tables[0, byte] = value
    for step in range(1, 8):
        for byte in range(256):
            value = int(tables[step - 1, byte])
            tables[step, byte] = value >> 8 ^ int(tables[0, value & 255])
    return tables


_CRC = _crc_tables()


@kernel
def crc32(source: Bytes, start: int, end: int) -> int:
    """Return the CRC32 of `source[start:end]`, as zlib does."""
    value = 0xFFFFFFFF
    at = start
    while end - at >= 8:
        low = value ^ read_32(source, at)
        value = (
            _CRC[7, low & 255]
            ^ _CRC[6, (low >> 8) & 255]
            ^ _CRC[5, (low >> 16) & 255]
            ^ _CRC[4, low >> 24]
            ^ _CRC[3, source[at + 4]]
            ^ _CRC[2, source[at + 5]]
            ^ _CRC[1, source[at + 6]]
            ^ _CRC[0, source[at + 7]]
        )
        at += 8
    while at < end:
        value = (value >> 8) ^ _CRC[0, (value ^ read_8(source, at)) & 255]
        at += 1
    return int(value ^ 0xFFFFFFFF)
