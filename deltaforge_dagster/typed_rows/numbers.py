"""Integers, decimals, floats and booleans as binary values.

The kernels read the forms that sources write; a number may be in quotes. Other forms (exponents,
`5.0` as an integer, NaN and infinities) are left to functions in Python, which read a number
exactly, digit by digit, whatever its exponent is.
"""

# ruff: noqa: C901, PLR0912, PLR0917, PLR1714, SIM109 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
    NoFitError,
)

FLOATS: Mapping[int, pa.DataType] = {32: pa.float32(), 64: pa.float64()}
"""Arrow's types by their bits."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_EXPONENT_DIGITS = 9
"""Longer exponents are outside of every range, and too large for `Decimal`."""
_ONE, _TEN = np.uint64(1), np.uint64(10)
_HALF, _LOW_HALF = np.uint64(32), np.uint64((1 << 32) - 1)
_WIDE = np.uint64(10**18)
"""From here on another digit may need more than 64 bits."""
_MOST_DIGITS = 19
"""A number with this many digits is always below 2^64."""


def scaled(text: str, precision: int, scale: int) -> int:
    """Return a number in units of its last decimal.

    Args:
        text: A JSON number, or one in quotes.
        precision: How many digits the result may have.
        scale: How many of them are decimals.

    Raises:
        NoFitError: It is no number, too large, or has other decimals than zeros beyond the scale.
    """
    digits, exponent = _parts(text)
    exponent += scale
    if not digits:
        return 0
    magnitude = digits.lstrip("-")
    if len(magnitude) + exponent > precision:
        raise NoFitError(OUT_OF_RANGE)
    if exponent < 0:
        raise NoFitError(TOO_PRECISE)
    return int(digits + "0" * exponent)


def _parts(text: str) -> tuple[str, int]:
    """Return a number's signed digits without outer zeros, and the exponent of the last one.

    Zero has no digits.
    """
    number = _unquoted(text)
    mantissa, _, exponent = number.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    sign = "-" if whole.startswith("-") else ""
    digits = (whole.removeprefix("-") + decimals).lstrip("0")
    if not digits:
        return "", 0
    if len(exponent.lstrip("+-").lstrip("0")) > _MOST_EXPONENT_DIGITS:
        raise NoFitError(TOO_PRECISE if exponent.startswith("-") else OUT_OF_RANGE)
    kept = digits.rstrip("0")
    return sign + kept, int(exponent or "0") - len(decimals) + len(digits) - len(kept)


def _unquoted(text: str) -> str:
    """Return a number without quotes.

    Raises:
        NoFitError: It is no number.
    """
    number = text[1:-1] if text.startswith('"') else text
    if not _NUMBER.fullmatch(number):
        raise NoFitError(NOT_OF_TYPE)
    return number


def integer(text: str, bits: int, *, signed: bool) -> int:
    """Return an integer of `bits` bits.

    Raises:
        NoFitError: It is no number, no integer, or too large.
    """
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    value = scaled(text, len(str(most)), 0)
    if not least <= value <= most:
        raise NoFitError(OUT_OF_RANGE)
    return value


def floating(text: str, bits: int, *, not_finite: bool) -> float:
    """Return the nearest IEEE 754 number of `bits` bits.

    Args:
        text: A JSON number, or one in quotes, or in quotes `NaN`, `Infinity` or `-Infinity`.
        bits: 32 or 64.
        not_finite: Whether the last three fit.

    Raises:
        NoFitError: It is no number, too large, or so small that it would become 0.
    """
    special = _SPECIAL.get(text[1:-1]) if text.startswith('"') else None
    if special is not None:
        if not not_finite:
            raise NoFitError(OUT_OF_RANGE)
        return special
    # Arrow rounds once. By way of Python's floats, a number of 32 bits would be rounded twice.
    nearest = pa.scalar(_unquoted(text)).cast(FLOATS[bits])
    value = cast("float", nearest.as_py())
    if math.isinf(value) or (value == 0 and _parts(text)[0]):
        raise NoFitError(OUT_OF_RANGE)
    return value


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
