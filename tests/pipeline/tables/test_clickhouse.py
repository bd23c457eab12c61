"""A pipeline from PostgreSQL to ClickHouse's tables, with a real Spark: what the tables have is what the source has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.kills.campaign import lease_seconds
from tests.pipeline.live import Feed
from tests.pipeline.tables.recipes import current_rows
from tests.pipeline.tables.runs import CHANGES, STEPS, killed_at_each, table_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.clickhouse]

SINK = (
    "    - {{type: clickhouse, config: {{id: {mode}, url: '{url}', password: '{password}', database: {database}, "
    "table: '{mode}_${{source.table}}', mode: {mode}, commit_seconds: 0.1}}}}\n"
)


class Tables:
    """A feed whose sinks have tables of ClickHouse, one of each mode.

    Attributes:
        feed: The pipeline.
    """

    def __init__(self, feed: Feed, server: ClickhouseServer, database: str) -> None:
        self.feed = feed
        self._server = server
        self._database = database

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what ClickHouse answers; decimals are texts."""
        query = re.sub(r"FROM (?=\w)", f"FROM {self._database}.", query)
        settings = " SETTINGS output_format_json_quote_decimals = 1"
        answer = self._server.query(query + settings, "JSONCompactEachRow")
        return [tuple(orjson.loads(line)) for line in answer.splitlines()]

    def in_source(self, query: str) -> list[tuple[Any, ...]]:
        """Return what the source answers."""
        with psycopg.connect(self.feed.shop.dsn) as connection:
            return connection.execute(query).fetchall()


MakeTables = Callable[..., Tables]


@pytest.fixture
def make_tables(
    shop: Shop,
    spark_server: SparkAddress,
    clickhouse_server: ClickhouseServer,
    clickhouse_database: str,
    tmp_path: Path,
) -> Iterator[MakeTables]:
    """Make tables of the shop."""
    with ExitStack() as stack:

        def make(modes: Sequence[str], lease_seconds: int = 20) -> Tables:
            sinks = "".join(
                SINK.format(
                    mode=mode,
                    url=clickhouse_server.url,
                    password=clickhouse_server.password,
                    database=clickhouse_database,
                )
                for mode in modes
            )
            opened = table_feed(
                shop, tmp_path / "feed.yaml", sinks, spark_server, lease_seconds=lease_seconds
            )
            feed = stack.enter_context(opened)
            return Tables(feed, clickhouse_server, clickhouse_database)

        yield make


def test_tables_equal_those_of_the_source(make_tables: MakeTables) -> None:
    """After inserts, updates, changed keys, deletes and a truncate, in one commit and in several; a changelog has them all."""
    tables = make_tables(["current", "changelog"])
    for part in (CHANGES[:1], CHANGES[1:]):
        for transaction in part:
            tables.feed.shop.execute(*transaction)
        outcome = tables.feed.catch_up()

        assert (outcome.reason, outcome.sink_errors, outcome.behind) == ("caught up", {}, {})
        for table, columns in (("customers", "id, name"), ("orders", "id, customer, total::text")):
            wanted = tables.in_source(f"SELECT {columns} FROM {table} ORDER BY id")
            read = columns.replace("total::text", "toDecimalString(total, 2)")
            found = tables.rows(f"SELECT {read} FROM current_{table} FINAL ORDER BY id")
            assert found == wanted
            name = f"changelog_{table}"
            query = current_rows("clickhouse.md", "orders", name).replace("*", f"{read}, _op", 1)
            assert sorted(row[:-1] for row in tables.rows(query)) == wanted
    query = "SELECT _op, id, toString(total) FROM changelog_orders ORDER BY _version, _op"
    assert tables.rows(query) == [
        ("c", 1, "10.5"),
        ("c", 2, "0.1"),
        ("d", 2, None),
        ("u", 3, "1.1"),
        ("t", None, None),
        ("c", 1, "99999999.99"),
        ("c", 7, None),
        ("d", 7, None),
    ]
    versions = tables.rows(
        "SELECT count(), uniqExact(_version), countIf(_op = 'd') FROM changelog_customers"
    )
    assert versions == [(200 + 66 + 40 + 1, 200 + 66 + 40 + 1, 40)]


@pytest.mark.soak("formats")
@pytest.mark.parametrize("mode", ["current", "changelog"])
def test_a_kill_at_each_step_of_a_commit(make_tables: MakeTables, mode: str) -> None:
    """Each change is in the table once, in order."""
    tables = make_tables([mode], lease_seconds=lease_seconds())
    killed_at_each(tables.feed, STEPS)

    if mode == "current":
        found = tables.rows("SELECT id, name FROM current_customers FINAL ORDER BY id")
        assert found == [(number, "y") for number in range(1, 5)]
        return
    found = tables.rows("SELECT id, name, _op FROM changelog_customers ORDER BY _version")
    assert found == [
        row for number in range(1, 5) for row in ((number, "x", "c"), (number, "y", "u"))
    ]
    ordered = tables.rows("SELECT id, _op FROM changelog_orders ORDER BY _version")
    assert ordered == [(number, "c") for number in range(1, 5)]
