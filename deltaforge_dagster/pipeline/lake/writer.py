"""Applies the staged changes of a table to the table, exactly once.

A commit may be repeated: by this process because the server's answer was lost, by a successor
because this process was killed, or by both at once, since Spark goes on with statements of a
process that was killed. Each format has its own way to make a commit take effect once:

Delta    Every statement has a transaction version, which the table's log remembers; a statement
         whose version is in the log already is skipped.
Iceberg  The statements write to a branch, which begins where the table was seen to lack the commit,
         and which can become the main one only if the table has not changed since. Otherwise the
         writer looks again.

A conflict with others who write to the table, such as its maintenance, is resolved by trying again.

Pending changes are *folded* in two steps: their net effect is merged into the table, and then they
are deleted. After a crash in between they are in both places, which changes nothing for readers of
the view (`sinks.lake.pending`), and folding them again changes nothing either. A commit that goes
to the table itself comes after all pending changes, so these are folded first.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.lake.pending import (
    PendingTarget,
    open_pending,
    replace_pending,
)
from deltaforge_dagster.pipeline.lake.recorded_commits import FigureReader, last_commit
from deltaforge_dagster.pipeline.lake.spark_failures import PASSING, failure_of, translated
from deltaforge_dagster.pipeline.lake.target import (
    LakeTarget,
    TableCommit,
    check_layout,
    columns_of,
    configure,
    has_rows,
    open_target,
    replace_table,
    replaceable,
    table_label,
    table_properties,
)
from deltaforge_dagster.pipeline.run_context import SessionProvider
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.dialect import (
    PENDING,
    Branches,
    LakeDialect,
    writer_settings,
)
from deltaforge_dagster.sinks.lake.statements import (
    STAGED,
    Statements,
    Truncate,
    WrittenColumn,
    quoted,
    sql_type,
)
from deltaforge_dagster.sinks.tables.staged import META, OLD_KEY, VALIDITY, StagedStep, StagedTable
from deltaforge_dagster.sinks.tables.writer import FoldTime, TableOwner, WrittenTable, check_names
from deltaforge_dagster.state.table_commits import TableFigures

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from deltaforge_dagster.pipeline.spark_client import SparkSession

BRANCH = "deltaforge_"
"""What the names of all writers' branches begin with."""

_T = TypeVar("_T")
_FOLD_TIMES: Sequence[FoldTime] = ("before", "after", "later")
_ATTEMPTS = 5
_BRANCH_SECONDS = 3600
"""How long a branch is kept, because its writer, or a statement of a dead writer, may still be at
work. If the branch were dropped meanwhile, the statement would make it again, from the main branch
as it is then and without the steps before; a writer that publishes it would lose those steps."""

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
"""Types in Spark of the columns of `META` and `VALIDITY`."""


