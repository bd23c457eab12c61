"""A table of PostgreSQL that cannot be decoded now waits in the journal, and comes in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import insert
from tests.pipeline.capturing import Stage
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres


@pytest.fixture
def stage(postgres_dsn: str, tmp_path: Path) -> Iterator[Stage]:
    """A pipeline that captures `orders`, whose key only the catalog knows, and `items`."""
    store = StateStore.open(f"sqlite:///{tmp_path / 'state.db'}")
    try:
        with PostgresBench(postgres_dsn) as bench:
            bench.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
            yield Stage(bench, store, tmp_path / "journal")
    finally:
        store.close()


def held(stage: Stage) -> int:
    """Return how many events are held."""
    return sum(hold.events for hold in stage.store.holds.read("p"))


def test_a_table_waits_through_runs_and_comes_in_order(stage: Stage) -> None:
    """Held once each, also by the next run, which could decode them; before newer rows once released."""
    bench = stage.bench
    bench.execute(insert("orders", 1), insert("items", 1), insert("orders", 2))
    bench.execute("UPDATE orders SET v = 'x' WHERE id = 1", "TRUNCATE items, orders")
    bench.execute("ALTER TABLE orders RENAME id TO number")
    stage.capture(lambda _: held(stage) >= 4 and len(stage.events("items")) >= 2)

    assert [row["op"] for row in stage.events("items")] == ["c", "t"]
    assert stage.events("orders") == []
    (hold,) = stage.store.holds.read("p")
    assert hold.subject == "public.orders"
    assert "today's primary key (number)" in hold.reason
    since: Position = parse_position(hold.since_position)
    assert not stage.start < since

    bench.execute("ALTER TABLE orders RENAME number TO id")
    bench.execute(insert("orders", 3), insert("items", 3))
    stage.capture(lambda _: held(stage) >= 5)
    assert stage.events("orders") == []

    fix = json.dumps({"db": "public", "table": "orders"})
    stage.store.holds.release("p", "table", "public.orders", fix)
    bench.execute(insert("orders", 4))
    stage.capture(lambda _: len(stage.events("orders")) >= 6)

    rows = stage.events("orders")
    assert [(row["op"], row["key"], row["tx_end"]) for row in rows] == [
        ("c", '{"id":1}', False),
        ("c", '{"id":2}', True),
        ("u", '{"id":1}', False),
        ("t", None, True),
        ("c", '{"id":3}', True),
        ("c", '{"id":4}', True),
    ]
    assert len({row["event_id"] for row in stage.rows()}) == len(stage.rows()) == 9
    assert [row["pos"] for row in rows] == sorted(row["pos"] for row in rows)
