"""Maintains a sink's tables: compacts files, expires snapshots, and deletes unused files.

Maintenance runs beside the delivery. If both change a table at once, one of them has to start over:
the delivery retries as usual (`writer`); maintenance retries a few times, and then leaves the rest
to the next time. Files that a commit in progress has written are never deleted: they are younger
than any file that is deleted, and a branch keeps its snapshots. A branch that a dead writer has
left is dropped once it is older than the retention. If its writer is alive after all, it makes
another branch.

Only tables that belong to the sink are maintained. The table of pending changes is maintained as
well: each small commit leaves files there, which are no longer used once the changes are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.lake.pending import pending_writer
from deltaforge_dagster.pipeline.lake.recorded_commits import CommitCopy, FigureReader, last_commit
from deltaforge_dagster.pipeline.lake.spark_failures import (
    SparkFailure,
    failure_of,
    is_not_found,
    translated,
)
from deltaforge_dagster.pipeline.lake.target import (
    Ownership,
    configure,
    table_label,
    table_properties,
)
from deltaforge_dagster.pipeline.lake.writer import BRANCH
from deltaforge_dagster.pipeline.run_context import SessionProvider
from deltaforge_dagster.sinks.lake.config import LakeMaintenanceConfig, LakeSinkConfig
from deltaforge_dagster.sinks.lake.dialect import (
    COMMITTED,
    OWNER,
    PENDING,
    Branches,
    LakeDialect,
    properties_text,
    session_settings,
)
from deltaforge_dagster.sinks.lake.pending import pending_name
from deltaforge_dagster.sinks.registry import LakeSinkType, sink_types
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import Destination, StoredWrite, TableFigures

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.errors import PySparkException
    from pyspark.sql import Row

    from deltaforge_dagster.pipeline.spark_client import SparkSession

_ATTEMPTS = 3  # after conflicts with commits; what is left is for the next maintenance
_ABORTS = {SparkFailure.LOST, SparkFailure.MISSING, SparkFailure.PLACE, SparkFailure.UNAVAILABLE}
"""Failures that would occur with other tables as well."""


@dataclass(frozen=True, slots=True)
class TableCondition:
    """What maintenance measures of a table.

    Attributes:
        figures: The table's files, bytes and rows; None if it has no version.
        small_files: Number of small files; None if unknown.
        snapshots: Number of snapshots that can be read; None if the format has none.
    """

    figures: TableFigures | None
    small_files: int | None
    snapshots: int | None

    @property
    def counts(self) -> dict[str, int]:
        """The numbers that are known, by name."""
        figures = self.figures or TableFigures()
        counts = {
            "files": figures.files,
            "small_files": self.small_files,
            "bytes": figures.bytes,
            "rows": figures.rows,
            "deleted_rows": figures.deleted,
            "snapshots": self.snapshots,
        }
        return {name: count for name, count in counts.items() if count is not None}

    @property
    def deleted_ratio(self) -> float | None:
        """The share of the rows in files that is deleted; None if unknown."""
        figures = self.figures
        if figures is None or figures.deleted is None or figures.rows is None:
            return None
        return figures.deleted / max(1, figures.rows + figures.deleted)


@dataclass(slots=True)
class MaintainedTable:
    """What was done to a table.

    Attributes:
        destination: Name of the table.
        before: Its condition before maintenance; None if it was left alone.
        after: Its condition afterwards.
        due: Whether its files are to be compacted.
        compacted: Whether its files were compacted.
        cleaned: Whether everything older than the retention was deleted.
        notes: Why the table was left alone, or which step failed because of conflicting writers.
        problems: Errors of steps that cannot succeed until somebody fixes the cause.
    """

    destination: Destination
    before: TableCondition | None = None
    after: TableCondition | None = None
    due: bool = False
    compacted: bool = False
    cleaned: bool = False
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def done(self) -> str:
        """What was done, in words; empty if nothing was."""
        steps = {"compacted": self.compacted, "cleaned": self.cleaned}
        return " and ".join(step for step, was in steps.items() if was)


def maintain_tables(
    store: StateStore,
    pipeline: str,
    sink: SinkBlock,
    sessions: Callable[[], AbstractContextManager[SessionProvider]],
    *,
    only: Collection[Destination] = (),
    dry_run: bool = False,
) -> Iterator[tuple[StoredWrite, MaintainedTable]]:
    """Maintain the tables that a sink has written, one after the other.

    If there are none, no session is made.

    Args:
        store: The state store.
        pipeline: Name of the pipeline.
        sink: The sink, whether its file enables maintenance or not.
        sessions: Lends a session.
        only: Names of the tables to maintain; all if empty.
        dry_run: Only look at the tables.

    Raises:
        NotAllowed: The sink has no such table.
        SparkUnavailable, SinkUnavailable, SettingsError: No table can be maintained now.
    """
    commits = store.table_commits.read(pipeline, sink.config.id)
    tables = [
        stored for stored in store.table_commits.tables(pipeline) if stored.sink == sink.config.id
    ]
    destinations = {stored.write.destination for stored in tables}
    for name in only:
        if name not in destinations:
            names = ", ".join(sorted(map(".".join, destinations))) or "none"
            raise NotAllowed(
                f"sink {sink.config.id} has written no table {'.'.join(name)} (there is: {names})"
            )
    tables = [stored for stored in tables if not only or stored.write.destination in only]
    if commits is None or not tables:
        return
    kind, config = sink_types()[sink.type], sink.config
    assert isinstance(kind, LakeSinkType)
    assert isinstance(config, LakeSinkConfig)
    owner = TableOwner(commits.front.owner, pipeline, config.id)
    with sessions() as provider:
        maintenance = LakeMaintenance(provider, kind.dialect(config), config, owner)
        for stored in tables:
            yield stored, maintenance.maintain(stored.write.destination, dry_run=dry_run)
            pending = maintenance.maintain_pending(stored.write.destination, dry_run=dry_run)
            if pending is not None:
                yield stored, pending


class LakeMaintenance:
    """Maintains tables of a sink.

    Args:
        sessions: Provides the session.
        dialect: Format of the tables.
        config: Options of the sink.
        owner: The owner of the tables.
    """

    def __init__(
        self,
        sessions: SessionProvider,
        dialect: LakeDialect,
        config: LakeSinkConfig,
        owner: TableOwner,
    ) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._config = config
        self._owner = owner
        self._options = config.maintenance
        self._session: SparkSession | None = None
        self._figures: FigureReader | None = None

    def maintain(self, destination: Destination, *, dry_run: bool = False) -> MaintainedTable:
        """Do what is due for a table; return what was done.

        Raises:
            SparkUnavailable, SinkUnavailable, SettingsError: No table can be maintained now.
        """
        maintained = MaintainedTable(destination)
        with self._noted(maintained):
            properties = self._properties(destination)
            if properties is None:
                maintained.notes.append("the table is gone")
            elif not self._owns(properties):
                maintained.notes.append(
                    "the table is not, or not yet, this sink's, so it is left alone"
                )
            else:
                self._maintain(maintained, properties, self._owner.name, dry_run=dry_run)
        return maintained

    def maintain_pending(
        self, destination: Destination, *, dry_run: bool = False
    ) -> MaintainedTable | None:
        """Maintain the table with a table's pending changes; return None if there is none yet."""
        maintained = MaintainedTable(pending_name(destination))
        with self._noted(maintained):
            table, pending = self._properties(destination), self._properties(maintained.destination)
            if table is None or pending is None or not self._owns(table):
                return None
            token = table.get(PENDING)
            if token is None or pending.get(PENDING) != token:
                return None
            self._maintain(maintained, pending, pending_writer(self._owner, token), dry_run=dry_run)
        return maintained

    def _owns(self, properties: Mapping[str, str]) -> bool:
        return Ownership.from_json(properties.get(OWNER, "")).is_of(self._owner)

    @contextmanager
    def _noted(self, maintained: MaintainedTable) -> Iterator[None]:
        """Note a failure with a table; raise if it would occur with other tables as well."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        try:
            yield
        except PySparkException as error:
            self._note(maintained, error)

    def _maintain(
        self,
        maintained: MaintainedTable,
        properties: Mapping[str, str],
        writer: str,
        *,
        dry_run: bool,
    ) -> None:
        """Do what is due for a table with these properties, whose commits `writer` has stamped."""
        session, figures = self._connected()
        maintained.before = maintained.after = self._condition(
            session, figures, maintained.destination
        )
        small = _has_small_files(maintained.before, self._options)
        deleted = (maintained.before.deleted_ratio or 0.0) >= self._options.deleted_ratio
        maintained.due = small or deleted
        if dry_run:
            return
        if maintained.due:
            compact = self._dialect.maintenance.compact(
                maintained.destination, self._options, properties, small=small, deleted=deleted
            )
            maintained.compacted = self._execute(session, compact, maintained)
        maintained.cleaned = self._clean(session, maintained, properties, writer)
        maintained.after = self._condition(session, figures, maintained.destination)

    def _properties(self, destination: Destination) -> Mapping[str, str] | None:
        """Return the properties of a table; None if it does not exist."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        session, _ = self._connected()
        try:
            return table_properties(session, self._dialect.table(destination))
        except PySparkException as error:
            if is_not_found(error):
                return None
            raise

    def _connected(self) -> tuple[SparkSession, FigureReader]:
        session = self._sessions.session()
        if session is not self._session or self._figures is None:
            settings = session_settings(self._dialect, self._config)
            configure(session, {**settings, **self._dialect.maintenance.settings})
            self._session, self._figures = session, FigureReader(session, self._dialect)
        return session, self._figures

    def _condition(
        self, session: SparkSession, figures: FigureReader, destination: Destination
    ) -> TableCondition:
        table = self._dialect.table(destination)
        version = figures.newest(table)
        snapshots = None
        if self._dialect.branches is not None:
            snapshots = len(session.sql(self._dialect.branches.snapshots(table)).collect())
        if version is None:
            return TableCondition(None, 0, snapshots)
        small = figures.small_files(destination, version)
        table_figures = figures.read(destination, version)
        if table_figures.rows is None:  # formats answer this query from metadata of the files
            count = session.sql(f"SELECT count(*) AS rows FROM {table}").collect()
            table_figures = replace(table_figures, rows=count[0]["rows"])
        return TableCondition(table_figures, small, snapshots)

    def _clean(
        self,
        session: SparkSession,
        maintained: MaintainedTable,
        properties: Mapping[str, str],
        writer: str,
    ) -> bool:
        """Delete what is older than the retention; return whether that succeeded."""
        now, hours = datetime.now(UTC), self._options.retention_hours
        branches = self._dialect.branches
        statements: Sequence[str] = ()
        if branches is not None:
            table = self._dialect.table(maintained.destination)
            before = int((now - timedelta(hours=hours)).timestamp() * 1e6)
            heads = {row.name: row.id for row in session.sql(branches.references(table)).collect()}
            snapshots = {row.id: row for row in session.sql(branches.snapshots(table)).collect()}
            # The newest stamp is copied to a property before `clean` expires its snapshot.
            statements = [
                *_copied(
                    table, snapshots, heads.get("main"), properties, writer=writer, before=before
                ),
                *_dropped(branches, table, snapshots, heads, before),
            ]
        cleaned = self._dialect.maintenance.clean(maintained.destination, now, hours)
        return self._execute(session, [*statements, *cleaned], maintained)

    def _execute(
        self, session: SparkSession, statements: Sequence[str], maintained: MaintainedTable
    ) -> bool:
        """Execute statements, again after conflicts; return whether they succeeded.

        If one does not, the reason is noted.
        """
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        for statement in statements:
            left = _ATTEMPTS
            while True:
                left -= 1
                try:
                    session.sql(statement).collect()
                    break
                except PySparkException as error:
                    if failure_of(error, self._sessions) is not SparkFailure.CONFLICT or not left:
                        self._note(maintained, error)
                        return False
        return True

    def _note(self, maintained: MaintainedTable, error: PySparkException) -> None:
        """Note a failure, or raise if it would occur with other tables as well."""
        failure = failure_of(error, self._sessions)
        label = table_label(self._dialect, self._owner, maintained.destination)
        problem = translated(error, failure, label)
        if failure in _ABORTS:
            raise problem from None
        (maintained.notes if failure is SparkFailure.CONFLICT else maintained.problems).append(
            str(problem)
        )


