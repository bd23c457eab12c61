"""Mode `triggers`: what the triggers write is the row, to the last bit, and never harms the application."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import turso
from hypothesis import example, given
from hypothesis import strategies as st

from deltaforge_dagster.errors import (
    NotAllowed,
    PositionLost,
    SourceMisconfigured,
    UnsupportedEvent,
)
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.turso import triggers
from deltaforge_dagster.sources.turso.connection import SqliteFile
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.schema import definition
from deltaforge_dagster.sources.turso.values import json_value, row_image
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Taken,
    Versions,
    add,
    insert,
    take,
    whole,
)
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
@example([None, 1.7976931348623023e308])  # SQLite's `%!.17g` makes another number of it
@example([1e23, sys.float_info.max])
@example([5e-324, -2.225073858507201e-308])
@example([-0.0, -0.0])
def test_values_are_exact(values: list[Any]) -> None:
    """Whatever SQLite holds, the trigger's row says the same as a SELECT does."""
    table = definition(_ODD)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(_ODD)
        connection.execute(triggers._CREATE_CHANGES)
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


def _reals() -> Iterator[float]:
    """Yield numbers of every size: around powers of two and of ten, between them, and subnormal ones."""
    bits = [1, 2, 3, (1 << 52) - 1]
    for exponent in (*range(0, 2047, 7), 2046):
        bits += [exponent << 52 | part for part in (0, 0x5555555555555, (1 << 52) - 1)]
        bits.append(exponent << 52 | exponent * 0x9E3779B97F4A7C15 >> 9 & (1 << 52) - 1)
    for number in bits:
        (value,) = struct.unpack("<d", number.to_bytes(8, "little"))
        yield value
    yield from (float(f"1e{power}") for power in range(-323, 309))
    yield from (sys.float_info.max, sys.float_info.min, 0.1, 1 / 3, 123456789012345680.0)


