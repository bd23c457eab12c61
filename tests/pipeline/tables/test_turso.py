"""A pipeline from a SQLite file to tables and objects: they have what the file has, existing rows included."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import cast

import duckdb
import orjson
import psycopg
import pytest

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import opened_feed

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.clickhouse,
    pytest.mark.soak("faults"),
]

PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source:
    type: turso
    config:
      {{id: shop, url: "{folder}/shop.db", tables: [items], auto_create_triggers: true, poll_interval_ms: 20}}
  sinks:
    - {{type: postgres, config: {{id: copy, dsn: "{dsn}", table: items, commit_seconds: 0.1}}}}
    - {{type: clickhouse, config: {{id: analytics, url: "{url}", password: "{password}", database: {database},
        table: items, mode: current, commit_seconds: 0.1}}}}
    - {{type: s3, config: {{id: files, local: true, bucket: "{folder}/files"}}}}
  engine: {{run: {{idle_seconds: 600, lease_seconds: 20, renew_seconds: 0.5}}}}
"""
ROWS = "id, name, price, data"


def test_every_sink_has_what_the_file_has(
    tmp_path: Path,
    spark_server: SparkAddress,
    postgres_server: PostgresServer,
    clickhouse_server: ClickhouseServer,
    clickhouse_database: str,
) -> None:
    """Rows that were there before, inserts, updates, a changed key, deletes, and a value that is no text."""
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as shop:
        shop.execute("PRAGMA journal_mode = WAL")
        shop.execute(
            "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL, data BLOB)"
        )
        shop.execute("INSERT INTO items VALUES (1, 'old', 0.1, x'00ff'), (2, 'gone', 1e300, NULL)")
        dsn = postgres_server.create_database()
        text = PIPELINE.format(
            folder=tmp_path,
            dsn=dsn,
            url=clickhouse_server.url,
            password=clickhouse_server.password,
            database=clickhouse_database,
        )
        # A feed's shop is a PostgreSQL; this one's is the file.
        with opened_feed(cast("Shop", None), tmp_path / "feed.yaml", text, spark_server) as feed:
            feed.store.snapshots.request(feed.name, cause="command")
            run = feed.begin()
            feed.read_snapshot()
            eventually(lambda: feed.store.snapshots.unfinished(feed.name) is None)
            run.end()
            shop.execute("INSERT INTO items VALUES (3, 'new', NULL, x''), (4, 'moves', 2.5, NULL)")
            shop.execute("UPDATE items SET name = 'x' || char(10) || 'é' WHERE id = 1")
            shop.execute("UPDATE items SET id = 9 WHERE id = 4")
            shop.execute("DELETE FROM items WHERE id = 2")
            outcome = feed.catch_up()
            assert (outcome.sink_errors, outcome.behind) == ({}, {})
        expected = shop.execute(f"SELECT {ROWS} FROM items ORDER BY id").fetchall()

    with psycopg.connect(dsn) as connection:
        assert connection.execute(f"SELECT {ROWS} FROM items ORDER BY id").fetchall() == expected
    answer = clickhouse_server.query(
        f"SELECT id, name, price, hex(data) FROM {clickhouse_database}.items FINAL ORDER BY id",
        "JSONCompactEachRow",
    )
    assert [tuple(orjson.loads(line)) for line in answer.splitlines()] == [
        (id_, name, price, None if data is None else data.hex().upper())
        for id_, name, price, data in expected
    ]
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT op, coalesce(after_id, before_id) FROM '{tmp_path}/files/**/*.parquet' ORDER BY 2, 1"
        ).fetchall()
    assert found == [("r", 1), ("u", 1), ("d", 2), ("r", 2), ("c", 3), ("c", 4), ("u", 9)]
