"""From MySQL with minimal row images into tables: they have what the source has, or are held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from deltaforge_lab.servers import mysql
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Feed, opened_feed

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.mysql]

PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: shop-db, dsn: "{source}", tables: ["{db}.*"]}}}}
  sinks:
    - {{type: postgres, config: {{id: copy, dsn: "{target}", mode: current, commit_seconds: 0.1}}}}
  engine: {{run: {{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}}}}
"""


@pytest.fixture
def target(postgres_server: PostgresServer) -> str:
    """DSN of the database with the copies."""
    return postgres_server.create_database()


@pytest.fixture
def feed(mysql_dsn: str, target: str, spark_server: SparkAddress, tmp_path: Path) -> Iterator[Feed]:
    """A pipeline of all tables of a MySQL database."""
    text = PIPELINE.format(source=mysql_dsn, db=urlsplit(mysql_dsn).path.strip("/"), target=target)
    with opened_feed(MysqlShop(mysql_dsn, ""), tmp_path / "feed.yaml", text, spark_server) as made:
        yield made


def rows_of(dsn: str, query: str) -> list[tuple[Any, ...]]:
    """Return what a query finds in either database."""
    if dsn.startswith("mysql"):
        with mysql.connect(dsn) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return [tuple(row) for row in cursor.fetchall()]
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_rows_have_their_defaults(feed: Feed, target: str, image: str) -> None:
    """Each has those of its time; updates of other columns leave them."""
    run = feed.shop.execute
    run(
        "CREATE TABLE t (id int NOT NULL DEFAULT 1 PRIMARY KEY, a int DEFAULT 7, b varchar(9) DEFAULT 'x',"
        " c decimal(5,2) NOT NULL DEFAULT 1.5, d text, e datetime DEFAULT '2020-01-02 03:04:05')"
    )
    session = f"SET SESSION binlog_row_image = {image}"
    run(session, "INSERT INTO t (d) VALUES ('y')", "INSERT INTO t (id) VALUES (2)")
    feed.catch_up()
    run("ALTER TABLE t ALTER a SET DEFAULT 9")
    run(session, "INSERT INTO t (id, b) VALUES (3, NULL)", "UPDATE t SET d = 'z' WHERE id = 2")
    feed.catch_up()

    query = "SELECT id, a, b, c, d, e FROM {} ORDER BY id"
    copied = rows_of(target, query.format(f"{urlsplit(feed.shop.dsn).path.strip('/')}.t"))
    assert copied == rows_of(feed.shop.dsn, query.format("t"))
    assert [row[:3] for row in copied] == [(1, 7, "x"), (2, 7, "x"), (3, 9, None)]


def test_a_default_that_is_not_certain(feed: Feed, target: str) -> None:
    """The table is held with the reason, and nothing is null that is not; a release without it lets the table go on."""
    run, database = feed.shop.execute, urlsplit(feed.shop.dsn).path.strip("/")
    run("CREATE TABLE t (id int PRIMARY KEY, v varbinary(3) DEFAULT 'a')")
    run("INSERT INTO t VALUES (1, 'b')")
    run("SET SESSION binlog_row_image = MINIMAL", "INSERT INTO t (id) VALUES (2)")

    feed.catch_up()

    (hold,) = feed.store.holds.read(feed.name)
    assert (hold.subject, hold.state) == (f"{database}.t", "held")
    assert "an insert lacks v (binlog_row_image)" in hold.reason
    assert rows_of(target, f"SELECT id, v FROM {database}.t") == [(1, b"b")]
