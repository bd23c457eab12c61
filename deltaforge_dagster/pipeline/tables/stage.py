"""Stages commits: has Spark's tasks type and fold the changes of segments, into files.

`sinks.tables.staged` describes the files.

For a changelog, one Spark job does this (`typed_files`). In other modes a second job folds the
changes of each key (`fold`), after the run has divided each table's changes into steps. No row
passes through the run.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import SinkFilter
from deltaforge_dagster.errors import SparkUnavailable, TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.encoder import check_server, share_out
from deltaforge_dagster.pipeline.encode.messages import source_origin
from deltaforge_dagster.pipeline.run_context import SessionProvider, spark_condition
from deltaforge_dagster.pipeline.spark_client import SparkSession
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
from deltaforge_dagster.pipeline.tables.fold import (
    FoldedFile,
    FoldJob,
    FoldTask,
    StepPlan,
    step_plan,
)
from deltaforge_dagster.pipeline.tables.reports import REPORT, TaskReport, reported
from deltaforge_dagster.pipeline.tables.typed_files import (
    StagePlan,
    TableName,
    TypedFile,
    TypingJob,
    full_name,
)
from deltaforge_dagster.processors.messages.expansion import RowSelection
from deltaforge_dagster.sinks.tables.config import StagedSinkConfig, TableSinkConfig
from deltaforge_dagster.sinks.tables.staged import (
    ChangePlace,
    StagedCommit,
    StagedSegment,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import check_names
from deltaforge_dagster.sources.registry import parse_position, source_types
from deltaforge_dagster.sources.value_types import parse_value_type
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Contained, TableSchema, contained, fingerprints
from deltaforge_dagster.typed_rows.schema import (
    TargetTypes,
    TypedColumn,
    TypedSchema,
    fitted,
    typed_schema,
)

_Config = TypeVar("_Config", bound=StagedSinkConfig)

BUCKET_ROWS = 250_000
BUCKET_BYTES = 32 << 20
"""Maximum of rows, and of bytes of segment files, that one task folds; one key may have more."""


@dataclass(frozen=True, slots=True)
class UsedVersions:
    """All versions of a table, and those of a commit's rows in the order of their last rows."""

    history: TableHistory
    versions: Sequence[SchemaVersion]


