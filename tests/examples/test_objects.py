"""The example of object files, read back with DuckDB."""

from __future__ import annotations

import datetime as dt

import duckdb
import pytest

from tests.examples.stage import Play
from tests.fix_objects import Bucket

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.s3,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


def test_orders_postgres_to_parquet(play: Play, bucket: Bucket) -> None:
    """A table's folders have every change of its rows, those that were there before included."""
    example = play(
        "orders-postgres-to-parquet",
        "CREATE TABLE orders (id int PRIMARY KEY, total numeric(12,2))",
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        LAKE_BUCKET=bucket.name,
        LAKE_ENDPOINT=bucket.server.url,
        LAKE_KEY=bucket.server.key,
        LAKE_SECRET=bucket.server.secret,
    )
    example.change(
        "INSERT INTO orders VALUES (1, 9.50)",
        "INSERT INTO customers VALUES (1, 'Ada')",
        "UPDATE orders SET total = 10 WHERE id = 1",
        "DELETE FROM orders WHERE id = 1",
    )
    example.deliver()

    today = dt.datetime.now(dt.UTC).date()
    (path,) = (one for one in bucket.paths() if "table=orders" in one)
    folder, _, name = path.rpartition("/")
    assert name.endswith(".parquet")
    day = dt.date(*(int(one.partition("=")[2]) for one in folder.split("/")[2:]))
    assert abs(today - day) <= dt.timedelta(days=1)

    query = f"SELECT op, before_id, after_id, CAST(after_total AS VARCHAR) FROM '{bucket.folder / path}'"
    with duckdb.connect() as connection:
        found = connection.execute(query).fetchall()
    assert found == [("c", None, 1, "9.50"), ("u", None, 1, "10.00"), ("d", 1, None, None)]
