"""A pipeline from PostgreSQL to ClickHouse's tables, with a real Spark: what the tables have is what the source has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest

from deltaforge_dagster.pipeline.failpoints import VARIABLE
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.kills.campaign import lease_seconds
from tests.kills.child import start
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.clickhouse]

SINK = (
    "    - {{type: clickhouse, config: {{id: {mode}, url: '{url}', password: '{password}', database: {database}, "
    "table: '{mode}_${{source.table}}', mode: {mode}, commit_seconds: 0.1}}}}\n"
)
CHANGES: tuple[tuple[str, ...], ...] = (
    (
        "INSERT INTO customers SELECT n, 'c' || n FROM generate_series(1, 200) n",
        "INSERT INTO orders VALUES (1, 1, 10.50), (2, 2, 0.10)",
    ),
    (
        "UPDATE customers SET name = 'changed' WHERE id % 3 = 0",
        "DELETE FROM customers WHERE id % 5 = 0",
        "UPDATE orders SET id = 3, total = total + 1 WHERE id = 2",
    ),
    ("TRUNCATE orders", "INSERT INTO orders VALUES (1, 9, 99999999.99), (7, NULL, NULL)"),
    ("UPDATE customers SET name = NULL WHERE id = 1", "DELETE FROM orders WHERE id = 7"),
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
        query = query.replace("FROM ", f"FROM {self._database}.")
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
            run = f"{{idle_seconds: 4, lease_seconds: {lease_seconds}, renew_seconds: 0.5}}"
            text = shop.pipeline("feed", more_sinks=sinks, range_="{max_seconds: 600}", run=run)
            text = "".join(
                line for line in text.splitlines(keepends=True) if "type: redis" not in line
            )
            path = tmp_path / "feed.yaml"
            feed = stack.enter_context(opened_feed(shop, path, text, spark_server))
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
    logged = tables.rows("SELECT _op, id, toString(total) FROM changelog_orders ORDER BY _version")
    assert logged == [
        ("c", 1, "10.5"),
        ("c", 2, "0.1"),
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
    steps = ["lake-planned", "lake-staged", "lake-table-committed", "lake-committed"]
    feed = tables.feed
    environment = {
        "DELTAFORGE_HOME": str(feed.path.parent / "home"),
        "DELTAFORGE_PIPELINES": str(feed.path.parent),
        **{name: os.environ[name] for name in ("PATH",)},
    }
    for number, step in enumerate(steps, start=1):
        feed.shop.execute(
            f"INSERT INTO customers VALUES ({number}, 'x')",
            f"UPDATE customers SET name = 'y' WHERE id = {number}",
            f"INSERT INTO orders VALUES ({number}, 1, 1)",
        )
        run = start(
            feed.path, {**environment, VARIABLE: step}, f"run-{number}", until_caught_up=True
        )
        run.join(120)
        assert run.exitcode == -9, step
    run = start(feed.path, {**environment, VARIABLE: ""}, "last", until_caught_up=True)
    run.join(120)
    assert run.exitcode == 0

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
