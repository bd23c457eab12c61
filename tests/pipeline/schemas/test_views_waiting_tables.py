"""Tables that wait for approval in real runs, from PostgreSQL to Redis, approved from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.capturing import Stage
from tests.pipeline.live import Feed, opened_feed
from tests.pipeline.snapshotting import Snapshots, fill
from tests.sources.postgres.bench import PostgresBench

__all__ = ["shop"]

pytestmark = pytest.mark.postgres


@pytest.fixture
def feed(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Feed]:
    """A pipeline of two tables that asks before one of them has another form."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "feed.yaml"))
    run = "{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}"
    text = shop.pipeline("feed", run=run)
    with opened_feed(shop, tmp_path / "feed.yaml", asking(text), spark_server) as made:
        yield made


def asking(text: str) -> str:
    """Return a pipeline file that asks before tables have another form."""
    return text.replace("engine:", "engine:\n    schemas: {on_schema_change: pause_table}", 1)


def names(feed: Feed, table: str) -> list[str]:
    """Return the names of what was delivered of a table, in order."""
    events = [json.loads(one["df-event"]) for one in feed.delivered(table)]
    return [one["after"]["name"] for one in events]


@pytest.mark.spark
@pytest.mark.redis
def test_a_live_run_holds_and_delivers(feed: Feed) -> None:
    """Held in a live run, which ends for the approval; the next one delivers in order, then goes on.

    A file that asks no more approves what waits.
    """
    shop, store = feed.shop, feed.store
    shop.execute("INSERT INTO customers (id, name) VALUES (1, 'a')")
    feed.catch_up()
    run = feed.begin()
    shop.execute("ALTER TABLE customers ADD COLUMN mail text")
    shop.execute("INSERT INTO customers (id, name) VALUES (2, 'b')")
    eventually(lambda: [one.events for one in store.holds.read("feed")] == [1])
    result = CliRunner().invoke(app, ["hold", "approve", "feed", "public.customers"])
    assert result.exit_code == 0, result.output
    assert run.outcome().reason == "hold released"
    assert names(feed, "customers") == ["a"]
    shop.execute("INSERT INTO customers (id, name) VALUES (3, 'c')")
    feed.catch_up()
    assert names(feed, "customers") == ["a", "b", "c"]

    shop.execute("ALTER TABLE customers DROP COLUMN mail, ADD COLUMN phone text")
    shop.execute("INSERT INTO customers (id, name) VALUES (4, 'd')")
    feed.catch_up()
    assert names(feed, "customers") == ["a", "b", "c"]
    feed.path.write_text(feed.path.read_text().replace("pause_table", "continue"))
    shop.execute("INSERT INTO customers (id, name) VALUES (5, 'e')")
    feed.catch_up()
    assert names(feed, "customers") == ["a", "b", "c", "d", "e"]
    assert store.holds.read("feed") == []


def test_chunks_of_a_waiting_form_wait(postgres_dsn: str, tmp_path: Path) -> None:
    """A snapshot that reads a form that nobody approved waits, and holds its table from there on."""
    store = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    shop = Shop(postgres_dsn, "")
    with PostgresBench(postgres_dsn) as bench:
        fill(shop, "hot", 60)
        stage = Stage(_Hot(bench), store, tmp_path / "journal")
        stage.pauses = True
        snapshots = Snapshots(stage, tmp_path)
        shop.execute("UPDATE hot SET v = 1 WHERE a = 1")
        stage.capture(lambda _: len(stage.rows()) == 1)
        shop.execute("ALTER TABLE hot ADD COLUMN n int DEFAULT 7")
        snapshots.request("public.hot")
        snapshots.read()
        shop.execute("INSERT INTO other VALUES (1, 'moves the log')")
        stage.capture(lambda _: [one.kind for one in store.holds.read("p")] == ["schema"])
        shop.execute("UPDATE hot SET v = 2 WHERE a = 1")
        stage.capture(lambda _: sum(one.events for one in store.holds.read("p")) == 1)
        assert not snapshots.complete()
        assert len(stage.events("hot")) == 1

        assert store.holds.approve_table("p", "public.hot") == 1
        stage.capture(lambda _: snapshots.complete())

        copy = snapshots.copy("hot")
        assert copy.older == []
        assert len(copy.rows) == 60
        assert copy.rows[1, "k1"]["v"] == 2
        assert all(row["n"] == 7 for row in copy.rows.values())
    store.close()


class _Hot:
    """A bench whose sources capture the table that a snapshot reads."""

    def __init__(self, bench: PostgresBench) -> None:
        self._bench = bench

    def source(self) -> object:
        """Return a new source."""
        return self._bench.source(tables=("public.hot", "public.other"))
