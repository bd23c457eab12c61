"""Kernels: dates, times, timestamps and UUIDs as binary values.

All are strings. The date comes as `YYYY-MM-DD` of the years 1 to 9999, the time as `hh:mm:ss` with
up to six digits of a fraction (more are zeros), the offset as `Z`, `+hh`, `+hh:mm` or `+hh:mm:ss`.
Dates are of the proleptic Gregorian calendar.
"""

# ruff: noqa: PLR0917, PLR1714 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_text import HEX_VALUES
from deltaforge_dagster.kernels.runtime import (
    COLON,
    DOT,
    MINUS,
    NINE,
    PLUS,
    QUOTE,
    SPACE,
    UPPER_T,
    UPPER_Z,
    ZERO,
    Bytes,
    Longs,
    kernel,
)
from deltaforge_dagster.typed_rows.cells import (
    FITS,
    NOT_OF_TYPE,
    OUT_OF_RANGE,
    TOO_PRECISE,
    VALUE,
    Ints,
)

_NONE = -(1 << 62)
"""Instead of a number: the text has another form."""
_PRECISE = _NONE + 1
"""Instead of a number: the fraction has more than six digits that count."""

_DATE_SIZE, _CLOCK_SIZE, _UUID_SIZE = 10, 8, 36
_MICROS_SIZE = 18
"""Digits of the largest number of microseconds that is read."""
_SECOND, _DAY = 1_000_000, 86_400_000_000
"""In microseconds."""
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The beginning of the year 1 and the end of 9999."""
_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.int64)


@kernel
def _digits(source: Bytes, at: int, count: int) -> int:
    """Return the number that `count` digits from `at` on form; -1 if one of them is no digit."""
    value = int(np.int64(0))
    for i in range(count):
        digit = np.int64(source[at + i]) - ZERO
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + int(digit)
    return value


@kernel
def _date(source: Bytes, at: int) -> int:
    """Return the days from 1970 to the date at `at`, or `_NONE`; there are ten bytes."""
    year, month, day = (
        _digits(source, at, 4),
        _digits(source, at + 5, 2),
        _digits(source, at + 8, 2),
    )
    if source[at + 4] != MINUS or source[at + 7] != MINUS:
        return _NONE
    if year < 1 or month < 1 or month > 12 or day < 1:
        return _NONE
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if day > _DAYS[month] and not (leap and month == 2 and day == 29):
        return _NONE
    # Hinnant, "chrono-Compatible Low-Level Date Algorithms", `days_from_civil`: years begin in
    # March.
    if month <= 2:
        year -= 1
        month += 12
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month - 3) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


@kernel
def _time(source: Bytes, at: int, stop: int) -> int:
    """Return the time `source[at:stop]` in microseconds since midnight, `_NONE` or `_PRECISE`."""
    if stop - at < _CLOCK_SIZE or source[at + 2] != COLON or source[at + 5] != COLON:
        return _NONE
    hour, minute, second = (
        _digits(source, at, 2),
        _digits(source, at + 3, 2),
        _digits(source, at + 6, 2),
    )
    if not (0 <= hour < 24 and 0 <= minute < 60 and 0 <= second < 60):
        return _NONE
    value = (hour * 3600 + minute * 60 + second) * _SECOND
    at += _CLOCK_SIZE
    if at == stop:
        return value
    if source[at] != DOT or at + 1 == stop:
        return _NONE
    unit, too_precise = int(np.int64(100_000)), False
    for position in range(at + 1, stop):
        digit = int(np.int64(source[position])) - ZERO
        if digit < 0 or digit > 9:
            return _NONE
        too_precise = too_precise or (unit == 0 and digit > 0)
        value += digit * unit
        unit //= 10
    return _PRECISE if too_precise else value


@kernel
def _offset(source: Bytes, at: int, stop: int) -> int:
    """Return how many microseconds the offset `source[at:stop]` is east of UTC, or `_NONE`."""
    size = stop - at
    if size == 1 and source[at] == UPPER_Z:
        return 0
    if not (size == 3 or size == 6 or size == 9) or (source[at] != PLUS and source[at] != MINUS):
        return _NONE
    offset, unit = int(np.int64(0)), int(np.int64(3600))
    for position in range(at, stop, 3):
        part = _digits(source, position + 1, 2)
        if (
            part < 0
            or (position > at and (source[position] != COLON or part > 59))
            or (position == at and part > 23)
        ):
            return _NONE
        offset += part * unit
        unit //= 60
    return (-offset if source[at] == MINUS else offset) * _SECOND


@kernel
def _timestamp(source: Bytes, at: int, stop: int, has_zone: bool) -> int:
    """Return the timestamp `source[at:stop]` in microseconds since 1970, `_NONE` or `_PRECISE`."""
    clock = at + _DATE_SIZE + 1
    if stop - clock < _CLOCK_SIZE:
        return _NONE
    day = _date(source, at)
    if day == _NONE or (source[clock - 1] != SPACE and source[clock - 1] != UPPER_T):
        return _NONE
    zone = clock + _CLOCK_SIZE
    while zone < stop and (source[zone] == DOT or ZERO <= source[zone] <= NINE):
        zone += 1
    time = _time(source, clock, zone)
    if time < 0:
        return time
    if has_zone == (zone == stop):
        return _NONE
    offset = _offset(source, zone, stop) if has_zone else 0
    return _NONE if offset == _NONE else day * _DAY + time - offset


@kernel
def _status(value: int) -> int:
    """Return the status of a value that was read."""
    if value == _NONE:
        return NOT_OF_TYPE
    return TOO_PRECISE if value == _PRECISE else FITS


@kernel
def read_dates(source: Bytes, starts: Ints, stops: Ints, status: Bytes, out: Longs) -> None:
    """Read dates as days since 1970."""
    for row in range(status.size):
        if status[row] == VALUE:
            at = int(starts[row]) + 1
            is_date = source[at - 1] == QUOTE and stops[row] - 1 - at == _DATE_SIZE
            value = _date(source, at) if is_date else _NONE
            status[row] = _status(value)
            out[row] = value


@kernel
def read_times(source: Bytes, starts: Ints, stops: Ints, status: Bytes, out: Longs) -> None:
    """Read times of a day as microseconds since midnight."""
    for row in range(status.size):
        if status[row] == VALUE:
            at, stop = int(starts[row]) + 1, int(stops[row]) - 1
            value = _time(source, at, stop) if source[at - 1] == QUOTE else _NONE
            status[row] = _status(value)
            out[row] = value


@kernel
def read_timestamps(
    source: Bytes,
    starts: Ints,
    stops: Ints,
    status: Bytes,
    has_zone: bool,
    has_micros: bool,
    out: Longs,
) -> None:
    """Read timestamps as microseconds since 1970.

    Those with `has_zone` need an offset, others must not have one. With `has_micros` a number is
    such a timestamp already, and 0 no timestamp.
    """
    for row in range(status.size):
        if status[row] != VALUE:
            continue
        at, stop = int(starts[row]), int(stops[row])
        value = _NONE
        if source[at] == QUOTE:
            value = _timestamp(source, at + 1, stop - 1, has_zone)
        elif has_micros and stop - at <= _MICROS_SIZE:
            micros = _digits(source, at, stop - at)
            value = micros if micros > 0 else _NONE
        status[row] = _status(value)
        if status[row] == FITS and not _FIRST <= value <= _LAST:
            status[row] = OUT_OF_RANGE
        out[row] = value


@kernel
def read_uuids(source: Bytes, starts: Ints, stops: Ints, status: Bytes, out: Bytes) -> None:
    """Read UUIDs, 32 hexadecimal digits with hyphens, as 16 bytes each."""
    for row in range(status.size):
        if status[row] != VALUE:
            continue
        at = int(starts[row]) + 1
        status[row] = NOT_OF_TYPE
        if source[at - 1] != QUOTE or stops[row] - 1 - at != _UUID_SIZE:
            continue
        position, wrong = at, np.uint8(0)
        for i in range(16):
            if i == 4 or i == 6 or i == 8 or i == 10:
                wrong |= np.uint8(source[position] != MINUS) << np.uint8(7)
                position += 1
            first, second = HEX_VALUES[source[position]], HEX_VALUES[source[position + 1]]
            wrong |= first | second
            out[16 * row + i] = np.int64(first & 15) << 4 | np.int64(second & 15)
            position += 2
        if wrong <= 15:
            status[row] = FITS
