"""A snapshot loads ClickHouse's tables beside writers, then one is loaded again: what they have is what the source has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from deltaforge_dagster.pipeline.tables.resync import request_resync
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.test_resync import ROWS, TABLES, LoadedLake, writers
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.clickhouse,
    pytest.mark.soak("formats"),
]

SINK = (
    "    - {{type: clickhouse, config: {{id: lake, url: '{url}', password: '{password}', database: {database}, "
    "mode: current, commit_seconds: 0.1}}}}\n"
)


class LoadedTables(LoadedLake):
    """A feed with tables of ClickHouse, and Redis beside them."""

    def __init__(
        self, feed: Feed, spark: SparkAddress, server: ClickhouseServer, database: str
    ) -> None:
        super().__init__(feed, "clickhouse", Path(), spark)
        self._server = server
        self._database = database

    def sql(self, query: str, table: str) -> list[tuple[Any, ...]]:
        """Return what ClickHouse answers to a query of a table's current rows."""
        text = query.format(f"{self._database}.{table} FINAL")
        answer = self._server.query(text, "JSONCompactEachRow")
        return [tuple(orjson.loads(line)) for line in answer.splitlines()]


@pytest.fixture
def tables(
    shop: Shop,
    spark_server: SparkAddress,
    clickhouse_server: ClickhouseServer,
    clickhouse_database: str,
    tmp_path: Path,
) -> Iterator[LoadedTables]:
    """Tables of a shop that has rows already."""
    server, database = clickhouse_server, clickhouse_database
    shop.execute(
        f"INSERT INTO customers SELECT n, 'c' || n FROM generate_series(1, {ROWS}) n",
        "INSERT INTO orders SELECT n, n, n FROM generate_series(1, 10) n",
    )
    sink = SINK.format(url=server.url, password=server.password, database=database)
    text = shop.pipeline("feed", more_sinks=sink, range_="{max_seconds: 600}")
    chunks = "      snapshot: {mode: never, chunk_size: 500, intra_table_parallel: true}\n"
    text = text.replace("      tables:", chunks + "      tables:")
    with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as feed:
        yield LoadedTables(feed, spark_server, server, database)


def test_a_snapshot_then_a_resync_of_one_table(tables: LoadedTables) -> None:
    """Beside writers; rows of a snapshot never win against later changes, nor lose against earlier ones."""
    feed, store = tables.feed, tables.feed.store
    store.snapshots.request("feed", cause="command")
    run = feed.begin()
    with writers(feed.shop) as number:
        assert tables.snapshot().state == "complete"
    last = number()
    tables.settle(run)
    assert [tables.differences(*one) for one in TABLES] == [[], []]

    request_resync(store, feed.loaded, "lake", ["public.customers"])
    run = feed.begin()
    with writers(feed.shop, last):
        snapshot = tables.snapshot()
    tables.settle(run)

    assert (snapshot.tables, snapshot.cause) == (["public.customers"], "resync")
    assert [tables.differences(*one) for one in TABLES] == [[], []]
