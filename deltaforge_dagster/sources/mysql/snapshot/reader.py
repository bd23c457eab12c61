"""Snapshots of MySQL's tables, chunk by chunk.

A chunk is read by one unbuffered SELECT in a separate transaction. Its read view is:

==========================  ========================================================================
server                      the transaction sees
==========================  ========================================================================
MySQL, gtid_mode ON         everything in `gtid_executed` before it began, and perhaps more
MySQL without GTIDs         the log up to its end while the table was locked against writes, which
                            takes only as long as it takes to begin the transaction
MariaDB                     the log up to the position that the server reports
                            (`binlog_snapshot_position`)
==========================  ========================================================================

The transaction's first statement on the table protects the table from being altered. Only then are
its columns queried, and then the log's end, so that a statement that altered the table before is in
the log up to there.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
import pymysql

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PermissionMissing,
    PositionLost,
    SourceMisconfigured,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding, finding_errors, share_of_retention
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.retention import log_retention
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession, MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.service import service_of
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.catalog import captured_tables
from deltaforge_dagster.sources.mysql.schema.column_types import described_type, labels, labels_text
from deltaforge_dagster.sources.mysql.snapshot import chunks
from deltaforge_dagster.sources.mysql.snapshot.read_view import GtidReadView, PositionReadView
from deltaforge_dagster.sources.mysql.snapshot.result_rows import Rows, send_query
from deltaforge_dagster.sources.mysql.snapshot.selected import (
    SESSION,
    MysqlSelectedRows,
    SelectedColumn,
    quoted,
)
from deltaforge_dagster.sources.mysql.values.types import ValueForms
from deltaforge_dagster.sources.outbox import MysqlOutboxTables
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.rows.snapshot import SnapshotRows
from deltaforge_dagster.sources.snapshot import Chunk, ChunkRead, ReadView
from deltaforge_dagster.sources.stream import SocketTimeLimit, notice_loss
from deltaforge_dagster.sources.tables import TablePatterns
from deltaforge_dagster.tables import Column, TableSchema

_QUESTION_SECONDS = 30.0
_PLAN_SECONDS = 3600.0
_LOCK_SECONDS = 10
_MAY_NOT_LOCK = 1044  # ER_DBACCESS_DENIED_ERROR
_SLOWEST_READER = 3600
"""Seconds for which the server waits for a slow reader of a result (`net_write_timeout`)."""
_BYTES_PER_SECOND = 20 << 20
"""Assumed speed of one reader, for estimates."""

_COLUMNS = """
    SELECT COLUMN_NAME AS name, COLUMN_TYPE AS type, CHARACTER_SET_NAME AS charset,
        IS_NULLABLE AS nullable
    FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
    ORDER BY ORDINAL_POSITION
"""
_KEY = """
    SELECT COLUMN_NAME AS name, SUB_PART AS part FROM information_schema.STATISTICS
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND INDEX_NAME = 'PRIMARY' ORDER BY SEQ_IN_INDEX
"""
_SIZE = """
    SELECT COALESCE(TABLE_ROWS, 0) AS row_count FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
