"""Numbers in forms that the kernels leave.

These are exponents, fractions of integers, numbers in quotes, NaN and infinities. They are read
exactly, digit by digit, whatever their exponent is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import cast

import pyarrow as pa

from deltaforge_dagster.typed_rows.cells import NOT_OF_TYPE, OUT_OF_RANGE, TOO_PRECISE, NoFitError

FLOATS: Mapping[int, pa.DataType] = {32: pa.float32(), 64: pa.float64()}
"""Arrow's types by their bits."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_EXPONENT_DIGITS = 9
"""Longer exponents are outside of every range, and too large for `Decimal`."""


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
