"""The objects of a commit with several table versions and truncates, put together again: they have what the source has."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import duckdb
import psycopg
import pytest

from deltaforge_lab.servers import mysql
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Feed, opened_feed

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.mysql]

Format = Literal["parquet", "jsonl"]

DOCS = Path(__file__).parents[3] / "docs/object-files.md"

PIPELINE = """\
metadata: {{name: feed, tenant: acme}}
spec:
  source: {source}
  sinks:
    - {{type: s3, config: {{id: files, bucket: "{bucket}", local: true, format: {format}, folder: "{folder}"}}}}
  engine: {{run: {{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}}}}
"""

CHANGES = (
    "INSERT INTO customers VALUES (1, 'a'), (2, 'b'), (3, 'c')",
    "TRUNCATE TABLE customers",
    "INSERT INTO customers VALUES (1, 'd'), (2, 'e')",
    "ALTER TABLE customers ADD COLUMN note varchar(20)",
    "UPDATE customers SET note = 'f', name = 'g' WHERE id = 1",
    "INSERT INTO customers VALUES (4, 'h', 'i')",
    "ALTER TABLE customers DROP COLUMN note",
    "UPDATE customers SET name = 'j' WHERE id IN (1, 2)",
    "ALTER TABLE customers ADD COLUMN note varchar(20)",
    "DELETE FROM customers WHERE id = 2",
)
"""Four stretches of two table versions, of which the first and the third are one; no version holds all changes."""

MORE = (
    "TRUNCATE TABLE customers",
    "INSERT INTO customers VALUES (5, 'k', 'l')",
    "ALTER TABLE customers DROP COLUMN note",
    "INSERT INTO customers VALUES (6, 'm'), (7, 'n')",
    "DELETE FROM customers WHERE id = 7",
    "TRUNCATE TABLE customers",
    "INSERT INTO customers VALUES (8, 'o'), (9, 'p')",
    "UPDATE customers SET id = 10 WHERE id = 9",
)


class Objects:
    """A feed of `customers` into objects in a local folder.

    Attributes:
        feed: The pipeline.
        folder: Where the objects are.
    """

    def __init__(self, feed: Feed, folder: Path, form: Format) -> None:
        self.feed = feed
        self.folder = folder
        self._form = form

    def capture(self, *statements: str) -> None:
        """Execute statements, each in its transaction; then capture and deliver them in one commit."""
        for statement in statements:
            self.feed.shop.execute(statement)
        outcome = self.feed.catch_up()
        assert (outcome.sink_errors, outcome.behind) == ({}, {})

    def names(self) -> list[str]:
        """Return the names of the objects, without their folders."""
        return [one.name for one in sorted(self.folder.rglob("*.*"), key=lambda one: one.name)]

    def rows(self, order: str) -> dict[int, str]:
        """Return the table's rows, from the changes of all objects in an order."""
        if self._form == "parquet":
            read = f"read_parquet('{self.folder}/**/*.parquet', union_by_name=true, filename=true)"
            columns = "op, before_id, after_id, after_name"
        else:
            read = f"read_json('{self.folder}/**/*.jsonl.gz', union_by_name=true, filename=true)"
            columns = "op, before.id, after.id, after.name"
        with duckdb.connect() as connection:
            query = f"SELECT {columns} FROM {read} ORDER BY {order}"
            changes = connection.execute(query).fetchall()
        rows: dict[int, str] = {}
        for op, old, new, name in changes:
            if op == "t":
                rows.clear()
            rows.pop(old, None)
            if new is not None:
                rows[new] = name
        return rows


MakeObjects = Callable[..., Objects]


