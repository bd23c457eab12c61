"""Fixtures of comparisons."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import opened_feed
from tests.pipeline.reconcile.copies import PIPELINE, SINKS, Copied, DatabaseShop, MakeCopied
from tests.sources.mysql.bench import MysqlBench


@pytest.fixture
def make_copied(
    postgres_server: PostgresServer,
    mysql_dsn: str,
    spark_server: SparkAddress,
    tmp_path: Path,
) -> Iterator[MakeCopied]:
    """Make a table in PostgreSQL or MySQL, and a pipeline that copies it, into PostgreSQL if no sinks are named."""
    with ExitStack() as stack:

        def make(
            kind: str, table: str, make_table: Callable[[Shop], None], sinks: str = SINKS
        ) -> Copied:
            shop: Shop
            if kind == "postgres":
                slot, schema = f"r_{uuid.uuid4().hex[:12]}", "public"
                shop = Shop(postgres_server.create_database(), "")
                more = f"slot: {slot}, publication: {slot}, "
                stack.callback(_drop_slot, shop.dsn)
            else:
                schema, more = stack.enter_context(MysqlBench(mysql_dsn)).database, ""
                shop = DatabaseShop(mysql_dsn, "", schema)
            make_table(shop)
            copy = postgres_server.create_database()
            text = PIPELINE.format(
                type=kind,
                dsn=shop.dsn,
                more=more,
                schema=schema,
                table=table,
                sinks=sinks.format(copy=copy),
            )
            feed = stack.enter_context(
                opened_feed(shop, tmp_path / "feed.yaml", text, spark_server)
            )
            return Copied(feed, copy)

        yield make


def _drop_slot(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        query = "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND active"
        eventually(lambda: connection.execute(query).fetchone() is None)
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
