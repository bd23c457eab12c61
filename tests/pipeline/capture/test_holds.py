"""Events that nobody can decode yet are kept back, in order, and come as if never held."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import insert
from tests.pipeline.capturing import Stage
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql


@pytest.fixture
def stage(mysql_dsn: str, tmp_path: Path) -> Iterator[Stage]:
    """A pipeline that captures `orders` and `items`."""
    store = StateStore.open(f"sqlite:///{tmp_path / 'state.db'}")
    try:
        with MysqlBench(mysql_dsn) as bench:
            yield Stage(bench, store, tmp_path / "journal")
    finally:
        store.close()


def held(stage: Stage) -> int:
    """Return how many events are held."""
    return sum(hold.events for hold in stage.store.holds.read("p"))


def test_held_events_come_as_if_they_had_never_been_held(stage: Stage) -> None:
    """Same ids, values and order; other tables go on meanwhile; newer rows come behind them."""
    bench = stage.bench
    bench.execute(insert("orders", 1, 2), insert("items", 1))
    bench.execute(insert("orders", 3))
    bench.run("ALTER TABLE orders RENAME COLUMN v TO w, ADD COLUMN n int FIRST")
    bench.execute(insert("items", 2), "INSERT INTO orders VALUES (7, 4, 'x')", insert("items", 3))
    bench.run("TRUNCATE TABLE orders")
    bench.execute("INSERT INTO orders VALUES (8, 5, 'y')", "UPDATE orders SET n = 9 WHERE id = 5")

    stage.capture(lambda _: held(stage) >= 7)

    assert stage.events("orders") == []
    assert [json.loads(row["after"])["id"] for row in stage.events("items")] == [1, 2, 3]
    (hold,) = stage.store.holds.read("p")
    assert (hold.kind, hold.subject) == ("table", f"{bench.database}.orders")
    assert "changed it since" in hold.reason
    since: Position = parse_position(hold.since_position)
    assert not stage.start < since

    # The next run keeps on holding it, although it could decode what is written now.
    bench.execute("INSERT INTO orders VALUES (8, 6, 'z')", insert("items", 4))
    stage.capture(lambda _: held(stage) >= 8)
    assert stage.events("orders") == []

    fix = {"db": bench.database, "table": "orders"}
    with pytest.raises(NotAllowed, match="holds no table"):
        stage.store.holds.release("p", "table", "no.such", "{}")
    stage.store.holds.release("p", "table", hold.subject, json.dumps(fix))
    stage.capture(lambda capture: capture.reading)
    (hold,) = stage.store.holds.read("p")
    assert hold.state == "held"
    assert "--create-table" in hold.reason

    made = "CREATE TABLE orders (id int PRIMARY KEY, v longtext)"
    stage.store.holds.release("p", "table", hold.subject, json.dumps(fix | {"create_table": made}))
    bench.execute("INSERT INTO orders VALUES (8, 10, 'last')")
    stage.capture(lambda _: len(stage.events("orders")) >= 9)

    found = stage.events("orders")
    expected = stage.never_held("orders", 9)
    ends = [row.pop("tx_end") for row in found]
    assert [row.pop("tx_end") for row in expected] == ends
    assert found == expected
    (hold,) = stage.store.holds.read("p")
    assert hold.state == "journaled"
    assert stage.store.holds.parts("p") == []
    positions = [segment.end_position for segment in stage.store.segments.read("p")]
    ordered: list[Position] = [parse_position(one) for one in positions]
    assert all(one <= other for one, other in pairwise(ordered))


def test_a_journal_with_holds_is_not_rebuilt(stage: Stage) -> None:
    """What is captured again could be taken for what sinks have: only with the loss accepted."""
    stage.bench.execute(insert("orders", 1))
    stage.bench.run("ALTER TABLE orders RENAME COLUMN v TO w")
    stage.capture(lambda _: held(stage) >= 1)

    with pytest.raises(NotAllowed, match=r"holds table .*orders"):
        stage.store.journals.rebuild("p", accept_loss=False)
    rebuilt = stage.store.journals.rebuild("p", accept_loss=True)
    assert rebuilt.held == [f"table {stage.bench.database}.orders"]
    assert stage.store.holds.read("p") == []
