"""Mode `polling`: new rows by rowid, each once; and the choice between modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import NotAllowed, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.registry import parse_position, parse_read_view
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.tables import ColumnDetails
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Versions,
    insert,
    inserts,
    take,
    whole,
)
from tests.sources.turso.bench import NativeBench, PollingBench, TriggerBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PollingBench]:
    """A SQLite file without any record of changes."""
    with PollingBench(tmp_path / "shop.db") as made:
        yield made


def test_new_rows_come_once(bench: PollingBench) -> None:
    """Rows before the start, updates and deletes are not seen; ids are functions of table and rowid."""
    bench.execute(insert("orders", 1, 2))
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 3), insert("items", -5, 7), insert("other", 1))
    bench.execute("UPDATE orders SET v = 'x' WHERE id = 1", "DELETE FROM orders WHERE id = 2")
    first, again = (take(bench, start, whole(3)) for _ in range(2))

    assert sorted(map(str, first.changes)) == sorted(
        map(str, inserts("orders", 3) + inserts("items", -5, 7))
    )
    assert [row["event_id"] for row in first.rows] == [row["event_id"] for row in again.rows]
    assert len({row["event_id"] for row in first.rows}) == 3
    assert bench.source().has_changes(start)
    assert not bench.source().has_changes(first.end)
    bench.execute(insert("items", 8))
    assert take(bench, parse_position(first.end.to_json()), whole(1)).changes == inserts("items", 8)


def test_pages_lose_nothing(bench: PollingBench) -> None:
    """More rows than a page, in several tables, arrive whole and in the order of each table."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", *range(1, 31)), insert("items", *range(1, 12)))

    taken = take(bench, start, whole(41), limits=ReadLimits(max_events=7, max_wait=0.05))

    for table, last in (("orders", 31), ("items", 12)):
        assert [one for one in taken.changes if one[0] == table] == inserts(table, *range(1, last))
    assert all(batch.end is not None for batch in taken.batches if batch.rows is not None)


def test_a_snapshot_knows_what_it_saw(bench: PollingBench) -> None:
    """Rows that came after a chunk was read are told from those that it has, table by table."""
    bench.execute(insert("orders", 1), insert("items", 9))
    snapshots = bench.source().snapshots()
    (chunk,) = snapshots.plan(["main.orders"], 100)
    with snapshots.reader() as reader:
        read = reader.read(chunk, snapshots.watermark())
        keys = [row["key"] for batch in read.batches for row in batch.to_pylist()]
    bench.execute(insert("orders", 2), insert("items", 8, 10))
    taken = take(bench, TursoPosition("polling"), whole(5))
    read_view = parse_read_view(read.read_view.to_json())

    not_visible = set()
    for rows in (one.rows for one in taken.batches if one.rows is not None):
        marks = read_view.not_visible(rows).to_pylist()
        not_visible |= {
            (row["table"], row["pos"])
            for row, new in zip(rows.to_pylist(), marks, strict=True)
            if new
        }
    assert keys == ['{"id":1}']
    assert not_visible == {("orders", 2), ("items", 10)}  # 8 is below what it saw of `items`
    assert read_view.covers(read.position)
    assert not read_view.covers(taken.end)


def test_positions_by_table() -> None:
    """A position is later when no table is less far; a table that it does not have is at its start."""
    one = TursoPosition("polling", None, (("a", 1), ("b", 5)))
    later = TursoPosition("polling", None, (("a", 2), ("b", 5), ("c", -9)))
    other = TursoPosition("polling", None, (("a", 3),))

    assert one < later
    assert not later < one
    assert parse_position(one.to_json()) == one
    assert not one < other
    assert not other < one
    assert not TursoPosition("native", 1) < TursoPosition("triggers", 2)


def test_what_has_no_order_is_refused(bench: PollingBench) -> None:
    """WITHOUT ROWID tables, and columns that are not the rowid, have no order that could be followed."""
    bench.run("CREATE TABLE unordered (k TEXT PRIMARY KEY) WITHOUT ROWID")
    with pytest.raises(SourceMisconfigured, match="WITHOUT ROWID"):
        bench.source(tables=("*",)).ensure_start()
    with pytest.raises(SourceMisconfigured, match="tracking_column: v is not the rowid"):
        bench.source(tracking_column="v").ensure_start()
    assert bench.source(tracking_column="id").ensure_start() == TursoPosition("polling")
    with pytest.raises(NotAllowed, match="what they are now"):
        next(iter(bench.source().read_again(TursoPosition("polling"), LIMITS, Versions())))


