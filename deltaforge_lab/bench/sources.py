"""The sources of benchmarks: servers that are filled, read by the pipeline, and read raw.

The raw read is the limit of a source on this machine: one client receives the same log, or the same
table, and only detects the end.
"""

# ruff: noqa: SLF001 - PyMySQL has no public access to a result's bytes

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from queue import SimpleQueue
from typing import Any, Literal, cast

import psycopg
from pymysql.connections import MySQLResult
from pymysql.constants import COMMAND

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.sources.mysql.connection import server as mysql
from deltaforge_dagster.sources.postgres.connection import server as postgres
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT
from deltaforge_dagster.sources.postgres.stream.replication import ReplicationStream
from deltaforge_lab.bench.shapes import TRANSACTION_ROWS, Shape
from deltaforge_lab.servers.base import Server
from deltaforge_lab.servers.mysql import MysqlServer, connect
from deltaforge_lab.servers.postgres import PostgresServer

SourceKind = Literal["pg", "mysql"]

_BUFFER = 4 << 20
_PATIENCE = 60.0
_END_BYTES = 16
_EOF = b"\x05\x00\x00"
_UTC = "SET time_zone = '+00:00'"
_CHECKSUMS = "SET @source_binlog_checksum = 'CRC32', @master_binlog_checksum = 'CRC32'"


class BenchSource(ABC):
    """A running server with a database for one table.

    Attributes:
        server: The server.
        dsn: Connection string of the database.
    """

    server: Server
    dsn: str

    @property
    @abstractmethod
    def block(self) -> str:
        """The `source` entry of the pipeline file, in YAML's flow style."""

    @property
    @abstractmethod
    def table(self) -> str:
        """The table's full name."""

    @abstractmethod
    def create(self, shape: Shape) -> None:
        """Create the table."""

    def write(self, first: int, rows: int, writers: int = 1) -> Iterator[int]:
        """Write rows from `first` on, 1,000 per transaction; yield how many are written so far.

        Each of the writers has its own connection. They share the transactions, which commit in any
        order.
        """
        shares = [
            (first + done, min(TRANSACTION_ROWS, rows - done))
            for done in range(0, rows, TRANSACTION_ROWS)
        ]
        idle: SimpleQueue[Callable[[str], object]] = SimpleQueue()

        def insert(number: int, count: int) -> int:
            execute = idle.get()
            try:
                execute(self._insert(number, count))
            finally:
                idle.put(execute)
            return count

        with ExitStack() as owned:
            for _ in range(writers):
                idle.put(owned.enter_context(self._writer()))
            pool = owned.enter_context(ThreadPoolExecutor(writers))
            owned.callback(pool.shutdown, cancel_futures=True)
            written = 0
            for done in as_completed([pool.submit(insert, *share) for share in shares]):
                written += done.result()
                yield written

    @abstractmethod
    def _writer(self) -> AbstractContextManager[Callable[[str], object]]:
        """Yield a function that executes a statement as a transaction on a new connection."""

    @abstractmethod
    def _insert(self, first: int, rows: int) -> str:
        """Return the statement that inserts these rows."""

    @abstractmethod
    def add(self, first: int, rows: int) -> float:
        """Write rows in one transaction; return when COMMIT was sent, in seconds since 1970."""

    @abstractmethod
    def begin_backlog(self) -> None:
        """Record the start of the raw read."""

    @abstractmethod
    def end_backlog(self) -> None:
        """Record the end of the raw read."""

    @abstractmethod
    def read_raw(self) -> float:
        """Receive and discard the log of the backlog; return seconds."""

    @abstractmethod
    def read_table_raw(self) -> float:
        """Receive and discard the whole table; return seconds."""

    def close(self) -> None:
        """Stop the server."""
        self.server.close()


