"""Tables of ClickHouse that are compared with the source, and repaired."""

from __future__ import annotations

import threading

import pytest

from deltaforge_dagster.pipeline.reconcile.reports import TableReport
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.e2e.deployment import eventually
from tests.pipeline.reconcile.copies import MakeCopied, goods, rows, shown
from tests.pipeline.snapshotting import Writers, fill

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.mysql, pytest.mark.clickhouse]

COLUMNS = "name, note, first, last, price, weight, at, _op, _version, _deleted, _source_ts"

LATEST = "(SELECT max(_version) + 1 FROM COPY)"


def sink(server: ClickhouseServer, database: str) -> str:
    """Return the sink `copy` in a pipeline file."""
    options = f"url: '{server.url}', password: '{server.password}', database: {database}"
    options += ", table: '${{source.table}}', mode: current, commit_seconds: 0.1"
    return f"    - {{{{type: clickhouse, config: {{{{id: copy, {options}}}}}}}}}\n"


def damage(server: ClickhouseServer, database: str, *statements: str) -> None:
    """Execute statements in which `COPY` is the sink's table."""
    for statement in statements:
        server.query(statement.replace("COPY", f"{database}.goods"))


def changed(key: int, assignments: str) -> str:
    """Return the statement that changes a row in place."""
    return f"ALTER TABLE COPY UPDATE {assignments} WHERE id = {key} SETTINGS mutations_sync = 1"


def copy_of(key: int, template: int) -> str:
    """Return the statement that adds a row like another one."""
    return f"INSERT INTO COPY (id, {COLUMNS}) SELECT {key}, {COLUMNS} FROM COPY FINAL WHERE id = {template}"


def test_damage_is_found_and_repaired(
    make_copied: MakeCopied, clickhouse_server: ClickhouseServer, clickhouse_database: str
) -> None:
    """Each kind of damage that is possible is found, named and repaired, and changes afterwards are in the table."""
    copied = make_copied("postgres", "goods", goods, sink(clickhouse_server, clickhouse_database))
    copied.deliver(rows(1, 20))
    copied.deliver(
        "UPDATE goods SET name = 'newer', first = 0 WHERE id = 5", "DELETE FROM goods WHERE id = 8"
    )
    before = copied.compare(window_rows=9)["copy"]
    assert (before.problem, before.shown, before.rows, before.whole) == (None, [], 19, True)
    damage(
        clickhouse_server,
        clickhouse_database,
        "DELETE FROM COPY WHERE id = 1",
        copy_of(1000, 2),
        changed(3, "name = 'another', weight = -0.0"),
        changed(5, "name = 'name 5', first = 5"),
        changed(6, "first = last, last = first"),
        changed(7, "note = left(note, 10)"),
        copy_of(8, 9).replace(
            "_version, _deleted, _source_ts FROM", f"{LATEST}, _deleted, _source_ts FROM"
        ),
        changed(11, "price = round(price, 4)"),
        changed(12, "at = at + interval 1 hour"),
    )
    report = copied.compare(window_rows=9, repair=True)["copy"]
    assert report.problem is None
    assert shown(report) == {
        1: ("missing", []),
        1000: ("extra", []),
        3: ("different", ["name", "weight"]),
        5: ("different", ["name", "first"]),
        6: ("different", ["first", "last"]),
        7: ("different", ["note"]),
        8: ("extra", []),
        11: ("different", ["price"]),
        12: ("different", ["at"]),
    }
    copied.deliver("UPDATE goods SET name = 'newest' WHERE id IN (1, 3)")
    after = copied.compare()["copy"]
    assert (after.problem, after.shown, after.rows, after.whole) == (None, [], 19, True)
    tables = clickhouse_server.query(f"SHOW TABLES FROM {clickhouse_database}")
    assert tables.split() == [b"goods"]


@pytest.mark.soak("reconcile")
@pytest.mark.timeout(1200)
def test_no_false_alarm_under_load(
    make_copied: MakeCopied, clickhouse_server: ClickhouseServer, clickhouse_database: str
) -> None:
    """While rows come, go, change and get other keys, and the table is truncated, nothing differs."""
    copied = make_copied(
        "postgres",
        "hot",
        lambda shop: fill(shop, "hot", 1),
        sink(clickhouse_server, clickhouse_database),
    )
    copied.deliver("TRUNCATE hot")
    copied.feed.begin()
    writers = Writers(copied.feed.shop, "hot")
    reports: list[TableReport] = []
    with writers.hammering():
        eventually(lambda: writers.transactions > 300)
        truncating = threading.Timer(5.0, lambda: copied.feed.shop.execute("TRUNCATE hot"))
        truncating.start()
        for _ in range(5):
            reports += copied.compare(window_rows=200).values()
        truncating.join()
    assert [(report.problem, report.shown) for report in reports] == [(None, [])] * 5
    assert sum(report.rows for report in reports) > 100
