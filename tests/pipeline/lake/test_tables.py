"""A pipeline from PostgreSQL to lake tables, with a real Spark: what the tables have is what the source has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from deltaforge_dagster.state.records import CheckpointRow
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress, connected
from tests.kills.campaign import lease_seconds
from tests.pipeline.lake.lake_tables import FORMATS, Format
from tests.pipeline.live import Feed
from tests.pipeline.tables.runs import CHANGES, STEPS, killed_at_each, table_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

PLACES: dict[Format, str] = {
    "delta": "path: {folder}/lake",
    "iceberg": "catalog: lake, catalog_properties: {{type: hadoop, warehouse: {folder}/lake}}",
}
SINK = "    - {{type: {format}, config: {{id: lake, {place}, mode: {mode}, commit_seconds: {seconds}{more}}}}}\n"

MakeLake = Callable[..., "Lake"]


class Lake:
    """A feed whose only sink has lake tables.

    Attributes:
        feed: The pipeline.
        folder: Where the tables are.
    """

    def __init__(self, feed: Feed, folder: Path, format_: Format, spark: SparkAddress) -> None:
        self.feed = feed
        self.folder = folder
        self._format = format_
        self._spark = spark

    def rows(self, table: str, columns: str = "*", order: str = "id") -> list[tuple[Any, ...]]:
        """Return rows of a table."""
        folder = f"{self.folder}/lake/public/{table}"
        session = connected(self._spark.remote)
        try:
            read = session.read.format(self._format).load(folder)
            return [
                tuple(row)
                for row in read.orderBy(*order.split(", "))
                .selectExpr(*columns.split(", "))
                .collect()
            ]
        finally:
            session.stop()

    def in_source(self, query: str) -> list[tuple[Any, ...]]:
        """Return what the source answers."""
        with psycopg.connect(self.feed.shop.dsn) as connection:
            return connection.execute(query).fetchall()

    @property
    def checkpoint(self) -> CheckpointRow:
        """The checkpoint of the lake sink."""
        return self.feed.store.checkpoints.read(self.feed.name)["lake"]


@pytest.fixture
def make_lake(shop: Shop, spark_server: SparkAddress, tmp_path: Path) -> Iterator[MakeLake]:
    """Make a lake of the shop."""
    with ExitStack() as stack:

        def make(
            format_: Format = "iceberg",
            mode: str = "current",
            seconds: float = 0.1,
            more: str = "",
            lease_seconds: int = 20,
        ) -> Lake:
            place = PLACES[format_].format(folder=tmp_path)
            sink = SINK.format(format=format_, place=place, mode=mode, seconds=seconds, more=more)
            opened = table_feed(
                shop, tmp_path / "feed.yaml", sink, spark_server, lease_seconds=lease_seconds
            )
            feed = stack.enter_context(opened)
            return Lake(feed, tmp_path, format_, spark_server)

        yield make


@pytest.mark.parametrize("format_", FORMATS)
def test_current_tables_equal_those_of_the_source(make_lake: MakeLake, format_: Format) -> None:
    """After inserts, updates, changed keys, deletes and a truncate, in one commit and in several."""
    lake = make_lake(format_)
    for part in (CHANGES[:1], CHANGES[1:]):
        for transaction in part:
            lake.feed.shop.execute(*transaction)
        outcome = lake.feed.catch_up()

        assert (outcome.reason, outcome.sink_errors, outcome.behind) == ("caught up", {}, {})
        for table, columns in (("customers", "id, name"), ("orders", "id, customer, total")):
            wanted = lake.in_source(f"SELECT {columns} FROM {table} ORDER BY id")
            assert lake.rows(table, columns) == wanted
    assert lake.checkpoint.whole_segment == lake.feed.store.segments.read("feed")[-1].segment


@pytest.mark.parametrize("format_", FORMATS)
def test_renamed_columns_equal_those_of_the_source(make_lake: MakeLake, format_: Format) -> None:
    """Rows that nobody has touched have their values under the new name, also where another column has had it."""
    lake = make_lake(format_)
    execute = lake.feed.shop.execute
    execute("INSERT INTO orders SELECT n, n + 10, n + 20 FROM generate_series(1, 4) AS n")
    assert lake.feed.catch_up().sink_errors == {}
    execute("UPDATE orders SET total = 1 WHERE id = 1")
    execute("ALTER TABLE orders RENAME COLUMN customer TO buyer")
    execute("ALTER TABLE orders RENAME COLUMN total TO customer")
    execute("UPDATE orders SET buyer = 2 WHERE id = 2", "DELETE FROM orders WHERE id = 3")
    last = (
        "ALTER TABLE orders RENAME COLUMN customer TO price",
        "UPDATE orders SET price = 7 WHERE id = 4",
    )
    for columns, then in (("id, buyer, customer", last), ("id, buyer, price", ())):
        outcome = lake.feed.catch_up()
        assert (outcome.sink_errors, outcome.behind) == ({}, {})
        wanted = lake.in_source(f"SELECT {columns} FROM orders ORDER BY id")
        assert lake.rows("orders", columns) == wanted
        assert len(wanted) == 3
        execute(*then)


@pytest.mark.soak("formats")
def test_a_live_run_commits_after_a_while_and_ends(make_lake: MakeLake) -> None:
    """What waits for the next commit keeps the run from being idle."""
    lake = make_lake(seconds=8)
    lake.feed.shop.execute(*CHANGES[0])

    outcome = lake.feed.live_run().execute()

    assert (outcome.reason, outcome.behind) == ("idle", {})
    assert outcome.delivered == {"lake": 202}
    assert len(lake.rows("customers", "id")) == 200


@pytest.mark.soak("formats")
def test_a_column_that_does_not_fit_holds_its_table_only(make_lake: MakeLake) -> None:
    """The sink fails and says why; the other table goes on; with another type the held one catches up."""
    lake = make_lake(more=", types: {public.customers: {name: int32}}")
    lake.feed.shop.execute(*CHANGES[0])
    outcome = lake.feed.catch_up()
    lake.feed.shop.execute("INSERT INTO orders VALUES (3, 3, 3)")
    outcome = lake.feed.catch_up()

    assert [row[0] for row in lake.rows("orders", "id")] == [1, 2, 3]
    reason = outcome.sink_errors["lake"]
    assert "table public.customers has everything up to segment 0 and is held" in reason
    assert "name" in reason
    assert "c1" not in reason
    assert lake.checkpoint.last_error == reason
    assert lake.checkpoint.whole_segment == 0

    text = lake.feed.path.read_text().replace(", types: {public.customers: {name: int32}}", "")
    lake.feed.path.write_text(text)
    outcome = lake.feed.live_run().execute()

    assert (outcome.sink_errors, outcome.behind) == ({}, {})
    assert len(lake.rows("customers", "id")) == 200
    assert [lake.checkpoint.failures, lake.checkpoint.last_error] == [0, None]


def test_a_kill_at_each_step_of_a_commit(make_lake: MakeLake) -> None:
    """A changelog has each change once, in order."""
    lake = make_lake(mode="changelog", lease_seconds=lease_seconds())
    killed_at_each(lake.feed, STEPS)

    found = lake.rows("customers", "id, name, df_op", order="df_position, df_ordinal")
    assert found == [
        row for number in range(1, 5) for row in ((number, "x", "c"), (number, "y", "u"))
    ]
    assert lake.rows("orders", "id, df_op") == [(number, "c") for number in range(1, 5)]