class PostgresBench(BenchSource):
    """PostgreSQL: a second slot keeps the backlog for the raw read."""

    def __init__(self) -> None:
        self.server = PostgresServer.start(origins=["package", "installed"])
        self.dsn = self.server.create_database("shop")
        self._connection = psycopg.connect(self.dsn, autocommit=True)
        self._marker = secrets.token_hex(16)

    @property
    def block(self) -> str:
        """The `source` of the pipeline file."""
        return (
            f'{{type: postgres, config: {{id: shop, dsn: "{self.dsn}", slot: bench, '
            f"publication: bench, tables: [{self.table}]}}}}"
        )

    @property
    def table(self) -> str:
        """Schema and table."""
        return f"public.{self._shape.name}"

    def create(self, shape: Shape) -> None:
        """Create the table."""
        self._shape = shape
        self._connection.execute(shape.create_table("postgres"))

    @contextmanager
    def _writer(self) -> Iterator[Callable[[str], object]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            yield connection.execute

    def _insert(self, first: int, rows: int) -> str:
        return self._shape.insert("postgres", first, rows)

    def add(self, first: int, rows: int) -> float:
        """Write rows in one transaction."""
        with self._connection.transaction():
            self._connection.execute(self._shape.insert("postgres", first, rows))
            return time.time()

    def begin_backlog(self) -> None:
        """Create the second slot."""
        self._connection.execute(
            "SELECT pg_create_logical_replication_slot('bench_raw', 'pgoutput')"
        )

    def end_backlog(self) -> None:
        """Write a message that marks the end for the raw read; pipelines skip heartbeats."""
        self._connection.execute(
            "SELECT pg_logical_emit_message(true, %s, %s)", [HEARTBEAT, self._marker]
        )

    def read_raw(self) -> float:
        """Receive pgoutput's output for the backlog."""
        server = postgres.PostgresSourceServer.from_dsn(self.dsn, "deltaforge/bench")
        with server.query(_PATIENCE) as connection:
            connected = server.replicate(connection, _PATIENCE)
        stream = ReplicationStream(connected, server.where)
        marker, overlap = self._marker.encode(), len(self._marker)
        buffer = bytearray(_BUFFER)
        began = heard = time.monotonic()
        stream.start(
            "START_REPLICATION SLOT bench_raw LOGICAL 0/0 "
            "(proto_version '1', publication_names 'bench', messages 'true')"
        )
        try:
            while True:
                with memoryview(buffer) as view:
                    count = stream.receive(view[overlap:], 1.0)
                if buffer.find(marker, 0, overlap + count) >= 0:
                    return time.monotonic() - began
                if count:
                    heard = time.monotonic()
                elif time.monotonic() - heard > _PATIENCE:
                    raise SettingsError("the raw log has no end")
                buffer[:overlap] = buffer[count : count + overlap]
        finally:
            stream.close()

    def read_table_raw(self) -> float:
        """Receive the output of COPY; the last message is `ReadyForQuery`, `Z Int32(5) I`."""
        with psycopg.connect(self.dsn) as connection:
            began = time.monotonic()
            connection.pgconn.send_query(f"COPY {self._shape.name} TO STDOUT".encode())
            with socket.socket(fileno=os.dup(connection.pgconn.socket)) as plain:
                _receive_until(plain, lambda end: end.endswith(b"Z\x00\x00\x00\x05I"))
            connection.pgconn.finish()  # libpq has not read the response
        return time.monotonic() - began

    def close(self) -> None:
        """Stop the server."""
        self._connection.close()
        super().close()


class MysqlBench(BenchSource):
    """MySQL: the raw read and the pipeline read the same binary log."""

    def __init__(self) -> None:
        self.server = MysqlServer.start()
        self.dsn = self.server.create_database("shop")
        self._connection = connect(self.dsn)
        self._execute(_UTC)
        self._execute("CREATE TABLE numbers (i INT PRIMARY KEY)")
        numbers = ", ".join(f"({i})" for i in range(TRANSACTION_ROWS))
        self._execute(f"INSERT INTO numbers VALUES {numbers}")  # noqa: S608 - numbers

    @property
    def block(self) -> str:
        """The `source` of the pipeline file."""
        return f'{{type: mysql, config: {{id: shop, dsn: "{self.dsn}", tables: [{self.table}]}}}}'

    @property
    def table(self) -> str:
        """Database and table."""
        return f"shop.{self._shape.name}"

    def create(self, shape: Shape) -> None:
        """Create the table."""
        self._shape = shape
        self._execute(shape.create_table("mysql"))

    @contextmanager
    def _writer(self) -> Iterator[Callable[[str], object]]:
        with closing(connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(_UTC)
            yield cursor.execute

    def _insert(self, first: int, rows: int) -> str:
        return self._shape.insert("mysql", first, rows)

    def add(self, first: int, rows: int) -> float:
        """Write rows in one transaction."""
        self._execute("BEGIN")
        self._execute(self._shape.insert("mysql", first, rows))
        sent_at = time.time()
        self._execute("COMMIT")
        return sent_at

    def begin_backlog(self) -> None:
        """Record the current end of the log."""
        self._start = self._execute("SHOW MASTER STATUS")[0][:2]

    def end_backlog(self) -> None:
        """Record the size of the log since `begin_backlog`."""
        file, position = self._start
        files = {str(row[0]): int(row[1]) for row in self._execute("SHOW BINARY LOGS")}
        later = [size for name, size in files.items() if name > str(file)]
        self._log_bytes = files[str(file)] - int(position) + sum(later)

    def read_raw(self) -> float:
        """Receive the whole binary log of the backlog.

        MySQL protocol, "COM_BINLOG_DUMP": `Int32 position | Int16 flags | Int32 server id | file`;
        with flag 1 the server sends an EOF packet at the end of the log. A packet is `Int24 size |
        Int8 number`, followed by `size` bytes, the first of which is 0xFE in an EOF packet.
        """
        file, position = self._start
        body = struct.pack("<IHI", position, 1, 4_000_000_001) + str(file).encode()
        server = mysql.MysqlSourceServer.from_dsn(self.dsn, "deltaforge/bench")
        began = time.monotonic()
        with server.dump([_CHECKSUMS], 0x12, body, _PATIENCE) as connected:
            connected.settimeout(_PATIENCE)
            buffer = bytearray(_BUFFER)
            view = memoryview(buffer)
            filled = at = (
                0  # end of the received bytes; start of the next packet, which may be later
            )
            received = 0
            while count := connected.recv_into(view[filled:]):
                received += count
                filled += count
                while filled - at >= 5:
                    size = int.from_bytes(view[at : at + 3], "little")
                    if buffer[at + 4] == 0xFE and size < 9:
                        seconds = time.monotonic() - began
                        if received < self._log_bytes:
                            raise SettingsError("the raw log is shorter than the server's files")
                        return seconds
                    at += 4 + size
                if at < filled:
                    view[: filled - at] = view[at:filled]
                filled, at = max(filled - at, 0), max(at - filled, 0)
        raise SettingsError("the raw log has no end")

    def read_table_raw(self) -> float:
        """Receive the result of a SELECT.

        MySQL protocol, "Text Resultset": an EOF packet, `Int24 5 | Int8 number | 0xFE | warnings |
        status`, ends the column definitions, and another one ends the rows.
        """
        connection = mysql.MysqlSourceServer.from_dsn(self.dsn, "deltaforge/bench").connect(
            _PATIENCE
        )
        began = time.monotonic()
        query = f"SELECT * FROM {self._shape.name}"  # noqa: S608 - constant name
        connection._execute_command(COMMAND.COM_QUERY, query)
        result = MySQLResult(connection)
        result.init_unbuffered_query()  # reads the column definitions
        result.unbuffered_active = False  # otherwise its destructor would read the rest
        ahead = connection._rfile.read1(1 << 16)
        _receive_until(connection._sock, lambda end: end[-9:-6] == _EOF and end[-5] == 0xFE, ahead)
        connection._force_close()  # PyMySQL has not read the response
        return time.monotonic() - began

    def close(self) -> None:
        """Stop the server."""
        self._connection.close()
        super().close()

    def _execute(self, statement: str) -> tuple[tuple[Any, ...], ...]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cast("tuple[tuple[Any, ...], ...]", cursor.fetchall())


def _receive_until(
    connected: socket.socket, ended: Callable[[bytes], bool], received: bytes = b""
) -> None:
    """Receive and discard bytes until `ended` returns True for the last bytes received."""
    connected.settimeout(_PATIENCE)
    buffer = bytearray(_BUFFER)
    end = received[-_END_BYTES:]
    while not ended(end):
        count = connected.recv_into(buffer)
        if not count:
            raise SettingsError("the raw table has no end")
        end = (end + bytes(buffer[max(0, count - _END_BYTES) : count]))[-_END_BYTES:]


STARTS: dict[SourceKind, Callable[[], BenchSource]] = {"pg": PostgresBench, "mysql": MysqlBench}
