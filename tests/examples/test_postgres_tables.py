"""The example of tables in PostgreSQL."""

from __future__ import annotations

import psycopg
import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.examples.stage import Play

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(900)]


def test_orders_postgres_to_postgres(play: Play, postgres_server: PostgresServer) -> None:
    """One table has the orders as they are, the other every version of them."""
    copy = postgres_server.create_database()
    example = play(
        "orders-postgres-to-postgres",
        "CREATE TABLE orders (id int PRIMARY KEY, total numeric(12,2))",
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        POSTGRES_DSN=postgres_server.create_database(),
        COPY_DSN=copy,
    )
    example.change(
        "INSERT INTO orders VALUES (1, 9.50), (2, 1)",
        "INSERT INTO customers VALUES (1, 'Ada')",
        "UPDATE orders SET total = 10 WHERE id = 1",
        "DELETE FROM orders WHERE id = 2",
    )
    example.deliver()

    with psycopg.connect(copy) as connection:
        rows = connection.execute("SELECT id, total::text FROM orders").fetchall()
        assert rows == [(1, "10.00")]
        assert connection.execute("SELECT * FROM customers").fetchall() == [(1, "Ada")]
        versions = connection.execute(
            "SELECT id, total::text, df_is_current FROM history.orders ORDER BY df_position, df_ordinal"
        ).fetchall()
        assert versions == [(1, "9.50", False), (2, "1.00", False), (1, "10.00", True)]
