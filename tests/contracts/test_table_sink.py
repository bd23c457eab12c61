"""What every sink that keeps tables promises a delivery, tried on all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import dict_row
from pydantic import SecretStr

from deltaforge_dagster.pipeline.lake.writer import LakeWriter
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig
from deltaforge_dagster.sinks.clickhouse.writer import ClickhouseWriter
from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.writer import PostgresWriter
from deltaforge_dagster.testing.table_sinks import TableSinkContract, TableSubject
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import FORMATS, Lake, dialect_of


@pytest.mark.postgres
class TestPostgresTables(TableSinkContract):
    """Tables of a PostgreSQL server."""

    @pytest.fixture
    def subject(self, postgres_server: PostgresServer, tmp_path: Path) -> TableSubject:
        """A database of its own."""
        dsn = postgres_server.create_database()
        config = PostgresSinkConfig(id="copy", dsn=SecretStr(dsn))

        def rows() -> list[dict[str, Any]]:
            with psycopg.connect(dsn, row_factory=dict_row) as connection:
                try:
                    return connection.execute("SELECT * FROM public.orders").fetchall()
                except psycopg.errors.UndefinedTable:
                    return []

        return TableSubject(lambda owner: PostgresWriter(config, owner), rows, tmp_path)


@pytest.mark.clickhouse
class TestClickhouseTables(TableSinkContract):
    """Tables of a ClickHouse server, read with FINAL."""

    @pytest.fixture
    def subject(
        self, clickhouse_server: ClickhouseServer, clickhouse_database: str, tmp_path: Path
    ) -> TableSubject:
        """A database of its own; a commit is one INSERT or several, which arrive one by one."""
        config = ClickhouseSinkConfig(
            id="copy",
            url=clickhouse_server.url,
            database=clickhouse_database,
            mode="current",
            password=SecretStr(clickhouse_server.password),
            send_timeout_secs=300.0,
        )

        def rows() -> list[dict[str, Any]]:
            if not clickhouse_server.query(f"SHOW TABLES FROM {clickhouse_database}"):
                return []
            query = (
                f"SELECT * FROM {clickhouse_database}.orders FINAL"
                " SETTINGS output_format_arrow_string_as_string = 0"
            )
            answer = clickhouse_server.query(query, "ArrowStream")
            return [
                {name: as_text(name, value) for name, value in row.items() if name[0] != "_"}
                for row in pa.ipc.open_stream(answer).read_all().to_pylist()
            ]

        return TableSubject(
            lambda owner: ClickhouseWriter(config, owner),
            rows,
            tmp_path,
            (clickhouse_database, "orders"),
            atomic=False,
        )


def as_text(name: str, value: Any) -> Any:
    """Return text as such: ClickHouse has one type for text and bytes, which only `raw` has."""
    return value.decode() if name != "raw" and isinstance(value, bytes) else value


@pytest.mark.spark
@pytest.mark.soak("formats")
class TestLakeTables(TableSinkContract):
    """Tables that Spark writes; each commit takes seconds."""

    @pytest.fixture(params=FORMATS)
    def subject(
        self, request: pytest.FixtureRequest, tmp_path: Path, spark_server: SparkAddress
    ) -> Iterator[TableSubject]:
        """A folder of its own."""
        from pyspark.errors import AnalysisException  # noqa: PLC0415 - slow to import

        lake = Lake(request.param, tmp_path, spark_server.remote)
        config = lake.config()
        dialect = dialect_of(config)

        def rows() -> list[dict[str, Any]]:
            query = f"SELECT * FROM {dialect.table(('public', 'orders'))}"
            try:
                return lake.reading().sql(query).toArrow().to_pylist()
            except AnalysisException:  # there is no such table
                return []

        yield TableSubject(
            lambda owner: LakeWriter(lake.sessions(), dialect, config, owner),
            rows,
            tmp_path,
            atomic=request.param == "iceberg",  # a transaction of Delta has one statement
        )
        lake.close()
