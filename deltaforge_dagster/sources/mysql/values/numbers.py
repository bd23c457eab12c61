"""Kernels that read integers from the binary log, and write floating point numbers.

A floating point number is written as the shortest decimal that reads back as the same, with the
algorithm of Raffaello Giulietti, "The Schubfach way to render doubles" (2020): of the decimals
inside the interval that rounds to the number, at most four have to be tried. It needs products of
64-bit numbers with 128-bit powers of ten, which are computed at import.

The text is the one that MySQL writes in JSON documents: `0.1`, `1.0`, `1e22`, with an exponent
below 10^-15 and from 10^15 on; -0 keeps its sign.
"""

# ruff: noqa: C901, PLR0912 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_strings import write_base64
from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import (
    CLOSE_BRACKET,
    COMMA,
    DOT,
    LOWER_E,
    MINUS,
    OPEN_BRACKET,
    ZERO,
    Bytes,
    kernel,
)


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


FLOAT_ROOM = 40
"""The most bytes of a number's text."""

VECTOR_GROWTH = 8
"""The most bytes of a vector's JSON per byte of the vector; a four-byte number takes up to 27."""

_LEAST, _MOST = -292, 324
"""The range of powers of ten that the algorithm needs."""


def _powers() -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Return the high and the low 64 bits of each 10^k, as 128 bits of which the highest is set.

    The values are rounded up.
    """
    table = np.empty((_MOST - _LEAST + 1, 2), np.uint64)
    for k in range(_LEAST, _MOST + 1):
        if k >= 0:
            shift = (10**k).bit_length() - 128
            value = -(-(10**k) >> shift) if shift > 0 else 10**k << -shift
        else:
            shift = 127 + (10**-k).bit_length()
            value = -(-(1 << shift) // 10**-k)
            if value.bit_length() > 128:
                value = -(-(1 << shift - 1) // 10**-k)
        table[k - _LEAST] = value >> 64, value & (1 << 64) - 1
    return table


_POWERS = _powers()

_ZERO, _ONE, _TWO, _FOUR, _TEN = (np.uint64(n) for n in (0, 1, 2, 4, 10))
_FORTY, _LOW, _HALF, _TOP = np.uint64(40), np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(63)


@kernel
def _high(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the upper 64 bits of the 128-bit product."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF)


@kernel
def _scaled(line: int, value: np.uint64) -> np.uint64:
    """Return `value` times a power of ten without the lower 128 bits; odd if they were not zero."""
    carry = _high(_POWERS[line, 1], value)
    low = _POWERS[line, 0] * value
    high = _high(_POWERS[line, 0], value)
    low += carry
    if low < carry:
        high += _ONE
    return high | (_ONE if low > _ONE else _ZERO)


@kernel
def _shortest(c: np.uint64, q: int, closer: bool) -> tuple[np.uint64, int]:
    """Return the shortest decimal s 10^k, as (s, k), for the binary number c 2^q.

    `closer` says whether the next smaller number is nearer than the next larger one.
    """
    odd = c & _ONE
    left = _FOUR * c - (_ONE if closer else _TWO)
    # In fixed point: log10(2) * 2^22, -log10(3/4) * 2^22, and log2(10) * 2^19.
    k = (q * 1_262_611 - (524_031 if closer else 0)) >> 22
    shift = np.uint64(q + ((-k * 1_741_647) >> 19) + 1)
    line = -k - _LEAST
    lower = _scaled(line, left << shift) + odd
    middle = _scaled(line, (_FOUR * c) << shift)
    upper = _scaled(line, (_FOUR * c + _TWO) << shift) - odd
    s = middle >> _TWO
    if s >= _TEN:
        tens = s // _TEN
        down = lower <= _FORTY * tens
        up = _FORTY * tens + _FORTY <= upper
        if down != up:
            return tens + (_ONE if up else _ZERO), k + 1
    down = lower <= _FOUR * s
    up = _FOUR * s + _FOUR <= upper
    if down != up:
        return s + (_ONE if up else _ZERO), k
    half = _FOUR * s + _TWO
    if middle > half or (middle == half and s & _ONE != _ZERO):
        s += _ONE
    return s, k


@kernel
def _write_decimal(s: np.uint64, k: int, out: Bytes, offset: int) -> int:
    """Write the number s 10^k, where s > 0."""
    while s % _TEN == _ZERO:
        s //= _TEN
        k += 1
    count = 0
    rest = s
    while rest != _ZERO:
        rest //= _TEN
        count += 1
    point = count + k  # digits before the decimal point
    scientific = point < -14 or point > 15
    before = 1 if scientific else point
    start = offset
    if before <= 0:
        out[offset] = ZERO
        out[offset + 1] = DOT
        for i in range(-before):
            out[offset + 2 + i] = ZERO
        start = offset + 2 - before
        offset = start + count
        for i in range(count):
            out[offset - 1 - i] = ZERO + np.int64(s % _TEN)
            s //= _TEN
        return offset
    if before >= count and not scientific:
        offset = start + before
        for i in range(count, before):
            out[start + i] = ZERO
        for i in range(count):
            out[start + count - 1 - i] = ZERO + np.int64(s % _TEN)
            s //= _TEN
        out[offset] = DOT
        out[offset + 1] = ZERO
        return offset + 2
    dot = 1 if count > before else 0
    offset = start + count + dot
    for i in range(count):
        digit = count - 1 - i
        out[start + digit + (dot if digit >= before else 0)] = ZERO + np.int64(s % _TEN)
        s //= _TEN
    if dot != 0:
        out[start + before] = DOT
    if not scientific:
        return offset
    out[offset] = LOWER_E
    offset += 1
    exponent = point - 1
    if exponent < 0:
        out[offset] = MINUS
        offset += 1
        exponent = -exponent
    digits = 3 if exponent > 99 else 2
    for i in range(digits):
        out[offset + digits - 1 - i] = ZERO + exponent % 10
        exponent //= 10
    return offset + digits


@kernel
def _write(bits: np.uint64, mantissa_bits: int, exponent_bits: int, out: Bytes, offset: int) -> int:
    fraction = bits & ((_ONE << np.uint64(mantissa_bits)) - _ONE)
    exponent = int(bits >> np.uint64(mantissa_bits)) & ((1 << exponent_bits) - 1)
    if exponent == (1 << exponent_bits) - 1:
        return INVALID  # infinite or not a number: MySQL has neither
    if bits >> np.uint64(mantissa_bits + exponent_bits) != _ZERO:
        out[offset] = MINUS
        offset += 1
    least = 1 - (1 << (exponent_bits - 1)) + 1 - mantissa_bits
    if exponent == 0:
        if fraction == _ZERO:
            out[offset] = ZERO
            out[offset + 1] = DOT
            out[offset + 2] = ZERO
            return offset + 3
        s, k = _shortest(fraction, least, False)
    else:
        s, k = _shortest(
            fraction | _ONE << np.uint64(mantissa_bits),
            least + exponent - 1,
            bool(fraction == _ZERO and exponent > 1),
        )
    return _write_decimal(s, k, out, offset)


@kernel
def write_float(source: Bytes, at: int, size: int, out: Bytes, offset: int) -> int:
    """Write a little-endian IEEE 754 number of 4 or 8 bytes; `INVALID` if it is not finite."""
    bits = read_unsigned(source, at, size)
    if size == 4:
        return _write(bits, 23, 8, out, offset)  # bits of fraction and exponent (IEEE 754)
    return _write(bits, 52, 11, out, offset)


@kernel
def write_vector(source: Bytes, start: int, end: int, out: Bytes, offset: int) -> int:
    """Write consecutive FLOATs as a JSON array.

    If they are not all finite FLOATs, write `{"_base64":"..."}`. Writes at most `VECTOR_GROWTH` n +
    32 bytes for n bytes.
    """
    first = offset
    out[offset] = OPEN_BRACKET
    for at in range(start, end - 3, 4):
        offset = write_float(source, at, 4, out, offset + 1)
        if offset == INVALID:
            return write_base64(source, start, end, out, first)
        out[offset] = COMMA
    if start == end:
        offset += 1
    elif (end - start) & 3 != 0:
        return write_base64(source, start, end, out, first)
    out[offset] = CLOSE_BRACKET
    return offset + 1
