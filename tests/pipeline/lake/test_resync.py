"""A snapshot loads lake tables beside writers, then one table is loaded again: what they have is what the source has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.tables.resync import request_resync
from deltaforge_dagster.state.snapshot_records import SnapshotRow
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress, connected
from tests.pipeline.changes import eventually
from tests.pipeline.live import Background, Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

ROWS = 2000
WHERE = {
    "delta": "path: {folder}",
    "iceberg": "catalog_properties: {{type: hadoop, warehouse: {folder}}}",
}


class LoadedLake:
    """A feed with tables of a lake, and Redis beside them.

    Attributes:
        feed: The pipeline.
        form: Format of the tables.
        folder: Where they are.
    """

    def __init__(self, feed: Feed, form: str, folder: Path, spark: SparkAddress) -> None:
        self.feed = feed
        self.form = form
        self.folder = folder
        self._spark = spark

    def sql(self, query: str, table: str) -> list[tuple[Any, ...]]:
        """Return what Spark answers to a query of a table."""
        session = connected(self._spark.remote)
        name = f"delta.`{self.folder}/public/{table}`"
        if self.form == "iceberg":
            catalog, name = "spark.sql.catalog.read", f"read.public.{table}"
            session.conf.set(catalog, "org.apache.iceberg.spark.SparkCatalog")
            session.conf.set(f"{catalog}.type", "hadoop")
            session.conf.set(f"{catalog}.warehouse", str(self.folder))
            session.conf.set(f"{catalog}.cache-enabled", "false")
        try:
            return [tuple(row) for row in session.sql(query.format(name)).collect()]
        finally:
            session.stop()

    def differences(self, table: str, columns: str) -> list[Any]:
        """Return the rows that only source or lake has, after a run that delivers all of them."""
        with psycopg.connect(self.feed.shop.dsn) as connection:
            wanted = connection.execute(f"SELECT {columns} FROM {table}").fetchall()
        found = self.sql(f"SELECT {columns} FROM {{}}", table)
        assert len(found) == len(set(found))
        return sorted(set(wanted) ^ set(found))

    def snapshot(self) -> SnapshotRow:
        """Read the snapshot that is requested; return it once it is in the journal."""
        store, name = self.feed.store, self.feed.name
        eventually(lambda: store.snapshots.unfinished(name) is not None)
        self.feed.read_snapshot()
        eventually(lambda: store.snapshots.unfinished(name) is None)
        return store.snapshots.read(name, newest=1)[0]

    def settle(self, run: Background) -> None:
        """End a run, and deliver everything."""
        run.end()
        outcome = self.feed.catch_up()
        assert (outcome.sink_errors, outcome.behind) == ({}, {})

    def reads_in_redis(self) -> int:
        """Return how many rows of snapshots the other sink has got."""
        entries = [*self.feed.delivered("customers"), *self.feed.delivered("orders")]
        return sum('"op":"r"' in text for entry in entries for text in entry.values())


@pytest.fixture(params=["iceberg", pytest.param("delta", marks=pytest.mark.soak("formats"))])
def lake(
    request: pytest.FixtureRequest, shop: Shop, spark_server: SparkAddress, tmp_path: Path
) -> Iterator[LoadedLake]:
    """A lake of a shop that has rows already."""
    shop.execute(
        f"INSERT INTO customers SELECT n, 'c' || n FROM generate_series(1, {ROWS}) n",
        "INSERT INTO orders SELECT n, n, n FROM generate_series(1, 10) n",
    )
    folder = tmp_path / "lake"
    where = WHERE[request.param].format(folder=folder)
    sink = f"    - {{type: {request.param}, config: {{id: lake, {where}, commit_seconds: 0.1}}}}\n"
    text = shop.pipeline("feed", more_sinks=sink, range_="{max_seconds: 600}")
    chunks = "      snapshot: {mode: never, chunk_size: 500, intra_table_parallel: true}\n"
    text = text.replace("      tables:", chunks + "      tables:")
    with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as feed:
        yield LoadedLake(feed, request.param, folder, spark_server)


@contextmanager
def writers(shop: Shop, first: int = 0) -> Iterator[Callable[[], int]]:
    """Change both tables all the time; yields a function that returns the number of the next transaction."""
    end, done = threading.Event(), [first]

    def work() -> None:
        while not end.wait(0.02):
            n = done[0]
            shop.execute(
                f"INSERT INTO customers VALUES ({ROWS + 1 + n}, 'new')",
                f"UPDATE customers SET name = 'changed {n}' WHERE id = {1 + n * 37 % ROWS}",
                f"DELETE FROM customers WHERE id = {1 + n * 101 % ROWS}",
                f"UPDATE customers SET id = -id WHERE id = {1 + n * 53 % ROWS} AND id > 0",
                f"INSERT INTO orders VALUES ({11 + n}, {n}, {n})",
            )
            done[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        eventually(lambda: done[0] > first + 2)
        yield lambda: done[0]
    finally:
        end.set()
        thread.join()


TABLES = (("customers", "id, name"), ("orders", "id, customer"))


def test_a_snapshot_then_a_resync_of_one_table(lake: LoadedLake) -> None:
    """Beside writers; the other table and the other sink notice nothing of the resync."""
    feed, store = lake.feed, lake.feed.store
    store.snapshots.request("feed", cause="command")
    run = feed.begin()
    with writers(feed.shop) as number:
        assert lake.snapshot().state == "complete"
    last = number()
    lake.settle(run)
    assert [lake.differences(*one) for one in TABLES] == [[], []]
    reads = lake.reads_in_redis()
    assert reads > ROWS / 2

    lake.sql("UPDATE {} SET id = id + 1000000 WHERE id % 3 = 0", "customers")
    assert lake.differences(*TABLES[0])
    made = lake.sql("SELECT max(df_position) FROM {}", "orders")[0][0]
    with pytest.raises(NotAllowed, match="writes no tables"):
        request_resync(store, feed.loaded, "redis", ["public.customers"])
    with pytest.raises(NotAllowed, match=r"nothing was captured of a table 'public\.nothing'"):
        request_resync(store, feed.loaded, "lake", ["public.nothing"])
    assert request_resync(store, feed.loaded, "lake", ["public.customers"]) == ["public.customers"]
    run = feed.begin()
    with writers(feed.shop, last):
        snapshot = lake.snapshot()
    lake.settle(run)

    assert (snapshot.tables, snapshot.sinks, snapshot.cause) == (
        ["public.customers"],
        ["lake"],
        "resync",
    )
    assert [lake.differences(*one) for one in TABLES] == [[], []]
    assert lake.reads_in_redis() == reads
    assert store.table_commits.resyncs("feed") == []
    assert lake.sql("SELECT min(df_position) FROM {}", "customers")[0][0] > made
    assert lake.sql("SELECT min(df_position) FROM {}", "orders")[0][0] <= made
