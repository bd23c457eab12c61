"""Folds the changes of keys: for tables with one row per key, and for tables with all versions of each row.

Rows are columns of a table, the key's hash, and of `staged.META` the place, the operation, the time, and what they
lack; updates that change the key and lack values have the old key. All functions handle whole columns at once.
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
from deltaforge_dagster.pipeline.tables.keys import key_codes
from deltaforge_dagster.pipeline.tables.steps import StepPlan
from deltaforge_dagster.pipeline.tables.typed_files import HASH
from deltaforge_dagster.sinks.tables.staged import OLD_KEY, ChangePlace, TableMode

PLACE = ("df_segment", "df_ordinal", "df_event_time")


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """What the rows of some keys contribute to a step of their table.

    Attributes:
        epoch: How many truncates are before it.
        level: Its level between them (`steps`); odd if its rows change keys and lack values.
        rows: The rows, as `staged` describes them.
        absent: The columns that some rows lack.
        inserts_only: Whether all changes are inserts, of keys that differ.
        reads: Whether all rows are those of snapshots, of keys that nothing else in the step changes.
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
                rows.filter(pa.array(kept)), segments[kept], ordinals[kept], rekeys[kept], epochs[kept],
                levels[kept],
            )  # fmt: skip
    steps = epochs * (2 + int(levels.max(initial=0))) + levels
    found, first, counts = np.unique(steps, return_index=True, return_counts=True)
    for step, row, count in zip(found.tolist(), first.tolist(), counts.tolist(), strict=True):
        chosen = steps == step
        some = rows if count == rows.num_rows else rows.filter(pa.array(chosen))
        places = np.lexsort((ordinals[chosen], segments[chosen]))
        last = places[-1]
        place = ChangePlace(int(segments[chosen][last]), int(ordinals[chosen][last]))
        if rekeys[row]:
            parts = [_FoldedPart(_rekeys(some.take(places), columns, key, mode))]
        else:
            parts = _folded(some, places, columns, key, mode, apart=not plan.together)
        for part in parts:
            names = frozenset(absent.masks_of(part.rows.column("df_absent").combine_chunks()))
            yield FoldedStep(
                int(epochs[row]), int(levels[row]), part.rows, names, part.inserts_only, part.reads, place
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
    """Return the folded rows of a step: what snapshots have read apart from the rest, if that may be applied before it."""
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
    """Changes by key, those of a key in the order of the journal.

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
        made, lacking = self._columns(rows, columns)
        chosen = self.wanted
        index = self.order[chosen]
        gone = self.deletes[chosen]
        made["df_op"] = _ops(gone)
        for name in PLACE:
            made[name] = rows.column(name).combine_chunks().take(index)
        made["df_absent"] = absent.names_of(lacking, len(chosen))
        if mode == "history":
            times = rows.column("df_event_time").combine_chunks().take(self.order)
            following = chosen + 1
            ends = np.append(self.starts, True)[following] | gone
            made["df_valid_from"] = times.take(chosen)
            made["df_valid_to"] = times.take(pa.array(following, pa.int64(), mask=ends))
        return pa.table(made)

    def _columns(
        self, rows: pa.Table, columns: pa.Schema
    ) -> tuple[dict[str, pa.Array[Any]], dict[str, Mask]]:
        """Return the columns of the wanted changes, with values from changes before them, and what they still lack."""
        masks = absent.masks_of(rows.column("df_absent").combine_chunks())
        made: dict[str, pa.Array[Any]] = {}
        lacking: dict[str, Mask] = {}
        plain = self.order[self.wanted]
        for field in columns:
            column = rows.column(field.name).combine_chunks()
            if field.name not in masks:
                made[field.name] = column.take(plain)
                continue
            found, lost = self._sources(masks[field.name][self.order])
            made[field.name] = column.take(pa.array(found, pa.int64(), mask=found < 0))
            if lost.any():
                lacking[field.name] = lost
        return made, lacking

    def _sources(self, mask: Mask) -> tuple[Longs, Mask]:
        """Return the row that has each wanted change's value of a column, -1 for null; and which changes lack it.

        A change that is no update has a value, which may be null: only an update leaves a column as it was.
        """
        numbers = np.arange(len(mask))
        last = np.maximum.accumulate(np.where(mask & self.updates, -1, numbers))[self.wanted]
        first = np.maximum.accumulate(np.where(self.starts, numbers, 0))[self.wanted]
        lost = (last < first) & ~self.deletes[self.wanted]
        # After a delete there is nothing: an update behind it begins a new row.
        null = lost | self.deletes[last] & (last != self.wanted)
        return np.where(null, -1, self.order[last]), lost


def _rekeys(rows: pa.Table, columns: pa.Schema, key: Sequence[str], mode: TableMode) -> pa.Table:
    """Return updates that change the key and lack values."""
    names = [*columns.names, *(OLD_KEY + name for name in key), *PLACE, "df_absent"]
    made = {name: rows.column(name).combine_chunks() for name in names}
    made["df_op"] = _ops(np.zeros(rows.num_rows, np.bool_))
    if mode == "history":
        made["df_valid_from"] = made["df_event_time"]
        made["df_valid_to"] = pa.nulls(rows.num_rows, made["df_event_time"].type)
    return pa.table(made)


def _ops(deletes: Mask) -> pa.Array[Any]:
    codes = pa.array(deletes.astype(np.int32), pa.int32())
    return pa.DictionaryArray.from_arrays(codes, pa.array(["u", "d"]))


def _numpy(mask: pa.ChunkedArray[Any]) -> Mask:
    return cast("Mask", mask.to_numpy())
