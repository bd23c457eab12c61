"""A MySQL database to read from: its tables and the sources over them."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import pymysql

from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.sources.mysql.source_type import MysqlSourceConfig, server_id
from deltaforge_dagster.sources.mysql.warm import warm
from deltaforge_dagster.testing.sources import Bench
from deltaforge_lab.servers.mysql import connect

PIPELINE = "orders"


class MysqlBench(Bench):
    """The tables `orders` and `items`, which are captured, and `other`, which is not.

    Args:
        dsn: An empty database, as a user with every privilege.
    """

    holds_log = False
    has_transactions = True

    def __init__(self, dsn: str) -> None:
        warm()  # or the first test would wait for the compiler
        self.dsn = dsn
        self.database = urlsplit(dsn).path.removeprefix("/")
        self.connection = connect(dsn)
        self._sources: list[MysqlSource] = []
        version = str(self.connection.get_server_info())
        self.is_mariadb = "MariaDB" in version
        self.version = tuple(map(int, re.findall(r"\d+", version.removeprefix("5.5.5-"))[:2]))
        if self.is_mariadb:
            self.run("SET SESSION max_recursive_iterations = 10000000")
        elif not version.startswith("5."):
            self.run("SET SESSION cte_max_recursion_depth = 10000000")
        for table in ("orders", "items", "other"):
            self.run(f"CREATE TABLE {table} (id int PRIMARY KEY, v longtext)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for source in self._sources:
            source.close()
        self.connection.close()

    def config(self, **changed: Any) -> MysqlSourceConfig:
        """Return the source's configuration, with some fields changed."""
        fields = {
            "id": f"{self.database}-db",
            "dsn": self.dsn,
            "tables": (f"{self.database}.orders", f"{self.database}.items"),
        }
        return MysqlSourceConfig(**{**fields, **changed})

    def source(self, **changed: Any) -> MysqlSource:
        """Return a new source, closed when the bench ends."""
        source = MysqlSource(self.config(**changed), PIPELINE)
        self._sources.append(source)
        return source

    def reconnect(self) -> None:
        """Use a new connection: the server was restarted."""
        self.connection.close()
        self.connection = connect(self.dsn)

    def execute(self, *statements: str) -> None:
        """Run the statements in one transaction."""
        self.run("BEGIN", *statements, "COMMIT")

    def run(self, *statements: str) -> None:
        """Run the statements, each for itself."""
        with self.connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with self.connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    def readers(self) -> list[int]:
        """Return the sessions that the log is sent to."""
        return [
            int(row[0])
            for row in self.rows("SHOW PROCESSLIST")
            if str(row[4]).startswith("Binlog Dump")
        ]

    def cut(self) -> None:
        """End the sessions that read the log."""
        for session in self.readers():
            self.run(f"KILL {session}")

    def forget(self) -> None:
        """Begin a new log file and remove all before it."""
        self.run("FLUSH BINARY LOGS")
        file = self.head().file
        if self.rows("SHOW VARIABLES LIKE 'slave_connections_needed_for_purge'"):
            # MariaDB 11 wants to be sure that its replicas have the log.
            self.run("SET GLOBAL slave_connections_needed_for_purge = 0")
        deadline = time.monotonic() + 60
        while self.rows("SHOW BINARY LOGS")[0][0] != file:
            self.run(f"PURGE BINARY LOGS TO '{file}'")
            assert time.monotonic() < deadline, "the server does not let go of its log"
            time.sleep(0.05)

    def confirmed(self) -> None:
        """Nothing: the server keeps its log by age."""

    def head(self) -> BinlogPosition:
        """Return where the log ends, without GTIDs."""
        try:
            (file, pos, *_), *_ = self.rows("SHOW MASTER STATUS")
        except pymysql.ProgrammingError:  # from MySQL 8.4 on
            (file, pos, *_), *_ = self.rows("SHOW BINARY LOG STATUS")
        return BinlogPosition(file, int(pos))

    @property
    def server_id(self) -> int:
        """The server id that our sources read with."""
        return server_id(self.config().id)