def test_auto_takes_the_first_that_there_is(tmp_path: Path, bench: PollingBench) -> None:
    """Turso's table, then triggers, then polling; triggers instead of polling where they may be made."""
    native = NativeBench(tmp_path / "native.db").source(cdc_mode="auto")
    triggers = TriggerBench(tmp_path / "triggers.db").source(cdc_mode="auto")
    making = bench.source(cdc_mode="auto", auto_create_triggers=True)

    assert bench.source(cdc_mode="auto").ensure_start().mode == "polling"
    assert [one.ensure_start().mode for one in (native, triggers, making)] == [
        "native", "triggers", "triggers",
    ]  # fmt: skip


def test_a_file_is_never_made(tmp_path: Path) -> None:
    """A path that is wrong, or not mounted yet, is waited for and stays as it is."""
    bench = PollingBench(tmp_path / "shop.db")
    for mode in ("auto", "native", "triggers", "polling"):
        with pytest.raises(SourceUnavailable):
            bench.source(url=str(tmp_path / "absent.db"), cdc_mode=mode).head()
    (tmp_path / "text.db").write_text("no database, but long enough to be looked at" * 100)
    for mode in ("auto", "native"):
        with pytest.raises(SourceMisconfigured):
            bench.source(url=str(tmp_path / "text.db"), cdc_mode=mode).head()

    assert not (tmp_path / "absent.db").exists()


def test_internal_tables_and_views_are_not_captured(bench: PollingBench) -> None:
    """Neither those of SQLite and other tools, nor what is not written to by itself."""
    bench.run(
        "CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY)",
        "CREATE TABLE _df_own (id INTEGER PRIMARY KEY AUTOINCREMENT)",
        "CREATE VIEW seen AS SELECT 1 AS a",
        "CREATE VIRTUAL TABLE words USING fts5(word)",
    )

    assert bench.source(tables=("*",)).tables() == ["main.items", "main.orders", "main.other"]
    assert bench.source(tables=("o%",)).tables() == ["main.orders", "main.other"]
    with pytest.raises(SourceMisconfigured, match="there is no table"):
        bench.source().schema("main.nothing")


def test_details_come_from_the_statement(bench: PollingBench) -> None:
    """What rows do not say: NOT NULL, defaults as written, and which column counts."""
    bench.run(
        "CREATE TABLE counted (id INTEGER PRIMARY KEY AUTOINCREMENT, a TEXT NOT NULL DEFAULT 'x',"
        " b INT, c INT DEFAULT (1 + 1), d INT AS (b + 1))"
    )
    source = bench.source(tables=("*",))

    assert source.details("main.counted").columns == {
        "id": ColumnDetails(False, None, "auto_increment"),
        "a": ColumnDetails(False, "'x'", ""),
        "b": ColumnDetails(True, None, ""),
        "c": ColumnDetails(True, "1 + 1", ""),
    }
    assert source.details("main.orders").columns["id"] == ColumnDetails(False, None, "")
    with pytest.raises(SourceMisconfigured, match="there is no table"):
        source.details("main.nothing")


def test_patterns_that_match_nothing_are_named(bench: PollingBench) -> None:
    """A person sees what was looked for."""
    findings = bench.source(tables=("nothing", "order_*")).preflight(None, None)

    texts = [one.text for one in findings if one.subject == "tables"]
    assert "no table matches source.config.tables (nothing, order_*)" in texts


def test_computed_columns_are_left_out(bench: PollingBench) -> None:
    """Events show what is stored, in every mode that selects rows."""
    bench.run("CREATE TABLE made (id INTEGER PRIMARY KEY, a, b AS (a * 2), c AS (a) STORED)")
    start = bench.source(tables=("made",)).ensure_start()
    bench.execute("INSERT INTO made (a) VALUES (3)")

    (row,) = take(bench, start, whole(1), source=bench.source(tables=("made",))).rows
    findings = {
        one.subject: one.level for one in bench.source(tables=("made",)).preflight(start, None)
    }

    assert row["after"] == '{"id":1,"a":3}'
    assert (findings["columns"], findings["polling"]) == ("note", "warning")
