"""Divides the changes of a table in a commit into steps, each of which can be applied at once.

A truncate separates the changes before it from those after it. An update that changes a key and
lacks values needs the table's row of the old key, so the changes of both keys before it must have
been applied, and those after it wait for it. Other keys need not wait: each key has a *level*, the
number of the step that its next changes are in, and such an update is in the step after those of
both of its keys::

    rows 0, rekey 0, rows 1, rekey 1, ...

Keys are compared by their hashes. Two keys with the same hash only cost another step. Where the
destination may take different keys for the same one (`TargetTypes.own_equality`), such an update
waits for the changes of all keys, and all keys wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.pipeline.tables.keys import Words

_LEVEL = np.dtype([("hash", "u8"), ("segment", "i8"), ("ordinal", "i8"), ("level", "i8")])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which step each change of a table is in.

    Attributes:
        truncates: Places of the truncates in the journal (segment, ordinal), in order.
        levels: By key and place, the level of the key's changes after that place.
        together: Whether all keys share one level, so that `levels` has only the key 0.
    """

    truncates: Sequence[tuple[int, int]]
    levels: npt.NDArray[Any]
    together: bool = False

    def steps(
        self, hashes: Words, segments: Longs, ordinals: Longs, rekeys: npt.NDArray[np.bool_]
    ) -> tuple[Longs, Longs]:
        """Return for each row how many truncates are before it, and its level between them.

        The returned level is twice that of the key; for an update that changes the key and lacks
        values, it is the odd number before that.
        """
        epochs = np.zeros(len(hashes), np.int64)
        for segment, ordinal in self.truncates:
            epochs += (segments > segment) | (segments == segment) & (ordinals > ordinal)
        if self.together:
            hashes = np.zeros_like(hashes)
        levels = np.zeros(len(hashes), np.int64)
        touched = np.flatnonzero(np.isin(hashes, self.levels["hash"]))
        if len(touched):
            levels[touched] = self._levels(hashes[touched], segments[touched], ordinals[touched])
        # An update that changes the key and lacks values comes after all changes of one level and
        # begins the next: it gets the odd number between them.
        return epochs, 2 * levels - rekeys

    def _levels(self, hashes: Words, segments: Longs, ordinals: Longs) -> Longs:
        """Return the levels that keys have after the changes at these places."""
        planned = self.levels
        merged = np.empty(len(planned) + len(hashes), _LEVEL)
        merged[: len(planned)] = planned
        rows = merged[len(planned) :]
        rows["hash"], rows["segment"], rows["ordinal"] = hashes, segments, ordinals
        is_row = np.arange(len(merged)) >= len(planned)
        order = np.lexsort((is_row, merged["ordinal"], merged["segment"], merged["hash"]))
        is_planned = ~is_row[order]
        last = np.maximum.accumulate(np.where(is_planned, np.arange(len(order)), -1))
        ordered = merged[order]
        same = (last >= 0) & (ordered["hash"][last] == ordered["hash"])
        row_levels = np.where(same, ordered["level"][last], 0)
        levels = np.empty(len(merged), np.int64)
        levels[order] = row_levels
        return levels[len(planned) :]


def step_plan(
    rekeys: npt.NDArray[Any], truncates: Sequence[tuple[int, int]], *, together: bool = False
) -> StepPlan:
    """Return the steps of a table.

    Args:
        rekeys: Updates that change the key and lack values: `old` and `new` hash of the key,
            `segment`, `ordinal`.
        truncates: Places of the truncates, segment and ordinal.
        together: Whether all keys have the same level.
    """
    if together:
        rekeys = rekeys.copy()
        rekeys["old"] = rekeys["new"] = 0
    ordered = sorted(truncates)
    records: list[tuple[int, int, int, int]] = []
    levels: dict[int, int] = {}
    passed = 0
    for old, new, segment, ordinal in rekeys[
        np.lexsort((rekeys["ordinal"], rekeys["segment"]))
    ].tolist():
        while passed < len(ordered) and ordered[passed] < (segment, ordinal):
            records += [(key, *ordered[passed], 0) for key in levels]
            levels.clear()
            passed += 1
        level = max(levels.get(old, 0), levels.get(new, 0))
        for key in {old, new}:
            levels[key] = level + 1
            records.append((key, segment, ordinal, level + 1))
    for truncate in ordered[passed:]:
        records += [(key, *truncate, 0) for key in levels]
        levels.clear()
    return StepPlan(ordered, np.array(records, _LEVEL), together)
