"""Kernels that write one value of the binary log as JSON text; `types` shows the binary formats.

Each kernel writes the value at `source[at]` into `out` from `offset` on, and returns the offset
after it, or `INVALID` if the bytes are not a value of the type. `out` must have room for
`MysqlValueType.room` bytes.

MariaDB's types `UUID`, `INET4` and `INET6` are written as MariaDB prints them. The log has them as
`BINARY(16)` and `BINARY(4)`, big-endian, without trailing zero bytes, in the order in which they
are printed (MariaDB's manual: "UUID Data Type", "INET6")::

    UUID    123e4567-e89b-12d3-a456-426655440000
    INET4   192.0.2.1
    INET6   2001:db8::ff00:42:8329      hexadecimal words; the first longest run of zero words is ::
            ::ffff:192.0.2.1  ::1.2.3.4 when that is the first six words, or five before ffff
"""

# ruff: noqa: C901, PLR0917 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import (
    COLON,
    DOT,
    MINUS,
    QUOTE,
    SPACE,
    UPPER_T,
    UPPER_Z,
    ZERO,
    Bytes,
    kernel,
)
from deltaforge_dagster.sources.mysql.values.numbers import read_8, read_24, read_big, read_unsigned

_TEN, _ONE, _ZERO = np.uint64(10), np.uint64(1), np.uint64(0)

# Bytes of a decimal's group of 0 to 9 digits; a full group of 9 digits has 4.
_DECIMAL_BYTES = np.array([0, 1, 1, 2, 2, 3, 3, 4, 4, 4], np.int64)
_POWERS = np.array([1_000_000, 10_000, 100, 1], np.int64)
"""The microseconds in one unit of a fraction, by the size of the fraction in bytes."""

_DAY = 86_400


@kernel
def write_unsigned(value: np.uint64, out: Bytes, offset: int) -> int:
    """Write an unsigned 64-bit number; at most 20 bytes."""
    size = 1
    rest = value
    while rest >= _TEN:
        rest //= _TEN
        size += 1
    for i in range(size):
        digit = value % _TEN
        value //= _TEN
        out[offset + size - 1 - i] = ZERO + np.int64(digit)
    return offset + size


@kernel
def write_signed(source: Bytes, at: int, size: int, out: Bytes, offset: int) -> int:
    """Write a little-endian number in two's complement."""
    value = read_unsigned(source, at, size)
    if source[at + size - 1] & 0x80 != 0:
        out[offset] = MINUS
        offset += 1
        # The absolute value, within the number's own width.
        value = (value ^ (~_ZERO >> np.uint64(64 - 8 * size))) + _ONE
    return write_unsigned(value, out, offset)


@kernel
def write_digits(value: int, digits: int, out: Bytes, offset: int) -> int:
    """Write a number with exactly `digits` digits, with leading zeros."""
    for i in range(digits):
        out[offset + digits - 1 - i] = ZERO + value % 10
        value //= 10
    return offset + digits


@kernel
def decimal_size(digits: int, scale: int) -> int:
    """Return the size of a NEWDECIMAL in bytes: four per nine digits on each side of the point."""
    whole = digits - scale
    return int(
        whole // 9 * 4 + _DECIMAL_BYTES[whole % 9] + scale // 9 * 4 + _DECIMAL_BYTES[scale % 9]
    )


@kernel
def write_decimal(source: Bytes, at: int, digits: int, scale: int, out: Bytes, offset: int) -> int:
    """Write a NEWDECIMAL as a string, with all digits of its scale."""
    out[offset] = QUOTE
    offset = write_number(source, at, digits, scale, out, offset + 1)
    out[offset] = QUOTE
    return offset + 1


@kernel
def write_number(source: Bytes, at: int, digits: int, scale: int, out: Bytes, offset: int) -> int:
    """Write a NEWDECIMAL as a number, with all digits of its scale.

    The binary format has groups of nine decimal digits in four bytes, big-endian. On either side,
    the group farthest from the point has the remaining digits, in as few bytes as possible
    (`decimal2bin` in the server's `decimal.cc`). The highest bit is 1 for numbers >= 0; all bytes
    of a negative number are inverted::

        DECIMAL(14,4)   1234567890.1234      81 | 0D FB 38 D2 | 04 D2
                                           1 digit |  9 digits  | 4 digits
    """
    negative = source[at] & 0x80 == 0
    inverted = 0xFF if negative else 0
    if negative:
        out[offset] = MINUS
        offset += 1
    first = at
    whole = digits - scale
    shown = False
    group = whole % 9
    left = whole
    while left > 0:
        if group == 0:
            group = 9
        value = 0
        for _ in range(_DECIMAL_BYTES[group]):
            byte = read_8(source, at) ^ inverted
            if at == first:
                byte ^= 0x80
            value = value << 8 | byte
            at += 1
        if shown:
            offset = write_digits(value, group, out, offset)
        elif value != 0:
            offset = write_unsigned(np.uint64(value), out, offset)
            shown = True
        left -= group
        group = 9
    if not shown:
        out[offset] = ZERO
        offset += 1
    if scale > 0:
        out[offset] = DOT
        offset += 1
    left = scale
    while left > 0:
        group = min(left, 9)
        value = 0
        for _ in range(_DECIMAL_BYTES[group]):
            byte = read_8(source, at) ^ inverted
            if at == first:
                byte ^= 0x80
            value = value << 8 | byte
            at += 1
        offset = write_digits(value, group, out, offset)
        left -= group
    return offset


