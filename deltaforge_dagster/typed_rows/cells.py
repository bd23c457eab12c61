"""The texts of values in row images: where they are, and the status of each.

The kernels find the values of columns, and the elements in arrays. Members are expected in the
table's order, as sources write them; others cost a search among the names.
"""

# ruff: noqa: C901, D417, PLR0912, PLR0917, SIM110 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.json_fields import blank, string_end, value_end
from deltaforge_dagster.kernels.json_strings import is_utf_8, write_plain
from deltaforge_dagster.kernels.json_text import UNCHANGED, equals
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACKET,
    COLON,
    COMMA,
    LOWER_N,
    OPEN_BRACE,
    OPEN_BRACKET,
    QUOTE,
    TAB,
    Bytes,
    Longs,
    kernel,
)

Ints: TypeAlias = npt.NDArray[np.int32]

ABSENT, NULL, VALUE, FITS, RARE, NOT_OF_TYPE, OUT_OF_RANGE, TOO_PRECISE, NOT_UNICODE = range(9)
"""The status of a cell: the image lacks it; it is null; it has a value that is not read yet; the
value was read; it has a rare form, which is left to Python; and the reasons why it does not fit.
"""

REASONS = {
    NOT_OF_TYPE: "it is not a value of that type",
    OUT_OF_RANGE: "it is outside of the type's range",
    TOO_PRECISE: "it has more decimals than the type",
    NOT_UNICODE: "it has half of a surrogate pair, which is not a character",
}

KNOWN, UNKNOWN_MEMBER, NO_OBJECT, NO_NAME = range(4)
"""What an image is: its members are columns of the table, or one is not; no JSON object; one with a
member whose name is not Unicode.
"""

_Value = TypeVar("_Value")


class NoFitError(Exception):
    """A value does not fit its column; has the status that says why."""

    def __init__(self, status: int) -> None:
        super().__init__(REASONS[status])
        self.status = status


@dataclass(frozen=True, slots=True)
class ColumnCells:
    """A column of values as JSON text.

    Attributes:
        source: The text of all rows.
        starts, stops: Where each value is in it; without meaning where there is none.
        status: One of the numbers above for each value; reading a value changes it.
    """

    source: Bytes
    starts: Ints
    stops: Ints
    status: Bytes

    def find_null_documents(self) -> None:
        """Mark each `null` that is a JSON document (`json_text.write_null_document`) as a value."""
        nulls = np.flatnonzero(self.status == NULL)
        stops = self.stops[nulls]
        inside = stops < self.source.size
        nulls, stops = nulls[inside], stops[inside]
        self.status[nulls[self.source[stops] == TAB]] = VALUE

    def text(self, row: int) -> str:
        """Return the JSON text of a value."""
        return self.source[self.starts[row] : self.stops[row]].tobytes().decode()

    def read_rare(self, read: Callable[[str], _Value]) -> Iterator[tuple[int, _Value]]:
        """Read the values that the kernels left; yield row and result of each that fits."""
        for row in np.flatnonzero(self.status == RARE).tolist():
            try:
                value = read(self.text(row))
            except NoFitError as error:
                self.status[row] = error.status
            else:
                self.status[row] = FITS
                yield row, value

    def size(self) -> int:
        """Return how many bytes the values that are not read yet have together."""
        return int(np.sum((self.stops - self.starts)[self.status == VALUE], dtype=np.int64))


@kernel
def _is(source: Bytes, start: int, stop: int, names: Bytes, first: int, last: int) -> bool:
    """Return whether `source[start:stop]` is `names[first:last]`."""
    if stop - start != last - first:
        return False
    for i in range(stop - start):
        if source[start + i] != names[first + i]:
            return False
    return True


@kernel
def _find(
    source: Bytes, start: int, stop: int, names: Bytes, name_ends: Longs, expected: int
) -> int:
    """Return which of the names `source[start:stop]` is; -1 for none.

    The expected one is tried first.
    """
    count = name_ends.size - 1
    for i in range(count):
        column = expected + i
        if column >= count:
            column -= count
        if _is(source, start, stop, names, name_ends[column], name_ends[column + 1]):
            return column
    return -1


