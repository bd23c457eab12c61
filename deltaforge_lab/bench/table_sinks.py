"""Where the tables of benchmarks are: a folder, or a server that the benchmark starts.

The raw write is the limit of a table on this machine: a plain client writes the rows that the
pipeline has written once more, from memory, to an empty table or file of the same kind.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import fsspec
import psycopg
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from deltaforge_dagster.installation.lake_jars import LAKE_JARS
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_lab.bench.installation import Installation
from deltaforge_lab.servers.base import Server
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.maven import fetch
from deltaforge_lab.servers.postgres import PostgresServer
from deltaforge_lab.servers.s3 import S3Server

TableMode = Literal["changelog", "current", "history"]
TableKind = Literal["delta", "iceberg", "postgres", "clickhouse", "objects"]

_SCHEMA, _TABLE = "bench", "orders"
_NAME, _RAW = f"{_SCHEMA}.{_TABLE}", f"{_SCHEMA}.raw"

RawWriter = Callable[[], int]
"""Writes rows from memory to an empty table or file, and returns how many."""


class TableBench(ABC):
    """The table that the pipeline writes.

    Args:
        mode: What it holds.
        folder: An empty folder for files.

    Attributes:
        modes: The modes that such tables can have, the default first.
        server: The server that has it, None if it is in a folder.
    """

    modes: ClassVar[Sequence[TableMode]] = ("current", "changelog", "history")
    server: Server | None = None

    def __init__(self, mode: TableMode, folder: Path) -> None:
        self._mode = mode
        self._folder = folder

    @property
    def jars(self) -> Sequence[Path]:
        """What Spark needs for it."""
        return ()

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's entry in the pipeline file, YAML."""
        del exactly_once  # tables always are
        kind, config = self._sink()
        return json.dumps({"type": kind, "config": {"id": "sink", **config}})

    @abstractmethod
    def _sink(self) -> tuple[str, Mapping[str, Any]]:
        """Return the kind of the sink and its options."""

    @abstractmethod
    def count(self, installation: Installation, condition: str) -> int:
        """Return how many rows fulfil an SQL condition.

        Object files have a row for each change, and the condition is ignored.
        """

    @abstractmethod
    def raw_writer(self) -> RawWriter:
        """Read the table's rows, and return a function that writes them with a plain client."""

    def close(self) -> None:
        """Stop the server, if there is one."""
        if self.server is not None:
            self.server.close()


class _LakeBench(TableBench):
    @property
    def jars(self) -> Sequence[Path]:
        """The formats."""
        return fetch(LAKE_JARS)

    def raw_writer(self) -> RawWriter:
        """Return what writes one Parquet file, without a commit."""
        return _parquet_writer(self._folder, fsspec.filesystem("file"), f"{self._folder}/raw")


class _DeltaBench(_LakeBench):
    def _sink(self) -> tuple[str, Mapping[str, Any]]:
        return "delta", {"table": _NAME, "mode": self._mode, "path": str(self._folder)}

    def count(self, installation: Installation, condition: str) -> int:
        """Ask Spark."""
        return _counted(installation, f"delta.`{self._folder}/{_SCHEMA}/{_TABLE}`", {}, condition)


class _IcebergBench(_LakeBench):
    def _sink(self) -> tuple[str, Mapping[str, Any]]:
        where = {"type": "hadoop", "warehouse": str(self._folder)}
        return "iceberg", {"table": _NAME, "mode": self._mode, "catalog_properties": where}

    def count(self, installation: Installation, condition: str) -> int:
        """Ask Spark."""
        prefix = "spark.sql.catalog.bench"
        settings = {
            prefix: "org.apache.iceberg.spark.SparkCatalog",
            f"{prefix}.type": "hadoop",
            f"{prefix}.warehouse": str(self._folder),
        }
        return _counted(installation, f"bench.{_NAME}", settings, condition)


def _parquet_writer(folder: Path, files: fsspec.AbstractFileSystem, target: str) -> RawWriter:
    """Return what writes the rows of a folder's data files as one file.

    The formats' own files begin with `_`.
    """
    paths = [
        path
        for path in folder.rglob("*.parquet")
        if not any(part.startswith("_") for part in path.relative_to(folder).parts)
    ]
    rows: pa.Table = ds.dataset(paths, format="parquet").to_table()

    def write() -> int:
        with files.open(target, "wb") as file:
            pq.write_table(rows, file)
        return rows.num_rows

    return write


def _counted(
    installation: Installation, table: str, settings: Mapping[str, str], condition: str
) -> int:
    session = SparkSession.builder.remote(installation.spark.remote).create()
    try:
        for name, value in settings.items():
            session.conf.set(name, value)
        return session.table(table).where(condition).count()
    finally:
        session.stop()


