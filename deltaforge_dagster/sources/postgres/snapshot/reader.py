"""Snapshots of PostgreSQL's tables, chunk by chunk.

A chunk is read by `COPY (SELECT ...) TO STDOUT` in a separate transaction, REPEATABLE READ. Its
first statement locks the table against being altered, as every SELECT does, before the
transaction's snapshot is taken: if the table were rewritten in between, the snapshot would see no
rows.

The rows are those that the stream would send: with the publication's column list and row filter,
and with the same conversion of values.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import psycopg
import pyarrow as pa
from psycopg import sql

from deltaforge_dagster.errors import (
    PermissionMissing,
    Retryable,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding, finding_errors, share_of_retention
from deltaforge_dagster.sources.postgres.connection import catalog, identity
from deltaforge_dagster.sources.postgres.connection.identity import insert_lsn
from deltaforge_dagster.sources.postgres.connection.refusals import translate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.connection.service import more_log
from deltaforge_dagster.sources.postgres.decode.types import PostgresValueType, value_type
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.snapshot import chunks
from deltaforge_dagster.sources.postgres.snapshot.column_fills import column_fills
from deltaforge_dagster.sources.postgres.snapshot.read_view import Watermark, XidReadView
from deltaforge_dagster.sources.postgres.snapshot.selected import PostgresSelectedRows
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.rows.snapshot import SnapshotRows
from deltaforge_dagster.sources.snapshot import Chunk, ChunkRead
from deltaforge_dagster.sources.stream import SocketTimeLimit, notice_loss
from deltaforge_dagster.sources.tables import TablePatterns
from deltaforge_dagster.tables import TableSchema

_QUESTION_SECONDS = 30.0
_PLAN_SECONDS = 3600.0
_READ_SECONDS = 86_400.0
_OPEN_SECONDS = 10.0
"""Seconds for which a read waits for transactions that were open at the watermark."""
_POLL_SECONDS = 0.05
_LOCK_MS = 10_000  # a read waits only for who alters, truncates or rewrites the table
_SAMPLE_SECONDS = 5.0
_SAMPLES = 20  # of the last 100 s

_BLOCK_HEADERS = (24, 40)
"""Sizes of the page headers of the log.

