"""Kernels that write MariaDB's types `UUID`, `INET4` and `INET6` as MariaDB prints them.

The log has them as `BINARY(16)` and `BINARY(4)`, big-endian, without trailing zero bytes,
in the order in which they are printed (MariaDB's manual: "UUID Data Type", "INET6")::

    UUID    123e4567-e89b-12d3-a456-426655440000
    INET4   192.0.2.1
    INET6   2001:db8::ff00:42:8329      hexadecimal words; the first longest run of zero words is ::
            ::ffff:192.0.2.1  ::1.2.3.4 when that is the first six words, or five before ffff
"""

from __future__ import annotations

from deltaforge_dagster.kernels.runtime import COLON, DOT, MINUS, QUOTE, ZERO, Bytes, kernel
from deltaforge_dagster.sources.mysql.values.numbers import read_8

UUID_ROOM, INET4_ROOM, INET6_ROOM = 38, 17, 41
"""Size of the longest JSON text of each type."""

_WORDS = 8
_LETTERS = ord("a") - 10


@kernel
def _byte(source: Bytes, at: int, end: int) -> int:
    """Return the byte at `at`, or zero after the end, where the log omits zeros."""
    return read_8(source, at) if at < end else 0


@kernel
def _write_hex_digit(value: int, out: Bytes, offset: int) -> int:
    out[offset] = value + (ZERO if value < 10 else _LETTERS)
    return offset + 1


@kernel
def write_uuid(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write a UUID."""
    out[offset] = QUOTE
    offset += 1
    for index in range(16):
        if index in (4, 6, 8, 10):
            out[offset] = MINUS
            offset += 1
        byte = _byte(source, start + index, end)
        offset = _write_hex_digit(byte >> 4, out, offset)
        offset = _write_hex_digit(byte & 15, out, offset)
    out[offset] = QUOTE
    return offset + 1


@kernel
def _write_parts(source: Bytes, at: int, end: int, out: Bytes, offset: int) -> int:
    """Write four bytes as decimal numbers, separated by dots."""
    for index in range(4):
        if index > 0:
            out[offset] = DOT
            offset += 1
        byte = _byte(source, at + index, end)
        if byte >= 100:
            out[offset] = ZERO + byte // 100
            offset += 1
        if byte >= 10:
            out[offset] = ZERO + byte // 10 % 10
            offset += 1
        out[offset] = ZERO + byte % 10
        offset += 1
    return offset


@kernel
def write_inet4(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write an IPv4 address."""
    out[offset] = QUOTE
    offset = _write_parts(source, start, end, out, offset + 1)
    out[offset] = QUOTE
    return offset + 1


@kernel
def _word(source: Bytes, start: int, end: int, index: int) -> int:
    at = start + 2 * index
    return _byte(source, at, end) << 8 | _byte(source, at + 1, end)


@kernel
def write_inet6(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write an IPv6 address."""
    gap, gap_size = -1, 0
    run = 0
    for index in range(_WORDS):
        run = run + 1 if _word(source, start, end, index) == 0 else 0
        if run > gap_size:
            gap, gap_size = index - run + 1, run
    out[offset] = QUOTE
    offset += 1
    index = 0
    while index < _WORDS:
        if index == gap:
            if index == 0:
                out[offset] = COLON
                offset += 1
            out[offset] = COLON
            offset += 1
            index += gap_size
            continue
        mapped = gap_size == 5 and _word(source, start, end, 5) == 0xFFFF
        if index == 6 and gap == 0 and (gap_size == 6 or mapped):
            offset = _write_parts(source, start + 12, end, out, offset)
            break
        word = _word(source, start, end, index)
        for shift in (12, 8, 4, 0):
            if shift == 0 or word >> shift != 0:
                offset = _write_hex_digit(word >> shift & 15, out, offset)
        index += 1
        if index < _WORDS:
            out[offset] = COLON
            offset += 1
    out[offset] = QUOTE
    return offset + 1
