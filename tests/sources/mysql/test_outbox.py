"""Outbox tables of a real MySQL: marked by every reader, whatever their storage engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.testing.sources import (
    Taken,
    Versions,
    add,
    insert,
    read_into,
    take,
    whole,
)
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

LIMITS = ReadLimits(max_wait=0.05)
ROW = "INSERT INTO outbox VALUES ({0}, 'Order', '{0}', 'OrderCreated', '{{\"total\": 9.90}}')"
COLUMNS = """(
    id bigint PRIMARY KEY, aggregate_type varchar(50), aggregate_id varchar(50),
    event_type varchar(50), payload json
)"""


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database with `orders`, and an outbox that exists in the log only."""
    with MysqlBench(mysql_dsn) as made:
        made.run(f"CREATE TABLE outbox {COLUMNS} ENGINE=BLACKHOLE")
        yield made


def source(bench: MysqlBench, *tables: str) -> MysqlSource:
    """Return a source of `orders` and these tables, which are outboxes by a pattern."""
    captured = tuple(f"{bench.database}.{one}" for one in ("orders", *tables))
    return bench.source(tables=captured, outbox={"tables": (f"{bench.database}.*outbox",)})


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return schema, table, op and id of each row."""
    images = (json.loads(row["after"] or row["before"] or "{}") for row in rows)
    return [
        (row["schema"], row["table"], row["op"], image.get("id"))
        for row, image in zip(rows, images, strict=True)
    ]


def test_a_blackhole_table_is_read_like_any_other(bench: MysqlBench) -> None:
    """Its rows stand between those of its transaction, with names, values and key.

    So they do in every reader: of the log, of the log again, and of log sections of it beside others.
    """
    reader = source(bench, "outbox")
    start = reader.ensure_start()
    for number in range(1, 4):
        bench.execute(insert("orders", number), ROW.format(number), insert("orders", 10 + number))
    assert reader.has_changes(start)
    assert f"{bench.database}.outbox" in reader.tables()
    taken = take(bench, start, whole(9), source=reader)

    one: Any = taken.rows[1]
    assert json.loads(one["after"]) == {
        "id": 1, "aggregate_type": "Order", "aggregate_id": "1",
        "event_type": "OrderCreated", "payload": {"total": 9.90},
    }  # fmt: skip
    assert (one["key"], one["db"]) == ('{"id":1}', bench.database)
    assert shown(taken.rows)[:3] == [
        (None, "orders", "c", 1), ("__outbox", "outbox", "c", 1), (None, "orders", "c", 11),
    ]  # fmt: skip
    assert [row["tx_end"] for row in taken.rows] == [False, False, True] * 3

    again = Taken([], start, [])
    for batch in source(bench, "outbox").read_again(start, LIMITS, Versions()):
        add(again, batch)
        if len(again.rows) == len(taken.rows):
            break
    assert shown(again.rows) == shown(taken.rows)
    planner = source(bench, "outbox")
    sections = [
        one for one in planner.plan_sections(start, Versions(), lambda: 1) if one is not None
    ]
    apart = Taken([], start, [])
    for number, section in enumerate(sections):
        read_into(apart, source(bench, "outbox").read_section(section, LIMITS, number))
    assert shown(apart.rows) == shown(taken.rows)


def test_every_change_of_an_outbox_is_marked(bench: MysqlBench) -> None:
    """Updates, deletes and a TRUNCATE of an ordinary table too, so that none passes for another's."""
    bench.run("CREATE TABLE my_outbox (id int PRIMARY KEY, v longtext)")
    start = source(bench, "my_outbox").ensure_start()
    bench.execute(insert("my_outbox", 1), "UPDATE my_outbox SET v = 'x'", "DELETE FROM my_outbox")
    bench.run("TRUNCATE TABLE my_outbox")
    bench.execute(insert("orders", 1))

    taken = take(bench, start, whole(5), source=source(bench, "my_outbox"))

    assert shown(taken.rows) == [
        ("__outbox", "my_outbox", "c", 1),
        ("__outbox", "my_outbox", "u", 1),
        ("__outbox", "my_outbox", "d", 1),
        ("__outbox", "my_outbox", "t", None),
        (None, "orders", "c", 1),
    ]


def test_an_outbox_that_was_held_is_marked(bench: MysqlBench) -> None:
    """Events that were kept back until somebody said what the table was are those of an outbox."""
    bench.run("CREATE TABLE my_outbox (id int PRIMARY KEY, v longtext)")
    reader = source(bench, "my_outbox")
    start = reader.ensure_start()
    bench.execute(insert("my_outbox", 1))
    bench.run("ALTER TABLE my_outbox RENAME COLUMN v TO w")
    bench.run("TRUNCATE TABLE my_outbox")
    bench.execute(insert("orders", 1))
    taken = take(bench, start, whole(1), source=reader)
    held = [event.data for batch in taken.batches for event in batch.parked]
    assert shown(taken.rows) == [(None, "orders", "c", 1)]

    table = "CREATE TABLE my_outbox (id int PRIMARY KEY, v longtext)"
    fix = json.dumps({"db": bench.database, "table": "my_outbox", "create_table": table})
    batches: list[pa.RecordBatch] = list(
        source(bench, "my_outbox").decode_parked(iter(held), fix, taken.end, Versions())
    )

    rows = [row for batch in batches for row in batch.to_pylist()]
    assert shown(rows) == [("__outbox", "my_outbox", "c", 1), ("__outbox", "my_outbox", "t", None)]
