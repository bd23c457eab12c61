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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.lake.columns import check_names
from deltaforge_dagster.pipeline.lake.figures import FigureReader, WrittenTable
from deltaforge_dagster.pipeline.lake.spark_failures import SparkFailure, failure_of, translated
from deltaforge_dagster.pipeline.lake.staged import META, OLD_KEY, VALIDITY, StagedStep, StagedTable
from deltaforge_dagster.pipeline.lake.stamps import last_commit
from deltaforge_dagster.pipeline.lake.target import (
    LakeOwner,
    LakeTarget,
    TableCommit,
    configure,
    open_target,
    table_label,
    table_properties,
)
from deltaforge_dagster.pipeline.spark_session import SessionProvider
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.dialect import Branches, LakeDialect
from deltaforge_dagster.sinks.lake.sql import quoted, sql_type
from deltaforge_dagster.sinks.lake.statements import STAGED, Statements
from deltaforge_dagster.state.lake_commits import TableFigures

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.sql import Row

    from deltaforge_dagster.pipeline.spark_client import SparkSession

BRANCH = "deltaforge_"
"""What the names of all writers' branches begin with."""

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


class _BranchReplaced(Exception):  # noqa: N818 - tried again
    """Somebody has dropped the branch during a commit."""


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
    _figures: FigureReader | None = field(default=None, init=False)
    _targets: dict[tuple[str, ...], LakeTarget] = field(default_factory=dict, init=False)

    def commit(
        self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool = False
    ) -> WrittenTable:
        """Apply the changes of a table, unless it has them already; return when they are durable.

        Args:
            table: The changes.
            through: Number of the commit's last segment. A commit that is repeated has the same changes; later
                commits have larger numbers.
            guard: Called before each statement that changes anything.
            exists: Whether the table has everything before these changes. If it is gone then, it is not made anew,
                because it would lack that without a sign.

        Returns:
            The table as it is then.

        Raises:
            TableRejected: The table cannot take the changes, or others keep changing it.
            SinkUnavailable: The storage or the catalog cannot be reached.
            SparkUnavailable: The session is gone.
            SettingsError: The Spark server lacks the format, the catalog, or what the storage needs.
        """
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        label = table_label(self.dialect, self.owner, table.destination)
        left = _ATTEMPTS
        while True:
            left -= 1
            try:
                figures = self._attempt(table, through, guard, exists=exists)
            except _BranchReplaced:
                self._targets.pop(table.destination, None)
                if not left:
                    raise TableRejected(
                        f"{label}: others dropped the branch of each attempt to write to it; it is tried again later"
                    ) from None
            except PySparkException as error:
                self._targets.pop(table.destination, None)
                failure = failure_of(error, self.sessions)
                if failure is not SparkFailure.CONFLICT or not left:
                    raise translated(error, failure, label) from None
            except BaseException:
                self._targets.pop(table.destination, None)
                raise
            else:
                columns = tuple(self._targets[table.destination].columns.values())
                return WrittenTable(columns, figures)

    def close(self) -> None:
        """Forget the session, which belongs to its provider."""
        self._session = self._figures = None
        self._targets.clear()

    def _attempt(
        self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool
    ) -> TableFigures | None:
        """Apply the changes unless the table has them; return what it consists of, if they were applied."""
        session = self._connected()
        commit = TableCommit(session, self.dialect, self.config, self.owner, table, guard, exists)
        names = (column.name for column in table.columns.columns)
        check_names(names, commit.label, self.dialect.bad_name)
        target = self._targets.get(table.destination)
        if target is None:
            target = self._targets[table.destination] = open_target(commit)
        branches = self.dialect.branches
        if branches is not None and target.branch is None:
            _begin(commit, target, branches, through)
        if through <= target.committed:
            return None
        columns = target.fit(commit)
        name = target.name
        if branches is not None and target.branch is not None:
            name = branches.part(name, target.branch)
        assert self._figures is not None
        self._figures.forget_version()
        statements = Statements(name, columns, table.key, table.absent, target.base)
        for number, step in enumerate(table.steps):
            for setting, value in self.dialect.stamp(self.owner.name, through, number).items():
                session.conf.set(setting, value)
            commit.execute(self._statement(commit, statements, step))
        if branches is not None and target.branch is not None:
            recent = commit.rows(branches.recent(target.name, target.branch))
            if not _is_whole(recent, target.branch_at, len(table.steps)):
                raise _BranchReplaced
            guard()
            published = commit.rows(branches.publish(table.destination, target.branch))
            target.branch_at = version = published[0]["updated_ref"]
        else:
            version = self._figures.last_version()
        target.committed = through
        return None if version is None else self._figures.read(table.destination, version)

    def _connected(self) -> SparkSession:
        session = self.sessions.session()
        if session is not self._session:
            self._targets.clear()
            configure(session, self.dialect, self.config)
            self._figures = FigureReader(session, self.dialect)
            self._session = session
        return session

    def _statement(self, commit: TableCommit, statements: Statements, step: StagedStep) -> str:
        """Return the statement that applies a step."""
        if step.kind == "truncate":
            return self._truncate(statements, step)
        schema = self._staged_schema(commit.table, step)
        staged = commit.session.read.schema(schema).parquet(*step.files)
        staged.createOrReplaceTempView(STAGED)
        mode, rekey = self.config.mode, step.kind == "rekey"
        if mode == "changelog":
            return statements.append()
        if mode == "current" and step.inserts_only and self._all_new(commit, statements):
            return statements.append_current()
        within = ""
        if not rekey and (query := statements.bounds()) is not None:
            within = statements.within(commit.rows(query)[0])
        if mode == "history":
            return statements.merge_history(rekey=rekey, within=within)
        soft = self.config.soft_deletes
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


