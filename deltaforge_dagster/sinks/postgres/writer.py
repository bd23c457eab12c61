"""Applies the staged changes of a table, in one transaction with the record that it has them.

The transaction locks the table's row in `commits`, and changes nothing else if the table has the
commit already. Otherwise the rows of each step are copied to a temporary table, and a few
statements apply them (`statements`). The guard is called before the transaction commits, while the
lock is held: a run that has lost its lease changes nothing, however late it resumes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pyarrow as pa

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PermissionMissing,
    SinkUnavailable,
    TableRejected,
)
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.postgres import commits
from deltaforge_dagster.sinks.postgres.copy_rows import HEADER, TRAILER, copy_rows, has_nul, wire
from deltaforge_dagster.sinks.postgres.server import (
    NAME_BYTES,
    NOT_PERMITTED,
    TargetServer,
    cut,
    end_former,
    quoted,
    translated,
)
from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.statements import (
    PostgresStatements,
    TargetColumn,
    staged_meta,
)
from deltaforge_dagster.sinks.postgres.target import PostgresTarget
from deltaforge_dagster.sinks.tables.staged import (
    META,
    OLD_KEY,
    VALIDITY,
    StagedStep,
    StagedTable,
    lacking,
    staged_batches,
)
from deltaforge_dagster.sinks.tables.writer import TableOwner, WrittenTable

_DIGEST = 12  # hexadecimal digits, 48 bits
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_META_TYPES = {field.name: field.type for field in (*META, *VALIDITY)}


class PostgresWriter:
    """Applies staged changes to the tables of a sink; used by one thread. Implements `TableWriter`.

    Args:
        config: Options of the sink.
        owner: Who writes.
    """

    def __init__(self, config: PostgresSinkConfig, owner: TableOwner) -> None:
        self._config = config
        self._owner = owner
        self._server = TargetServer.from_dsn(
            config.dsn.get_secret_value(),
            owner.sink_id,
            session_name(owner),
        )
        self._connection: psycopg.Connection | None = None
        self._working = threading.Lock()

    def commit(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
    ) -> WrittenTable:
        """Apply the changes of a table, unless it has them; see `TableWriter.commit`.

        The guard is also called before the transaction is committed, while the table is locked.

        Raises:
            TableRejected: The table cannot take the changes; other tables are not affected.
            SinkUnavailable: The server cannot be reached now, or somebody holds a lock.
            AuthFailed, PermissionMissing, SinkRejected: The server refuses the sink.
        """
        with self._target(table, guard, exists=exists) as target:
            before = commits.lock(target.connection, target.name)
            row = target.open(before)
            relation = row.relation
            assert relation is not None
            if through > row.through:
                row = target.rename(row)
                columns = target.fit(relation, ours=before.relation == relation)
                statements = PostgresStatements(
                    target.sql, columns, table.key, table.absent, row.base
                )
                for step in table.steps:
                    StepApplication(target, statements).apply(step)
                row = replace(row, through=through)
            if row != before:
                commits.write(target.connection, target.name, row)
            figures = None if row == before else target.figures(relation)
            return WrittenTable(
                [(column.name, column.type) for column in target.columns(relation)], figures
            )

    def recreate(self, table: StagedTable, guard: SendGuard) -> Sequence[tuple[str, str]]:
        """Replace a table by one without rows.

        See `TableWriter.recreate`, and `commit` for what is raised.
        """
        with self._target(table, guard) as target:
            row = target.recreate(commits.lock(target.connection, target.name))
            commits.write(target.connection, target.name, row)
            assert row.relation is not None
            return [(column.name, column.type) for column in target.columns(row.relation)]

    def close(self) -> None:
        """Disconnect, which ends what is under way; may be called twice, and from any thread."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        cut(connection)
        if self._working.acquire(blocking=False):
            try:
                connection.close()
            finally:
                self._working.release()

    @contextmanager
    def _target(
        self, table: StagedTable, guard: SendGuard, *, exists: bool = False
    ) -> Iterator[PostgresTarget]:
        """Provide a table in a transaction that is committed at the end of the block."""
        with self._working:
            guard()
            connection = self._connected()
            target = PostgresTarget(connection, self._config, self._owner, table, exists)
            target.check_names()
            problem: DeltaforgeError | None = None
            try:
                with connection.transaction():
                    yield target
                    guard()
            except psycopg.errors.LockNotAvailable as error:
                connection.close()  # the next connection ends former holders first
                problem = self._problem(error, target)
            except psycopg.Error as error:
                problem = self._problem(error, target)
            finally:
                if connection.closed or connection is not self._connection:
                    connection.close()
                    self._connection = None
            if problem is not None:
                # Not chained: the server's text may quote a value of a row.
                raise problem

    def _problem(self, error: psycopg.Error, target: PostgresTarget) -> DeltaforgeError:
        server = self._server
        return translated(error, server.where, server.user, target.label, target.name)

    def _connected(self) -> psycopg.Connection:
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._server.connect()
            try:
                self._set_up(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return connection

    def _set_up(self, connection: psycopg.Connection) -> None:
        where, problem = self._server.where, None
        try:
            end_former(connection)
            commits.set_up(connection)
        except psycopg.Error as error:
            problem = error.sqlstate
            if problem is None:
                raise SinkUnavailable(f"{where}: connection lost") from None
        if problem == NOT_PERMITTED:
            raise PermissionMissing(
                f"{where}: role {self._server.user!r} may not make the table {commits.COMMITS}; "
                "make its schema, or make the role the owner of that schema",
                remedy=f"CREATE SCHEMA {commits.SCHEMA} AUTHORIZATION {quoted(self._server.user)}",
            )
        if problem is not None:
            raise SinkUnavailable(
                f"{where}: the table {commits.COMMITS} cannot be made (SQLSTATE {problem})"
            )


def session_name(owner: TableOwner) -> str:
    """Return the `application_name` of a sink's sessions; it differs between installations, too."""
    digest = hashlib.sha256(owner.name.encode()).hexdigest()[:_DIGEST]
    return f"deltaforge:{digest}:{owner.pipeline}:{owner.sink_id}"[:NAME_BYTES]


class StepApplication:
    """Applies steps to a table.

    Args:
        target: The table, in a transaction.
        statements: What applies them.
    """

    def __init__(self, target: PostgresTarget, statements: PostgresStatements) -> None:
        self._target = target
        self._connection = target.connection
        self._config = target.config
        self._statements = statements

    def apply(self, step: StagedStep) -> None:
        """Apply a step."""
        if step.kind == "truncate":
            self._truncate(step)
            return
        rekey = step.kind == "rekey"
        self._stage(step, rekey=rekey)
        for statement in self._applying(rekey=rekey):
            self._connection.execute(statement)
        self._connection.execute(self._statements.unstage())

    def _applying(self, *, rekey: bool) -> Iterator[str]:
        """Yield the statements that apply the rows in the temporary table."""
        statements, soft = self._statements, self._config.soft_deletes
        mode, absent = self._config.mode, bool(self._statements.lacked)
        if mode == "changelog":
            yield statements.append()
        elif mode == "current":
            if rekey:
                if absent:
                    yield statements.fill(rekey=True, current=False)
                yield statements.delete_old(soft_deletes=soft)
            yield statements.merge_current(absent=absent and not rekey, soft_deletes=soft)
        else:
            if absent:
                yield statements.fill(rekey=rekey, current=True)
            if rekey:
                yield statements.close_old()
            yield statements.close()
            yield statements.add_versions()

    def _truncate(self, step: StagedStep) -> None:
        time = _EPOCH + timedelta(microseconds=step.event_time_us)
        match self._config.mode:
            case "changelog":
                values = (self._statements.base + step.last.segment, step.last.ordinal, time)
                self._connection.execute(self._statements.truncated_changelog(), values)
            case "current":
                soft = self._config.soft_deletes
                self._connection.execute(self._statements.truncate_current(soft_deletes=soft))
            case "history":
                self._connection.execute(self._statements.truncate_history(), [time])

    def _stage(self, step: StagedStep, *, rekey: bool) -> None:
        """Copy the rows of a step to the temporary table."""
        statements = self._statements
        columns = self._target.table.columns.arrow
        meta = staged_meta(self._config.mode, exact_keys=statements.exact_keys)
        absent = self._config.mode != "changelog" and bool(statements.lacked)
        fields: list[pa.Field[Any]] = [
            *columns,
            *(pa.field(name, _META_TYPES[name]) for name in meta),
        ]
        if absent:
            fields.append(META.field("df_absent"))
        if rekey:
            fields += [
                pa.field(OLD_KEY + key.staged, columns.field(key.number).type)
                for key in statements.keys
            ]
        self._connection.execute(statements.stage(meta, absent=absent, rekey=rekey))
        with self._connection.cursor() as cursor, cursor.copy(statements.copy()) as copy:
            copy.write(HEADER)
            for batch in staged_batches(step, pa.schema(fields)):
                copy.write(self._rows(batch, statements.lacked if absent else ()))
            copy.write(TRAILER)

    def _rows(self, batch: pa.RecordBatch, lacked: Sequence[TargetColumn]) -> memoryview:
        """Return rows in COPY's format; a boolean for each in `lacked` replaces `df_absent`."""
        sent: list[pa.Array[Any]] = []
        for name in batch.schema.names:
            column = batch.column(name)
            if name == "df_absent":
                sent += [pa.array(lacking(column, target.staged)) for target in lacked]
                continue
            values = wire(column)
            if has_nul(values):
                raise TableRejected(
                    f"{self._target.label}: a value of its column {name} has the character NUL, "
                    "which PostgreSQL's texts cannot have; replace it in the source or with a "
                    "processor, or leave the column out with a column rule"
                )
            sent.append(values)
        return copy_rows(sent)
