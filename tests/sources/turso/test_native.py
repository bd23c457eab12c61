"""Mode `native`: rows are decoded with the columns of their time, or kept back; nothing is passed over."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import (
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ParkedEvent
from deltaforge_dagster.sources.turso.connection import TursoFile
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Taken,
    Versions,
    add,
    insert,
    take,
    whole,
)
from tests.sources.turso.bench import NativeBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[NativeBench]:
    """A Turso file whose connections capture."""
    with NativeBench(tmp_path / "shop.db") as made:
        yield made


def read_all(bench: NativeBench, start: Position, versions: Versions) -> Taken:
    """Read up to the head."""
    taken = Taken([], start, [])
    head = bench.source().head()
    source = bench.source()
    for batch in source.read(start, LIMITS, versions):
        add(taken, batch)
        assert isinstance(taken.end, TursoPosition)
        if head <= taken.end:
            break
    source.close()
    return taken


def begin(bench: NativeBench) -> tuple[TursoPosition, Versions]:
    """Fix a start, as the pipeline does: with what is noted of tables there."""
    start = bench.source().ensure_start()
    versions = Versions()
    versions.define(bench.source().definitions(start), start)
    return start, versions


def held(taken: Taken) -> list[ParkedEvent]:
    """Return what was kept back."""
    return [one for batch in taken.batches for one in batch.parked]


def images(taken: Taken) -> list[object]:
    """Return the newest images, as text."""
    return [row["after"] or row["before"] for row in taken.rows]


def test_columns_of_their_time(bench: NativeBench) -> None:
    """Rows before ADD and DROP COLUMN have the columns that they had, also when read afterwards."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1))
    bench.execute("ALTER TABLE orders ADD COLUMN n INTEGER DEFAULT 7")
    bench.execute("UPDATE orders SET v = 'b' WHERE id = 1", "INSERT INTO orders VALUES (2, 'c', 8)")
    bench.execute("ALTER TABLE orders DROP COLUMN v")
    bench.execute("DELETE FROM orders WHERE id = 2")

    taken = read_all(bench, start, versions)

    assert images(taken) == [
        '{"id":1,"v":"1"}', '{"id":1,"v":"b","n":7}', '{"id":2,"v":"c","n":8}', '{"id":2,"n":8}',
    ]  # fmt: skip
    assert taken.rows[1]["before"] == '{"id":1,"v":"1","n":7}'
    names = [[column.name for column in table.columns] for table, _ in versions.registered]
    assert names == [["id", "v"], ["id", "v", "n"], ["id", "n"]]
    assert held(taken) == []


def test_a_start_in_the_middle_knows_the_columns_there(bench: NativeBench) -> None:
    """What was noted while reading is enough to go on between two ALTERs."""
    start, versions = begin(bench)
    bench.execute("ALTER TABLE orders ADD COLUMN n INTEGER")
    bench.execute("INSERT INTO orders VALUES (1, 'a', 5)")
    middle = read_all(bench, start, versions).end
    bench.execute("INSERT INTO orders VALUES (2, 'b', 6)")
    bench.execute("ALTER TABLE orders ADD COLUMN m INTEGER")
    bench.execute("INSERT INTO orders VALUES (3, 'c', 7, 8)")

    taken = read_all(bench, middle, versions)

    assert images(taken) == ['{"id":2,"v":"b","n":6}', '{"id":3,"v":"c","n":7,"m":8}']
    assert held(taken) == []


def test_a_rename_that_is_not_recorded_keeps_rows_back(bench: NativeBench) -> None:
    """Turso records no RENAME: rows around it are held, other tables go on, and a person decides."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1))
    bench.execute("ALTER TABLE orders RENAME COLUMN v TO w")
    bench.execute(insert("orders", 2), insert("items", 3))
    taken = read_all(bench, start, versions)

    kept = held(taken)
    assert taken.changes == [("items", "c", {"id": 3, "v": "3"})]
    assert [one.table for one in kept] == ["main.orders", "main.orders"]
    assert "RENAME" in kept[0].reason
    source = bench.source()
    data = [one.data for one in kept]
    with pytest.raises(UnsupportedEvent, match="--create-table"):
        list(source.decode_parked(iter(data), "{}", taken.end, versions))
    fix = json.dumps({"create_table": "CREATE TABLE orders (id INTEGER PRIMARY KEY, w TEXT)"})
    rows = [
        row
        for batch in source.decode_parked(iter(data), fix, taken.end, versions)
        for row in batch.to_pylist()
    ]
    assert [row["after"] for row in rows] == ['{"id":1,"w":"1"}', '{"id":2,"w":"2"}']
    assert rows[0]["pos"] < rows[1]["pos"]


def test_a_rename_between_looks_harms_nothing(bench: NativeBench) -> None:
    """A reader that was up to date before and after it knows which rows have which columns."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1))
    source = bench.source()
    reading = source.read(start, LIMITS, versions)
    taken = Taken([], start, [])
    while not taken.rows:
        add(taken, next(reading))
    bench.execute("ALTER TABLE orders RENAME COLUMN v TO w")
    while not [one for _, one in versions.definitions if "w TEXT" in str(one.get("orders"))]:
        add(taken, next(reading))
    bench.execute(insert("orders", 2))
    while len(taken.rows) < 2:
        add(taken, next(reading))
    source.close()

    assert images(taken) == ['{"id":1,"v":"1"}', '{"id":2,"w":"2"}']
    assert held(taken) == []


