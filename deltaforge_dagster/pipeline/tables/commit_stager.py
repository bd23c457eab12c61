"""What the stagers of every kind of sink share: which table versions a commit has, and Spark jobs.

`stage` stages commits for tables, `object_stage` for object files.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote

import pyarrow as pa
from pyspark.errors import PySparkException

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import SinkFilter
from deltaforge_dagster.errors import SparkUnavailable, TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.encoder import check_server
from deltaforge_dagster.pipeline.run_context import SessionProvider, spark_condition
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_dagster.pipeline.tables.columns import (
    SAME_NAMES,
    RowNames,
    union,
)
from deltaforge_dagster.pipeline.tables.reports import REPORT, TaskReport, reported
from deltaforge_dagster.pipeline.tables.typed_files import (
    TableName,
    full_name,
)
from deltaforge_dagster.processors.messages.expansion import RowSelection
from deltaforge_dagster.sinks.tables.config import StagedSinkConfig
from deltaforge_dagster.sinks.tables.staged import (
    StagedCommit,
    StagedTable,
)
from deltaforge_dagster.sources.registry import source_types
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


@dataclass(frozen=True, slots=True)
class CommitFiles:
    """The files of a commit: their folder, and what their names begin with."""

    folder: str
    name: str

    def discard(self) -> None:
        """Delete the files."""
        encoded_files.remove_job(self.folder, self.name)