@dataclass(slots=True)
class LakeWriter:
    """Applies staged changes to the tables of a sink; implements `PendingWriter`.

    Args:
        sessions: Provides the session, which nobody else may write with: the settings that stamp
            the writer's statements stay set in it.
        dialect: Format of the tables.
        config: Options of the sink.
        owner: Who writes.
    """

    sessions: SessionProvider
    dialect: LakeDialect
    config: LakeSinkConfig
    owner: TableOwner
    _session: SparkSession | None = field(default=None, init=False)
    _figures: FigureReader | None = field(default=None, init=False)
    _targets: dict[tuple[str, ...], LakeTarget] = field(default_factory=dict, init=False)
    _pending: dict[tuple[str, ...], PendingTarget] = field(default_factory=dict, init=False)

    def commit(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
        required: bool = False,
    ) -> WrittenTable:
        """Apply the changes of a table, unless it already has them; see `PendingWriter.commit`.

        The guard is called before each statement that changes anything.

        Raises:
            TableRejected: The table cannot take the changes, or others keep changing it.
            SinkUnavailable: The storage or the catalog cannot be reached.
            SparkUnavailable: The session is gone.
            SettingsError: The Spark server lacks the format, the catalog, or what the storage
                needs.
        """
        return self._with_retries(
            table, lambda: self._commit(table, through, guard, exists=exists, required=required)
        )

    def append(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
        required: bool = False,
    ) -> WrittenTable:
        """Add changes to the pending ones of a table; see `PendingWriter.append`.

        Raises the same errors as `commit`.
        """
        return self._with_retries(
            table, lambda: self._append(table, through, guard, exists=exists, required=required)
        )

    def fold(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        time: FoldTime,
        *,
        required: bool = False,
    ) -> WrittenTable:
        """Fold the pending changes of a table into it; see `PendingWriter.fold`.

        Raises the same errors as `commit`.
        """

        def attempt() -> WrittenTable:
            commit, target = self._opened(table, guard, exists=True)
            version = self._fold(commit, target, through, time, required=required)
            return _written_table(target, self._figures_of(commit, version))

        return self._with_retries(table, attempt)

    def recreate(self, table: StagedTable, guard: SendGuard) -> Sequence[tuple[str, str]]:
        """Replace a table by one without rows, as it would be made today; make it if there is none.

        The table of its pending changes is replaced as well, and before it: pending changes that a
        crash leaves then belong to no table. Queries that have begun continue with the old rows,
        and both formats keep these for queries of an older version.

        See `TableWriter.recreate`; raises the same errors as `commit`.
        """

        def attempt() -> Sequence[tuple[str, str]]:
            commit = self._new_commit(table, guard)
            check_layout(commit)
            properties = replaceable(commit)
            token = None
            if self.config.pending is not None or PENDING in (properties or {}):
                token = replace_pending(commit)
                failpoint("lake-pending-recreated")
            replace_table(commit, token, exists=properties is not None)
            return list(columns_of(commit.session, self.dialect.table(table.destination)).values())

        columns = self._with_retries(table, attempt)
        self._forget(table.destination)
        return columns

    def close(self) -> None:
        """Forget the session, which belongs to its provider."""
        self._session = self._figures = None
        self._forget()

    def _with_retries(self, table: StagedTable, attempt: Callable[[], _T]) -> _T:
        """Call `attempt`, again after conflicts; on failure, forget what is known of the table."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        label = table_label(self.dialect, self.owner, table.destination)
        left = _ATTEMPTS
        while True:
            left -= 1
            try:
                return attempt()
            except PySparkException as error:
                self._forget(table.destination)
                failure = failure_of(error, self.sessions)
                if failure not in PASSING or not left:
                    raise translated(error, failure, label) from None
            except BaseException:
                self._forget(table.destination)
                raise

    def _forget(self, destination: tuple[str, ...] | None = None) -> None:
        """Forget what is known of a table, or of all tables."""
        if destination is None:
            self._targets.clear()
            self._pending.clear()
        else:
            self._targets.pop(destination, None)
            self._pending.pop(destination, None)

    def _new_commit(
        self, table: StagedTable, guard: SendGuard, *, exists: bool = False
    ) -> TableCommit:
        session = self._connected()
        commit = TableCommit(session, self.dialect, self.config, self.owner, table, guard, exists)
        names = (column.name for column in table.columns.columns)
        check_names(names, commit.label, self.dialect.bad_name)
        return commit

    def _opened(
        self, table: StagedTable, guard: SendGuard, *, exists: bool
    ) -> tuple[TableCommit, LakeTarget]:
        """Return the commit to a table, and the table as it is now."""
        commit = self._new_commit(table, guard, exists=exists)
        target = self._targets.get(table.destination)
        if target is None:
            target = self._targets[table.destination] = open_target(commit)
        return commit, target

    def _opened_pending(
        self, commit: TableCommit, target: LakeTarget, *, make: bool, required: bool
    ) -> PendingTarget | None:
        destination = commit.table.destination
        if destination not in self._pending:
            pending = open_pending(commit, target, make=make, required=required)
            if pending is None:
                return None
            self._pending[destination] = pending
        return self._pending[destination]

    def _commit(
        self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool, required: bool
    ) -> WrittenTable:
        commit, target = self._opened(table, guard, exists=exists)
        self._ensure_branch(commit, target, through)
        if through <= target.committed:
            return _written_table(target)
        self._rename(commit, target, through, required=required)
        columns = target.fit(commit)
        target.identify(commit)
        # The table of pending changes is made as well, so that the view works from the beginning.
        make = self.config.pending is not None
        pending = self._opened_pending(commit, target, make=make, required=required)
        self._fold(commit, target, through, "before")
        self._fill(commit, target, through)
        if pending is not None:
            pending.align(target)
        name = self._written_name(target)
        statements = Statements(name, columns, table.key, table.absent, target.base)
        version = self._execute(commit, target, through, self._steps(commit, statements))
        target.committed = through
        return _written_table(target, self._figures_of(commit, version))

    def _append(
        self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool, required: bool
    ) -> WrittenTable:
        commit, target = self._opened(table, guard, exists=exists)
        self._rename(commit, target, through, required=required)
        target.fit(commit)
        target.identify(commit)
        pending = self._opened_pending(commit, target, make=True, required=required)
        assert pending is not None
        if not pending.takes(commit, target):
            self._fold(commit, target, through, "before")
        self._fill(commit, target, through)
        pending.align(target)
        destination = pending.commit.table.destination
        added = replace(pending.commit, guard=guard, table=replace(table, destination=destination))
        self._ensure_branch(added, pending.table, through)
        if through <= pending.table.committed:
            return _written_table(target)
        columns = pending.table.fit(added)
        pending.key_becomes(table.key)
        staged_names = {column.name.lower() for column in columns}
        missing = [name for name, _ in pending.source_columns if name.lower() not in staged_names]
        name = self._written_name(pending.table)
        statements = Statements(name, columns, table.key, table.absent, target.base)

        def append() -> Iterator[str]:
            for step in table.steps:
                read_staged(commit.session, commit.table, step, self.config.mode)
                yield statements.append_pending([name.lower() for name in missing])

        pending.empty = False
        self._execute(added, pending.table, through, append())
        pending.table.committed = through
        return _written_table(target)

    def _fill(self, commit: TableCommit, target: LakeTarget, through: int) -> None:
        """Fill added columns in existing rows with the values that the source gave them."""
        if not target.unfilled:
            return
        self._ensure_branch(commit, target, through)
        # Each set of columns has a series of its own, so that it is filled only once.
        names = [target.identities.get(name, name) for name in target.unfilled]
        filled = replace(commit, series=f"/fill/{','.join(sorted(names))}")
        self._execute(filled, target, through, [target.fill(commit, self._written_name(target))])
        failpoint("lake-filled")
        target.filled(commit)

    def _rename(
        self, commit: TableCommit, target: LakeTarget, through: int, *, required: bool
    ) -> None:
        """Give columns the new names that they have at the source.

        Pending changes are folded under the old names first, because their rows contain names of
        columns. The columns of their table are renamed before those of the table itself: as long as
        the latter has the old names, a run that was interrupted can tell that it is not done.
        """
        moves = target.moves(commit)
        if not moves:
            return
        pending = self._opened_pending(commit, target, make=False, required=required)
        if pending is not None:
            self._fold(commit, target, through, "before")
            pending.table.rename(pending.commit, moves)
        target.rename(commit, moves)

    def _fold(
        self,
        commit: TableCommit,
        target: LakeTarget,
        through: int,
        time: FoldTime,
        *,
        required: bool = False,
    ) -> int | None:
        """Fold pending changes into a table; return the version that this has made of the table."""
        pending = self._opened_pending(commit, target, make=False, required=required)
        if pending is None or pending.empty:
            return None
        # Folds at different times may have the same last segment. With the same number of the
        # statement, Delta would skip the second one.
        number, last = _FOLD_TIMES.index(time), target.base + through
        rows = pending.rows
        absent = {row.name for row in commit.rows(rows.absent(last))}
        commit.session.sql(rows.folded(last, absent)).createOrReplaceTempView(STAGED)
        columns = [
            WrittenColumn(name, stored_name, type_, stored_type)
            for name, type_ in pending.source_columns
            for stored_name, stored_type in [target.columns[name.lower()]]
        ]
        # The series contains the token, so it is not that of a predecessor with larger numbers:
        # after the checkpoint was set back, a recreated table begins with smaller ones.
        merged = replace(commit, series=f"/{target.token}/fold")
        self._ensure_branch(commit, target, through)
        lacking = frozenset(column.staged for column in columns if column.staged.lower() in absent)
        # Pending rows have positions already, not numbers of segments: nothing is added to them.
        statements = Statements(self._written_name(target), columns, pending.key, lacking, base=0)
        merge = statements.merge_current(
            rekey=False, soft_deletes=False, within=self._within(commit, statements)
        )
        version = self._execute(merged, target, through, [merge], number)
        failpoint("lake-fold-merged")
        appended = replace(pending.commit, guard=commit.guard)
        self._ensure_branch(appended, pending.table, through)
        deleted = replace(appended, series=f"{appended.series}/fold")
        delete = f"DELETE FROM {self._written_name(pending.table)} WHERE df_position <= {last}"
        self._execute(deleted, pending.table, through, [delete], number)
        # Delta skips the statements if a later fold has been there, and later rows may be pending.
        pending.empty = not has_rows(commit, pending.table.name)
        failpoint("lake-fold-deleted")
        return version

    def _ensure_branch(self, commit: TableCommit, target: LakeTarget, through: int) -> None:
        """If the format has branches, find out which commits the table has, and make a branch."""
        branches = self.dialect.branches
        if branches is not None and target.branch is None:
            _make_branch(commit, target, branches, through)

    def _written_name(self, target: LakeTarget) -> str:
        """Return the name of the table or branch that statements write to."""
        branches = self.dialect.branches
        if branches is None or target.branch is None:
            return target.name
        return branches.part(target.name, target.branch)

    def _execute(
        self,
        commit: TableCommit,
        target: LakeTarget,
        through: int,
        statements: Iterator[str] | Sequence[str],
        first: int = 0,
    ) -> int | None:
        """Execute the statements of a commit, stamped, and publish them; return the new version."""
        assert self._figures is not None
        self._figures.forget_version()
        for number, statement in enumerate(statements, first):
            for setting, value in self.dialect.stamp(commit.stamp, through, number).items():
                commit.session.conf.set(setting, value)
            commit.execute(statement)
        branches = self.dialect.branches
        if branches is None or target.branch is None:
            return self._figures.last_version()
        commit.guard()
        published = commit.rows(branches.publish(commit.table.destination, target.branch))
        version: int | None = published[0]["updated_ref"]
        return version

    def _figures_of(self, commit: TableCommit, version: int | None) -> TableFigures | None:
        """Return the figures of a commit's table in a version."""
        assert self._figures is not None
        return None if version is None else self._figures.read(commit.table.destination, version)

    def _connected(self) -> SparkSession:
        session = self.sessions.session()
        if session is not self._session:
            self._forget()
            configure(session, writer_settings(self.dialect, self.config))
            self._figures = FigureReader(session, self.dialect)
            self._session = session
        return session

    def _steps(self, commit: TableCommit, statements: Statements) -> Iterator[str]:
        """Yield the statements that apply the steps of a commit.

        Without branches, each statement makes a version that readers see. Then rows after a
        truncate are applied in the same statement: a table that the source has filled again is
        never seen empty.
        """
        together = self.config.mode == "current" and self.dialect.branches is None
        truncate: Truncate | None = None
        for step in commit.table.steps:
            if truncate is not None and not (together and step.kind == "rows"):
                yield self._truncate(statements, truncate)
                truncate = None
            if step.kind == "truncate":
                truncated_at = statements.base + step.last.segment, step.last.ordinal
                truncate = Truncate(*truncated_at, step.event_time_us)
            else:
                read_staged(commit.session, commit.table, step, self.config.mode)
                yield self._statement(commit, statements, step, truncate)
                truncate = None
        if truncate is not None:
            yield self._truncate(statements, truncate)

    def _statement(
        self,
        commit: TableCommit,
        statements: Statements,
        step: StagedStep,
        truncate: Truncate | None,
    ) -> str:
        """Return the statement that applies a truncate, if any, and the staged rows after it."""
        if self.config.mode == "changelog":
            return statements.append()
        if truncate is not None:
            return statements.merge_current(
                rekey=False, soft_deletes=self.config.soft_deletes, truncate=truncate
            )
        if (
            self.config.mode == "current"
            and step.inserts_only
            and self._all_new(commit, statements)
        ):
            return statements.append_current(soft_deletes=False)
        return self._by_key(commit, statements, step)

    def _by_key(self, commit: TableCommit, statements: Statements, step: StagedStep) -> str:
        """Return the statement that updates, deletes or adds rows by their keys."""
        rekey, history = step.kind == "rekey", self.config.mode == "history"
        within, soft = "", self.config.soft_deletes
        if not rekey:
            within = self._within(commit, statements)
        if step.reads and _has_no_key(commit, statements, within):
            if history:
                return statements.append_history()
            return statements.append_current(soft_deletes=soft)
        if history:
            return statements.merge_history(rekey=rekey, within=within)
        return statements.merge_current(rekey=rekey, soft_deletes=soft, within=within)

    @staticmethod
    def _within(commit: TableCommit, statements: Statements) -> str:
        """Return a condition that limits keys to the range of the staged ones, if useful."""
        query = statements.bounds()
        return "" if query is None else statements.within(commit.rows(query)[0])

    def _truncate(self, statements: Statements, truncate: Truncate) -> str:
        match self.config.mode:
            case "changelog":
                return statements.truncated_changelog(truncate)
            case "current":
                return statements.truncate_current(truncate, soft_deletes=self.config.soft_deletes)
            case "history":
                return statements.truncate_history(truncate)

    def _all_new(self, commit: TableCommit, statements: Statements) -> bool:
        """Return whether the table is sure not to have the keys of inserts.

        That is so if the table has received all changes, above all deletes, of a source's table
        with an enforced key.
        """
        config = self.config
        filtered = config.filter is not None or bool(config.skipped_operations)
        declared = config.keys_of(*commit.table.source) is not None
        return not (statements.base or config.soft_deletes or filtered or declared)