def test_a_column_that_another_connection_added(bench: NativeBench) -> None:
    """DDL of a connection that does not capture is noticed in the same way."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1))
    bench.uncaptured("ALTER TABLE orders ADD COLUMN n INTEGER")
    bench.execute("INSERT INTO orders VALUES (2, 'b', 3)")

    taken = read_all(bench, start, versions)

    assert taken.rows == []
    assert len(held(taken)) == 2


def test_tables_that_are_held_are_kept_back(bench: NativeBench) -> None:
    """Nothing overtakes what is held of a table, and comes back as if it had never been."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1), insert("items", 2))
    plain = read_all(bench, start, versions)
    versions.on_hold = {"main.orders": "because"}

    taken = read_all(bench, start, versions)

    (kept,) = held(taken)
    (batch,) = bench.source().decode_parked(iter([kept.data]), "{}", taken.end, versions)
    (row,) = batch.to_pylist()
    assert [one["table"] for one in taken.rows] == ["items"]
    assert kept.reason == "because"
    same = ("after", "key", "event_id", "pos", "tx_id", "row", "ts_us", "op")
    assert [row[name] for name in same] == [plain.rows[0][name] for name in same]


def test_tables_that_come_and_go(bench: NativeBench) -> None:
    """A table is captured from its first row on, also when it was dropped before it is read."""
    source = bench.source(tables=())
    start = source.ensure_start()
    versions = Versions()
    versions.define(source.definitions(start), start)
    bench.execute("CREATE TABLE brief (k TEXT PRIMARY KEY, b BLOB, r REAL)")
    bench.execute("INSERT INTO brief VALUES ('a', x'00ff', 2)", "UPDATE brief SET k = 'b'")
    bench.execute("DROP TABLE brief")
    bench.execute("CREATE TABLE brief (only_this INT)", "INSERT INTO brief VALUES (9)")
    taken = take(bench, start, whole(3), source=bench.source(tables=()))

    after = '{"k":"%s","b":{"_base64":"AP8="},"r":2.0}'
    assert [(row["op"], row["before"], row["after"], row["key"]) for row in taken.rows] == [
        ("c", None, after % "a", '{"k":"a"}'),
        ("u", after % "a", after % "b", '{"k":"b"}'),
        ("c", None, '{"only_this":9}', None),
    ]


def test_ddl_events(bench: NativeBench) -> None:
    """With `native_cdc.level: binlog` what changes captured tables is an event, too."""
    start, _ = begin(bench)
    bench.execute("ALTER TABLE orders ADD COLUMN n INTEGER")
    bench.execute("CREATE TABLE unseen (a)", "DROP TABLE items")
    source = bench.source(native_cdc={"level": "binlog"})
    reading = source.read(start, LIMITS, Versions())
    found: list[dict[str, object]] = []
    while len(found) < 2:
        batch = next(reading)
        found += [] if batch.rows is None else batch.rows.to_pylist()
    source.close()

    assert [(row["op"], row["table"], row["key"]) for row in found] == [("ddl", "_ddl", None)] * 2
    sql = [json.loads(str(row["ddl"])) for row in found]
    assert [one["database"] for one in sql] == ["main", "main"]
    assert "n INTEGER" in sql[0]["sql"]
    assert sql[1]["sql"] == 'DROP TABLE "items"'


def test_the_older_form_of_the_table(tmp_path: Path) -> None:
    """Without transactions in it each change is one of its own, and nothing is lost at its end."""
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE turso_cdc (change_id INTEGER PRIMARY KEY AUTOINCREMENT, change_time INTEGER,"
            " change_type INTEGER, table_name TEXT, id, before BLOB, after BLOB, updates BLOB)"
        )
    with NativeBench(path) as bench:
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1, 2), insert("items", 3))
        taken = take(bench, start, whole(3))

        assert [(row["tx_id"], row["row"], row["tx_end"]) for row in taken.rows] == [
            (None, 0, True)
        ] * 3
        assert bench.rows("SELECT max(change_type) FROM turso_cdc") == [(1,)]
        assert taken.end == bench.source().head()