class _PostgresBench(TableBench):
    def __init__(self, mode: TableMode, folder: Path) -> None:
        super().__init__(mode, folder)
        self.server = PostgresServer.start(origins=["package", "installed"])
        self._dsn = self.server.create_database("tables")

    def _sink(self) -> tuple[str, Mapping[str, Any]]:
        return "postgres", {"table": _NAME, "mode": self._mode, "dsn": self._dsn}

    def count(self, installation: Installation, condition: str) -> int:
        """Ask the server."""
        del installation
        with psycopg.connect(self._dsn) as connection:
            query = f"SELECT count(*) FROM {_NAME} WHERE {condition}"  # noqa: S608
            row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return cast("int", row[0])

    def raw_writer(self) -> RawWriter:
        """Return what fills and commits a new table of the same columns and keys with one COPY."""
        with psycopg.connect(self._dsn) as connection, connection.cursor() as cursor:
            with cursor.copy(f"COPY {_NAME} TO STDOUT (FORMAT binary)".encode()) as copy:
                rows = b"".join(copy)
            count = cursor.rowcount

        def write() -> int:
            with psycopg.connect(self._dsn) as connection, connection.cursor() as cursor:
                cursor.execute(f"DROP TABLE IF EXISTS {_RAW}".encode())
                cursor.execute(f"CREATE TABLE {_RAW} (LIKE {_NAME} INCLUDING ALL)".encode())
                with cursor.copy(f"COPY {_RAW} FROM STDIN (FORMAT binary)".encode()) as copy:
                    copy.write(rows)
            return count

        return write


class _ClickhouseBench(TableBench):
    modes = ("current", "changelog")

    def __init__(self, mode: TableMode, folder: Path) -> None:
        super().__init__(mode, folder)
        self.server = self._server = ClickhouseServer.start()
        self._server.query(f"CREATE DATABASE {_SCHEMA}")

    def _sink(self) -> tuple[str, Mapping[str, Any]]:
        login = {"user": self._server.user, "password": self._server.password}
        location = {"url": self._server.url, "database": _SCHEMA, "table": _TABLE}
        return "clickhouse", {"mode": self._mode, **location, **login}

    def count(self, installation: Installation, condition: str) -> int:
        """Ask the server; in mode current, replaced and deleted rows do not count."""
        del installation
        final = " FINAL" if self._mode == "current" else ""
        query = f"SELECT count() FROM {_NAME}{final} WHERE {condition}"  # noqa: S608
        return int(self._server.query(query))

    def raw_writer(self) -> RawWriter:
        """Return what fills a new table of the same columns with one INSERT."""
        count = int(self._server.query(f"SELECT count() FROM {_NAME}"))  # noqa: S608
        rows = self._server.query(f"SELECT * FROM {_NAME}", "Native")  # noqa: S608

        def write() -> int:
            self._server.query(f"DROP TABLE IF EXISTS {_RAW}")
            self._server.query(f"CREATE TABLE {_RAW} AS {_NAME}")
            self._server.query(f"INSERT INTO {_RAW} FORMAT Native", data=rows)
            return count

        return write


class _ObjectsBench(TableBench):
    modes = ("changelog",)

    def __init__(self, mode: TableMode, folder: Path) -> None:
        super().__init__(mode, folder)
        self.server = self._server = S3Server.start()
        self._bucket = f"bench-{secrets.token_hex(4)}"
        self._server.folder(self._bucket).mkdir()

    def _sink(self) -> tuple[str, Mapping[str, Any]]:
        login = {"access_key_id": self._server.key, "secret_access_key": self._server.secret}
        location = {"bucket": self._bucket, "endpoint": self._server.url, "region": "us-east-1"}
        return "s3", {**location, **login}

    def count(self, installation: Installation, condition: str) -> int:
        """Read the number of rows from the files."""
        del installation, condition
        return ds.dataset(self._server.folder(self._bucket), format="parquet").count_rows()

    def raw_writer(self) -> RawWriter:
        """Return what writes one Parquet file to the same bucket."""
        files = fsspec.filesystem(
            "s3",
            key=self._server.key,
            secret=self._server.secret,
            endpoint_url=self._server.url,
            client_kwargs={"region_name": "us-east-1"},
        )
        return _parquet_writer(self._server.folder(self._bucket), files, f"{self._bucket}/raw")


TABLES: Mapping[TableKind, type[TableBench]] = {
    "delta": _DeltaBench,
    "iceberg": _IcebergBench,
    "postgres": _PostgresBench,
    "clickhouse": _ClickhouseBench,
    "objects": _ObjectsBench,
}
"""Every kind."""