@pytest.fixture(params=["postgres", pytest.param("mysql", marks=pytest.mark.soak("formats"))])
def make_objects(request: Any, spark_server: SparkAddress, tmp_path: Path) -> Iterator[MakeObjects]:
    """Make a feed of a new table, from each database."""
    is_mysql = request.param == "mysql"
    if is_mysql:
        dsn = request.getfixturevalue("mysql_dsn")
        shop: Shop = MysqlShop(dsn, "")
        table = f"{urlsplit(dsn).path.strip('/')}.customers"
        config = f'{{id: shop-db, dsn: "{dsn}", tables: [{table}]}}'
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        dsn = server.create_database()
        shop = Shop(dsn, "")
        slot = f"feed_{uuid.uuid4().hex[:8]}"
        config = f'{{id: shop-db, dsn: "{dsn}", slot: {slot}, publication: feed, tables: [public.customers]}}'
    shop.execute("CREATE TABLE customers (id int PRIMARY KEY, name varchar(20))")
    with ExitStack() as stack:

        def make(form: Format, folder: str = "") -> Objects:
            text = PIPELINE.format(
                source=f"{{type: {request.param}, config: {config}}}",
                bucket=tmp_path / "objects",
                format=form,
                folder=folder or "${source.table}",
            )
            feed = stack.enter_context(
                opened_feed(shop, tmp_path / "feed.yaml", text, spark_server)
            )
            return Objects(feed, tmp_path / "objects", form)

        yield make


def source_rows(feed: Feed) -> dict[int, str]:
    """Return what the source has."""
    query = "SELECT id, name FROM customers"
    if isinstance(feed.shop, MysqlShop):
        with mysql.connect(feed.shop.dsn) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return dict(cursor.fetchall())
    with psycopg.connect(feed.shop.dsn) as connection:
        return dict(connection.execute(query).fetchall())


ORDERS: dict[Format, list[str]] = {
    "parquet": ["sequence", "parse_filename(filename), file_row_number", "filename, sequence"],
    "jsonl": ["sequence", "filename, sequence"],
}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_objects_have_the_order_of_changes(make_objects: MakeObjects, form: Format) -> None:
    """By their names and places in them, and by `sequence` alone, in one commit and over several."""
    objects = make_objects(form)

    objects.capture(*CHANGES)
    for order in ORDERS[form]:
        assert objects.rows(order) == source_rows(objects.feed) == {1: "j", 4: "h"}, order
    assert len({name.partition("-")[0].partition(".")[0] for name in objects.names()}) == 1
    assert len(objects.names()) == (4 if form == "parquet" else 1)

    objects.capture(*MORE)
    for order in ORDERS[form]:
        assert objects.rows(order) == source_rows(objects.feed) == {8: "o", 10: "p"}, order


def test_the_query_for_current_rows(make_objects: MakeObjects) -> None:
    """That of the docs has the source's rows, whatever changed keys, came back or was truncated."""
    (text,) = re.findall(r"```sql\n(WITH changes.*?);\n```", DOCS.read_text(), re.DOTALL)
    objects = make_objects("parquet", "table=${source.table}/hour=${time.hour}")
    query, places = re.subn(r"'s3:[^']*'", f"'{objects.folder}/table=customers/**/*.parquet'", text)
    assert places == 1

    for statements in (
        CHANGES,
        MORE,
        ("DELETE FROM customers", "INSERT INTO customers VALUES (8, 'q')"),
    ):
        objects.capture(*statements)
        with duckdb.connect() as connection:
            rows = connection.execute(f"SELECT after_id, after_name FROM ({query})").fetchall()
        assert len(rows) == len(dict(rows))
        assert dict(rows) == source_rows(objects.feed)


def test_folders_of_times_have_one_order(make_objects: MakeObjects) -> None:
    """Names sort in each folder; `sequence` also over all of them."""
    objects = make_objects("parquet", "table=${source.table}/hour=${time.hour}")

    objects.capture(*CHANGES)
    objects.capture(*MORE)

    assert objects.rows("sequence") == source_rows(objects.feed)
    assert objects.rows("filename, sequence") == source_rows(objects.feed)
