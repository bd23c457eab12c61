"""Folds the changes of keys, for tables of the modes `current` and `history`.

Rows have the columns of a table, the key's hash, and of `staged.META` the place, the operation, the
time, and the absent columns; updates that change the key and lack values also have the old key. All
functions handle whole columns at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from deltaforge_dagster.kernels.message_text import Mask
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.pipeline.tables import absent
from deltaforge_dagster.pipeline.tables.fold import StepPlan
from deltaforge_dagster.pipeline.tables.keys import key_codes
from deltaforge_dagster.pipeline.tables.typed_files import HASH
from deltaforge_dagster.sinks.tables.staged import OLD_KEY, ChangePlace, TableMode

PLACE = ("df_segment", "df_ordinal", "df_event_time")


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """What the rows of some keys contribute to a step of their table.

    Attributes:
        epoch: Number of truncates before the step.
        level: Its level between these truncates (`steps`); odd if its rows change keys and lack
            values.
        rows: The rows, as `staged` describes them.
        absent: The columns that some rows lack.
        inserts_only: Whether all changes are inserts, each of another key.
        reads: Whether all rows are snapshot rows, of keys that no other change in the step has.
        last: Place of the last change.
    """

    epoch: int
    level: int
    rows: pa.Table
    absent: frozenset[str]
    inserts_only: bool
    reads: bool
    last: ChangePlace


def fold(
    rows: pa.Table, columns: pa.Schema, key: Sequence[str], mode: TableMode, plan: StepPlan
) -> Iterator[FoldedStep]:
    """Yield the steps of some keys, in order.

    Args:
        rows: All changes of these keys in the commit, in any order.
        columns: The columns of the table.
        key: Names of the key columns.
        mode: `current` or `history`.
        plan: The steps of the table.
    """
    segments, ordinals = (rows.column(name).to_numpy() for name in PLACE[:2])
    rekeys = np.zeros(rows.num_rows, np.bool_)
    if OLD_KEY + key[0] in rows.schema.names:
        rekeys = _numpy(rows.column(OLD_KEY + key[0]).is_valid())
    epochs, levels = plan.steps(rows.column(HASH).to_numpy(), segments, ordinals, rekeys)
    if mode == "current" and plan.truncates:
        kept = epochs == len(plan.truncates)
        if not kept.all():
            rows, segments, ordinals, rekeys, epochs, levels = (
                rows.filter(pa.array(kept)), segments[kept], ordinals[kept], rekeys[kept],
                epochs[kept], levels[kept],
            )  # fmt: skip
    steps = epochs * (2 + int(levels.max(initial=0))) + levels
    step_numbers, first, counts = np.unique(steps, return_index=True, return_counts=True)
    for step, row, count in zip(
        step_numbers.tolist(), first.tolist(), counts.tolist(), strict=True
    ):
        chosen = steps == step
        step_rows = rows if count == rows.num_rows else rows.filter(pa.array(chosen))
        places = np.lexsort((ordinals[chosen], segments[chosen]))
        last = places[-1]
        last_place = ChangePlace(int(segments[chosen][last]), int(ordinals[chosen][last]))
        if rekeys[row]:
            parts = [_FoldedPart(_rekeys(step_rows.take(places), columns, key, mode))]
        else:
            parts = _folded(step_rows, places, columns, key, mode, apart=not plan.together)
        for part in parts:
            names = frozenset(absent.masks_of(part.rows.column("df_absent").combine_chunks()))
            yield FoldedStep(
                int(epochs[row]), int(levels[row]), part.rows, names,
                part.inserts_only, part.reads, last_place,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _FoldedPart:
    """Folded rows of a step; see `FoldedStep`."""

    rows: pa.Table
    inserts_only: bool = False
    reads: bool = False


def _folded(
    rows: pa.Table,
    places: Longs,
    columns: pa.Schema,
    key: Sequence[str],
    mode: TableMode,
    *,
    apart: bool,
) -> list[_FoldedPart]:
    """Return the folded rows of a step: with `apart`, snapshot rows separately, before the rest.

    Only snapshot rows whose key has no other change in the step are separated.
    """
    codes = key_codes([rows.column(name).combine_chunks() for name in key])
    order = places[np.argsort(codes[places], kind="stable")]
    codes = codes[order]
    starts = np.ones(len(codes), np.bool_)
    starts[1:] = codes[1:] != codes[:-1]
    ops = rows.column("df_op").combine_chunks().dictionary_encode()
    names = ops.dictionary.to_pylist()
    op = ops.indices.to_numpy()[order]
    deletes = op == names.index("d") if "d" in names else np.zeros(len(op), np.bool_)
    updates = op == names.index("u") if "u" in names else np.zeros(len(op), np.bool_)
    inserts_only = names == ["c"] and bool(starts.all())
    lasts = np.append(starts[1:], True)
    wanted = lasts if mode == "current" else ~deletes | starts
    reads = np.zeros(len(op), np.bool_)
    if apart and "r" in names:
        reads = starts & lasts & (op == names.index("r"))
    parts: list[_FoldedPart] = []
    for of_part in (reads, ~reads):
        numbers = np.flatnonzero(wanted & of_part)
        if len(numbers):
            groups = _Groups(order, starts, deletes, updates, numbers)
            parts.append(
                _FoldedPart(groups.made(rows, columns, mode), inserts_only, of_part is reads)
            )
    return parts


@dataclass(frozen=True, slots=True)
class _Groups:
    """Changes grouped by key, those of each key in the order of the journal.

    Attributes:
        order: The numbers of the rows.
        starts: Which changes are the first of their key.
        deletes, updates: Which changes are deletes and updates.
        wanted: Numbers of the changes that are to be returned, in this order.
    """

    order: Longs
    starts: Mask
    deletes: Mask
    updates: Mask
    wanted: Longs

    def made(self, rows: pa.Table, columns: pa.Schema, mode: TableMode) -> pa.Table:
        """Return the wanted changes as rows of a staged file."""
        arrays, lacking = self._columns(rows, columns)
        chosen = self.wanted
        index = self.order[chosen]
        deleted = self.deletes[chosen]
        arrays["df_op"] = _ops(deleted)
        for name in PLACE:
            arrays[name] = rows.column(name).combine_chunks().take(index)
        arrays["df_absent"] = absent.names_of(lacking, len(chosen))
        if mode == "history":
            times = rows.column("df_event_time").combine_chunks().take(self.order)
            following = chosen + 1
            ends = np.append(self.starts, True)[following] | deleted
            arrays["df_valid_from"] = times.take(chosen)
            arrays["df_valid_to"] = times.take(pa.array(following, pa.int64(), mask=ends))
        return pa.table(arrays)

    def _columns(
        self, rows: pa.Table, columns: pa.Schema
    ) -> tuple[dict[str, pa.Array[Any]], dict[str, Mask]]:
        """Return the wanted changes' columns, filled from earlier changes, and what they lack."""
        masks = absent.masks_of(rows.column("df_absent").combine_chunks())
        arrays: dict[str, pa.Array[Any]] = {}
        lacking: dict[str, Mask] = {}
        plain = self.order[self.wanted]
        for field in columns:
            column = rows.column(field.name).combine_chunks()
            if field.name not in masks:
                arrays[field.name] = column.take(plain)
                continue
            sources, lost = self._sources(masks[field.name][self.order])
            arrays[field.name] = column.take(pa.array(sources, pa.int64(), mask=sources < 0))
            if lost.any():
                lacking[field.name] = lost
        return arrays, lacking

    def _sources(self, mask: Mask) -> tuple[Longs, Mask]:
        """Return the row with each wanted change's value, -1 for null; and which changes lack it.

        `mask` tells which changes lack the column. Only an update leaves a column as it was; any
        other change has a value, which may be null.
        """
        numbers = np.arange(len(mask))
        last = np.maximum.accumulate(np.where(mask & self.updates, -1, numbers))[self.wanted]
        first = np.maximum.accumulate(np.where(self.starts, numbers, 0))[self.wanted]
        lost = (last < first) & ~self.deletes[self.wanted]
        # After a delete, there is no earlier value: an update that follows it begins a new row.
        null = lost | self.deletes[last] & (last != self.wanted)
        return np.where(null, -1, self.order[last]), lost


def _rekeys(rows: pa.Table, columns: pa.Schema, key: Sequence[str], mode: TableMode) -> pa.Table:
    """Return updates that change the key and lack values."""
    names = [*columns.names, *(OLD_KEY + name for name in key), *PLACE, "df_absent"]
    arrays = {name: rows.column(name).combine_chunks() for name in names}
    arrays["df_op"] = _ops(np.zeros(rows.num_rows, np.bool_))
    if mode == "history":
        arrays["df_valid_from"] = arrays["df_event_time"]
        arrays["df_valid_to"] = pa.nulls(rows.num_rows, arrays["df_event_time"].type)
    return pa.table(arrays)


def _ops(deletes: Mask) -> pa.Array[Any]:
    codes = pa.array(deletes.astype(np.int32), pa.int32())
    return pa.DictionaryArray.from_arrays(codes, pa.array(["u", "d"]))


def _numpy(mask: pa.ChunkedArray[Any]) -> Mask:
    return cast("Mask", mask.to_numpy())