An LSN right after a header means the end of the page before.
"""

_ROW_FILTER_VERSION = 150000  # publications have row filters from 15 on


@dataclass(frozen=True, slots=True)
class PostgresSnapshots:
    """Snapshots of one database's tables; implements `sources.snapshot.base.Snapshots`.

    Attributes:
        server: The server.
        source_id: `id` of the source.
        slot, publication: Names of the stream's slot and publication.
        patterns: Which tables the stream captures.
        rules: The column rules.
        built_in: The built-in types, with the formats of their values.
    """

    server: PostgresSourceServer
    source_id: str
    slot: str
    publication: str
    patterns: TablePatterns
    rules: ColumnRules
    built_in: Mapping[int, PostgresValueType]

    def watermark(self) -> str:
        """Return a watermark with the transactions that are open now.

        Before that, tables that match are added to the publication, if we created it, so that all
        changes of transactions that begin later are sent.
        """
        with self.server.query(_QUESTION_SECONDS) as connection:
            publications.extend(connection, self.server, self.publication, self.patterns)
            return Watermark.now(connection).to_json()

    def plan(
        self, tables: Sequence[str] | None, chunk_rows: int, where: str | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks of captured tables, table after table; see `Snapshots.plan`.

        Raises:
            SourceMisconfigured: There is no such table, the stream does not capture it, or `where`
                is not a valid condition.
            PermissionMissing: The message names the grant.
        """
        for table in self._tables(tables):
            with self.server.query(_PLAN_SECONDS) as connection, self._readable(connection, table):
                target = chunks.target(connection, table)
                version = connection.info.server_version
                sent = identity.sent_schema(connection, table, self.publication, version)
                if set(target.key) != set(sent.primary_key):
                    # The stream's key differs, so it does not show when a row's primary key
                    # changes.
                    target = replace(target, key=())
                elif self.rules.hides(sent, target.key):
                    # Bounds by key are stored with the chunks, and would show hidden values.
                    target = replace(target, operators=None)
                connection.execute(_select(target, [], _conditions(where)) + sql.SQL(" LIMIT 0"))
                yield from chunks.plan(connection, target, chunk_rows, where)

    @contextmanager
    def reader(self) -> Generator[PostgresReader]:
        """Provide a reader of chunks, which connects for its first chunk."""
        chunk_reader = PostgresReader(self)
        try:
            yield chunk_reader
        finally:
            chunk_reader.close()

    def preflight(
        self,
        tables: Sequence[str] | None,
        parallel: int,  # noqa: ARG002 - a slot keeps log by size, not by time
    ) -> list[Finding]:
        """Check slot and publication, and whether the slot may retain enough log.

        The estimate is that twice the tables' size is written to the log while the snapshot is
        read.
        """
        chosen = self._tables(tables)
        findings: list[Finding] = []
        with self.server.query(_QUESTION_SECONDS) as connection:
            with finding_errors("slot", findings):
                slots.check(catalog.slot(connection, self.slot), self.server, self.slot)
            with finding_errors("publication", findings):
                publications.check(connection, self.server, self.publication, self.patterns)
            row = connection.execute(
                """
                SELECT 2 * coalesce(sum(pg_total_relation_size(leaf.relid)), 0)::int8,
                       (SELECT setting::int8 * 1048576 FROM pg_settings
                         WHERE name = 'max_slot_wal_keep_size')
                  FROM unnest(%s::oid[]) AS root, pg_partition_tree(root) AS leaf
                """,
                ([table.oid for table in chosen],),
            ).fetchone()
            written, limit = row if row is not None else (0, None)
            findings.append(_retention(connection, written, limit))
        return findings

    def guard(
        self,
        start: Position,  # noqa: ARG002 - the slot knows what is needed
    ) -> list[Finding]:
        """Check that the slot still retains the unread log; see `Snapshots.guard`."""
        findings: list[Finding] = []
        with suppress(Retryable), self.server.query(_QUESTION_SECONDS) as connection:
            existing = catalog.slot(connection, self.slot)
            with finding_errors("slot", findings):
                if slots.check(existing, self.server, self.slot).unreserved:
                    text = (
                        f"replication slot {self.slot!r} needs log that the server removes at its "
                        "next checkpoint (max_slot_wal_keep_size)"
                    )
                    findings.append(Finding("slot", "warning", text))
        return findings

    def _tables(self, names: Sequence[str] | None) -> list[catalog.PublishableTable]:
        """Return the captured tables with these full names, or all; each must be published."""
        with self.server.query(_QUESTION_SECONDS) as connection:
            sent = catalog.published(connection, self.publication) or frozenset()
            captured = {
                table.full_name: table
                for table in catalog.tables(connection)
                if (table.schema, table.name) in sent
                and self.patterns.matches(table.schema, table.name)
            }
        if names is None:
            return list(captured.values())
        absent = [name for name in names if name not in captured]
        if absent:
            raise SourceMisconfigured(
                f"{self.server.where}: not captured: {', '.join(absent)}; a table must match "
                f"source.config.tables, and publication {self.publication!r} must send it"
            )
        return [captured[name] for name in names]

    @contextmanager
    def _readable(
        self, connection: psycopg.Connection, table: catalog.PublishableTable
    ) -> Generator[None]:
        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            name = table.identifier.as_string(connection)
            raise PermissionMissing(
                f"{self.server.where}: role {self.server.user!r} may not read {name} (of a "
                "table with row-level security only members of its owner may, "
                "and roles with BYPASSRLS)",
                remedy=f'GRANT SELECT ON {name} TO "{self.server.user}"',
            ) from error


