"""SHA-256 as a kernel (FIPS 180-4), for millions of hashes without a Python object for each."""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_text import HEX_DIGITS
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel

DIGITS = 64
"""Number of hexadecimal digits of a hash."""

PADDING = 72
"""Bytes after a message that `write_sha256` overwrites with SHA-256's padding to a whole block."""

WORDS = 72
"""Number of words of scratch memory that `write_sha256` needs."""

_MASK = 0xFFFFFFFF
_BLOCK = 64
_STATE = 64  # index of the hash state in `words`, after the message schedule


def _first_bits(roots: int, count: int) -> list[int]:
    """Return the first 32 fractional bits of the roots of the first primes.

    `roots` is 2 for square roots and 3 for cube roots.
    """
    primes: list[int] = []
    number = 2
    while len(primes) < count:
        if all(number % prime for prime in primes):
            primes.append(number)
        number += 1
    return [_root(prime << (32 * roots), roots) & _MASK for prime in primes]


def _root(number: int, degree: int) -> int:
    """Return the largest integer whose power of `degree` is at most `number`."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low


_INITIAL = np.array(_first_bits(2, 8), np.int64)
_ROUNDS = np.array(_first_bits(3, 64), np.int64)


@kernel
def _rotated(word: int, bits: int) -> int:
    """Return the 32 bits of `word` rotated to the right; the bits above them are undefined."""
    return (word >> bits) | (word << (32 - bits))


@kernel
def _mix(message: Bytes, at: int, words: Longs) -> None:
    """Process one block of the message: update the state in `words`."""
    for i in range(16):
        position = at + 4 * i
        words[i] = (
            np.int64(message[position]) << 24
            | np.int64(message[position + 1]) << 16
            | np.int64(message[position + 2]) << 8
            | np.int64(message[position + 3])
        )
    for i in range(16, 64):
        old, new = words[i - 15], words[i - 2]
        low = _rotated(old, 7) ^ _rotated(old, 18) ^ (old >> 3)
        high = _rotated(new, 17) ^ _rotated(new, 19) ^ (new >> 10)
        words[i] = (words[i - 16] + (low & _MASK) + words[i - 7] + (high & _MASK)) & _MASK
    a, b, c, d = words[_STATE], words[_STATE + 1], words[_STATE + 2], words[_STATE + 3]
    e, f, g, h = words[_STATE + 4], words[_STATE + 5], words[_STATE + 6], words[_STATE + 7]
    for i in range(64):
        high = (_rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)) & _MASK
        first = h + high + (g ^ (e & (f ^ g))) + _ROUNDS[i] + words[i]
        low = (_rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)) & _MASK
        second = low + ((a & b) | (c & (a | b)))
        h, g, f = g, f, e
        e = (d + first) & _MASK
        d, c, b = c, b, a
        a = (first + second) & _MASK
    words[_STATE] = (words[_STATE] + a) & _MASK
    words[_STATE + 1] = (words[_STATE + 1] + b) & _MASK
    words[_STATE + 2] = (words[_STATE + 2] + c) & _MASK
    words[_STATE + 3] = (words[_STATE + 3] + d) & _MASK
    words[_STATE + 4] = (words[_STATE + 4] + e) & _MASK
    words[_STATE + 5] = (words[_STATE + 5] + f) & _MASK
    words[_STATE + 6] = (words[_STATE + 6] + g) & _MASK
    words[_STATE + 7] = (words[_STATE + 7] + h) & _MASK


@kernel
def write_sha256(message: Bytes, size: int, words: Longs, out: Bytes, at: int) -> int:
    """Write the hash of `message[:size]` as hexadecimal digits; return the offset after it.

    `message` must have `PADDING` more bytes, which are overwritten; `words` is scratch with `WORDS`
    words.
    """
    for i in range(8):
        words[_STATE + i] = _INITIAL[i]
    # A byte of 0x80 and eight of the size follow the message.
    blocks = (size + 9 + _BLOCK - 1) // _BLOCK
    end = blocks * _BLOCK
    message[size] = 0x80
    for position in range(size + 1, end - 8):
        message[position] = 0
    bits = np.int64(size) * 8
    for i in range(8):
        message[end - 1 - i] = (bits >> (8 * i)) & 255
    for block in range(blocks):
        _mix(message, block * _BLOCK, words)
    for i in range(8):
        word = words[_STATE + i]
        for digit in range(8):
            out[at + digit] = HEX_DIGITS[(word >> (28 - 4 * digit)) & 15]
        at += 8
    return at
