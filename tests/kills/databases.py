"""Databases that the workload writes to, and that pipelines read."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
from psycopg.rows import dict_row
from pymysql.cursors import DictCursor

from deltaforge_lab.servers import mysql
from tests.kills.ends import Row
from tests.kills.workload import LEDGER, TABLE


class PostgresConnection:
    """A writer's connection to PostgreSQL."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None

    def transaction(self, statements: Sequence[str]) -> None:
        """Run statements in one transaction, sent at once."""
        self._run("; ".join(["BEGIN", *statements, "COMMIT"]))

    def count(self, query: str) -> int:
        """Return a number."""
        row = self._run(query).fetchone()
        assert row is not None
        return int(row[0])

    def log_end(self) -> int:
        """Return the end of the write-ahead log."""
        return self.count("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statement: str) -> psycopg.Cursor[Any]:
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._dsn, autocommit=True, connect_timeout=5)
                # The test server's default would let the log's durable end lag behind a commit.
                self._connection.execute("SET synchronous_commit = on")
            return self._connection.execute(statement)
        except psycopg.OperationalError as error:
            self.close()
            raise ConnectionError(str(error)) from error


class PostgresDatabase:
    """A database of a PostgreSQL server.

    Attributes:
        dsn: Where it is.
        slot: Name of the replication slot that the pipeline uses.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.slot = f"kills_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(dsn) as connection:
            connection.execute(TABLE)
            connection.execute("ALTER TABLE items REPLICA IDENTITY FULL")
            connection.execute(LEDGER)

    def connect(self) -> PostgresConnection:
        """Return a connection for a writer."""
        return PostgresConnection(self.dsn)

    def source(self, name: str, *, chunk_rows: int) -> str:
        """Return the pipeline's source."""
        return (
            f'{{type: postgres, config: {{id: {name}-source, dsn: "{self.dsn}", slot: {self.slot}, '
            f"publication: {self.slot}, tables: [public.items], {_snapshot(chunk_rows)}}}}}"
        )

    def rows(self) -> dict[int, Row]:
        """Return the rows of the table, by their keys."""
        with psycopg.connect(self.dsn, row_factory=dict_row) as connection:
            return {row["id"]: row for row in connection.execute("SELECT * FROM items")}

    def confirmed(self) -> int | None:
        """Return the slot's confirmed position; None while the server is not there."""
        try:
            with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                row = connection.execute(
                    "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots"
                    " WHERE slot_name = %s",
                    [self.slot],
                ).fetchone()
        except psycopg.OperationalError:
            return None
        return None if row is None else int(row[0])

    def drop_slot(self) -> None:
        """Let the server forget the pipeline."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active",
                [self.slot],
            )
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s",
                [self.slot],
            )


class MysqlConnection:
    """A writer's connection to MySQL."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: pymysql.Connection[Any] | None = None

    def transaction(self, statements: Sequence[str]) -> None:
        """Run statements in one transaction."""
        self._run("BEGIN", *statements, "COMMIT")

    def count(self, query: str) -> int:
        """Return a number."""
        return int(self._run(query)[0])

    def log_end(self) -> int:
        """Return zero: the server keeps its log whatever the pipeline does."""
        return 0

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, *statements: str) -> tuple[Any, ...]:
        try:
            if self._connection is None:
                self._connection = mysql.connect(self._dsn)
                # Without locks on gaps, writers of neighbouring keys never wait for each other.
                self._run("SET SESSION transaction_isolation = 'READ-COMMITTED'")
            with self._connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return tuple(cursor.fetchone() or ())
        except (pymysql.err.OperationalError, pymysql.err.InterfaceError) as error:
            self._connection = None  # closed by its error, or of no use
            raise ConnectionError(str(error)) from error


class MysqlDatabase:
    """A database of a MySQL server."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        mysql.execute(dsn, TABLE, LEDGER)

    def connect(self) -> MysqlConnection:
        """Return a connection for a writer."""
        return MysqlConnection(self.dsn)

    def source(self, name: str, *, chunk_rows: int) -> str:
        """Return the pipeline's source."""
        table = f"{urlsplit(self.dsn).path.strip('/')}.items"
        config = f'id: {name}-source, dsn: "{self.dsn}", tables: [{table}], {_snapshot(chunk_rows)}'
        return f"{{type: mysql, config: {{{config}}}}}"

    def rows(self) -> dict[int, Row]:
        """Return the rows of the table, by their keys."""
        with mysql.connect(self.dsn) as connection, connection.cursor(DictCursor) as cursor:
            cursor.execute("SELECT * FROM items")
            return {row["id"]: row for row in cursor.fetchall()}

    def confirmed(self) -> int | None:
        """Return None: the server keeps its log whatever the pipeline does."""
        return None


def _snapshot(chunk_rows: int) -> str:
    return f"snapshot: {{mode: never, chunk_size: {chunk_rows}, intra_table_parallel: true}}"
