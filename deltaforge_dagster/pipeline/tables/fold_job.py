"""The second Spark job of a commit: folds the changes of keys, and writes a file for each step.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.tables import absent
from deltaforge_dagster.pipeline.tables.fold import StepPlan, fold
from deltaforge_dagster.pipeline.tables.reports import TaskReport, run_tasks
from deltaforge_dagster.pipeline.tables.typed_files import write_parquet
from deltaforge_dagster.sinks.tables.staged import ChangePlace, TableMode


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
    """The rows of a step that one task has written; the fields are those of `fold.FoldedStep`."""

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


def completed(rows: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """Return rows with all columns of their table; columns added here are absent in updates."""
    missing: Collection[str] = [name for name in columns.names if name not in rows.schema.names]
    if not missing:
        return rows
    masks = absent.masks_of(cast("pa.ListArray[Any]", rows.column("df_absent")))
    updates = pc.equal(rows.column("df_op"), pa.scalar("u")).to_numpy(zero_copy_only=False)
    arrays: dict[str, pa.Array[Any]] = dict(zip(rows.schema.names, rows.columns, strict=True))
    for name in missing:
        arrays[name] = pa.nulls(rows.num_rows, columns.field(name).type)
        masks[name] = updates
    arrays["df_absent"] = absent.names_of(masks, rows.num_rows)
    return pa.RecordBatch.from_pydict(arrays)
