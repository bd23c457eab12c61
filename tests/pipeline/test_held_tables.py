"""Holds in real runs: from MySQL to Redis, released from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import HoldRow
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Feed, opened_feed
from tests.sources.mysql.bench import MysqlBench

pytestmark = [pytest.mark.spark, pytest.mark.mysql, pytest.mark.redis]

SINKS = ("least", "once")
PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: shop-db, dsn: "{dsn}", tables: ["{db}.orders", "{db}.items"]}}}}
  sinks:
    - {{type: redis, config: {{id: least, uri: "{redis}", stream: "feed.${{source.table}}"}}}}
    - type: redis
      config: {{id: once, uri: "{redis}", stream: "once.${{source.table}}", exactly_once: true}}
  engine: {{run: {{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}}}}
"""


@pytest.fixture
def feed(  # noqa: PLR0917 - its servers
    mysql_dsn: str,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Feed]:
    """A pipeline from `orders` and `items` to two sinks, and an installation for commands."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "feed.yaml"))
    with MysqlBench(mysql_dsn) as bench:
        text = PIPELINE.format(dsn=mysql_dsn, db=bench.database, redis=redis_server.uri)
        shop = MysqlShop(mysql_dsn, redis_server.uri)
        with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as made:
            yield made


def deltaforge(*command: str) -> Result:
    """Run a command that succeeds."""
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code == 0, result.output
    return result


def changes(feed: Feed, sink: str, table: str) -> list[tuple[str, Any]]:
    """Return op and newest image of what a sink has of a table, in order."""
    stream = f"{'feed' if sink == 'least' else sink}.{table}"
    events = [json.loads(one["df-event"]) for one in feed.shop.entries(stream)]
    return [(one["op"], one["after"] or one["before"]) for one in events]


def the_hold(feed: Feed) -> HoldRow:
    """Return the only hold."""
    (hold,) = feed.store.holds.read("feed")
    return hold


def confirmed(feed: Feed) -> Position:
    """Return what the source may forget."""
    row = feed.store.pipelines.get("feed")
    assert row is not None
    return parse_position(str(row.confirmed_position or row.start_position))


def test_a_held_table_waits_and_the_others_go_on(feed: Feed, tmp_path: Path) -> None:
    """Held in a live run, kept through another, released; every sink has all of it in order."""
    shop, name = feed.shop, urlsplit(feed.shop.dsn).path[1:]
    shop.execute("INSERT INTO orders VALUES (1, 'a')", "INSERT INTO items VALUES (1, 'i')")
    feed.catch_up()
    # What the log does not have, and a statement behind it: nobody knows the rows between.
    unlogged = ("COMMIT", "SET SESSION sql_log_bin = 0")
    shop.execute(*unlogged, "ALTER TABLE orders ADD COLUMN n int FIRST")
    shop.execute("INSERT INTO orders VALUES (7, 2, 'b')", "UPDATE orders SET n = 8 WHERE id = 2")
    shop.execute("ALTER TABLE orders RENAME COLUMN v TO w")
    shop.execute("INSERT INTO items VALUES (2, 'i')", "INSERT INTO orders VALUES (9, 3, 'c')")
    shop.execute("TRUNCATE TABLE orders")
    shop.execute("INSERT INTO orders VALUES (10, 4, 'd')", "INSERT INTO items VALUES (3, 'i')")
    run = feed.begin()
    eventually(lambda: all(len(changes(feed, sink, "items")) == 3 for sink in SINKS))

    hold = the_hold(feed)
    assert (hold.subject, hold.state) == (f"{name}.orders", "held")
    assert "changed it since" in hold.reason
    since: Position = parse_position(hold.since_position)
    assert not since < confirmed(feed)
    assert f"table {name}.orders" in deltaforge("hold", "list", "feed").stdout
    assert run.end().captured == 3  # and the statement, an event of its own
    for sink in SINKS:
        assert changes(feed, sink, "orders") == [("c", {"id": 1, "v": "a"})]

    shop.execute("INSERT INTO orders VALUES (11, 5, 'e')", "INSERT INTO items VALUES (4, 'i')")
    feed.catch_up()  # still nothing of it, although this could be decoded
    assert changes(feed, "once", "items")[-1] == ("c", {"id": 4, "v": "i"})
    assert len(changes(feed, "once", "orders")) == 1
    assert not since < confirmed(feed)

    run = feed.begin()
    shop.execute("INSERT INTO items VALUES (5, 'i')")
    eventually(lambda: len(changes(feed, "once", "items")) == 5)
    (tmp_path / "orders.sql").write_text(
        "CREATE TABLE orders (n int, id int PRIMARY KEY, v longtext)"
    )
    release = ("hold", "release", "feed", f"{name}.orders")
    deltaforge(*release, "--create-table", str(tmp_path / "orders.sql"))
    assert run.outcome().reason == "hold released"
    shop.execute("INSERT INTO orders VALUES (12, 6, 'f')", "INSERT INTO items VALUES (6, 'i')")
    feed.catch_up()

    for sink in SINKS:
        assert changes(feed, sink, "orders") == [
            ("c", {"id": 1, "v": "a"}),
            ("c", {"n": 7, "id": 2, "v": "b"}),
            ("u", {"n": 8, "id": 2, "v": "b"}),
            ("c", {"n": 9, "id": 3, "w": "c"}),
            ("t", None),
            ("c", {"n": 10, "id": 4, "w": "d"}),
            ("c", {"n": 11, "id": 5, "w": "e"}),
            ("c", {"n": 12, "id": 6, "w": "f"}),
        ]
        assert [image["id"] for _, image in changes(feed, sink, "items")] == [1, 2, 3, 4, 5, 6]
    assert feed.store.holds.read("feed") == []
    assert since < confirmed(feed)
    assert "Nothing is held" in deltaforge("hold", "list", "feed").stdout
