"""Applies the staged changes of a table to the table, exactly once.

A commit may be repeated: by this process because its answer was lost, by a successor because this process was killed,
or by both at once, since Spark finishes what a killed process has asked for. Each format makes sure that it takes
effect once:

Delta    Every statement has a transaction version, which the table's log remembers; the second one is skipped.
Iceberg  The statements write to a branch, which begins where the table was seen to lack the commit, and which can
         become the main one only if the table has not changed since. Otherwise the writer looks again.

A conflict with others who write to the table, such as its maintenance, is resolved by trying again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltaforge_dagster.pipeline.lake.columns import check_names
from deltaforge_dagster.pipeline.lake.spark_failures import SparkFailure, failure_of, translated
from deltaforge_dagster.pipeline.lake.staged import META, OLD_KEY, VALIDITY, StagedStep, StagedTable
from deltaforge_dagster.pipeline.lake.target import (
    LakeOwner,
    LakeTarget,
    TableCommit,
    open_target,
    replace_table,
    table_label,
)
from deltaforge_dagster.pipeline.spark_session import SessionProvider
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.dialect import Branches, LakeDialect
from deltaforge_dagster.sinks.lake.sql import quoted, sql_type
from deltaforge_dagster.sinks.lake.statements import STAGED, Statements

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.sql import Row

    from deltaforge_dagster.pipeline.spark_client import SparkSession

_ATTEMPTS = 5
_META_TYPES: Mapping[str, str] = {
    "df_op": "string",
    "df_segment": "bigint",
    "df_ordinal": "bigint",
    "df_event_time": "timestamp",
    "df_source_position": "string",
    "df_tx_id": "string",
    "df_event_id": "string",
    "df_schema_version": "string",
    "df_absent": "array<string>",
    "df_valid_from": "timestamp",
    "df_valid_to": "timestamp",
}
"""Types of the columns of `META` and `VALIDITY` in Spark."""


@dataclass(slots=True)
class LakeWriter:
    """Applies staged changes to the tables of a sink; used by one thread.

    Args:
        sessions: Provides the session, which nobody else may write with: what stamps our statements stays set.
        dialect: Format of the tables.
        config: Options of the sink.
        owner: Who writes.
    """

    sessions: SessionProvider
    dialect: LakeDialect
    config: LakeSinkConfig
    owner: LakeOwner
    _session: SparkSession | None = field(default=None, init=False)
    _targets: dict[tuple[str, ...], LakeTarget] = field(default_factory=dict, init=False)

    def commit(
        self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool = False
    ) -> Sequence[tuple[str, str]]:
        """Apply the changes of a table, unless it has them already; return when they are durable.

        Args:
            table: The changes.
            through: Number of the commit's last segment. A commit that is repeated has the same changes; later
                commits have larger numbers.
            guard: Called before each statement that changes anything.
            exists: Whether the table has everything before these changes. If it is gone then, it is not made anew,
                because it would lack that without a sign.

        Returns:
            Name and type of each column that the table has then.

        Raises:
            TableRejected: The table cannot take the changes, or others keep changing it.
            SinkUnavailable: The storage or the catalog cannot be reached.
            SparkUnavailable: The session is gone.
            SettingsError: The Spark server lacks the format, the catalog, or what the storage needs.
        """
        self._tried(table, lambda: self._attempt(table, through, guard, exists=exists))
        return tuple(self._targets[table.destination].columns.values())

    def make_anew(self, table: StagedTable, guard: SendGuard) -> None:
        """Replace a table by one without rows, as it would be made today; make it if it does not exist.

        Readers who have begun go on with the old rows, and both formats keep these for queries of an older version.

        Args:
            table: The table, without changes.
            guard: Called before each statement that changes anything.

        Raises:
            TableRejected: The table is not this sink's, or cannot be made.
            SinkUnavailable, SparkUnavailable, SettingsError: See `commit`.
        """
        self._tried(table, lambda: replace_table(self._begun(table, guard)))
        self._targets.pop(table.destination, None)

    def _tried(self, table: StagedTable, attempt: Callable[[], None]) -> None:
        """Do something with a table, and try it again after conflicts; its target is forgotten if it fails."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        label = table_label(self.dialect, self.owner, table)
        left = _ATTEMPTS
        while True:
            left -= 1
            try:
                attempt()
            except PySparkException as error:
                self._targets.pop(table.destination, None)
                failure = failure_of(error, self.sessions)
                if failure is not SparkFailure.CONFLICT or not left:
                    raise translated(error, failure, label) from None
            except BaseException:
                self._targets.pop(table.destination, None)
                raise
            else:
                return

    def close(self) -> None:
        """Forget the session, which belongs to its provider."""
        self._session = None
        self._targets.clear()

    def _begun(self, table: StagedTable, guard: SendGuard, *, exists: bool = False) -> TableCommit:
        session = self._connected()
        commit = TableCommit(session, self.dialect, self.config, self.owner, table, guard, exists)
        names = (column.name for column in table.columns.columns)
        check_names(names, commit.label, self.dialect.bad_name)
        return commit

    def _attempt(self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool) -> None:
        commit = self._begun(table, guard, exists=exists)
        target = self._targets.get(table.destination)
        if target is None:
            target = self._targets[table.destination] = open_target(commit)
        branches = self.dialect.branches
        if branches is not None and target.branch is None:
            _begin(commit, target, branches, through)
        if through <= target.committed:
            return
        columns = target.fit(commit)
        name = target.name
        if branches is not None and target.branch is not None:
            name = branches.part(name, target.branch)
        statements = Statements(name, columns, table.key, table.absent, target.base)
        for number, step in enumerate(table.steps):
            for setting, value in self.dialect.stamp(self.owner.name, through, number).items():
                commit.session.conf.set(setting, value)
            commit.execute(self._statement(commit, statements, step))
        if branches is not None and target.branch is not None:
            commit.execute(branches.publish(table.destination, target.branch))
        target.committed = through

    def _connected(self) -> SparkSession:
        session = self.sessions.session()
        if session is not self._session:
            self._targets.clear()
            settings = dict(self.dialect.settings)
            settings |= {name: one.get_secret_value() for name, one in self.config.spark.items()}
            for name, value in settings.items():
                session.conf.set(name, value)
            self._session = session
        return session

    def _statement(self, commit: TableCommit, statements: Statements, step: StagedStep) -> str:
        """Return the statement that applies a step."""
        if step.kind == "truncate":
            return self._truncate(statements, step)
        schema = self._staged_schema(commit.table, step)
        staged = commit.session.read.schema(schema).parquet(*step.files)
        staged.createOrReplaceTempView(STAGED)
        if self.config.mode == "changelog":
            return statements.append()
        if (
            self.config.mode == "current"
            and step.inserts_only
            and self._all_new(commit, statements)
        ):
            return statements.append_current(soft_deletes=False)
        return self._by_key(commit, statements, step)

    def _by_key(self, commit: TableCommit, statements: Statements, step: StagedStep) -> str:
        """Return the statement that applies rows to those of the same keys, or adds them if there are none."""
        rekey, history = step.kind == "rekey", self.config.mode == "history"
        within, soft = "", self.config.soft_deletes
        if not rekey and (query := statements.bounds()) is not None:
            within = statements.within(commit.rows(query)[0])
        if step.reads and _has_no_key(commit, statements, within):
            if history:
                return statements.append_history()
            return statements.append_current(soft_deletes=soft)
        if history:
            return statements.merge_history(rekey=rekey, within=within)
        return statements.merge_current(rekey=rekey, soft_deletes=soft, within=within)

    def _truncate(self, statements: Statements, step: StagedStep) -> str:
        place = (statements.base + step.last.segment, step.last.ordinal, step.event_time_us)
        match self.config.mode:
            case "changelog":
                return statements.truncated_changelog(*place)
            case "current":
                return statements.truncate_current(*place, soft_deletes=self.config.soft_deletes)
            case "history":
                return statements.truncate_history(*place)

    def _all_new(self, commit: TableCommit, statements: Statements) -> bool:
        """Return whether the table is sure not to have the keys of inserts.

        That is so if it has had all changes, deletes above all, of a table whose source enforces the key.
        """
        config = self.config
        filtered = config.filter is not None or bool(config.skipped_operations)
        declared = config.keys_of(*commit.table.source) is not None
        return not (statements.base or config.soft_deletes or filtered or declared)

    def _staged_schema(self, table: StagedTable, step: StagedStep) -> str:
        types = {one.name: sql_type(one.type) for one in table.columns.columns}
        fields = types | {name: _META_TYPES[name] for name in META.names}
        if self.config.mode == "history":
            fields |= {name: _META_TYPES[name] for name in VALIDITY.names}
        if step.kind == "rekey":
            fields |= {OLD_KEY + name: types[name] for name in table.key}
        return ", ".join(f"{quoted(name)} {type_}" for name, type_ in fields.items())