@pytest.mark.parametrize("capture", ["after", "id", "before"])
def test_connections_that_capture_less(tmp_path: Path, capture: str) -> None:
    """`after` is enough for inserts and updates; what has no row is held, never guessed."""
    with NativeBench(tmp_path / "shop.db") as bench:
        start, versions = begin(bench)
        bench.capture = capture
        bench.execute(insert("orders", 1), "UPDATE orders SET v = 'x'")
        bench.execute("DELETE FROM orders")

        taken = read_all(bench, start, versions)

        if capture == "after":
            assert [(row["op"], row["before"], row["after"]) for row in taken.rows] == [
                ("c", None, '{"id":1,"v":"1"}'),
                ("u", None, '{"id":1,"v":"x"}'),
            ]
        assert len(held(taken)) + len(taken.rows) == 3
        assert any("captures no row" in one.reason for one in held(taken))


def test_numbers_that_began_again_are_noticed(bench: NativeBench) -> None:
    """Turso counts from 1 again when its table was emptied: the same number is another change then."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1))
    end = read_all(bench, start, versions).end
    bench.forget()
    for id_ in range(2, 30):
        bench.execute(insert("orders", id_))
    (same,) = bench.rows(f"SELECT change_time FROM turso_cdc WHERE change_id = {_number(end)}")
    older = TursoPosition("native", _number(end), change_time=same[0] - 5)

    with pytest.raises(PositionLost, match="Re-snapshot required"):
        take(bench, older, whole(1))


def test_old_changes_may_be_deleted(bench: NativeBench) -> None:
    """All before the last one that was captured may go; a gap behind it is a loss."""
    start, versions = begin(bench)
    bench.execute(insert("orders", 1))
    end = read_all(bench, start, versions).end
    bench.uncaptured(f"DELETE FROM turso_cdc WHERE change_id < {_number(end)}")
    bench.execute(insert("orders", 2))
    bench.execute(insert("orders", 3))

    assert len(take(bench, end, whole(2)).rows) == 2
    bench.uncaptured(f"DELETE FROM turso_cdc WHERE change_id = {_number(end) + 1}")
    with pytest.raises(PositionLost, match="deleted before it was read"):
        take(bench, end, whole(2))


_OPEN = """
import sys, turso
connection = turso.connect(sys.argv[1])
connection.execute("SELECT 1").fetchall()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_file_that_is_open_elsewhere_is_waited_for(bench: NativeBench) -> None:
    """An application that has the file open is a reason to try again, until it closes it."""
    start = bench.source().ensure_start()
    with subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(bench.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(SourceUnavailable, match="lock"), TursoFile(bench.path).session(0.2):
            pass
        other.communicate()
    bench.execute(insert("orders", 1))

    assert take(bench, start, whole(1)).changes == [("orders", "c", {"id": 1, "v": "1"})]


def test_a_plan_does_not_keep_the_file_open(bench: NativeBench) -> None:
    """While the chunks of a snapshot are stored, an application may open the file."""
    for number in range(3):
        bench.execute(insert("orders", number))
    chunks = bench.source().snapshots().plan(["main.orders"], 1)

    assert next(iter(chunks)).table == "main.orders"
    subprocess.run(
        [sys.executable, "-c", _OPEN, str(bench.path)], stdin=subprocess.DEVNULL, check=True
    )


def test_without_a_change_table(tmp_path: Path) -> None:
    """The message says what the application has to do."""
    with NativeBench(tmp_path / "shop.db") as bench:
        bench.uncaptured("DROP TABLE turso_cdc")
        with pytest.raises(SourceMisconfigured, match="unstable_capture_data_changes_conn"):
            bench.source().ensure_start()


def test_hidden_columns_are_in_no_image(bench: NativeBench) -> None:
    """Column rules apply before anything leaves the source."""
    start, _ = begin(bench)
    bench.execute(insert("orders", 1), "UPDATE orders SET v = 'secret'")
    source = bench.source(columns=ColumnOptions(mask={"orders.v": "-"}))
    taken = take(bench, start, whole(2), source=source)

    assert [(row["before"], row["after"]) for row in taken.rows] == [
        (None, '{"id":1,"v":"-"}'),
        ('{"id":1,"v":"-"}', '{"id":1,"v":"-"}'),
    ]


def test_what_is_found_before_the_first_run(bench: NativeBench) -> None:
    """The mode, the tables, and what people should know of Turso's files."""
    found = {one.subject: one for one in bench.source().preflight(None, None)}

    assert found["tables"].text == "2 captured: items, orders"
    assert {one.level for one in found.values()} == {"ok", "note"}
    assert {"mode", "changes", "capture", "lock"} <= found.keys()


def _number(position: Position) -> int:
    assert isinstance(position, TursoPosition)
    assert position.last_change_id is not None
    return position.last_change_id
