"""The texts of one column's values in row images, and the status of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import TAB, Bytes

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