class CommitStager(ABC, Generic[_Config]):
    """Stages commits of one sink.

    Args:
        spec: The pipeline.
        config: The sink.
        types: What types a column can have at the sink.
        journal: Holds the segments; staged files go there as well.
        sessions: Provides the Spark session; None to run the tasks in this process.
        store: Holds the table versions.
        run_id: Part of the files' names, so that the files of a dead run can be deleted.
    """

    def __init__(  # noqa: PLR0917 - what a run has
        self,
        spec: PipelineSpec,
        config: _Config,
        types: TargetTypes,
        journal: Journal,
        sessions: SessionProvider | None,
        store: StateStore,
        run_id: str,
    ) -> None:
        self._spec = spec
        self._config = config
        self._types = types
        self._journal = journal
        self._sessions = sessions
        self._store = store
        self._prefix = quote(run_id, safe="")
        self._probed: SparkSession | None = None
        self._source = source_types()[spec.spec.source.type]
        chosen = config.filter or SinkFilter()
        self._selection = RowSelection(
            skipped=config.skipped_operations,
            captured=not chosen.synthetic_only,
            synthetic=not chosen.exclude_synthetic,
            producers=chosen.producers,
        )

    def stage(
        self,
        segments: Sequence[SegmentRow],
        *,
        only: frozenset[tuple[str, ...]] | None = None,
        skip: frozenset[tuple[str, ...]] = frozenset(),
    ) -> StagedCommit:
        """Return the changes of consecutive segments, by table.

        Args:
            segments: The segments as sinks receive them (`SegmentRow.delivered`).
            only: The destinations to stage; None for all.
            skip: Destinations that are not staged.

        Raises:
            SparkUnavailable: Server or session is gone, or a job failed; a retry may help.
            JournalDamaged: A segment's file is missing or unreadable.
            StoreUnavailable: The journal cannot be read or written now.
            SettingsError: The server lacks our package, or does not share the journal with us.
        """
        chosen = [
            segment for segment in segments if segment.rows and segment.is_for(self._config.id)
        ]
        job = CommitFiles(
            self._journal.encoded_dir(self._spec.metadata.name),
            f"{self._prefix}.{uuid.uuid4().hex}",
        )
        if not chosen:
            return StagedCommit((), {}, job.discard)

        def wants(table: TableName) -> bool:
            destination, _ = self._destination(table)
            return destination not in skip and (only is None or destination in only)

        try:
            return self._staged(chosen, wants, job)
        except BaseException:
            job.discard()
            raise

    def without_changes(self, destination: tuple[str, ...]) -> StagedTable:
        """Return a table without changes, with columns and key of the current table version.

        Raises:
            TableRejected: No table of the source has this destination, or it cannot have these
                columns.
        """
        for history in self._store.schemas.histories(self._spec.metadata.name):
            current = history.current.table
            name = current.db, current.schema, current.table
            if self._destination(name) == (destination, None):
                columns = union([self._typed_schema(current)], history.name)
                key = self._key_of(current)
                missing = set(key) - {column.name for column in columns.columns}
                columns = columns.with_added(sorted(missing))
                return StagedTable(
                    destination, name, columns, key, frozenset(), (), 0,
                    identities=history.current.columns.identities,
                )  # fmt: skip
        raise TableRejected(
            f"no table of the source is written to {'.'.join(destination)} any more"
        )

    def destinations(self) -> Mapping[TableName, tuple[str, ...]]:
        """Return where the rows of each registered table of the source go."""
        tables = [
            history.current.table
            for history in self._store.schemas.histories(self._spec.metadata.name)
        ]
        names = [(table.db, table.schema, table.table) for table in tables]
        return {name: self._destination(name)[0] for name in names}

    def elsewhere(self, table: TableName, former: tuple[str, ...]) -> TableRejected:
        """Return the error for a table whose earlier rows belong to a former destination."""
        destination, _ = self._destination(table)
        return TableRejected(
            f"rows of {full_name(table)} from before are not in {'.'.join(destination)}, because "
            f"the sink's `table` was {'.'.join(former)} then; have it loaded",
            remedy=self._resync_command(table),
        )

    @property
    def is_log(self) -> bool:
        """Whether tables keep each change as a row, so that a new one may begin with any change."""
        return True

    def _resync_command(self, table: TableName) -> str:
        return (
            f"deltaforge resync {self._spec.metadata.name} --sink {self._config.id} --tables "
            f"{full_name(table)}"
        )

    def _key_of(self, table: TableSchema) -> tuple[str, ...]:  # noqa: ARG002
        """Return the key of a table at the sink, empty if it needs none."""
        return ()

    def _versions(
        self, segments: Sequence[SegmentRow], wants: Callable[[TableName], bool]
    ) -> tuple[dict[TableName, UsedVersions], frozenset[TableName]]:
        """Return the versions of each wanted table that rows have, and the tables not wanted."""
        of_rows: dict[str, Contained] = {}
        for segment in segments:
            for full, of_segment in segment.schema_versions.items():
                of_rows[full] = contained(of_rows.get(full), of_segment)
        chosen: dict[TableName, UsedVersions] = {}
        skipped: set[TableName] = set()
        for history in self._store.schemas.histories(self._spec.metadata.name):
            current = history.current.table
            name = current.db, current.schema, current.table
            by_fingerprint = {version.stamp.fingerprint: version for version in history.versions}
            wanted = fingerprints(of_rows.get(history.name, ()))
            if not wants(name):
                skipped.add(name)
            elif versions := [
                by_fingerprint[fingerprint]
                for fingerprint in wanted
                if fingerprint in by_fingerprint
            ]:
                chosen[name] = UsedVersions(history, versions)
        return chosen, frozenset(skipped)

    @abstractmethod
    def _staged(
        self, segments: Sequence[SegmentRow], wants: Callable[[TableName], bool], job: CommitFiles
    ) -> StagedCommit:
        """Return the changes of segments that have any, only of the tables that are wanted."""

    def _run(
        self,
        run: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        tasks: int,
        label: str,
    ) -> list[TaskReport]:
        """Run a Spark job and return the reports of its tasks."""
        if not tasks:
            return []
        sessions = self._sessions
        if sessions is None:
            numbers = pa.RecordBatch.from_pydict({"id": list(range(tasks))})
            return [task for batch in run([numbers]) for task in reported(batch)]
        try:
            session = self._session(sessions)
            report = session.range(0, tasks, 1, tasks).mapInArrow(run, REPORT).toArrow()
        except PySparkException as error:
            sessions.lost(error)
            # Not chained: Spark's text of a failed task may quote a value of a row.
            raise SparkUnavailable(
                f"{label}: the Spark job that makes tables' rows failed "
                f"({spark_condition(error)}); see the server's log"
            ) from None
        return reported(report)

    def _session(self, sessions: SessionProvider) -> SparkSession:
        session = sessions.session()
        if sessions.elsewhere and session is not self._probed:
            folder = self._journal.encoded_dir(self._spec.metadata.name)
            check_server(session, folder, self._prefix)
            self._probed = session
        return session

    def _destination(self, table: TableName) -> tuple[tuple[str, ...], TableRejected | None]:
        """Return a table's destination; if it cannot have one, its own name and the error."""
        try:
            return self._config.name_of(*table), None
        except TableRejected as error:
            return tuple(part for part in table if part is not None), error

    def _typed_schema(self, table: TableSchema, names: RowNames = SAME_NAMES) -> TypedSchema:
        """Return the columns of a table version, with their names in the commit."""
        declared = self._config.types_of(table.db, table.schema, table.table)
        schema = typed_schema(
            table, self._source, self._spec.spec.engine, names.declared(declared), self._types
        )
        return names.of_commit(schema)

    def _declared(self, types: Mapping[str, str]) -> TypedSchema:
        """Return the columns of a table that the source has not registered."""
        columns = (
            TypedColumn(name, fitted(parse_value_type(type_), self._types))
            for name, type_ in types.items()
        )
        return TypedSchema(tuple(columns), self._source.marks_unchanged)


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


@dataclass(frozen=True, slots=True)
class CommitFiles:
    """The files of a commit: their folder, and what their names begin with."""

    folder: str
    name: str

    def discard(self) -> None:
        """Delete the files."""
        encoded_files.remove_job(self.folder, self.name)


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