def _has_no_key(commit: TableCommit, statements: Statements, within: str) -> bool:
    """Return whether the table is sure to have no row of keys that are within these limits.

    The keys that a snapshot has read need not be new to the table: a chunk follows all changes that its read saw, so an
    insert or update that was captured meanwhile is in the table before it; a chunk may be read again; and an earlier
    snapshot, or an earlier life of the table, may have had the same keys. What the journal still knows cannot rule that
    out, but the table can. Chunks are ranges of keys, so statistics of its files answer, mostly, without reading any.

    The answer stays true until the statement that follows: nobody but the sink adds rows, its earlier commits are
    finished, and of the statements of a commit that is repeated at the same time only one takes effect.
    """
    return not commit.rows(f"SELECT 1 FROM {statements.table} AS t WHERE true{within} LIMIT 1")


def _begin(commit: TableCommit, target: LakeTarget, branches: Branches, through: int) -> None:
    """Find out which commits the table has, and make a branch where it is now."""
    heads = _heads(commit, target, branches)
    head = heads.get("main")
    known = _stamped(commit.rows(branches.snapshots(target.name)), head, commit.owner)
    if known is None and head is not None and _has_last_row(commit, target):
        known = through
    target.committed = -1 if known is None else known
    prefix = f"deltaforge_{hashlib.sha256(commit.owner.name.encode()).hexdigest()[:8]}_"
    commit.execute(*(branches.drop(target.name, left) for left in heads if left.startswith(prefix)))
    # Never a name that was used before: a statement of a dead writer may still be on its way to that branch.
    branch = prefix + secrets.token_hex(4)
    commit.execute(branches.create(target.name, branch, head))
    if head is None and "main" in _heads(commit, target, branches):
        # No longer empty, and perhaps so before the branch was made, which may then begin anywhere.
        _begin(commit, target, branches, through)
    else:
        target.branch = branch


def _heads(commit: TableCommit, target: LakeTarget, branches: Branches) -> Mapping[str, int]:
    """Return the newest snapshot of each branch."""
    return {row.name: row.id for row in commit.rows(branches.references(target.name))}


def _stamped(snapshots: Sequence[Row], head: int | None, owner: LakeOwner) -> int | None:
    """Return the number of the owner's last commit in the history of `head`."""
    known = {row.id: row for row in snapshots}
    while head is not None and (row := known.get(head)) is not None:
        if row.owner == owner.name:
            return int(row.version)
        head = row.parent
    return None


def _has_last_row(commit: TableCommit, target: LakeTarget) -> bool:
    """Return whether a changelog has the last row of the commit.

    Asked if no snapshot is left that says which commits there are. In other modes, repeating a commit is harmless.
    """
    if commit.config.mode != "changelog" or not commit.table.steps:
        return False
    last = commit.table.steps[-1].last
    place = f"df_position = {target.base + last.segment} AND df_ordinal = {last.ordinal}"
    return bool(commit.rows(f"SELECT 1 FROM {target.name} WHERE {place} LIMIT 1"))
