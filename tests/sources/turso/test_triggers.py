"""Mode `triggers`: what the triggers write is the row, to the last bit, and never harms the application."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import (
    NotAllowed,
    PositionLost,
    SourceMisconfigured,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import TursoPosition
from deltaforge_dagster.sources.turso import triggers
from deltaforge_dagster.sources.turso.definitions import definition
from deltaforge_dagster.sources.turso.files import SqliteFile
from deltaforge_dagster.sources.turso.values import row_image
from tests.contracts.test_source import LIMITS, Taken, Versions, add, insert, take, whole
from tests.sources.turso.bench import SqliteBench, TriggerBench

_NAME = '"o\'d""d"'
_ODD = f'CREATE TABLE {_NAME} (id INTEGER PRIMARY KEY, "a""b" , r REAL, "ü x" TEXT)'


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[TriggerBench]:
    """A SQLite file with triggers."""
    with TriggerBench(tmp_path / "shop.db") as made:
        yield made


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.integers(-(1 << 63), (1 << 63) - 1),
            st.floats(allow_nan=False),
            st.text(st.characters(exclude_categories=["Cs"])),
            st.binary(max_size=40),
        ),
        min_size=2,
        max_size=2,
    )
)
def test_values_are_exact(values: list[Any]) -> None:
    """Whatever SQLite holds, the trigger's row says the same as a SELECT does."""
    table = definition(_ODD)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(_ODD)
        connection.execute(triggers._MADE)
        for statement in triggers.trigger_statements(table).values():
            connection.execute(statement)
        connection.execute(f"INSERT INTO {_NAME} VALUES (1, ?, ?, ?)", (*values, "x\0y"))
        (row,) = connection.execute(f"SELECT * FROM {_NAME}").fetchall()
        recorded = connection.execute(
            "SELECT id, table_name, operation, row_data, old_data, created_at FROM _df_cdc_changes"
        ).fetchall()

    log = triggers.TriggerLog("f", lambda _: True)
    change = log._change(recorded[0], table)

    assert change.after == row_image(dict(zip(table.columns, row, strict=True)))
    assert change.key == '{"id":1}'


def test_statements_with_blobs_succeed(bench: TriggerBench) -> None:
    """JSON has no BLOBs, and the application's statement must not fail for that."""
    start = bench.source().head()
    bench.execute("INSERT INTO orders VALUES (1, x'00ff')", "UPDATE orders SET v = 9e999")

    taken = take(bench, start, whole(2))

    assert [(row["before"], row["after"]) for row in taken.rows] == [
        (None, '{"id":1,"v":{"_base64":"AP8="}}'),
        ('{"id":1,"v":{"_base64":"AP8="}}', '{"id":1,"v":"Inf"}'),
    ]


def test_triggers_are_made_anew_when_columns_come(tmp_path: Path) -> None:
    """A reader notices that a table was altered; tables that come later are captured, too."""
    with SqliteBench(tmp_path / "shop.db") as bench:
        bench.mode = "triggers"
        start = bench.source(auto_create_triggers=True).ensure_start()
        source = bench.source(auto_create_triggers=True, tables=())
        reading = source.read(start, LIMITS, Versions())
        taken = Taken([], start, [])
        bench.execute("ALTER TABLE orders ADD COLUMN n", "CREATE TABLE late (k TEXT PRIMARY KEY)")
        while "_df_cdc_delete_late" not in str(bench.rows("SELECT name FROM sqlite_schema")):
            add(taken, next(reading))
        bench.execute("INSERT INTO orders VALUES (1, 'a', 2.5)", "INSERT INTO late VALUES ('x')")
        while len(taken.rows) < 2:
            add(taken, next(reading))
        source.close()

        assert [row["after"] for row in taken.rows] == ['{"id":1,"v":"a","n":2.5}', '{"k":"x"}']
        assert bench.source(auto_create_triggers=True).preflight(None, None)[-1].level == "ok"