@dataclass(slots=True)
class PostgresReader:
    """Reads chunks, one after another, over one connection; not thread-safe."""

    snapshots: PostgresSnapshots
    _connection: psycopg.Connection | None = None
    _samples: list[Watermark] = field(default_factory=list)
    _sampled_at: float = field(default_factory=time.monotonic)
    _types: dict[int, PostgresValueType] = field(default_factory=dict)

    def read(self, chunk: Chunk, watermark: str) -> ChunkRead:
        """Begin to read a chunk; see `sources.snapshot.base.ChunkReader`."""
        connection = self._idle()
        with SocketTimeLimit(connection.fileno(), _QUESTION_SECONDS + _OPEN_SECONDS) as cutter:
            try:
                return self._read(connection, chunk, Watermark.parse(watermark))
            except psycopg.Error as error:
                self.close()
                server = self.snapshots.server
                raise server.problem(error, _QUESTION_SECONDS, cutter) from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; the next chunk opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _idle(self) -> psycopg.Connection:
        """Return the open connection if it is not in a transaction, otherwise a new one."""
        if self._connection is not None and (
            self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        ):
            self.close()
        if self._connection is None:
            self._connection = self.snapshots.server.connect(_READ_SECONDS)
            notice_loss(self._connection.fileno())
        return self._connection

    def _read(
        self, connection: psycopg.Connection, chunk: Chunk, watermark: Watermark
    ) -> ChunkRead:
        snapshots = self.snapshots
        table = self._table(connection, chunk.table)
        with snapshots._readable(connection, table):  # noqa: SLF001 - both classes belong together
            read_view, position, ts_us = self._begin(connection, table, watermark)
            version = connection.info.server_version
            sent = identity.sent_schema(connection, table, snapshots.publication, version)
            types = {column.name: self._type(column.type_oid or 0) for column in sent.columns}
            logged = _with_fills(connection, identity.logged_schema(sent), list(types.values()))
            target = chunks.target(connection, table)
            conditions = [*_bounds(target, chunk), *_conditions(chunk.where)]
            conditions += _conditions(_row_filter(connection, table, snapshots.publication))
            query = _select(target, list(types), conditions)
            # The module imports the compiler.
            from deltaforge_dagster.sources.postgres.snapshot import copy_out  # noqa: PLC0415

            lines = copy_out.buffers(connection, sql.SQL("COPY ({}) TO STDOUT").format(query))
        rows = SnapshotRows(
            snapshots.source_id, chunk, read_view, table=logged, rules=snapshots.rules, ts_us=ts_us
        )
        batches = self._batches(lines, PostgresSelectedRows(types, logged.primary_key), rows)
        return ChunkRead(rows.table, read_view, position, batches)

    def _batches(
        self, lines: Iterator[Bytes | bytes], selected: PostgresSelectedRows, rows: SnapshotRows
    ) -> Iterator[pa.RecordBatch]:
        connection = self._connection
        assert connection is not None
        try:
            for buffer in lines:
                yield rows.batch(*selected.write(buffer))
            connection.execute("COMMIT")
        except psycopg.Error as error:
            server = self.snapshots.server
            raise translate(error.sqlstate, str(error), server.where, server.user) from error

    def _begin(
        self, connection: psycopg.Connection, table: catalog.PublishableTable, watermark: Watermark
    ) -> tuple[XidReadView, LsnPosition, int]:
        """Begin a transaction that sees all transactions that were open at the watermark.

        Returns its read view, a position before which the log has everything that it sees, and the
        time in microseconds since 1970.
        """
        deadline = time.monotonic() + _OPEN_SECONDS
        while True:
            self._sample(connection)
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            # The lock must precede the transaction's snapshot; see the module's docstring.
            only = sql.SQL("") if table.partitioned else sql.SQL("ONLY ")
            connection.execute(
                sql.SQL("LOCK TABLE {}{} IN ACCESS SHARE MODE").format(only, table.identifier)
            )
            row = connection.execute(
                """
                SELECT txid_current_snapshot()::text,
                       current_setting('wal_block_size')::int8,
                       (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
                       to_regclass(%s)::oid::int8
                """,
                (table.identifier.as_string(connection),),
            ).fetchone()
            assert row is not None
            snapshot, block, ts_us, oid = row
            end = insert_lsn(connection)  # after the snapshot: all that it sees was logged before
            if oid != table.oid:
                raise SourceUnavailable(
                    f"{self.snapshots.server.where}: table {table.full_name} was just replaced"
                )
            read_view = XidReadView.of(snapshot, LsnPosition(watermark.lsn))
            if read_view.sees(watermark.running):
                break
            connection.execute("ROLLBACK")
            if time.monotonic() > deadline:
                raise SourceUnavailable(
                    f"{self.snapshots.server.where}: a transaction that was open when the snapshot "
                    f"began has not ended{slots.oldest_transaction(connection)}; table "
                    f"{table.full_name} cannot be read before that"
                )
            time.sleep(_POLL_SECONDS)
        passed = [sample.lsn for sample in self._samples if read_view.sees(sample.running)]
        return (
            replace(read_view, since=LsnPosition(max([watermark.lsn, *passed]))),
            LsnPosition(_record_end(end, block)),
            ts_us,
        )

    def _sample(self, connection: psycopg.Connection) -> None:
        """Take a watermark every few seconds; a read uses the newest whose transactions it sees."""
        if time.monotonic() - self._sampled_at > _SAMPLE_SECONDS:
            self._sampled_at = time.monotonic()
            self._samples = [*self._samples[-_SAMPLES:], Watermark.now(connection)]

    def _table(self, connection: psycopg.Connection, name: str) -> catalog.PublishableTable:
        row = connection.execute(
            """
            SELECT c.oid::int8, n.nspname, c.relname, c.relkind = 'p', NULL::int8
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.relkind IN ('r', 'p') AND n.nspname || '.' || c.relname = %s
            """,
            (name,),
        ).fetchone()
        if row is None:
            raise SourceMisconfigured(f"{self.snapshots.server.where}: there is no table {name}")
        return catalog.PublishableTable(*row)

    def _type(self, oid: int) -> PostgresValueType:
        if oid not in self._types:
            type_catalog = catalog.PostgresCatalog(self.snapshots.server.query)
            self._types[oid] = value_type(oid, type_catalog, built_in=self.snapshots.built_in)
        return self._types[oid]


