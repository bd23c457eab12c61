"""Stages commits: has Spark's tasks type and fold the changes of some segments, into files that `staged` describes.

For a changelog that is one Spark job (`typed_files`); otherwise a second one folds the changes of each key
(`fold_job`), after the run has divided each table's changes into steps (`steps`). No row gets into the run.
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
from deltaforge_dagster.config.sinks.base import SinkFilter
from deltaforge_dagster.errors import SparkUnavailable, TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.encoder import share_out
from deltaforge_dagster.pipeline.encode.messages import source_origin
from deltaforge_dagster.pipeline.encode.probe import check_server
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_dagster.pipeline.spark_session import SessionProvider, spark_condition
from deltaforge_dagster.pipeline.tables.added_columns import AddedColumns, added_columns
from deltaforge_dagster.pipeline.tables.columns import keeps_values, union
from deltaforge_dagster.pipeline.tables.fold_job import FoldedFile, FoldJob, FoldTask
from deltaforge_dagster.pipeline.tables.renames import (
    SAME_NAMES,
    RowNames,
    check_certain,
    commit_columns,
)
from deltaforge_dagster.pipeline.tables.reports import REPORT, TaskReport, reported
from deltaforge_dagster.pipeline.tables.steps import StepPlan, step_plan
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
"""Most rows, and bytes of segment files, whose keys are folded by one task; one key may have more."""


@dataclass(frozen=True, slots=True)
class UsedVersions:
    """The versions of a table that rows of a commit have, in the order of their last rows, and all that there are."""

    history: TableHistory
    versions: Sequence[SchemaVersion]


class CommitStager(ABC, Generic[_Config]):
    """Stages commits of one sink.

    Args:
        spec: The pipeline.
        config: The sink.
        types: What a column there can be.
        journal: Holds the segments; staged files go there as well.
        sessions: Provides the Spark session.
        store: Holds the table versions.
        run_id: Part of the names of the files, so that those of a dead run can be deleted.
    """

    def __init__(  # noqa: PLR0917 - what a run has
        self,
        spec: PipelineSpec,
        config: _Config,
        types: TargetTypes,
        journal: Journal,
        sessions: SessionProvider,
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
        chosen = [one for one in segments if one.rows and one.is_for(self._config.id)]
        job = CommitFiles(
            self._journal.encoded_dir(self._spec.metadata.name),
            f"{self._prefix}.{uuid.uuid4().hex}",
        )
        if not chosen:
            return StagedCommit((), {}, job.discard)

        def wants(table: TableName) -> bool:
            there, _ = self._destination(table)
            return there not in skip and (only is None or there in only)

        try:
            return self._staged(chosen, wants, job)
        except BaseException:
            job.discard()
            raise

    def without_changes(self, destination: tuple[str, ...]) -> StagedTable:
        """Return a table with the columns and the key of the table version that is in force, and no changes.

        Raises:
            TableRejected: No table of the source has this destination, or it cannot have these columns.
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
        """Return the error for a table whose rows from before went, or were to go, to another destination than now."""
        destination, _ = self._destination(table)
        return TableRejected(
            f"rows of {full_name(table)} from before are not in {'.'.join(destination)}, because the sink's `table` was "
            f"{'.'.join(former)} then; have it loaded",
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
        """Return the versions of each wanted table that rows of segments have, and the tables not wanted."""
        of_rows: dict[str, Contained] = {}
        for segment in segments:
            for full, found in segment.schema_versions.items():
                of_rows[full] = contained(of_rows.get(full), found)
        chosen: dict[TableName, UsedVersions] = {}
        skipped: set[TableName] = set()
        for history in self._store.schemas.histories(self._spec.metadata.name):
            current = history.current.table
            name = current.db, current.schema, current.table
            known = {one.stamp.fingerprint: one for one in history.versions}
            wanted = fingerprints(of_rows.get(history.name, ()))
            if not wants(name):
                skipped.add(name)
            elif versions := [known[one] for one in wanted if one in known]:
                chosen[name] = UsedVersions(history, versions)
        return chosen, frozenset(skipped)

    @abstractmethod
    def _staged(
        self, segments: Sequence[SegmentRow], wants: Callable[[TableName], bool], job: CommitFiles
    ) -> StagedCommit:
        """Return the changes of segments that have any, of the tables that are wanted."""

    def _run(
        self,
        run: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        tasks: int,
        what: str,
    ) -> list[TaskReport]:
        """Run a Spark job and return the reports of its tasks."""
        if not tasks:
            return []
        try:
            session = self._session()
            report = session.range(0, tasks, 1, tasks).mapInArrow(run, REPORT).toArrow()
        except PySparkException as error:
            self._sessions.lost(error)
            # Not chained: Spark's text of a failed task may quote a value of a row.
            raise SparkUnavailable(
                f"{what}: the Spark job that makes tables' rows failed ({spark_condition(error)}); see the server's log"
            ) from None
        return reported(report)

    def _session(self) -> SparkSession:
        session = self._sessions.session()
        if self._sessions.elsewhere and session is not self._probed:
            folder = self._journal.encoded_dir(self._spec.metadata.name)
            check_server(session, folder, self._prefix)
            self._probed = session
        return session

    def _destination(self, table: TableName) -> tuple[tuple[str, ...], TableRejected | None]:
        """Return the destination of a table; or if it cannot have one, the table's own name, and why."""
        try:
            return self._config.name_of(*table), None
        except TableRejected as error:
            return tuple(part for part in table if part is not None), error

    def _typed_schema(self, table: TableSchema, names: RowNames = SAME_NAMES) -> TypedSchema:
        """Return the columns of rows of a version, as the commit names them."""
        declared = self._config.types_of(table.db, table.schema, table.table)
        found = typed_schema(
            table, self._source, self._spec.spec.engine, names.declared(declared), self._types
        )
        return names.of_commit(found)

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
        rows, size = sum(one.rows for one in segments), sum(one.bytes for one in segments)
        buckets = max(-(-rows // BUCKET_ROWS), -(-size // BUCKET_BYTES))
        tasks = share_out(segments)
        typing = TypingJob(self._journal.url, plan, tasks, buckets, job.folder, job.name)
        what = f"segments {segments[0].segment} to {segments[-1].segment}"
        files = [TypedFile.of_report(one) for one in self._run(typing.run, len(tasks), what)]
        files = [one for one in files if wants(one.table)]
        plan = self._with_truncated(plan, {one.table for one in files})
        if plan.mode != "changelog":
            # A table of which nothing is known but that it was truncated has rows nowhere.
            files = [one for one in files if one.path or one.error or plan.key(one.table)]
        tables, failed = _tables(files, plan, self._types, self._destination, self._resync_command)
        if plan.mode == "changelog":
            staged = [one.logged() for one in tables]
        else:
            work = _fold_tasks(tables, max(1, -(-rows // buckets)))
            folding = FoldJob(plan.mode, work, job.folder, job.name)
            made = [FoldedFile.of_report(one) for one in self._run(folding.run, len(work), what)]
            staged = [
                table.folded([one for one in made if one.table == number], plan.mode)
                for number, table in enumerate(tables)
            ]
            encoded_files.remove(*(path for one in files if (path := one.path) is not None))
        places = {
            one.segment: StagedSegment(one.start_position, one.end_position, one.created_at)
            for one in segments
        }
        staged = [replace(one, segments=places) for one in staged if one.steps]
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
            tables = [one.table for one in used.versions]
            keys[name] = tables[-1].primary_key
            schemas[name] = self._typed_schema(tables[-1])
            past = used.history.passed(used.versions[-1])
            columns = commit_columns(
                [(one.stamp.fingerprint, one.columns.identities) for one in used.versions],
                [one.columns.identities for one in past],
            )
            try:
                check_certain(
                    [one.columns.identities for one in used.versions],
                    full_name(name),
                    self._resync_command(name),
                )
                names = [columns.rows[one.stamp.fingerprint] for one in used.versions]
                typed = [self._typed_schema(*one) for one in zip(tables, names, strict=True)]
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
            for one in used.versions:
                version = name, one.stamp.fingerprint
                until = used.history.until(one)
                later[version] = columns.missing(each.columns.identities for each in until)
                if columns.rows[one.stamp.fingerprint] is not SAME_NAMES:
                    renamed[version] = columns.rows[one.stamp.fingerprint]
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
        """Return the plan with the registered tables that have events but no rows: they were truncated."""
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
        """Delete them."""
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
        rekeys = np.concatenate([one.rekeys for one in self.files])
        truncates = [(segment, ordinal) for segment, ordinal, _ in self._truncates]
        texts = {one.name for one in self.columns.columns if one.field.type == pa.string()}
        together = self.own_equality and not texts.isdisjoint(self.key)
        self.plan = step_plan(rekeys, truncates, together=together)

    @property
    def first(self) -> ChangePlace:
        """Place of the first change."""
        return min(one.first for one in self.files if one.first is not None)

    @property
    def changes(self) -> int:
        """Number of changes of the source."""
        return sum(one.changes for one in self.files)

    @property
    def _truncates(self) -> list[tuple[int, int, int]]:
        return sorted(truncate for one in self.files for truncate in one.truncates)

    def logged(self) -> StagedTable:
        """Return the changes of a changelog."""
        files = [one for one in self.files if one.path is not None]
        last = max(one.last for one in files if one.last is not None)
        paths = [encoded_files.spark_path(one.path) for one in files if one.path is not None]
        step = StagedStep(
            "rows", paths, sum(one.rows for one in files), inserts_only=True, last=last
        )
        found = frozenset(name for one in files for name in one.absent)
        return self._staged(found, [step])

    def folded(self, files: Sequence[FoldedFile], mode: str) -> StagedTable:
        """Return the folded changes, out of the files that tasks have written for this table."""
        steps: list[StagedStep] = []
        truncates = self._truncates
        for epoch in range(len(truncates) + 1):
            if epoch:
                segment, ordinal, time = truncates[epoch - 1]
                steps.append(
                    StagedStep("truncate", (), 0, inserts_only=False, last=ChangePlace(segment, ordinal), event_time_us=time)
                )  # fmt: skip
            parts: dict[tuple[int, bool], list[FoldedFile]] = {}
            for one in files:
                if one.epoch == epoch:
                    parts.setdefault((one.level, not one.reads), []).append(one)
            steps += [_step(level, parts[level, rest]) for level, rest in sorted(parts)]
        if mode == "current" and truncates:
            steps = steps[len(truncates) - 1 :]
        return self._staged(frozenset(name for one in files for name in one.absent), steps)

    def _staged(self, lacking: frozenset[str], steps: Sequence[StagedStep]) -> StagedTable:
        return StagedTable(
            self.destination, self.name, self.columns, self.key, lacking, steps, self.changes,
            identities=self.identities, fills=self.added.texts, unfilled=self.added.unfilled,
        )  # fmt: skip


_NOWHERE = ChangePlace(0, 0)


def _step(level: int, files: Sequence[FoldedFile]) -> StagedStep:
    return StagedStep(
        "rekey" if level % 2 else "rows",
        [encoded_files.spark_path(one.path) for one in files],
        sum(one.rows for one in files),
        all(one.inserts_only for one in files),
        max(one.last for one in files),
        reads=files[0].reads,
    )


def _tables(
    files: Sequence[TypedFile],
    plan: StagePlan,
    types: TargetTypes,
    destination_of: Callable[[TableName], tuple[tuple[str, ...], TableRejected | None]],
    resync_command: Callable[[TableName], str],
) -> tuple[list[_TableReports], dict[tuple[str, ...], Exception]]:
    """Return the tables that tasks have reported, and those that cannot be staged."""
    by_name: dict[TableName, list[TypedFile]] = {}
    for one in sorted(files, key=lambda one: one.first or _NOWHERE):
        by_name.setdefault(one.table, []).append(one)
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
    for one in files:
        if one.error is not None:
            raise TableRejected(one.error)
    known = plan.schema(name)
    key = plan.key(name)
    added = {field for one in files for field in one.added}
    if plan.mode != "changelog":
        added |= set(key) - {column.name for column in known.columns}
    columns = known.with_added(sorted(added))
    check_names((column.name for column in columns.columns), f"table {full_name(name)}")
    added_by_source = plan.added.get(name, AddedColumns())
    if plan.mode == "changelog":  # its rows are changes, which had no such column
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
        found = [place for place, (bucket, _) in enumerate(file.buckets) if bucket in buckets]
        if file.path is not None and found:
            batches.append((file.path, found))
    return FoldTask(number, table.columns.arrow, table.key, table.plan, batches)