"""


@dataclass(frozen=True, slots=True)
class MysqlSnapshots:
    """Snapshots of one server's tables; implements `sources.snapshot.base.Snapshots`.

    Attributes:
        server: The server.
        source_id: `id` of the source.
        patterns: Which tables the stream captures.
        outboxes: Which of them are outboxes, which snapshots leave out.
        forms: The formats of values where there is a choice.
        rules: The column rules.
    """

    server: MysqlSourceServer
    source_id: str
    patterns: TablePatterns
    outboxes: MysqlOutboxTables
    forms: ValueForms
    rules: ColumnRules

    def watermark(self) -> str:
        """Return an empty watermark: the read view contains everything that is needed."""
        return "{}"

    def plan(
        self, tables: Sequence[str] | None, chunk_rows: int, where: str | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks of captured tables, table after table; see `Snapshots.plan`.

        Raises:
            SourceMisconfigured: There is no such table, or the stream does not capture it.
            PermissionMissing: The message names the grant.
        """
        for table in self._tables(tables):
            with self.server.query(_PLAN_SECONDS) as session:
                target = self.target(session, table)
                _run(session, *SESSION)
                if where is not None:
                    # The condition is the user's own.
                    session.texts(
                        f"SELECT 1 FROM {target.name} WHERE ({where}) LIMIT 0"  # noqa: S608
                    )
                yield from chunks.plan(session, target, chunk_rows, where)

    @contextmanager
    def reader(self) -> Generator[MysqlReader]:
        """Provide a reader of chunks, which connects for its first chunk."""
        reader = MysqlReader(self)
        try:
            yield reader
        finally:
            reader.close()

    def preflight(self, tables: Sequence[str] | None, parallel: int) -> list[Finding]:
        """Check that the log can be read, and is kept for as long as the snapshot may take."""
        chosen = self._tables(tables)
        findings: list[Finding] = []
        size = 0
        with (
            finding_errors("log settings", findings),
            self.server.query(_QUESTION_SECONDS) as session,
        ):
            server_log.facts(session, self.server.where)
            for name in chosen:
                rows = session.rows(
                    "SELECT COALESCE(DATA_LENGTH + INDEX_LENGTH, 0) AS size FROM"
                    " information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
                    *name.split(".", 1),
                )
                size += int(rows[0]["size"]) if rows else 0
            seconds = size / (_BYTES_PER_SECOND * max(min(parallel, len(chosen)), 1))
            retention = log_retention(session, service_of(session))
            text = f"the tables may take {seconds / 60:,.0f} minutes to read"
            kept = retention.seconds
            unsafe = retention.unsafe(session)
            if unsafe is not None:  # a forecast: the stream may keep up
                findings.append(replace(unsafe, level="warning"))
            elif kept == math.inf:
                findings.append(Finding("retention", "ok", f"{text}, and the log is kept for ever"))
            elif kept:
                longer = retention.longer(session)
                text += f", and log files are kept for {kept / 3600:g} hours{longer.advice}"
                findings.append(share_of_retention(text, seconds / kept, longer.remedy or ()))
        return findings

    def guard(self, start: Position) -> list[Finding]:
        """Check that the server still has its log after `start`; see `Snapshots.guard`."""
        assert isinstance(start, BinlogPosition)
        where = self.server.where
        try:
            with self.server.query(_QUESTION_SECONDS) as session:
                server_log.is_lost_here(session, where, start, server_log.facts(session, where))
        except PositionLost as lost:
            return [Finding("position", "error", str(lost))]
        except DeltaforgeError:
            pass  # the server is unreachable, or failing over; the caller checks again later
        return []

    def target(self, session: MysqlSession, table: str) -> chunks.MysqlSnapshotTable:
        """Return a table as the catalog describes it now.

        Raises:
            SourceMisconfigured: There is no such table.
            UnsupportedEvent: A column's type cannot be decoded.
        """
        db, _, name = table.partition(".")
        described = session.rows(_COLUMNS, db, name)
        if not described:
            raise SourceMisconfigured(
                f"{self.server.where}: there is no table {table}, or not for user"
                f" {self.server.user!r}"
            )
        key = session.rows(_KEY, db, name)
        key_names = {row["name"] for row in key}
        columns: dict[str, chunks.KeyColumn] = {}
        schema: list[Column] = []
        for number, row in enumerate(described, start=1):
            column_labels = labels(row["type"])
            try:
                type_ = described_type(row["type"], row["charset"], column_labels, self.forms)
            except UnsupportedEvent as error:
                raise UnsupportedEvent(
                    f"table {table}, column {row['name']} is not decoded: {error}"
                ) from error
            column = SelectedColumn(row["name"], type_, column_labels)
            columns[row["name"]] = chunks.KeyColumn(column, row["charset"] or "")
            data_type = type_.name + labels_text(column_labels)
            schema.append(Column(row["name"], data_type, None, row["nullable"] == "YES", number))
        chunk_key = tuple(columns[row["name"]] for row in key)
        if any(row["part"] is not None for row in key) or not all(
            part.has_literals for part in chunk_key
        ):
            chunk_key = ()
        as_read = TableSchema(
            db,
            None,
            name,
            tuple(schema),
            tuple(key_name for key_name in columns if key_name in key_names),
        )
        if self.rules.hides(as_read, key_names):  # stored bounds would show them
            chunk_key = ()
        return chunks.MysqlSnapshotTable(
            as_read,
            tuple(key_column.column for key_column in columns.values()),
            chunk_key,
            int(session.rows(_SIZE, db, name)[0]["row_count"]),
        )

    def _tables(self, names: Sequence[str] | None) -> list[str]:
        with self.server.query(_QUESTION_SECONDS) as session:
            captured = [
                table
                for table in captured_tables(session, self.patterns.matches)
                if not self.outboxes.has(*table.split(".", 1))
            ]
        if names is None:
            return captured
        absent = [name for name in names if name not in captured]
        if absent:
            raise SourceMisconfigured(
                f"{self.server.where}: not captured: {', '.join(absent)}; a table must match "
                "source.config.tables, be no outbox, and be there for user "
                f"{self.server.user!r} to see"
            )
        return list(names)