def _begin(commit: TableCommit, target: LakeTarget, branches: Branches, through: int) -> None:
    """Find out which commits the table has, and make a branch where it is now."""
    heads = _heads(commit, target, branches)
    head = heads.get("main")
    snapshots = commit.rows(branches.snapshots(target.name))
    properties = table_properties(commit.session, target.name)
    known = last_commit(snapshots, head, properties, commit.owner)
    if known is None and head is not None and _has_last_row(commit, target):
        known = through
    target.committed = -1 if known is None else known
    prefix = f"{BRANCH}{hashlib.sha256(commit.owner.name.encode()).hexdigest()[:8]}_"
    commit.execute(*(branches.drop(target.name, left) for left in heads if left.startswith(prefix)))
    # Never a name that was used before: a statement of a dead writer may still be on its way to that branch.
    branch = prefix + secrets.token_hex(4)
    commit.execute(branches.create(target.name, branch, head))
    target.branch_at = head
    if head is None:
        heads = _heads(commit, target, branches)
        target.branch_at = heads.get(
            branch
        )  # a branch of an empty table begins with an empty snapshot
    if head is None and "main" in heads:
        # No longer empty, and perhaps so before the branch was made, which may then begin anywhere.
        _begin(commit, target, branches, through)
    else:
        target.branch = branch


def _is_whole(recent: Sequence[Row], start: int | None, steps: int) -> bool:
    """Return whether a branch has a snapshot of each step of a commit, and before them the one at which it was made.

    If somebody drops a branch while a statement writes to it, the statement makes it again, from what main is then:
    without the steps before, and perhaps with the commit itself.
    """
    parents = {row.id: row.parent for row in recent}
    at = recent[0].head if recent else start
    for _ in range(steps):
        if at not in parents:
            return False
        at = parents[at]
    return at == start


def _heads(commit: TableCommit, target: LakeTarget, branches: Branches) -> Mapping[str, int]:
    """Return the newest snapshot of each branch."""
    return {row.name: row.id for row in commit.rows(branches.references(target.name))}


def _has_last_row(commit: TableCommit, target: LakeTarget) -> bool:
    """Return whether a changelog has the last row of the commit.

    Asked if no snapshot is left that says which commits there are. In other modes, repeating a commit is harmless.
    """
    if commit.config.mode != "changelog" or not commit.table.steps:
        return False
    last = commit.table.steps[-1].last
    place = f"df_position = {target.base + last.segment} AND df_ordinal = {last.ordinal}"
    return bool(commit.rows(f"SELECT 1 FROM {target.name} WHERE {place} LIMIT 1"))