def read_staged(session: SparkSession, table: StagedTable, step: StagedStep, mode: str) -> None:
    """Make the view `STAGED` of a session contain the rows of a step."""
    types = {column.name: sql_type(column.type) for column in table.columns.columns}
    fields = types | {name: _META_TYPES[name] for name in META.names}
    if mode == "history":
        fields |= {name: _META_TYPES[name] for name in VALIDITY.names}
    if step.kind == "rekey":
        fields |= {OLD_KEY + name: types[name] for name in table.key}
    schema = ", ".join(f"{quoted(name)} {type_}" for name, type_ in fields.items())
    session.read.schema(schema).parquet(*step.files).createOrReplaceTempView(STAGED)


def _written_table(target: LakeTarget, figures: TableFigures | None = None) -> WrittenTable:
    return WrittenTable(
        tuple(target.columns.values()), figures, int64_timestamps=target.int64_timestamps
    )


def _has_no_key(commit: TableCommit, statements: Statements, within: str) -> bool:
    """Return whether the table is sure to have no rows with keys within these limits.

    Keys that a snapshot has read need not be new to the table. A chunk comes after all changes that
    its read saw, so an insert or update that was captured meanwhile is in the table before it; a
    chunk may be read again; and an earlier snapshot, or an earlier life of the table, may have had
    the same keys. The journal no longer has enough to rule that out, but the table does. Chunks are
    ranges of keys, so the statistics of the table's files mostly answer the query without reading
    any file.

    The answer stays true until the next statement: only the sink adds rows, its earlier commits are
    finished, and if a commit is repeated at the same time, only one of the two takes effect.
    Pending changes do not matter: those of earlier commits are folded into the table already, and
    later ones are merged by their key.
    """
    return not commit.rows(f"SELECT 1 FROM {statements.table} AS t WHERE true{within} LIMIT 1")


