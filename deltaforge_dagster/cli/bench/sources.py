"""The sources of benchmarks: a server that is filled, read by the pipeline, and read raw.

The raw reading is the limit of a source on this machine: the same log, received by one client that
looks at nothing but the end.
"""

from __future__ import annotations

import secrets
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import psycopg

from deltaforge_dagster.cli.bench.shapes import TRANSACTION_ROWS, Shape
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.servers.base import Server
from deltaforge_dagster.servers.mysql import MysqlServer, connect
from deltaforge_dagster.servers.postgres import PostgresServer
from deltaforge_dagster.sources.mysql import connection as mysql
from deltaforge_dagster.sources.postgres import connection as postgres
from deltaforge_dagster.sources.postgres.messages import HEARTBEAT
from deltaforge_dagster.sources.postgres.stream import ReplicationStream

SourceKind = Literal["pg", "mysql"]

_BUFFER = 4 << 20
_PATIENCE = 60.0
_CHECKSUMS = "SET @source_binlog_checksum = 'CRC32', @master_binlog_checksum = 'CRC32'"


class BenchSource(ABC):
    """A running server with a database for one table.

    Attributes:
        server: The server.
    """

    server: Server

    @property
    @abstractmethod
    def block(self) -> str:
        """The `source` of the pipeline file, in YAML's flow style."""

    @abstractmethod
    def create(self, shape: Shape) -> None:
        """Make the table."""

    @abstractmethod
    def write(self, first: int, rows: int) -> Iterator[int]:
        """Write rows from number `first` on, 1,000 to a transaction; yield rows written so far."""

    @abstractmethod
    def add(self, first: int, rows: int) -> float:
        """Write rows in one transaction; return when it was told to commit (seconds of the clock)."""

    @abstractmethod
    def begin_backlog(self) -> None:
        """Remember that the raw reading starts here."""

    @abstractmethod
    def end_backlog(self) -> None:
        """Remember that the raw reading ends here."""

    @abstractmethod
    def read_raw(self) -> float:
        """Receive the log of the backlog into memory; return seconds."""

    def close(self) -> None:
        """End the server."""
        self.server.close()


class PostgresBench(BenchSource):
    """PostgreSQL: a second slot keeps the backlog for the raw reading."""

    def __init__(self) -> None:
        self.server = PostgresServer.start(origins=["package", "installed"])
        self._dsn = self.server.create_database("shop")
        self._connection = psycopg.connect(self._dsn, autocommit=True)
        self._marker = secrets.token_hex(16)

    @property
    def block(self) -> str:
        """The `source` of the pipeline file."""
        return (
            f'{{type: postgres, config: {{id: shop, dsn: "{self._dsn}", slot: bench, '
            f"publication: bench, tables: [public.{self._shape.name}]}}}}"
        )

    def create(self, shape: Shape) -> None:
        """Make the table."""
        self._shape = shape
        self._connection.execute(shape.create_table("postgres"))

    def write(self, first: int, rows: int) -> Iterator[int]:
        """Write rows."""
        for done in range(0, rows, TRANSACTION_ROWS):
            share = min(TRANSACTION_ROWS, rows - done)
            self._connection.execute(self._shape.insert("postgres", first + done, share))
            yield done + share

    def add(self, first: int, rows: int) -> float:
        """Write rows in one transaction."""
        with self._connection.transaction():
            self._connection.execute(self._shape.insert("postgres", first, rows))
            return time.time()

    def begin_backlog(self) -> None:
        """Make the second slot."""
        self._connection.execute(
            "SELECT pg_create_logical_replication_slot('bench_raw', 'pgoutput')"
        )

    def end_backlog(self) -> None:
        """Write a message that only the raw reading looks at: pipelines pass over heartbeats."""
        self._connection.execute(
            "SELECT pg_logical_emit_message(true, %s, %s)", [HEARTBEAT, self._marker]
        )

    def read_raw(self) -> float:
        """Receive what pgoutput makes of the backlog."""
        server = postgres.Server.from_dsn(self._dsn, "deltaforge/bench")
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

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        super().close()


class MysqlBench(BenchSource):
    """MySQL: the binary log is there for everybody."""

    def __init__(self) -> None:
        self.server = MysqlServer.start()
        self._dsn = self.server.create_database("shop")
        self._connection = connect(self._dsn)
        self._execute("SET time_zone = '+00:00'")
        self._execute("CREATE TABLE numbers (i INT PRIMARY KEY)")
        numbers = ", ".join(f"({i})" for i in range(TRANSACTION_ROWS))
        self._execute(f"INSERT INTO numbers VALUES {numbers}")  # noqa: S608 - our numbers

    @property
    def block(self) -> str:
        """The `source` of the pipeline file."""
        return (
            f'{{type: mysql, config: {{id: shop, dsn: "{self._dsn}", '
            f"tables: [shop.{self._shape.name}]}}}}"
        )

    def create(self, shape: Shape) -> None:
        """Make the table."""
        self._shape = shape
        self._execute(shape.create_table("mysql"))

    def write(self, first: int, rows: int) -> Iterator[int]:
        """Write rows."""
        for done in range(0, rows, TRANSACTION_ROWS):
            share = min(TRANSACTION_ROWS, rows - done)
            self._execute(self._shape.insert("mysql", first + done, share))
            yield done + share

    def add(self, first: int, rows: int) -> float:
        """Write rows in one transaction."""
        self._execute("BEGIN")
        self._execute(self._shape.insert("mysql", first, rows))
        told = time.time()
        self._execute("COMMIT")
        return told

    def begin_backlog(self) -> None:
        """Remember where the log ends now."""
        self._start = self._execute("SHOW MASTER STATUS")[0][:2]

    def end_backlog(self) -> None:
        """Nothing: the server says where the log ends."""

    def read_raw(self) -> float:
        """Receive the binary log.

        MySQL protocol, "COM_BINLOG_DUMP": `Int32 position | Int16 flags | Int32 server id | file`,
        and with the flag 1 an EOF packet at the log's end. A packet is `Int24 size | Int8 number`
        and so many bytes, of which the first is 0xFE in an EOF packet.
        """
        file, position = self._start
        body = struct.pack("<IHI", position, 1, 4_000_000_001) + str(file).encode()
        server = mysql.Server.from_dsn(self._dsn, "deltaforge/bench")
        began = time.monotonic()
        with server.dump([_CHECKSUMS], 0x12, body, _PATIENCE) as connected:
            connected.settimeout(_PATIENCE)
            buffer = bytearray(_BUFFER)
            view = memoryview(buffer)
            filled = at = 0  # received; where the next packet begins, maybe beyond that
            while count := connected.recv_into(view[filled:]):
                filled += count
                while filled - at >= 5:
                    size = int.from_bytes(view[at : at + 3], "little")
                    if buffer[at + 4] == 0xFE and size < 9:
                        return time.monotonic() - began
                    at += 4 + size
                if at < filled:
                    view[: filled - at] = view[at:filled]
                filled, at = max(filled - at, 0), max(at - filled, 0)
        raise SettingsError("the raw log has no end")

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        super().close()

    def _execute(self, statement: str) -> tuple[tuple[Any, ...], ...]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cast("tuple[tuple[Any, ...], ...]", cursor.fetchall())


STARTS: dict[SourceKind, Callable[[], BenchSource]] = {"pg": PostgresBench, "mysql": MysqlBench}
