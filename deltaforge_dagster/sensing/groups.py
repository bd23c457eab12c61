"""Cells sorted by what they are, and counted: the one loop over values, done by NumPy."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.sensing.scan import Cells
from deltaforge_dagster.sources.kernel import Longs

Flags: TypeAlias = npt.NDArray[np.bool_]

KIND_BITS = 3
"""A pair of path and type is the number `path << KIND_BITS | type`."""


class Groups:
    """Cells by what they are: a pair of path and type, one number; in order of these numbers.

    Attributes:
        pairs: The pairs.
        first: The first cell of each.
        counts: How many cells each has.
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
        """Return the cells of one group, in the order of documents."""
        start = self._starts[index]
        return self._order[start : start + self.counts[index]]

    def structures(self) -> Longs:
        """Return a number for each document: the same for those with the same pairs."""
        of_cell = np.repeat(np.arange(len(self.pairs)), self.counts)
        documents = self._cells.document[self._order]
        both = np.unique(documents * len(self.pairs) + of_cell)
        weights = _spread(self.pairs)
        total = np.zeros(self._cells.documents, np.uint64)
        np.add.at(total, both // len(self.pairs), weights[both % len(self.pairs)])
        return (total >> np.uint64(1)).astype(np.int64)

    def lacking(self, known: Collection[int]) -> Flags:
        """Say which documents have a pair that is not among those known."""
        unknown = np.array([pair not in known for pair in self.pairs.tolist()], np.bool_)
        strange = np.zeros(self._cells.documents, np.bool_)
        strange[self._cells.document[self._order[np.repeat(unknown, self.counts)]]] = True
        return strange


def _spread(numbers: Longs) -> npt.NDArray[np.uint64]:
    """Return numbers of which any bit depends on all bits (the finish of SplitMix64)."""
    mixed = numbers.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