def _make_branch(commit: TableCommit, target: LakeTarget, branches: Branches, through: int) -> None:
    """Find out which commits the table has, and make a branch at its newest snapshot."""
    heads = _heads(commit, target, branches)
    head = heads.get("main")
    snapshots = commit.rows(branches.snapshots(target.name))
    properties = table_properties(commit.session, target.name)
    last = last_commit(snapshots, head, properties, commit.stamp)
    if last is None and head is not None and _has_last_row(commit, target):
        last = through
    target.committed = -1 if last is None else last
    prefix, now = _branch_prefix(commit.owner), int(time.time())
    own_branches = [name for name in heads if name.startswith(prefix)]
    old_branches = [
        name
        for name in own_branches
        if now - _branch_time(name.removeprefix(prefix)) > _BRANCH_SECONDS
    ]
    commit.execute(*(branches.drop(target.name, name) for name in old_branches))
    branch = branch_name(commit.owner)
    commit.execute(branches.create(target.name, branch, head))
    if head is None and "main" in _heads(commit, target, branches):
        # The table is no longer empty, perhaps since before the branch was made. So it is not known
        # where the branch begins.
        commit.execute(branches.drop(target.name, branch))
        _make_branch(commit, target, branches, through)
    else:
        target.branch = branch


def branch_name(owner: TableOwner) -> str:
    """Return the name of a new branch of a writer.

    It is never one that was used before: a statement of a dead writer may still write to that
    branch.
    """
    return f"{_branch_prefix(owner)}{int(time.time()):x}_{secrets.token_hex(4)}"


def _branch_prefix(owner: TableOwner) -> str:
    return f"{BRANCH}{hashlib.sha256(owner.name.encode()).hexdigest()[:8]}_"


def _branch_time(name: str) -> int:
    """Return when a branch was made, in seconds since 1970, by its name without the prefix."""
    return int(name.partition("_")[0], 16)


def _heads(commit: TableCommit, target: LakeTarget, branches: Branches) -> Mapping[str, int]:
    """Return the newest snapshot of each branch."""
    return {row.name: row.id for row in commit.rows(branches.references(target.name))}


def _has_last_row(commit: TableCommit, target: LakeTarget) -> bool:
    """Return whether a changelog has the last row of the commit.

    This matters only if no snapshot with a stamp is left. In other modes, repeating a commit is
    harmless.
    """
    if commit.config.mode != "changelog" or not commit.table.steps:
        return False
    last = commit.table.steps[-1].last
    condition = f"df_position = {target.base + last.segment} AND df_ordinal = {last.ordinal}"
    return bool(commit.rows(f"SELECT 1 FROM {target.name} WHERE {condition} LIMIT 1"))