def test_rows_of_deltaforges_own_triggers(tmp_path: Path) -> None:
    """Rows that `json_object` wrote are read; a column that the trigger does not know is absent."""
    with SqliteBench(tmp_path / "shop.db") as bench:
        bench.mode = "triggers"
        bench.run(
            triggers._MADE,
            "CREATE TRIGGER _df_cdc_insert_orders AFTER INSERT ON orders BEGIN INSERT INTO _df_cdc_changes"
            " (table_name, operation, row_data, created_at) VALUES ('orders', 'INSERT',"
            " json_object('id', NEW.id, 'v', NEW.v), 1700000000123); END",
            "ALTER TABLE orders ADD COLUMN n",
        )
        start = bench.source().ensure_start()
        bench.execute("INSERT INTO orders VALUES (1, 'a', 2)")
        (row,) = take(bench, start, whole(1)).rows

        assert (row["after"], row["key"]) == ('{"id":1,"v":"a"}', '{"id":1}')
        assert row["ts_us"] == 1_700_000_000_123_000
        levels = {one.subject: one.level for one in bench.source().preflight(None, None)}
        assert levels["triggers"] == "error"  # `items` has none


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("UPDATE _df_cdc_changes SET operation = 'MERGE'", UnsupportedEvent),
        ("UPDATE _df_cdc_changes SET row_data = 'no json'", UnsupportedEvent),
        ("UPDATE _df_cdc_changes SET row_data = NULL", UnsupportedEvent),
        ("DELETE FROM _df_cdc_changes WHERE id = 2", PositionLost),
        ("UPDATE sqlite_sequence SET seq = 0", PositionLost),
    ],
)
def test_what_is_not_understood_stops(
    bench: TriggerBench, statement: str, error: type[Exception]
) -> None:
    """A row of an unknown kind, and one that is gone, are never passed over."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1), insert("orders", 2), insert("orders", 3))
    end = TursoPosition("triggers", 1)
    bench.run(statement)

    with pytest.raises(error) as caught:
        take(bench, start if error is UnsupportedEvent else end, whole(3))

    assert "no json" not in str(caught.value)


def test_numbers_that_could_be_used_again_are_refused(tmp_path: Path) -> None:
    """Without AUTOINCREMENT an emptied table counts from 1 again, and changes would be passed over."""
    with SqliteBench(tmp_path / "shop.db") as bench:
        bench.mode = "triggers"
        with pytest.raises(SourceMisconfigured, match="auto_create_triggers"):
            bench.source().ensure_start()
        bench.run("CREATE TABLE _df_cdc_changes (id INTEGER PRIMARY KEY, table_name, operation)")
        with pytest.raises(SourceMisconfigured, match="AUTOINCREMENT"):
            bench.source().ensure_start()


def test_a_position_belongs_to_its_mode(bench: TriggerBench) -> None:
    """Another mode in the file stops the pipeline; `auto` stays with the position's."""
    start = bench.source(cdc_mode="auto").ensure_start()
    bench.execute(insert("orders", 1))

    assert start.mode == "triggers"
    assert len(take(bench, start, whole(1), source=bench.source(cdc_mode="auto")).rows) == 1
    with pytest.raises(SourceMisconfigured, match="captured in mode triggers"):
        bench.source(cdc_mode="polling").has_changes(start)
    with pytest.raises(NotAllowed, match="deleted once every sink has them"):
        next(iter(bench.source().read_again(start, LIMITS, Versions())))


def test_held_changes_come_back(bench: TriggerBench) -> None:
    """What is held of a table is the change that it would have been."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1), insert("items", 2))
    plain = take(bench, start, whole(2))
    versions = Versions()
    versions.holds = {"main.orders": "because"}
    source = bench.source()
    kept = [
        one
        for batch in _until_end(source.read(start, LIMITS, versions), plain)
        for one in batch.held
    ]
    (batch,) = source.decode_held(iter([one.data for one in kept]), "{}", plain.end, versions)
    source.close()
    (row,) = batch.to_pylist()

    assert {**row, "schema_version": None, "schema_sequence": None} == {
        **plain.rows[0],
        "schema_version": None,
        "schema_sequence": None,
    }


def _until_end(reading: Iterator[Any], taken: Taken) -> Iterator[Any]:
    for batch in reading:
        yield batch
        if batch.end == taken.end:
            return


def test_only_what_is_confirmed_is_deleted(bench: TriggerBench) -> None:
    """The reader tidies up while it goes on, and never beyond what it was told."""
    start = bench.source().ensure_start()
    bench.execute(*(insert("orders", number) for number in range(1, 6)))
    source = bench.source()
    reading = source.read(start, LIMITS, Versions())
    next(reading)
    source.confirm(TursoPosition("triggers", 3))
    while bench.rows("SELECT min(id) FROM _df_cdc_changes") != [(4,)]:
        next(reading)
    source.close()

    with SqliteFile(bench.path).session(5) as session:
        assert session.query("SELECT count(*) FROM _df_cdc_changes") == [(2,)]
    assert bench.source().ensure_start() == TursoPosition("triggers", 3)
    assert [json.loads(str(row["after"]))["id"] for row in take(bench, TursoPosition("triggers", 3), whole(2)).rows] == [4, 5]  # fmt: skip