class MysqlReader:
    """Reads chunks, one after another, over one connection; not thread-safe."""

    def __init__(self, snapshots: MysqlSnapshots) -> None:
        self._snapshots = snapshots
        self._connection: pymysql.Connection | None = None
        self._gtids = False
        self._busy = False

    def read(self, chunk: Chunk, watermark: str) -> ChunkRead:  # noqa: ARG002 - read view suffices
        """Begin to read a chunk; see `sources.snapshot.base.ChunkReader`."""
        server = self._snapshots.server
        if self._busy:  # the rows of the chunk before were not read to their end
            self.close()
        connection = self._connected()
        with SocketTimeLimit(_descriptor(connection), _QUESTION_SECONDS) as cutter:
            try:
                return self._read(connection, chunk)
            except pymysql.MySQLError as error:
                self.close()
                raise server.problem(error, cutter, _QUESTION_SECONDS) from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; the next chunk opens another."""
        connection, self._connection, self._busy = self._connection, None, False
        if connection is not None and connection.open:
            # COM_QUIT cannot be sent while rows are pending.
            connection._force_close()  # noqa: SLF001

    def _connected(self) -> pymysql.Connection:
        if self._connection is None:
            where = self._snapshots.server.where
            connection = self._snapshots.server.connect(_QUESTION_SECONDS)
            self._connection = connection
            notice_loss(_descriptor(connection))
            session = MysqlSession(connection)
            settings = server_log.facts(session, where)
            self._gtids = settings.gtids and not session.is_mariadb
            _run(session, *SESSION[:-1], f"SET net_write_timeout = {_SLOWEST_READER}")
            _run(session, f"SET lock_wait_timeout = {_LOCK_SECONDS}")
            _run(session, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        return self._connection

    def _read(self, connection: pymysql.Connection, chunk: Chunk) -> ChunkRead:
        snapshots, session = self._snapshots, MysqlSession(connection)
        self._busy = True
        # For the catalog's texts; the chunk's are sent unconverted (the last statement of SESSION).
        _run(session, "SET character_set_results = utf8mb4")
        name = ".".join(map(quoted, chunk.table.split(".", 1)))
        read_view = self._begin(session, name)
        session.rows(f"SELECT 1 FROM {name} LIMIT 0")  # noqa: S608 - quoted
        target = snapshots.target(session, chunk.table)
        position = server_log.tail(session, snapshots.server.where, gtids=False)
        clock = session.rows("SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED) AS us")
        _run(session, SESSION[-1])
        selected = MysqlSelectedRows(target.columns, target.table.primary_key)
        rows = SnapshotRows(
            snapshots.source_id,
            chunk,
            read_view,
            table=target.table,
            rules=snapshots.rules,
            ts_us=int(clock[0]["us"]),
        )
        conditions = []
        index = ""
        if chunk.kind == "key":
            conditions = chunks.bounds([part.column.name for part in target.key], chunk)
            index = " FORCE INDEX (PRIMARY)"
        if chunk.where is not None:
            conditions.append(f"({chunk.where})")
        answer = send_query(
            connection,
            f"SELECT {', '.join(selected.expressions)}"  # noqa: S608 - quoted names, literals
            f" FROM {target.name}{index} WHERE {' AND '.join(conditions) or 'TRUE'}",
        )
        return ChunkRead(rows.table, read_view, position, self._batches(answer, selected, rows))

    def _batches(
        self, answer: Iterator[Rows], selected: MysqlSelectedRows, rows: SnapshotRows
    ) -> Iterator[pa.RecordBatch]:
        connection = self._connection
        assert connection is not None
        try:
            for buffer in answer:
                yield rows.batch(*selected.write(buffer))
            _run(MysqlSession(connection), "COMMIT")
            self._busy = False
        except pymysql.MySQLError as error:
            raise self._snapshots.server.problem(error) from error

    def _begin(self, session: MysqlSession, table: str) -> ReadView:
        """Begin a transaction, and return its read view."""
        begin = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
        if self._gtids:
            executed = server_log.executed(session)  # first: see `read_view`
            _run(session, begin)
            return GtidReadView(executed)
        if session.is_mariadb:
            _run(session, begin)
            rows = session.rows("SHOW STATUS LIKE 'binlog_snapshot_%'")
            status = {row["Variable_name"].lower(): row["Value"] for row in rows}
            file, pos = status["binlog_snapshot_file"], int(status["binlog_snapshot_position"])
            return PositionReadView(BinlogPosition(file, pos))
        with self._locked(table) as locked:
            log_end = server_log.tail(locked, self._snapshots.server.where, gtids=False)
            _run(session, begin)
        return PositionReadView(log_end)

    @contextmanager
    def _locked(self, table: str) -> Generator[MysqlSession]:
        """Lock a table against writes, after waiting for the transactions that write it."""
        server = self._snapshots.server
        with server.query(_QUESTION_SECONDS) as session:
            # Without autocommit, InnoDB takes its own table lock as well.
            _run(session, "SET autocommit = 0", f"SET lock_wait_timeout = {_LOCK_SECONDS}")
            _run(session, f"SET innodb_lock_wait_timeout = {_LOCK_SECONDS}")
            try:
                _run(session, f"LOCK TABLES {table} READ")
            except pymysql.OperationalError as error:
                if error.args[0] != _MAY_NOT_LOCK:
                    raise
                raise PermissionMissing(
                    f"{server.where}: user {server.user!r} may not lock {table}, which a snapshot"
                    " needs on a server without GTIDs",
                    remedy=(
                        f"GRANT LOCK TABLES, SELECT ON {table.split('.', maxsplit=1)[0]}.*"
                        f" TO {session.account}"
                    ),
                ) from error
            yield session
            _run(session, "UNLOCK TABLES")


def _descriptor(connection: pymysql.Connection) -> int:
    return int(connection._sock.fileno())  # noqa: SLF001 - PyMySQL has no other way


def _run(session: MysqlSession, *statements: str) -> None:
    for statement in statements:
        session.rows(statement)
