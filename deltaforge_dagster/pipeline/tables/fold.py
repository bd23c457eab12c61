"""The second Spark job of a commit: folds the changes of keys, and writes a file for each step.

It is for tables of the modes `current` and `history`. Rows have the columns of a table, the key's
hash, and of `staged.META` the place, the operation, the time, and the absent columns; updates that
change the key and lack values also have the old key. Whole columns are handled at once.

A *step* is a part of a table's changes that can be applied at once. A truncate separates the
changes before it from those after it. An update that changes a key and lacks values needs the
table's row of the old key, so the changes of both keys before it must have been applied, and those
after it wait for it. Other keys need not wait: each key has a *level*, the number of the step that
its next changes are in, and such an update is in the step after those of both of its keys::

    rows 0, rekey 0, rows 1, rekey 1, ...

Keys are compared by their hashes. Two keys with the same hash only cost another step. Where the
destination may take different keys for the same one (`TargetTypes.own_equality`), such an update
waits for the changes of all keys, and all keys wait for it.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.kernels.message_text import Mask
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.tables.columns import absent_masks, absent_names
from deltaforge_dagster.pipeline.tables.keys import Words, key_codes
from deltaforge_dagster.pipeline.tables.reports import TaskReport, run_tasks
from deltaforge_dagster.pipeline.tables.typed_files import HASH, write_parquet
from deltaforge_dagster.sinks.tables.staged import OLD_KEY, ChangePlace, TableMode

PLACE = ("df_segment", "df_ordinal", "df_event_time")

_LEVEL = np.dtype([("hash", "u8"), ("segment", "i8"), ("ordinal", "i8"), ("level", "i8")])


@dataclass(frozen=True, slots=True)
class FoldTask:
    """Some keys of a table, which one task folds.

    Attributes:
        table: Number of the table in the commit.
        columns: Its columns.
        key: Names of the key columns.
        plan: Its steps.
        batches: The files with the rows of these keys, and which batches of each file have them.
    """

    table: int
    columns: pa.Schema
    key: Sequence[str]
    plan: StepPlan
    batches: Sequence[tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class FoldedFile:
    """The rows of a step that one task has written; the fields are those of `FoldedStep`."""

    table: int
    path: str
    epoch: int
    level: int
    rows: int
    absent: Sequence[str]
    inserts_only: bool
    reads: bool
    last: ChangePlace

    @classmethod
    def of_report(cls, report: TaskReport) -> FoldedFile:
        """Return the file that a task has reported."""
        fields = dict(report.fields)
        return cls(**fields | {"last": ChangePlace(**fields["last"])})


@dataclass(frozen=True, slots=True)
class FoldJob:
    """The Spark job; pickled for its tasks.

    Attributes:
        mode: `current` or `history`.
        tasks: What each task folds.
        folder: Where files go.
        name: What their names begin with.
    """

    mode: TableMode
    tasks: Sequence[Sequence[FoldTask]]
    folder: str
    name: str

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the tasks with these numbers; called by Spark. Yields columns of `reports.REPORT`."""
        return run_tasks(numbers, self._task)

    def _task(self, number: int) -> Iterator[TaskReport]:
        for task in self.tasks[number]:
            for step in fold(_rows(task), task.columns, task.key, self.mode, task.plan):
                path = f"{self.folder}/{self.name}.{uuid.uuid4().hex}.parquet"
                write_parquet(path, step.rows)
                file = FoldedFile(
                    task.table, path, step.epoch, step.level, step.rows.num_rows,
                    sorted(step.absent), step.inserts_only, step.reads, step.last,
                )  # fmt: skip
                yield TaskReport(asdict(file))


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


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """What the rows of some keys contribute to a step of their table.

    Attributes:
        epoch: Number of truncates before the step.
        level: Its level between these truncates (`StepPlan`); odd if its rows change keys and lack
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
            names = frozenset(absent_masks(part.rows.column("df_absent").combine_chunks()))
            yield FoldedStep(
                int(epochs[row]), int(levels[row]), part.rows, names,
                part.inserts_only, part.reads, last_place,
            )  # fmt: skip


def completed(rows: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """Return rows with all columns of their table; columns added here are absent in updates."""
    missing: Collection[str] = [name for name in columns.names if name not in rows.schema.names]
    if not missing:
        return rows
    masks = absent_masks(cast("pa.ListArray[Any]", rows.column("df_absent")))
    updates = pc.equal(rows.column("df_op"), pa.scalar("u")).to_numpy(zero_copy_only=False)
    arrays: dict[str, pa.Array[Any]] = dict(zip(rows.schema.names, rows.columns, strict=True))
    for name in missing:
        arrays[name] = pa.nulls(rows.num_rows, columns.field(name).type)
        masks[name] = updates
    arrays["df_absent"] = absent_names(masks, rows.num_rows)
    return pa.RecordBatch.from_pydict(arrays)


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
        arrays["df_absent"] = absent_names(lacking, len(chosen))
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
        masks = absent_masks(rows.column("df_absent").combine_chunks())
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


def _rows(task: FoldTask) -> pa.Table:
    """Return the changes of a task's keys."""
    tables: list[pa.Table] = []
    for path, numbers in task.batches:
        try:
            with encoded_files.open_file(path) as file:
                reader = pa.ipc.open_file(cast("pa.NativeFile", file))
                tables += [
                    pa.Table.from_batches([completed(reader.get_batch(number), task.columns)])
                    for number in numbers
                ]
        except (OSError, JournalDamaged) as error:
            raise StoreUnavailable(f"the typed file {path} cannot be read") from error
    return pa.concat_tables(tables, promote_options="default")