def _has_small_files(condition: TableCondition, options: LakeMaintenanceConfig) -> bool:
    """Return whether there are many small files, or their number is unknown."""
    if condition.figures is None:
        return False
    return condition.small_files is None or condition.small_files >= options.small_files


def _copied(
    table: str,
    snapshots: Mapping[int, Row],
    head: int | None,
    properties: Mapping[str, str],
    *,
    writer: str,
    before: int,
) -> Iterator[str]:
    """Return the statement that copies the last commit's stamp to a property, if one is needed.

    None is needed if no snapshot expires, or if the copy is up to date.

    A copy from before the table was rolled back to an earlier snapshot is replaced or removed: once
    that snapshot has expired, nothing shows that the copy is wrong.
    """
    if head is None or all(row.at >= before for row in snapshots.values()):
        return
    last = last_commit(list(snapshots.values()), head, properties, writer)
    if last is None:
        if COMMITTED in properties:
            yield f"ALTER TABLE {table} UNSET TBLPROPERTIES ('{COMMITTED}')"
        return
    copy = CommitCopy(writer, last, head, snapshots[head].at)
    if CommitCopy.of(properties) != copy:
        text = properties_text({COMMITTED: copy.to_json()})
        yield f"ALTER TABLE {table} SET TBLPROPERTIES ({text})"


def _dropped(
    branches: Branches,
    table: str,
    snapshots: Mapping[int, Row],
    heads: Mapping[str, int],
    before: int,
) -> Iterator[str]:
    """Return the statements that drop the branches of writers that have not written for long.

    A branch that equals the table is kept: it costs nothing, and its writer may still use it.
    """
    for name, head in heads.items():
        old = head != heads.get("main") and head in snapshots and snapshots[head].at < before
        if name.startswith(BRANCH) and old:
            yield branches.drop(table, name)
