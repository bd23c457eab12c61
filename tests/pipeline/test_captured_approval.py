"""Tables whose form changes wait for approval: captured from real servers, in order and complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.schemas import live as live_schemas
from deltaforge_dagster.pipeline.schemas import views as schema_views
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import insert
from tests.pipeline.capturing import Stage
from tests.sources.mysql.bench import MysqlBench
from tests.sources.postgres.bench import PostgresBench


@pytest.fixture
def mysql_stage(mysql_dsn: str, tmp_path: Path) -> Iterator[Stage]:
    """A pipeline that captures `orders` and `items`, and asks before a table has another form."""
    store = StateStore.open(f"sqlite:///{tmp_path / 'state.db'}")
    try:
        with MysqlBench(mysql_dsn) as bench:
            yield Stage(bench, store, tmp_path / "journal", knows_tables=True)
    finally:
        store.close()


@pytest.fixture
def postgres_stage(postgres_dsn: str, tmp_path: Path) -> Iterator[Stage]:
    """The same on PostgreSQL."""
    store = StateStore.open(f"sqlite:///{tmp_path / 'state.db'}")
    try:
        with PostgresBench(postgres_dsn) as bench:
            yield Stage(bench, store, tmp_path / "journal")
    finally:
        store.close()


def held(stage: Stage) -> int:
    """Return how many changes are held."""
    return sum(hold.events for hold in stage.store.holds.read("p") if hold.state == "held")


def images(stage: Stage, table: str) -> list[Any]:
    """Return the newest images of a table's rows in the journal, in order."""
    rows = [row for row in stage.events(table) if row["op"] in "cud"]
    return [json.loads(row["after"] or row["before"]) for row in rows]


def waits_and_comes(stage: Stage, orders: str) -> None:
    """Alter a table twice, and see what waits, what passes, and what comes after each approval."""
    stage.pauses = True
    bench, store = stage.bench, stage.store
    bench.execute(insert("orders", 1), insert("items", 1))
    stage.capture(lambda _: len(images(stage, "items")) >= 1)

    bench.execute("ALTER TABLE orders ADD COLUMN n int")
    # One transaction of both tables ends with a row that waits.
    bench.execute(insert("items", 2), "INSERT INTO orders (id, v, n) VALUES (2, 'b', 2)")
    stage.capture(lambda _: held(stage) >= 1 and len(images(stage, "items")) >= 2)
    bench.execute("UPDATE orders SET n = 3 WHERE id = 1", insert("items", 3))
    stage.capture(lambda _: held(stage) >= 2 and len(images(stage, "items")) >= 3)

    assert [one["id"] for one in images(stage, "orders")] == [1]
    assert [row["tx_end"] for row in stage.events("items")] == [True, True, True]
    (hold,) = store.holds.read("p")
    assert (hold.kind, hold.subject, hold.state) == ("schema", orders, "held")
    assert "version 2 of the table (+ n int" in hold.reason
    assert f"deltaforge hold approve p {orders}" in hold.reason
    (of_orders,) = [one for one in schema_views.tables(store, "p") if one["name"] == orders]
    assert of_orders["pending"] == [2]

    # What comes between the approval and the next run waits for an approval of its own.
    assert store.holds.approve_table("p", orders) == 2
    bench.execute("ALTER TABLE orders ADD COLUMN m int")
    bench.execute("INSERT INTO orders (id, v, n, m) VALUES (4, 'd', 4, 4)", insert("items", 4))
    stage.capture(lambda _: held(stage) >= 1 and len(images(stage, "items")) >= 4)
    assert [(one["id"], one.get("n")) for one in images(stage, "orders")] == [
        (1, None),
        (2, 2),
        (1, 3),
    ]
    assert [row["tx_end"] for row in stage.events("orders")][1:] == [True, True]

    store.holds.approve_table("p", orders)
    bench.execute("INSERT INTO orders (id, v, n, m) VALUES (5, 'e', 5, 5)", insert("items", 5))
    stage.capture(lambda _: len(images(stage, "orders")) >= 5)
    assert [(one["id"], one.get("m")) for one in images(stage, "orders")][3:] == [(4, 4), (5, 5)]
    assert [one["id"] for one in images(stage, "items")] == [1, 2, 3, 4, 5]
    rows = [row for row in stage.rows() if row["table"] in {"orders", "items"}]
    assert len({row["event_id"] for row in rows}) == len(rows) == 10
    with pytest.raises(NotAllowed, match="waits for approval"):
        store.holds.approve_table("p", orders)

    history = store.schemas.history("p", orders)
    sequences = {row["schema_sequence"] for row in rows if row["table"] == "orders"}
    assert {one.stamp.sequence for one in history.versions} == sequences


def compares(stage: Stage, orders: str) -> None:
    """Alter a table while nothing runs; the comparison says how, and registers nothing."""
    stage.pauses = False
    stage.bench.execute("ALTER TABLE orders DROP COLUMN m")
    before = stage.store.schemas.versions("p")
    source = stage.bench.source()
    try:
        found = live_schemas.reload(stage.store, "p", source)
    finally:
        source.close()

    by_name = {one["name"]: one for one in found["tables"]}
    assert by_name[orders]["status"] == "altered"
    assert by_name[orders]["differences"] == ["column_dropped m"]
    others = {one["status"] for name, one in by_name.items() if name != orders}
    assert others <= {"same", "new"}
    assert stage.store.schemas.versions("p") == before


@pytest.mark.mysql
def test_mysql(mysql_stage: Stage) -> None:
    """MySQL, with the little that its log says by default."""
    orders = f"{mysql_stage.bench.database}.orders"
    waits_and_comes(mysql_stage, orders)
    compares(mysql_stage, orders)


@pytest.mark.postgres
def test_postgres(postgres_stage: Stage) -> None:
    """PostgreSQL, whose log describes a table again with the first change after it was altered."""
    waits_and_comes(postgres_stage, "public.orders")
    compares(postgres_stage, "public.orders")


@pytest.mark.postgres
def test_a_table_changed_within_a_transaction(postgres_stage: Stage) -> None:
    """Rows before and behind an ALTER of one transaction: the first pass, and end it."""
    stage = postgres_stage
    stage.pauses = True
    stage.bench.execute(insert("orders", 1))
    stage.capture(lambda _: len(stage.rows()) >= 1)
    stage.bench.execute(
        insert("orders", 2), "ALTER TABLE orders ADD COLUMN n int", insert("orders", 3)
    )
    stage.bench.execute("ALTER TABLE orders DROP COLUMN n", insert("orders", 4))
    stage.capture(lambda _: held(stage) >= 2)
    assert [row["tx_end"] for row in stage.events("orders")] == [True, True]

    stage.store.holds.approve_table("p", "public.orders")
    stage.capture(lambda _: len(stage.rows()) >= 4)

    assert [one["id"] for one in images(stage, "orders")] == [1, 2, 3, 4]
    history = stage.store.schemas.history("p", "public.orders")
    # The form of before is in force again, and keeps its stamp.
    assert [sequence for _, sequence in history.in_force] == [1, 2, 1]
    assert history.current.stamp.version == 1
