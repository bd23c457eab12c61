"""Kernels: integers, decimals and booleans as binary values.

A number may be in quotes. Forms that sources do not write (exponents, `5.0` as an integer) are left
to `exact`.
"""

# ruff: noqa: C901, PLR0912, PLR0917, PLR1714, SIM109 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import (
    DOT,
    LOWER_F,
    LOWER_T,
    MINUS,
    QUOTE,
    ZERO,
    Bytes,
    kernel,
)
from deltaforge_dagster.typed_rows.cells import (
    FITS,
    NOT_OF_TYPE,
    OUT_OF_RANGE,
    RARE,
    TOO_PRECISE,
    VALUE,
    Ints,
)

_ONE, _TEN = np.uint64(1), np.uint64(10)
_HALF, _LOW_HALF = np.uint64(32), np.uint64((1 << 32) - 1)
_WIDE = np.uint64(10**18)
"""From here on another digit may need more than 64 bits."""
_MOST_DIGITS = 19
"""A number with this many digits is always below 2^64."""


@kernel
def read_integers(
    source: Bytes,
    starts: Ints,
    stops: Ints,
    status: Bytes,
    least: np.uint64,
    most: np.uint64,
    out: npt.NDArray[np.uint64],
) -> None:
    """Read integers from `-least` to `most`, in two's complement."""
    for row in range(status.size):
        if status[row] != VALUE:
            continue
        at, stop = int(starts[row]), int(stops[row])
        if source[at] == QUOTE:
            at, stop = at + 1, stop - 1
        negative = at < stop and source[at] == MINUS
        if negative:
            at += 1
        size = stop - at
        is_plain = 0 < size <= _MOST_DIGITS and (source[at] != ZERO or size == 1)
        value = np.uint64(0)
        if is_plain:
            for position in range(at, stop):
                digit = np.int64(source[position]) - ZERO
                if digit < 0 or digit > 9:
                    is_plain = False
                    break
                value = value * _TEN + np.uint64(digit)
        if not is_plain:
            status[row] = RARE
        elif value > (least if negative else most):
            status[row] = OUT_OF_RANGE
        else:
            out[row] = ~value + _ONE if negative and value > 0 else value
            status[row] = FITS


@kernel
def _append(digit: int, out: npt.NDArray[np.uint64], row: int) -> None:
    """Append a digit to the number of 128 bits in a row."""
    low, high = out[row, 0], out[row, 1]
    if high == 0 and low < _WIDE:
        out[row, 0] = low * _TEN + np.uint64(digit)
        return
    part = (low & _LOW_HALF) * _TEN + np.uint64(digit)
    carry = (low >> _HALF) * _TEN + (part >> _HALF)
    out[row, 0] = carry << _HALF | part & _LOW_HALF
    out[row, 1] = high * _TEN + (carry >> _HALF)


@kernel
def read_decimals(
    source: Bytes,
    starts: Ints,
    stops: Ints,
    status: Bytes,
    precision: int,
    scale: int,
    out: npt.NDArray[np.uint64],
) -> None:
    """Read decimals of 128 bits, counted in units of the last decimal.

    Decimals beyond the scale must be zeros. `out` has two words per row, the low one first, which
    are 0 before.
    """
    for row in range(status.size):
        if status[row] != VALUE:
            continue
        at, stop = int(starts[row]), int(stops[row])
        if source[at] == QUOTE:
            at, stop = at + 1, stop - 1
        negative = at < stop and source[at] == MINUS
        if negative:
            at += 1
        is_plain = at < stop
        if at + 1 < stop and source[at] == ZERO and source[at + 1] != DOT:
            is_plain = False
        point = stop
        digits = int(np.int64(0))
        too_precise = False
        for position in range(at, stop):
            if source[position] == DOT and point == stop and at < position < stop - 1:
                point = position
                continue
            digit = np.int64(source[position]) - ZERO
            if digit < 0 or digit > 9:
                is_plain = False
            if not is_plain:
                break
            if position - point > scale:
                too_precise = bool(too_precise or digit > 0)
                continue
            if digits > 0 or digit > 0:
                digits += 1
            if digits <= precision:
                _append(int(digit), out, row)
        missing = scale - max(stop - point - 1, 0)
        if digits > 0 and missing > 0:
            digits += missing
            if digits <= precision:
                for _ in range(missing):
                    _append(0, out, row)
        if not is_plain:
            status[row] = RARE
        elif digits > precision:
            status[row] = OUT_OF_RANGE
        elif too_precise:
            status[row] = TOO_PRECISE
        else:
            if negative and out[row, 0] > 0:
                out[row, 0] = ~out[row, 0] + _ONE
                out[row, 1] = ~out[row, 1]
            elif negative and out[row, 1] > 0:
                out[row, 1] = ~out[row, 1] + _ONE
            status[row] = FITS


@kernel
def read_booleans(source: Bytes, starts: Ints, status: Bytes, out: Bytes) -> None:
    """Read `true` as 1 and `false` as 0."""
    for row in range(status.size):
        if status[row] == VALUE:
            first = source[starts[row]]
            status[row] = FITS if first == LOWER_T or first == LOWER_F else NOT_OF_TYPE
            out[row] = 1 if first == LOWER_T else 0