@contextmanager
def _sqlite() -> Iterator[Callable[[str, float], Any]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        yield lambda query, value: connection.execute(query, (value,)).fetchone()[0]


@contextmanager
def _turso() -> Iterator[Callable[[str, float], Any]]:
    """Return what asks Turso's engine, whose `printf` is that of SQLite from 3.43 to 3.51."""
    with closing(turso.connect(":memory:")) as connection:
        cursor = connection.cursor()
        yield lambda query, value: cursor.execute(query, (value,)).fetchone()[0]


@pytest.mark.parametrize("connect", [_sqlite, _turso])
def test_numbers_of_every_size_are_exact(
    connect: Callable[[], AbstractContextManager[Callable[[str, float], Any]]],
) -> None:
    """What a trigger writes of a REAL is that number to the last bit, and shown in its shortest form."""
    query = f"SELECT {triggers._real('v')} FROM (SELECT ? AS v)"
    wrong = []
    with connect() as ask:
        for size in _reals():
            for value in (size, -size):
                shown = triggers._decoded(json.loads(ask(query, value)))
                if json.dumps(shown) != json.dumps(json_value(value)):
                    wrong.append((value, shown))

        assert wrong == []
        assert json.loads(ask(query, float("inf"))) == "Infinity"
        assert json.loads(ask(query, -float("inf"))) == "-Infinity"


def test_statements_with_blobs_succeed(bench: TriggerBench) -> None:
    """JSON has no BLOBs, and the application's statement must not fail for that."""
    start = bench.source().head()
    bench.execute("INSERT INTO orders VALUES (1, x'00ff')", "UPDATE orders SET v = 9e999")

    taken = take(bench, start, whole(2))

    assert [(row["before"], row["after"]) for row in taken.rows] == [
        (None, '{"id":1,"v":{"_base64":"AP8="}}'),
        ('{"id":1,"v":{"_base64":"AP8="}}', '{"id":1,"v":"Inf"}'),
    ]


def test_triggers_are_recreated_when_columns_come(tmp_path: Path) -> None:
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


def test_triggers_that_are_gone(bench: TriggerBench) -> None:
    """A look recreates them where the file says so, and else names the table, also beside a reader."""
    start = bench.source().ensure_start()
    bench.execute("DROP TRIGGER _df_cdc_update_orders")
    strict = bench.source(auto_create_triggers=False)
    for found in (strict.maintain(start), strict.maintain(None)):
        assert [(one.subject, one.level) for one in found] == [("triggers", "error")]
        assert "orders" in found[0].text
    assert bench.source(auto_create_triggers=True).maintain(start) == []
    assert strict.maintain(start) == []


def test_a_table_is_told_from_one_that_had_its_name(bench: TriggerBench) -> None:
    """It has another identity once its triggers were made again; altered triggers are still those of the same table."""
    source = bench.source(auto_create_triggers=True)
    start = source.ensure_start()
    first = source.logged_tables()["main.orders"]
    assert first.whole

    bench.execute("ALTER TABLE orders ADD COLUMN n", "INSERT INTO orders VALUES (1, 'a', 2)")
    source.maintain(start)
    assert source.logged_tables()["main.orders"] == first

    bench.execute("DROP TABLE orders", "CREATE TABLE orders (id INTEGER PRIMARY KEY, v TEXT)")
    assert "main.orders" not in source.logged_tables()
    bench.execute("INSERT INTO orders VALUES (2, 'b')")
    source.maintain(start)
    again = source.logged_tables()["main.orders"]
    assert again.identity != first.identity
    assert not again.whole

    bench.execute("DROP TRIGGER _df_cdc_update_orders")
    source.maintain(start)
    assert source.logged_tables()["main.orders"].identity not in {first.identity, again.identity}


def test_rows_of_deltaforges_own_triggers(tmp_path: Path) -> None:
    """Rows that `json_object` wrote are read; a column that the trigger does not know is absent."""
    with SqliteBench(tmp_path / "shop.db") as bench:
        bench.mode = "triggers"
        bench.run(
            triggers._CREATE_CHANGES,
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


def test_triggers_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They will be made, which is a note; by a user who may not write the file they cannot be."""
    with SqliteBench(tmp_path / "shop.db") as bench:
        bench.mode = "triggers"

        def finding() -> Finding:
            found = bench.source(auto_create_triggers=True).preflight(None, None)
            return next(one for one in found if one.subject == "triggers")

        assert finding().level == "note"
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
        assert finding().level == "error"
        assert str(tmp_path / "shop.db") in finding().text


FIRST_VERSION = (
    'CREATE TRIGGER "_df_cdc_insert_orders" AFTER INSERT ON "orders" BEGIN INSERT INTO _df_cdc_changes'
    " (table_name, operation, row_data, old_data, created_at) VALUES ('orders', 'INSERT', '{' ||"
    ' \'"id":\' || CASE typeof(NEW."id") WHEN \'blob\' THEN \'{"_df_hex":"\' || hex(NEW."id") || \'"}\''
    " WHEN 'real' THEN printf('%!.17g', NEW.\"id\") WHEN 'null' THEN 'null' ELSE json_quote(NEW.\"id\") END"
    " || ',' || '\"v\":' || json_quote(NEW.\"v\") || '}', NULL, 1700000000123); END"
)
"""Much like what was made first: numbers had 17 digits."""


def test_triggers_of_an_earlier_version(tmp_path: Path) -> None:
    """They are recreated, or named where the file does not say so; what they wrote is read."""
    with SqliteBench(tmp_path / "shop.db") as bench:
        bench.mode = "triggers"
        start = bench.source(auto_create_triggers=True).ensure_start()
        made = "SELECT sql FROM sqlite_schema WHERE name = '_df_cdc_insert_orders'"
        now = bench.rows(made)
        bench.run("DROP TRIGGER _df_cdc_insert_orders", FIRST_VERSION)
        bench.execute(insert("orders", 1))
        given_, asked = (
            next(one for one in source.preflight(None, None) if one.subject == "triggers")
            for source in (bench.source(), bench.source(auto_create_triggers=True))
        )
        taken = take(bench, start, whole(1), source=bench.source(auto_create_triggers=True))

        assert (given_.level, asked.level) == ("warning", "note")
        assert "before columns were added: orders;" in given_.text
        assert [row["after"] for row in taken.rows] == ['{"id":1,"v":"1"}']
        assert bench.rows(made) == now
        levels = {one.subject: one.level for one in bench.source().preflight(None, None)}
        assert levels["triggers"] == "ok"


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("UPDATE _df_cdc_changes SET operation = 'MERGE'", UnsupportedEvent),
        ("UPDATE _df_cdc_changes SET row_data = 'no json'", UnsupportedEvent),
        (
            """UPDATE _df_cdc_changes SET row_data = '{"v":{"_df_real":[9,1e9]}}'""",
            UnsupportedEvent,
        ),
        (
            """UPDATE _df_cdc_changes SET row_data = '{"v":{"_df_real":[9,9999]}}'""",
            UnsupportedEvent,
        ),
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
    versions.on_hold = {"main.orders": "because"}
    source = bench.source()
    kept = [
        one
        for batch in _until_end(source.read(start, LIMITS, versions), plain)
        for one in batch.parked
    ]
    (batch,) = source.decode_parked(iter([one.data for one in kept]), "{}", plain.end, versions)
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


def test_changes_around_the_positions(bench: TriggerBench) -> None:
    """What follows a position is counted by the size of the newest changes, deleted or not."""
    source = bench.source()
    start = source.ensure_start()
    bench.execute(
        *(f"INSERT INTO orders VALUES ({number}, repeat('x', 1000))" for number in range(10))
    )
    half = TursoPosition(triggers.MODE, 5)

    found = source.retained_log(half, start)

    assert found is not None
    assert found.end == TursoPosition(triggers.MODE, 10)
    assert found.bytes == pytest.approx(5 * 1020, rel=0.02)
    assert found.unconfirmed == 2 * found.bytes
    assert found.retained is None
    bench.run(f"DELETE FROM {triggers.TABLE}")
    gone = source.retained_log(TursoPosition(triggers.MODE, 10), start)
    assert gone is not None
    assert gone.bytes == 0


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
