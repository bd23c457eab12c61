"""From MySQL to Redis: real runs, seen by a reader of the streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.source_type import server_id
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state import legacy
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_lab.servers.mysql import connect
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Feed, opened_feed
from tests.sources.mysql.bench import MysqlBench

pytestmark = [pytest.mark.spark, pytest.mark.mysql, pytest.mark.redis]

PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: shop-db, dsn: "{dsn}", tables: ["{db}.orders", "{db}.items"]}}}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "{redis}", stream: "feed.${{source.table}}"}}}}
  engine: {{run: {{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}}}}
"""


@pytest.fixture
def feed(
    mysql_dsn: str,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spark_server: SparkAddress,
    tmp_path: Path,
) -> Iterator[Feed]:
    """A pipeline from a MySQL database with `orders`, `items` and `other` to Redis."""
    with MysqlBench(mysql_dsn) as bench:
        text = PIPELINE.format(dsn=mysql_dsn, db=bench.database, redis=redis_server.uri)
        shop = MysqlShop(mysql_dsn, redis_server.uri)
        with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as made:
            yield made


def events(feed: Feed, table: str) -> list[dict[str, Any]]:
    """Return the events of a table's stream."""
    return [json.loads(one["df-event"]) for one in feed.delivered(table)]


def test_every_change_arrives_in_order(feed: Feed) -> None:
    """Through several runs, each from where the last one ended; `other` is not captured."""
    feed.shop.execute(
        "INSERT INTO orders VALUES (1, 'ä'), (2, 'b')", "INSERT INTO other VALUES (1, '')"
    )
    feed.catch_up()
    feed.shop.execute("UPDATE orders SET v = 'c' WHERE id = 2", "INSERT INTO items VALUES (7, '')")
    feed.shop.execute("DELETE FROM orders WHERE id = 1")
    feed.catch_up()

    orders = events(feed, "orders")
    assert [(one["op"], one["before"], one["after"]) for one in orders] == [
        ("c", None, {"id": 1, "v": "ä"}),
        ("c", None, {"id": 2, "v": "b"}),
        ("u", {"id": 2, "v": "b"}, {"id": 2, "v": "c"}),
        ("d", {"id": 1, "v": "ä"}, None),
    ]
    assert len(events(feed, "items")) == 1
    assert len({one["event_id"] for one in orders}) == 4


def test_an_event_says_where_it_comes_from(feed: Feed) -> None:
    """The `source` block of MySQL: our server id, GTID, file and offset; no schema."""
    feed.shop.execute("INSERT INTO orders VALUES (1, 'a')")
    feed.catch_up()

    (event,) = events(feed, "orders")
    source = event["source"]
    assert list(source)[-4:] == ["server_id", "gtid", "file", "pos"]
    assert source["connector"] == "mysql"
    assert source["name"] == "shop-db"
    assert source["db"] == urlsplit(feed.shop.dsn).path[1:]
    assert "schema" not in source
    assert source["server_id"] == server_id("shop-db")
    assert source["gtid"] == event["transaction"]["id"]
    assert event["tx_end"] is True
    row = feed.store.pipelines.get("feed")
    assert row is not None
    captured = parse_position(row.captured_position or "")
    assert isinstance(captured, BinlogPosition)
    assert captured.file == source["file"]
    assert captured.pos > source["pos"]


def test_a_live_run_follows(feed: Feed) -> None:
    """Changes arrive while the run lives, also after the server cut its connection."""
    run = feed.begin()
    feed.shop.execute("INSERT INTO orders VALUES (1, 'a')")
    eventually(lambda: len(feed.delivered("orders")) == 1)
    with connect(feed.shop.dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW PROCESSLIST")
        for session in [row[0] for row in cursor.fetchall() if "Binlog Dump" in str(row[4])]:
            cursor.execute(f"KILL {session}")

    feed.shop.execute("INSERT INTO orders VALUES (2, 'b')")
    eventually(lambda: len(feed.delivered("orders")) == 2)

    assert run.end().captured == 2


def test_moving_from_deltaforge(feed: Feed) -> None:
    """Its checkpoint stands inside a transaction and claims all of it: the rest arrives all the same."""
    feed.shop.execute("INSERT INTO orders VALUES (1, 'a')")
    before = position_of(feed)
    feed.shop.execute(*(f"INSERT INTO orders VALUES ({n}, 'b')" for n in (2, 3, 4)))
    claimed = position_of(feed)
    inside = BinlogPosition(before.file, (before.pos + claimed.pos) // 2, claimed.gtid_set)
    feed.shop.execute("DELETE FROM orders WHERE id = 1")
    feed.store.journals.reset("feed")
    checkpoints = Kv(feed.store.database, legacy.NAMESPACE)
    checkpoints.put(legacy.sink_key("shop-db", "redis"), inside.to_json().encode())

    feed.catch_up()

    assert [(one["op"], (one["after"] or one["before"])["id"]) for one in events(feed, "orders")] == [
        ("c", 2), ("c", 3), ("c", 4), ("d", 1),
    ]  # fmt: skip
    row = feed.store.pipelines.get("feed")
    assert row is not None
    assert row.start_position == before.to_json()


def position_of(feed: Feed) -> BinlogPosition:
    """Return where the server's log ends now."""
    source = build_run_context(feed.opened, feed.loaded).build_source()
    try:
        position = source.ensure_start()
    finally:
        source.close()
    assert isinstance(position, BinlogPosition)
    return position
