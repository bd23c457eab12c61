"""Stages commits: has Spark's tasks type and fold the changes of segments, into files.

`sinks.tables.staged` describes the files.

For a changelog, one Spark job does this (`typed_files`). In other modes a second job folds the
changes of each key (`fold`), after the run has divided each table's changes into steps. No row
passes through the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.encoder import share_out
from deltaforge_dagster.pipeline.encode.messages import source_origin
from deltaforge_dagster.pipeline.tables.columns import (
    SAME_NAMES,
    AddedColumns,
    RowNames,
    added_columns,
    check_certain,
    commit_columns,
    keeps_values,
    union,
)
from deltaforge_dagster.pipeline.tables.commit_stager import CommitFiles, CommitStager
from deltaforge_dagster.pipeline.tables.fold import (
    FoldedFile,
    FoldJob,
    FoldTask,
    StepPlan,
    step_plan,
)
from deltaforge_dagster.pipeline.tables.typed_files import (
    StagePlan,
    TableName,
    TypedFile,
    TypingJob,
    full_name,
)
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sinks.tables.staged import (
    ChangePlace,
    StagedCommit,
    StagedSegment,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import check_names
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.tables import TableSchema
from deltaforge_dagster.typed_rows.schema import (
    TargetTypes,
    TypedSchema,
)

BUCKET_ROWS = 250_000
BUCKET_BYTES = 32 << 20
"""Maximum of rows, and of bytes of segment files, that one task folds; one key may have more."""


class TableStager(CommitStager[TableSinkConfig]):
    """Stages commits of a sink that keeps tables."""

    @property
    def is_log(self) -> bool:
        """Whether the sink's mode is `changelog`; see `CommitStager.is_log`."""
        return self._config.mode == "changelog"

    def _key_of(self, table: TableSchema) -> tuple[str, ...]:
        declared = self._config.keys_of(table.db, table.schema, table.table)
        return declared or table.primary_key

    def _staged(
        self,
        segments: Sequence[SegmentRow],
        wants: Callable[[TableName], bool],
        job: CommitFiles,
    ) -> StagedCommit:
        plan = self._plan(segments, wants)
        rows, size = (
            sum(segment.rows for segment in segments),
            sum(segment.bytes for segment in segments),
        )
        buckets = max(-(-rows // BUCKET_ROWS), -(-size // BUCKET_BYTES))
        tasks = share_out(segments)
        typing = TypingJob(self._journal.url, plan, tasks, buckets, job.folder, job.name)
        label = f"segments {segments[0].segment} to {segments[-1].segment}"
        files = [TypedFile.of_report(report) for report in self._run(typing.run, len(tasks), label)]
        files = [file for file in files if wants(file.table)]
        plan = self._with_truncated(plan, {file.table for file in files})
        if plan.mode != "changelog":
            # A table of which only a truncate is known has no rows at the sink.
            files = [file for file in files if file.path or file.error or plan.key(file.table)]
        tables, failed = _tables(files, plan, self._types, self._destination, self._resync_command)
        if plan.mode == "changelog":
            staged = [table.logged() for table in tables]
        else:
            work = _fold_tasks(tables, max(1, -(-rows // buckets)))
            folding = FoldJob(plan.mode, work, job.folder, job.name)
            folded = [
                FoldedFile.of_report(report) for report in self._run(folding.run, len(work), label)
            ]
            staged = [
                table.folded([file for file in folded if file.table == number], plan.mode)
                for number, table in enumerate(tables)
            ]
            encoded_files.remove(*(path for file in files if (path := file.path) is not None))
        places = {
            segment.segment: StagedSegment(
                segment.start_position, segment.end_position, segment.created_at
            )
            for segment in segments
        }
        staged = [replace(table, segments=places) for table in staged if table.steps]
        return StagedCommit(staged, failed, job.discard)

    def _plan(
        self, segments: Sequence[SegmentRow], wants: Callable[[TableName], bool]
    ) -> StagePlan:
        schemas: dict[TableName, TypedSchema] = {}
        keys: dict[TableName, tuple[str, ...]] = {}
        refused: dict[TableName, str] = {}
        later: dict[tuple[TableName, str | None], frozenset[str]] = {}
        renamed: dict[tuple[TableName, str | None], RowNames] = {}
        identities: dict[TableName, Mapping[str, str]] = {}
        added: dict[TableName, AddedColumns] = {}
        chosen, skipped = self._versions(segments, wants)
        for name, used in chosen.items():
            tables = [version.table for version in used.versions]
            keys[name] = tables[-1].primary_key
            schemas[name] = self._typed_schema(tables[-1])
            past = used.history.passed(used.versions[-1])
            columns = commit_columns(
                [
                    (version.stamp.fingerprint, version.columns.identities)
                    for version in used.versions
                ],
                [version.columns.identities for version in past],
            )
            try:
                check_certain(
                    [version.columns.identities for version in used.versions],
                    full_name(name),
                    self._resync_command(name),
                )
                names = [columns.rows[version.stamp.fingerprint] for version in used.versions]
                typed = [self._typed_schema(*pair) for pair in zip(tables, names, strict=True)]
                schemas[name] = union(typed, full_name(name))
            except TableRejected as error:
                refused[name] = error.text
                continue
            identities[name] = columns.identities
            added[name] = added_columns(
                used.history,
                used.versions[-1],
                columns.identities,
                schemas[name],
                parse_position(segments[0].start_position),
                keeps_values=partial(
                    keeps_values, kind=self._source, options=self._spec.spec.engine.values
                ),
                processed=bool(self._spec.spec.processors),
            )
            for version in used.versions:
                version_key = name, version.stamp.fingerprint
                until = used.history.until(version)
                later[version_key] = columns.missing(each.columns.identities for each in until)
                if columns.rows[version.stamp.fingerprint] is not SAME_NAMES:
                    renamed[version_key] = columns.rows[version.stamp.fingerprint]
        declared = {full: self._declared(types) for full, types in self._config.types.items()}
        return StagePlan(
            mode=self._config.mode,
            selection=self._selection,
            origin=source_origin(self._spec),
            schemas=schemas,
            declared=declared,
            unknown=self._declared({}),
            later=later,
            renamed=renamed,
            identities=identities,
            added=added,
            keys=keys,
            declared_keys=self._config.keys,
            refused=refused,
            skipped=skipped,
        )

    def _with_truncated(self, plan: StagePlan, reported: Collection[TableName]) -> StagePlan:
        """Return the plan with the truncated tables too: registered, with events but no rows."""
        if not any(name not in plan.schemas for name in reported):
            return plan
        schemas, keys, identities = dict(plan.schemas), dict(plan.keys), dict(plan.identities)
        for history in self._store.schemas.histories(self._spec.metadata.name):
            current = history.current.table
            name = current.db, current.schema, current.table
            if name in reported and name not in schemas:
                schemas[name], keys[name] = self._typed_schema(current), current.primary_key
                identities[name] = history.current.columns.identities
        return replace(plan, schemas=schemas, keys=keys, identities=identities)


@dataclass(slots=True)
class _TableReports:
    """What tasks have reported of a table."""

    name: TableName
    destination: tuple[str, ...]
    columns: TypedSchema
    identities: Mapping[str, str]
    added: AddedColumns
    key: tuple[str, ...]
    files: list[TypedFile]
    own_equality: bool
    plan: StepPlan = field(init=False)

    def __post_init__(self) -> None:
        rekeys = np.concatenate([file.rekeys for file in self.files])
        truncates = [(segment, ordinal) for segment, ordinal, _ in self._truncates]
        texts = {column.name for column in self.columns.columns if column.field.type == pa.string()}
        together = self.own_equality and not texts.isdisjoint(self.key)
        self.plan = step_plan(rekeys, truncates, together=together)

    @property
    def first(self) -> ChangePlace:
        """Place of the first change."""
        return min(file.first for file in self.files if file.first is not None)

    @property
    def changes(self) -> int:
        """Number of changes of the source."""
        return sum(file.changes for file in self.files)

    @property
    def _truncates(self) -> list[tuple[int, int, int]]:
        return sorted(truncate for file in self.files for truncate in file.truncates)

    def logged(self) -> StagedTable:
        """Return the changes of a changelog."""
        files = [file for file in self.files if file.path is not None]
        last = max(file.last for file in files if file.last is not None)
        paths = [encoded_files.spark_path(file.path) for file in files if file.path is not None]
        step = StagedStep(
            "rows", paths, sum(file.rows for file in files), inserts_only=True, last=last
        )
        lacking = frozenset(name for file in files for name in file.absent)
        return self._staged(lacking, [step])

    def folded(self, files: Sequence[FoldedFile], mode: str) -> StagedTable:
        """Return the folded changes, from the files that tasks have written for this table."""
        steps: list[StagedStep] = []
        truncates = self._truncates
        for epoch in range(len(truncates) + 1):
            if epoch:
                segment, ordinal, time = truncates[epoch - 1]
                steps.append(
                    StagedStep(
                        "truncate", (), 0, inserts_only=False,
                        last=ChangePlace(segment, ordinal), event_time_us=time,
                    )
                )  # fmt: skip
            parts: dict[tuple[int, bool], list[FoldedFile]] = {}
            for file in files:
                if file.epoch == epoch:
                    parts.setdefault((file.level, not file.reads), []).append(file)
            steps += [_step(level, parts[level, rest]) for level, rest in sorted(parts)]
        if mode == "current" and truncates:
            steps = steps[len(truncates) - 1 :]
        return self._staged(frozenset(name for file in files for name in file.absent), steps)

    def _staged(self, lacking: frozenset[str], steps: Sequence[StagedStep]) -> StagedTable:
        return StagedTable(
            self.destination, self.name, self.columns, self.key, lacking, steps, self.changes,
            identities=self.identities, fills=self.added.texts, unfilled=self.added.unfilled,
        )  # fmt: skip


_NOWHERE = ChangePlace(0, 0)


def _step(level: int, files: Sequence[FoldedFile]) -> StagedStep:
    return StagedStep(
        "rekey" if level % 2 else "rows",
        [encoded_files.spark_path(file.path) for file in files],
        sum(file.rows for file in files),
        all(file.inserts_only for file in files),
        max(file.last for file in files),
        reads=files[0].reads,
    )


def _tables(
    files: Sequence[TypedFile],
    plan: StagePlan,
    types: TargetTypes,
    destination_of: Callable[[TableName], tuple[tuple[str, ...], TableRejected | None]],
    resync_command: Callable[[TableName], str],
) -> tuple[list[_TableReports], dict[tuple[str, ...], Exception]]:
    """Return the tables that tasks have reported, and the errors of those that cannot be staged."""
    by_name: dict[TableName, list[TypedFile]] = {}
    for file in sorted(files, key=lambda typed: typed.first or _NOWHERE):
        by_name.setdefault(file.table, []).append(file)
    tables: list[_TableReports] = []
    failed: dict[tuple[str, ...], Exception] = {}
    names: dict[tuple[str, ...], list[TableName]] = {}
    for name in by_name:
        destination, problem = destination_of(name)
        if problem is not None:
            failed[destination] = problem
        else:
            names.setdefault(destination, []).append(name)
    for destination, (name, *others) in names.items():
        if others:
            failed[destination] = TableRejected(
                f"tables {full_name(name)} and {full_name(others[0])} have the same destination, "
                f"{'.'.join(destination)}: change the template `table` so that each has its own"
            )
            continue
        try:
            tables.append(_table(name, destination, by_name[name], plan, types))
        except TableRejected as error:
            loaded_again = error.text in {plan.keyless(name), plan.refused.get(name)}
            remedy = resync_command(name) if loaded_again else error.remedy
            failed[destination] = TableRejected(error.text, remedy=remedy)
    return tables, failed


def _table(
    name: TableName,
    destination: tuple[str, ...],
    files: list[TypedFile],
    plan: StagePlan,
    types: TargetTypes,
) -> _TableReports:
    for file in files:
        if file.error is not None:
            raise TableRejected(file.error)
    schema = plan.schema(name)
    key = plan.key(name)
    added = {field for file in files for field in file.added}
    if plan.mode != "changelog":
        added |= set(key) - {column.name for column in schema.columns}
    columns = schema.with_added(sorted(added))
    check_names((column.name for column in columns.columns), f"table {full_name(name)}")
    added_by_source = plan.added.get(name, AddedColumns())
    # Rows of a changelog are changes: those from before a column existed stay without a value.
    if plan.mode == "changelog":
        added_by_source = AddedColumns()
    return _TableReports(
        name,
        destination,
        columns,
        plan.identities.get(name, {}),
        added_by_source,
        key,
        files,
        types.own_equality,
    )


def _fold_tasks(tables: Sequence[_TableReports], most: int) -> list[list[FoldTask]]:
    """Distribute the buckets of tables among tasks with about `most` rows each."""
    tasks: list[list[FoldTask]] = []
    room = 0
    for number, table in enumerate(tables):
        rows: dict[int, int] = {}
        for file in table.files:
            for bucket, count in file.buckets:
                rows[bucket] = rows.get(bucket, 0) + count
        group: set[int] = set()
        for bucket in sorted(rows):
            if room <= rows[bucket] // 2:
                if group:
                    tasks[-1].append(_fold_task(number, table, group))
                    group = set()
                tasks.append([])
                room = most
            group.add(bucket)
            room -= rows[bucket]
        if group:
            tasks[-1].append(_fold_task(number, table, group))
    return tasks


def _fold_task(number: int, table: _TableReports, buckets: Collection[int]) -> FoldTask:
    batches: list[tuple[str, Sequence[int]]] = []
    for file in table.files:
        batch_numbers = [
            batch for batch, (bucket, _) in enumerate(file.buckets) if bucket in buckets
        ]
        if file.path is not None and batch_numbers:
            batches.append((file.path, batch_numbers))
    return FoldTask(number, table.columns.arrow, table.key, table.plan, batches)
