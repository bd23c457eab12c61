"""A pipeline to tables in PostgreSQL, with a real Spark: what the tables have is what the source has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from deltaforge_dagster.pipeline.tables.resync import request_resync
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.kills.campaign import lease_seconds
from tests.pipeline.live import Feed
from tests.pipeline.tables.runs import STEPS, killed_at_each, table_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

SINK = '    - {{type: postgres, config: {{id: copy, dsn: "{dsn}", mode: {mode}, commit_seconds: 0.1{more}}}}}\n'
MakeCopy = Callable[..., "Copy"]


class Copy:
    """A feed whose only sink has tables in another database.

    Attributes:
        feed: The pipeline.
        dsn: The database.
    """

    def __init__(self, feed: Feed, dsn: str) -> None:
        self.feed = feed
        self.dsn = dsn

    def rows(self, query: str, *, source: bool = False) -> list[tuple[Any, ...]]:
        """Return what the database with the copy, or the source's, answers."""
        with psycopg.connect(self.feed.shop.dsn if source else self.dsn) as connection:
            return connection.execute(query).fetchall()

    def differences(self, table: str) -> list[Any]:
        """Return the rows that only source or copy has."""
        query = f"SELECT t::text FROM {table} t ORDER BY 1"
        return sorted(set(self.rows(query, source=True)) ^ set(self.rows(query)))


@pytest.fixture
def make_copy(
    shop: Shop, postgres_server: PostgresServer, spark_server: SparkAddress, tmp_path: Path
) -> Iterator[MakeCopy]:
    """Make a copy of the shop."""
    with ExitStack() as stack:

        def make(mode: str = "current", more: str = "", lease: int = 20) -> Copy:
            dsn = postgres_server.create_database()
            sink = SINK.format(dsn=dsn, mode=mode, more=more)
            opened = table_feed(
                shop,
                tmp_path / "feed.yaml",
                sink,
                spark_server,
                lease_seconds=lease,
                tables="[public.customers, public.orders, public.wide]",
            )
            feed = stack.enter_context(opened)
            return Copy(feed, dsn)

        yield make


WIDE = """CREATE TABLE wide (id int, "key 2" text, n numeric, d numeric(10,2), f real, j jsonb, b bytea, u uuid,
    day date, at timestamptz, local timestamp, span interval, tags text[], mood mood, big text, doc jsonb,
    docs jsonb[], PRIMARY KEY (id, "key 2"))"""
ROW = """INSERT INTO wide SELECT i, 'k', 'NaN', i, 'infinity', '{"a": [1]}', '\\x0001', '00000000-0000-0000-0000-00000000000a',
    '1969-12-31', '2024-01-01 00:00:00.000001Z', '0001-01-01', '1 month -2 hours', ARRAY['', NULL, 'a"b'], 'ok',
    repeat('x', 100000), (ARRAY['null', '{"_unchanged": true}', NULL]::jsonb[])[i],
    ARRAY['null', NULL, '[null]']::jsonb[] FROM generate_series(1, 3) i"""


def test_tables_equal_those_of_the_source(make_copy: MakeCopy, shop: Shop) -> None:
    """After inserts, updates, changed keys, deletes, a truncate and unchanged TOAST. One that is dropped is held, then recreated."""
    shop.execute(
        "CREATE TYPE mood AS ENUM ('ok')", WIDE, "ALTER TABLE wide ALTER big SET STORAGE EXTERNAL"
    )
    copy = make_copy()
    shop.execute(
        "INSERT INTO customers SELECT n, 'c' || n FROM generate_series(1, 200) n",
        "INSERT INTO orders VALUES (1, 1, 10.50), (2, 2, 0.10)",
        ROW,
    )
    for transaction in (
        (
            "UPDATE customers SET name = 'changed' WHERE id % 3 = 0",
            "DELETE FROM customers WHERE id % 5 = 0",
            "UPDATE orders SET id = 3, total = total + 1 WHERE id = 2",
        ),
        ("TRUNCATE orders", "INSERT INTO orders VALUES (1, 9, 99999999.99), (7, NULL, NULL)"),
        (
            "UPDATE wide SET d = -1 WHERE id = 1",
            "UPDATE wide SET id = 9, \"key 2\" = '' WHERE id = 2",
        ),
    ):
        outcome = copy.feed.catch_up()
        assert (outcome.reason, outcome.sink_errors, outcome.behind) == ("caught up", {}, {})
        shop.execute(*transaction)
    outcome = copy.feed.catch_up()

    assert (outcome.sink_errors, outcome.behind) == ({}, {})
    assert [copy.differences(table) for table in ("customers", "orders", "wide")] == [[], [], []]
    checkpoint = copy.feed.store.checkpoints.read("feed")["copy"]
    assert checkpoint.whole_segment == copy.feed.store.segments.read("feed")[-1].segment
    types = {row[0]: row[1] for row in copy.rows("SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'wide'::regclass")}  # fmt: skip
    assert (types["n"], types["j"], types["span"], types["mood"]) == (
        "numeric", "jsonb", "interval", "text",
    )  # fmt: skip

    with psycopg.connect(copy.dsn) as connection:
        connection.execute("DROP TABLE customers")
    shop.execute("INSERT INTO customers VALUES (1000, 'y')", "INSERT INTO orders VALUES (2, 1, 1)")
    outcome = copy.feed.catch_up()
    assert "customers of sink copy is gone" in outcome.sink_errors["copy"]
    assert copy.differences("orders") == []
    assert request_resync(copy.feed.store, copy.feed.loaded, "copy", ["public.customers"])
    copy.feed.catch_up()
    assert copy.rows("SELECT * FROM customers") == []  # recreated; its snapshot is to come


@pytest.mark.soak("kills")
def test_a_kill_at_each_step_of_a_commit(make_copy: MakeCopy, shop: Shop) -> None:
    """A changelog has each change once, in order."""
    shop.execute("CREATE TABLE wide (id int)")
    copy = make_copy("changelog", lease=lease_seconds())
    killed_at_each(copy.feed, STEPS[1:])

    found = copy.rows("SELECT id, name, df_op FROM customers ORDER BY df_position, df_ordinal")
    assert found == [
        row for number in range(1, 4) for row in ((number, "x", "c"), (number, "y", "u"))
    ]
    assert copy.rows("SELECT id, df_op FROM orders ORDER BY df_position, df_ordinal") == [
        (number, "c") for number in range(1, 4)
    ]
