"""Examples of tables in PostgreSQL."""

from __future__ import annotations

from typing import Any

import dagster as dg
import psycopg
import pytest

from deltaforge_dagster.assets.lake_tables import KnownTable, lake_table_specs, publish_writes
from deltaforge_lab.servers.postgres import PostgresServer
from tests.examples.stage import Play

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


def test_orders_postgres_to_postgres(
    play: Play, postgres_server: PostgresServer, instance: dg.DagsterInstance
) -> None:
    """One table has the orders as they are, the other every version of them; Dagster knows what they are."""
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

    loaded = example.loaded
    publish_writes(instance, example.store, loaded, instance.report_runless_asset_event)
    key = dg.AssetKey([loaded.name, "copy", "public", "orders_copy"])
    (record,) = instance.fetch_materializations(key, limit=9).records
    assert record.asset_materialization is not None
    metadata = record.asset_materialization.metadata
    assert (metadata["changes"].value, metadata["table"].value) == (4, "public.orders")
    columns: Any = metadata["dagster/column_schema"].value
    assert {one.name: one.type for one in columns.columns} == {
        "id": "integer",
        "total": "numeric(12,2)",
    }
    lineage: Any = metadata["dagster/column_lineage"].value
    source = dg.AssetKey([loaded.name, "source", "orders-postgres", "public", "orders"])
    assert lineage.deps_by_column == {
        name: [dg.TableColumnDep(source, name)] for name in ("id", "total")
    }
    (spec, *_) = [
        one
        for one in lake_table_specs(loaded, [KnownTable("copy", ("public", "orders"))])
        if one.key == key
    ]
    assert spec.kinds == {"postgres"}
    assert "postgres://" not in str(spec.metadata)


@pytest.mark.mysql
def test_shop_mysql_to_postgres(play: Play, postgres_server: PostgresServer) -> None:
    """One table has the rows, those that are deleted too; the other every change. MySQL's own types and values are kept."""
    copy = postgres_server.create_database()
    example = play(
        "shop-mysql-to-postgres",
        "CREATE TABLE orders (id bigint unsigned PRIMARY KEY, total decimal(10,2), paid bit(1), at timestamp(6) NULL, data json, raw blob)",
        "CREATE TABLE customers (id int PRIMARY KEY, name varchar(9), kind enum('a','b'), born date)",
        COPY_DSN=copy,
    )
    example.change(
        "SET time_zone = '+00:00'",
        "SET sql_mode = ''",
        "INSERT INTO orders VALUES (18446744073709551615, 9.5, b'1', '2024-01-31 23:59:59.000001', '{\"a\": [1]}', x'00ff'),"
        " (2, 1, NULL, NULL, NULL, '')",
        "INSERT INTO customers VALUES (1, '', 'b', '0000-00-00')",
    )
    example.deliver()
    example.change("DELETE FROM orders WHERE id = 2", "UPDATE customers SET id = 7 WHERE id = 1")
    example.deliver()

    with psycopg.connect(copy) as connection:
        connection.execute("SET timezone = 'UTC'")
        rows = connection.execute(
            "SELECT id::text, total::text, paid, at::text, data::text, raw, df_deleted FROM shop.orders o ORDER BY o.id"
        ).fetchall()
        assert rows == [
            ("2", "1.00", None, None, None, b"", True),
            ("18446744073709551615", "9.50", 1, "2024-01-31 23:59:59.000001+00", '{"a":[1]}', b"\x00\xff", False),
        ]  # fmt: skip
        customers = "SELECT * FROM shop.customers WHERE NOT df_deleted"
        assert connection.execute(customers).fetchall() == [(7, "", "b", "0000-00-00", False)]
        changes = connection.execute(
            "SELECT df_op, id FROM audit.orders ORDER BY df_position, df_ordinal"
        ).fetchall()
        assert [(op, int(key)) for op, key in changes] == [("c", 2**64 - 1), ("c", 2), ("d", 2)]