@kernel
def write_day(year: int, month: int, day: int, out: Bytes, offset: int) -> int:
    """Write `YYYY-MM-DD`."""
    offset = write_digits(year, 4, out, offset)
    out[offset] = MINUS
    offset = write_digits(month, 2, out, offset + 1)
    out[offset] = MINUS
    return write_digits(day, 2, out, offset + 1)


@kernel
def write_clock(hour: int, minute: int, second: int, micros: int, out: Bytes, offset: int) -> int:
    """Write `hh:mm:ss.ffffff`."""
    offset = write_digits(hour, 3 if hour > 99 else 2, out, offset)
    out[offset] = COLON
    offset = write_digits(minute, 2, out, offset + 1)
    out[offset] = COLON
    offset = write_digits(second, 2, out, offset + 1)
    out[offset] = DOT
    return write_digits(micros, 6, out, offset + 1)


@kernel
def write_date(source: Bytes, at: int, out: Bytes, offset: int) -> int:
    """Write a DATE."""
    value = read_24(source, at)
    if value >> 9 > 9999:
        return INVALID
    out[offset] = QUOTE
    offset = write_day(value >> 9, value >> 5 & 15, value & 31, out, offset + 1)
    out[offset] = QUOTE
    return offset + 1


@kernel
def write_datetime(source: Bytes, at: int, digits: int, out: Bytes, offset: int) -> int:
    """Write a DATETIME2 as a string; the column has `digits` fractional digits."""
    value = read_big(source, at, 5) - (1 << 39)
    if value < 0:
        return INVALID
    size = (digits + 1) >> 1
    micros = read_big(source, at + 5, size) * _POWERS[size]
    months = value >> 22
    if months // 13 > 9999 or micros > 999_999:
        return INVALID
    out[offset] = QUOTE
    offset = write_day(months // 13, months % 13, value >> 17 & 31, out, offset + 1)
    out[offset] = SPACE
    offset = write_clock(
        value >> 12 & 31, value >> 6 & 63, value & 63, micros, out, offset + 1
    )  # fmt: skip
    out[offset] = QUOTE
    return offset + 1


@kernel
def write_timestamp(source: Bytes, at: int, digits: int, out: Bytes, offset: int) -> int:
    """Write a TIMESTAMP2 of `digits` fractional digits as an ISO 8601 string in UTC."""
    seconds = read_big(source, at, 4)
    size = (digits + 1) >> 1
    micros = read_big(source, at + 4, size) * _POWERS[size]
    if micros > 999_999:
        return INVALID
    out[offset] = QUOTE
    offset += 1
    if seconds == 0 and micros == 0:
        # 0 is not 1970-01-01, but the zero value: `0000-00-00 00:00:00`.
        offset = write_day(0, 0, 0, out, offset)
    else:
        # Convert the day number to a calendar date. Eras are cycles of 400 years that begin with
        # March 1, so that a leap day is the last day of its year.
        shifted = seconds // _DAY + 719_468  # days from 0000-03-01 to 1970-01-01
        era = shifted // 146_097
        of_era = shifted - era * 146_097
        year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
        of_year = of_era - (365 * year + year // 4 - year // 100)
        march = (5 * of_year + 2) // 153
        day = of_year - (153 * march + 2) // 5 + 1
        month = march + 3 if march < 10 else march - 9
        offset = write_day(
            year + era * 400 + (1 if month <= 2 else 0), month, day, out, offset
        )  # fmt: skip
    out[offset] = UPPER_T
    second = seconds % _DAY
    offset = write_clock(
        second // 3600, second // 60 % 60, second % 60, micros, out, offset + 1
    )  # fmt: skip
    out[offset] = UPPER_Z
    out[offset + 1] = QUOTE
    return offset + 2


@kernel
def write_micros(source: Bytes, at: int, digits: int, out: Bytes, offset: int) -> int:
    """Write a TIMESTAMP2 as a number of microseconds since 1970; 0 for the zero date."""
    size = (digits + 1) >> 1
    micros = read_big(source, at + 4, size) * _POWERS[size]
    if micros > 999_999:
        return INVALID
    seconds = read_big(source, at, 4)
    return write_unsigned(np.uint64(seconds * 1_000_000 + micros), out, offset)


@kernel
def write_time(source: Bytes, at: int, digits: int, out: Bytes, offset: int) -> int:
    """Write a TIME2 as a string; the column has `digits` fractional digits."""
    size = (digits + 1) >> 1
    value = read_big(source, at, 3 + size) - (0x800000 << (8 * size))
    out[offset] = QUOTE
    offset += 1
    if value < 0:
        out[offset] = MINUS
        offset += 1
        value = -value
    micros = (value & ((1 << (8 * size)) - 1)) * _POWERS[size]
    if micros > 999_999:
        return INVALID
    value >>= 8 * size
    offset = write_clock(
        value >> 12 & 1023, value >> 6 & 63, value & 63, micros, out, offset
    )  # fmt: skip
    out[offset] = QUOTE
    return offset + 1


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