@kernel
def _skip(source: Bytes, at: int, stop: int, byte: int) -> int:
    """Return the offset after white space and any number of `byte`."""
    while at < stop and (source[at] == byte or blank(source[at])):
        at += 1
    return at


@kernel
def locate_members(
    source: Bytes,
    ends: Ints,
    valid: Bytes,
    names: Bytes,
    name_ends: Longs,
    marks_unchanged: bool,
    scratch: Bytes,
    starts: Ints,
    stops: Ints,
    status: Bytes,
    kinds: Bytes,
    unknown_starts: Ints,
    unknown_stops: Ints,
) -> None:
    """Find the columns of each image.

    Args:
        source, ends, valid: The images, as in an Arrow string array; a byte for each row in
            `valid`, 0 for null.
        names, name_ends: The names of the columns without escapes; one begins where the one before
            ends.
        marks_unchanged: Whether `{"_unchanged":true}` says that the image lacks a value.
        scratch: Room for the longest name in the images.
        starts, stops, status: A line per column: where its values are, and `ABSENT`, `NULL` or
            `VALUE`; all are `ABSENT` before.
        kinds: One of the numbers above for each row.
        unknown_starts, unknown_stops: Where the first name that is not among `names` is, in quotes.
    """
    for row in range(valid.size):
        kinds[row] = KNOWN
        if valid[row] == 0:
            continue
        stop = int(ends[row + 1])
        at = _skip(source, int(ends[row]), stop, 32)
        if at == stop or source[at] != OPEN_BRACE:
            kinds[row] = NO_OBJECT
            continue
        at += 1
        expected = int(np.int64(0))
        while True:
            at = _skip(source, at, stop, COMMA)
            if at >= stop or source[at] != QUOTE:
                break
            name = at
            at = string_end(source, name, stop)
            column = _find(source, name + 1, at - 1, names, name_ends, expected)
            if column < 0:
                for position in range(name + 1, at - 1):
                    if source[position] == BACKSLASH:
                        size = write_plain(source, name + 1, at - 1, scratch, 0)
                        column = _find(scratch, 0, size, names, name_ends, expected)
                        if not is_utf_8(scratch, 0, size):
                            kinds[row] = NO_NAME
                        break
                if kinds[row] == NO_NAME:
                    break
            value = _skip(source, at, stop, COLON)
            name_end = at
            at = value_end(source, value, stop)
            if column < 0:
                if kinds[row] == KNOWN:
                    kinds[row] = UNKNOWN_MEMBER
                    unknown_starts[row], unknown_stops[row] = name, name_end
                continue
            expected = column + 1
            if expected == name_ends.size - 1:
                expected = 0
            if status[column, row] != ABSENT:  # of several members with one name the first counts
                continue
            starts[column, row], stops[column, row] = value, at
            if source[value] == LOWER_N:
                status[column, row] = NULL
            elif not (marks_unchanged and equals(source, value, at, UNCHANGED)):
                status[column, row] = VALUE


@kernel
def locate_elements(
    source: Bytes,
    starts: Ints,
    stops: Ints,
    status: Bytes,
    ends: Ints,
    element_starts: Ints,
    element_stops: Ints,
    element_status: Bytes,
) -> int:
    """Find the elements of arrays, and return how many there are.

    If the arrays for the elements are empty, they are only counted. The status of a value that is
    no array becomes `NOT_OF_TYPE`. `ends` is where the elements of each row end, after a 0.
    """
    count = int(np.int64(0))
    for row in range(status.size):
        if status[row] == VALUE:
            at, stop = int(starts[row]), int(stops[row]) - 1
            if source[at] != OPEN_BRACKET:
                status[row] = NOT_OF_TYPE
            else:
                at = _skip(source, at + 1, stop, COMMA)
                while at < stop and source[at] != CLOSE_BRACKET:
                    end = value_end(source, at, stop)
                    if element_status.size > 0:
                        element_starts[count], element_stops[count] = at, end
                        element_status[count] = NULL if source[at] == LOWER_N else VALUE
                    count += 1
                    at = _skip(source, end, stop, COMMA)
        ends[row + 1] = count
    return count
