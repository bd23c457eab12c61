"""Examples of tables of a lakehouse, read back with the formats' own libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.table import StaticTable

from deltaforge_dagster.assets.lake_tables import publish_writes
from tests.examples.stage import Play

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


def delta(folder: Path, columns: str) -> list[dict[str, Any]]:
    """Return columns of a Delta table, in the order of its changes."""
    query = f"SELECT {columns} FROM t ORDER BY df_position, df_ordinal"
    found = QueryBuilder().register("t", DeltaTable(folder)).execute(query)
    return pa.table(found).to_pylist()


@pytest.mark.postgres
def test_orders_postgres_to_delta(play: Play, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """One table has the orders as they are, the other every change of them; Dagster knows what they are."""
    example = play(
        "orders-postgres-to-delta",
        "CREATE TABLE orders (id int PRIMARY KEY, total numeric(12,2))",
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        LAKE=str(tmp_path),
    )
    example.change(
        "INSERT INTO orders VALUES (1, 9.50), (2, 1)",
        "INSERT INTO customers VALUES (1, 'Ada')",
        "UPDATE orders SET total = 10 WHERE id = 1",
        "DELETE FROM orders WHERE id = 2",
    )
    example.deliver()

    orders = delta(tmp_path / "shop/public/orders", "id, CAST(total AS VARCHAR) AS total")
    assert orders == [{"id": 1, "total": "10.00"}]
    assert delta(tmp_path / "shop/public/customers", "id, name") == [{"id": 1, "name": "Ada"}]
    changes = delta(tmp_path / "audit/public/orders", "df_op, id")
    assert [(one["df_op"], one["id"]) for one in changes] == [
        ("c", 1),
        ("c", 2),
        ("u", 1),
        ("d", 2),
    ]

    loaded = example.loaded
    publish_writes(instance, example.store, loaded, instance.report_runless_asset_event)
    key = dg.AssetKey([loaded.name, "audit", "public", "orders_audit"])
    (record,) = instance.fetch_materializations(key, limit=9).records
    assert record.asset_materialization is not None
    metadata = record.asset_materialization.metadata
    assert metadata["changes"].value == 4
    columns: Any = metadata["dagster/column_schema"].value
    types = {one.name: one.type for one in columns.columns}
    assert (types["id"], types["total"], types["df_op"]) == ("int", "decimal(12,2)", "string")
    lineage: Any = metadata["dagster/column_lineage"].value
    source = dg.AssetKey([loaded.name, "source", "orders-postgres", "public", "orders"])
    assert lineage.deps_by_column == {
        name: [dg.TableColumnDep(source, name)] for name in ("id", "total")
    }


@pytest.mark.mysql
def test_shop_mysql_to_iceberg(play: Play, tmp_path: Path) -> None:
    """A table has each version of each order, with the declared type and partition."""
    example = play(
        "shop-mysql-to-iceberg",
        "CREATE TABLE orders (id int PRIMARY KEY, total decimal(10,4), created_at datetime)",
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        LAKE=str(tmp_path),
    )
    example.change("INSERT INTO orders VALUES (1, 9.5, '2026-01-31'), (2, 1, '2026-02-01')")
    example.change("UPDATE orders SET total = 10 WHERE id = 1", "DELETE FROM orders WHERE id = 2")
    example.deliver()

    (database,) = (one for one in tmp_path.iterdir() if (one / "orders").is_dir())
    table = StaticTable.from_metadata(str(database / "orders"))
    versions = (
        table.scan().to_arrow().sort_by([("df_position", "ascending"), ("df_ordinal", "ascending")])
    )
    assert [
        (one["id"], str(one["total"]), one["df_is_current"], one["df_valid_to"] is None)
        for one in versions.to_pylist()
    ] == [(1, "9.50", False, False), (2, "1.00", False, False), (1, "10.00", True, True)]
    assert [field.name for field in table.spec().fields] == ["created_at_month"]