def _with_fills(
    connection: psycopg.Connection, table: TableSchema, types: Sequence[PostgresValueType]
) -> TableSchema:
    """Return a table with the fills of its columns."""
    numbers = [column.number for column in table.columns]
    types_by_number = {
        number: type_ for number, type_ in zip(numbers, types, strict=True) if number is not None
    }
    fills = column_fills(connection, table.relation or 0, types_by_number, rewritten=None)
    columns = (replace(column, fill=fills.get(column.number or 0)) for column in table.columns)
    return replace(table, columns=tuple(columns))


def _select(
    target: chunks.PostgresSnapshotTable,
    columns: Sequence[str],
    conditions: Sequence[sql.Composable],
) -> sql.Composed:
    """Return the SELECT of rows that satisfy all conditions."""
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)), target.source
    )
    if conditions:
        query += sql.SQL(" WHERE ") + sql.SQL(" AND ").join(conditions)
    return query


def _bounds(target: chunks.PostgresSnapshotTable, chunk: Chunk) -> list[sql.Composed]:
    """Return the SQL conditions for a chunk's bounds."""
    if chunk.kind == "key":
        after = [] if chunk.after is None else [target.bound(">", chunk.after)]
        return after + ([] if chunk.upto is None else [target.bound("<=", chunk.upto)])
    if chunk.kind == "whole":
        return []
    bounds = [("ctid >= {}::tid", chunk.after), ("ctid < {}::tid", chunk.upto)]
    return [
        sql.SQL(text).format(sql.Literal(f"({int(block)},0)"))
        for text, block in bounds
        if block is not None
    ]


def _conditions(text: str | None) -> list[sql.Composed]:
    """Return a list with the SQL condition `text`, or an empty list for None."""
    return [] if text is None else [sql.SQL("({})").format(sql.SQL(text))]


def _row_filter(
    connection: psycopg.Connection, table: catalog.PublishableTable, publication: str
) -> str | None:
    """Return the publication's row filter for a table; None if there is none.

    Manual: "Row Filters".
    """
    if connection.info.server_version < _ROW_FILTER_VERSION:
        return None
    row = connection.execute(
        "SELECT rowfilter FROM pg_publication_tables"
        " WHERE pubname = %s AND schemaname = %s AND tablename = %s",
        (publication, table.schema, table.name),
    ).fetchone()
    return None if row is None else row[0]


def _record_end(lsn: int, block: int) -> int:
    """Return the end of the last record before an LSN, which may be followed by a page header."""
    inside = lsn % block
    return lsn - inside if inside in _BLOCK_HEADERS else lsn


def _retention(connection: psycopg.Connection, written: int, limit: int | None) -> Finding:
    text = f"about {written >> 20:,} MiB of log may be written while the tables are read"
    if limit is None or limit <= 0:
        return Finding("retention", "ok", f"{text}, and the slot may keep any amount")
    more, remedy = more_log(connection, written)
    finding = share_of_retention(
        f"{text}, and the slot may keep {limit >> 20:,} MiB (max_slot_wal_keep_size)",
        written / limit,
        remedy,
    )
    return replace(finding, text=f"{finding.text}; {more}") if finding.bad else finding
