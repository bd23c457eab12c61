"""Group and count: cells by path and type, and the equal values of a column.

Values that many rows share are processed once (`coded`, `count_values`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.sensing.scan import Cells, unescaped

Flags: TypeAlias = npt.NDArray[np.bool_]

KIND_BITS = 3
"""The bits of a type: a pair of path and type is the number `path << KIND_BITS | type`."""


class Groups:
    """Cells grouped by pair of path and type, in the order of the pairs' numbers.

    Attributes:
        pairs: The distinct pairs.
        first: The first cell of each group.
        counts: The number of cells of each group.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        numbers = cells.path << KIND_BITS | cells.type
        self._order = np.argsort(numbers, kind="stable")
        ordered = numbers[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self.pairs = ordered[self._starts]
        self.first = self._order[self._starts]
        self.counts = np.diff(np.r_[self._starts, len(ordered)])

    def cells(self, index: int) -> Longs:
        """Return the cells of one group, in document order."""
        start = self._starts[index]
        return self._order[start : start + self.counts[index]]

    def structures(self) -> Longs:
        """Return a hash per document; documents with the same set of pairs have the same hash."""
        of_cell = np.repeat(np.arange(len(self.pairs)), self.counts)
        documents = self._cells.document[self._order]
        distinct = np.unique(documents * len(self.pairs) + of_cell)
        weights = _spread(self.pairs)
        total = np.zeros(self._cells.documents, np.uint64)
        np.add.at(total, distinct // len(self.pairs), weights[distinct % len(self.pairs)])
        return (total >> np.uint64(1)).astype(np.int64)

    def lacking(self, expected: Collection[int]) -> Flags:
        """Return a mask of the documents that have a pair which is not in `expected`."""
        unknown = np.array([pair not in expected for pair in self.pairs.tolist()], np.bool_)
        lacking = np.zeros(self._cells.documents, np.bool_)
        lacking[self._cells.document[self._order[np.repeat(unknown, self.counts)]]] = True
        return lacking


def _spread(numbers: Longs) -> npt.NDArray[np.uint64]:
    """Mix numbers so that each bit depends on all bits (the finalizer of SplitMix64)."""
    mixed = numbers.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def coded(batch: pa.RecordBatch, name: str) -> tuple[Longs, list[str | None]]:
    """Return a column as codes and the list of values that they index; the last value is None."""
    column = batch.column(name)
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    values: list[str | None] = [*column.dictionary.to_pylist(), None]
    indices = column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return indices.astype(np.int64), values


def count_values(texts: pa.StringArray) -> dict[str, int]:
    """Count occurrences of each string; `texts` are JSON strings with escapes, without quotes."""
    counts: dict[str, int] = {}
    pairs = pc.value_counts(texts)
    values = cast("list[str]", pairs.field(0).to_pylist())
    for text, count in zip(values, cast("list[int]", pairs.field(1).to_pylist()), strict=True):
        value = unescaped(text)
        counts[value] = counts.get(value, 0) + count
    return counts
