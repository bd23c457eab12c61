"""Applying staged changes to tables of a real server, read back by psycopg."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo

from deltaforge_dagster.errors import (
    AuthFailed,
    LeaseLost,
    PermissionMissing,
    SinkRejected,
    SinkUnavailable,
    TableRejected,
)
from deltaforge_dagster.sinks.postgres import writer as writer_module
from deltaforge_dagster.sinks.postgres.server import TargetServer
from deltaforge_dagster.sinks.tables.staged import StagedStep, StagedTable, staged_batches
from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.value_types import INT16, INT32, INT64, TEXT, ValueType
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from tests.e2e.deployment import eventually
from tests.fix_postgres import PostgresVersion
from tests.pipeline.lake.lake_tables import Staging, moment
from tests.sinks.postgres.database import Target, unguarded

pytestmark = pytest.mark.postgres


def numbered(*names: str) -> list[dict[str, Any]]:
    """Rows with ids from 1, and these names."""
    return [{"id": key, "name": name, "note": f"x{key}"} for key, name in enumerate(names, 1)]


def test_a_changelog_has_every_change(target: Target) -> None:
    """A changelog has each change once, and a row for a truncate, whoever repeats a commit."""
    staging, writer = Staging(target, "changelog"), target.writer(mode="changelog")
    first = staging.table(staging.step({"id": 1, "name": "a", "df_op": "c"}))
    second = staging.table(
        staging.truncate(3, 0),
        staging.step(
            {"id": 2, "name": "b", "df_ordinal": 1, "df_absent": ["note"]},
            {"id": 2, "df_op": "d", "df_ordinal": 2, "df_tx_id": "7", "df_source_position": "0/1"},
            segment=4,
        ),
    )
    writer.commit(first, 2, unguarded)
    made = writer.commit(second, 4, unguarded)
    writer.commit(second, 4, unguarded)
    target.writer(mode="changelog").commit(second, 4, unguarded)
    target.writer(mode="changelog").commit(first, 2, unguarded)

    names = "id, name, df_op, df_position, df_ordinal, df_event_id, df_tx_id, df_event_time"
    assert target.rows(names, order="df_position, df_ordinal") == [
        (1, "a", "c", 0, 0, "e0", None, moment(0)),
        (None, None, "t", 3, 0, None, None, moment(300)),
        (2, "b", "u", 4, 1, "e1", None, moment(401)),
        (2, None, "d", 4, 2, "e2", "7", moment(402)),
    ]
    assert list(made.columns) == list(target.types().items())


def named(staging: Staging, *steps: StagedStep, **identities: str) -> StagedTable:
    """The changes of a commit whose columns are identified like that."""
    return replace(staging.table(*steps), identities=identities)


@pytest.mark.parametrize("mode", ["current", "history"])
def test_columns_that_get_other_names(target: Target, mode: str) -> None:
    """They keep their values: renamed, with each other's names, and dropped ones whose name another column gets."""
    first, writer = Staging(target, mode, {"id": INT32, "a": INT32, "b": TEXT}), target.writer(mode=mode)  # fmt: skip
    step = first.step({"id": 1, "a": 1, "b": "x"})
    writer.commit(named(first, step, id="id@1", a="a@1", b="b@1"), 0, unguarded)

    swapped = Staging(target, mode, {"id": INT32, "b": INT32, "a": TEXT})
    step = swapped.step({"id": 2, "b": 2, "a": "y"}, segment=1)
    for _ in range(2):
        writer.commit(named(swapped, step, id="id@1", b="a@1", a="b@1"), 1, unguarded)
    assert target.rows("id, a, b") == [(1, "x", 1), (2, "y", 2)]

    again = Staging(target, mode, {"id": INT32, "a": INT32, "c": TEXT})
    step = again.step({"id": 3, "a": 3, "c": "z"}, segment=2)
    writer.commit(named(again, step, id="id@1", a="a@3", c="c@3"), 2, unguarded)
    assert target.rows("id, a, b_dropped_1, b, c") == [
        (1, None, "x", 1, None), (2, None, "y", 2, None), (3, 3, None, None, "z"),
    ]  # fmt: skip


def test_columns_that_may_be_others(target: Target) -> None:
    """The table is held, and the reason says what to do; loaded again, it takes them."""
    staging, writer = Staging(target, "current", {"id": INT32}), target.writer()
    writer.commit(named(staging, staging.step({"id": 1}), id="id@1"), 0, unguarded)
    uncertain = named(staging, staging.step({"id": 2}, segment=1), id="id@2?")
    with pytest.raises(
        TableRejected, match="is not known; have the table loaded again; run: deltaforge resync"
    ):
        writer.commit(uncertain, 1, unguarded)
    writer.recreate(named(staging, id="id@2?"), unguarded)
    writer.commit(uncertain, 1, unguarded)
    assert target.rows("id") == [(2,)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("current", [(1, 7, "it's", None), (2, 7, "it's", None), (3, None, "n", 1)]),
        ("history", [(1, None, None, None), (1, 7, "it's", None), (2, 7, "it's", None), (3, None, "n", 1)]),
    ],
)  # fmt: skip
def test_what_rows_have_in_added_columns(
    target: Target, mode: str, expected: list[tuple[Any, ...]]
) -> None:
    """Rows that are there have what the source gave them; versions of a row that have ended have nothing."""
    first, writer = Staging(target, mode, {"id": INT32}), target.writer(mode=mode)
    writer.commit(first.table(first.step({"id": 1}, {"id": 2})), 0, unguarded)
    if mode == "history":
        writer.commit(first.table(first.step({"id": 1}, segment=1)), 1, unguarded)
    second = Staging(target, mode, {"id": INT32, "n": INT32, "t": TEXT, "o": INT32})
    added = second.table(second.step({"id": 3, "t": "n", "o": 1}, segment=2))
    for _ in range(2):
        writer.commit(replace(added, fills={"n": "7", "t": "it's"}), 2, unguarded)
    order = "id, n IS NOT NULL, df_position" if mode == "history" else "id"
    assert target.rows("id, n, t, o", order=order) == expected
    defaults = (
        "information_schema.columns WHERE table_name = 'orders' AND column_default IS NOT NULL"
    )
    assert target.rows("count(*)", defaults) == [(0,)]


def test_the_table_of_commits_of_an_earlier_version(target: Target) -> None:
    """It gets the column that it lacks, and columns go by their names until something is known of them."""
    staging = Staging(target, "current", {"id": INT32, "a": INT32})
    writer = target.writer()
    writer.commit(staging.table(staging.step({"id": 1, "a": 1})), 0, unguarded)
    writer.close()
    target.execute("ALTER TABLE deltaforge.commits DROP COLUMN columns")
    step = staging.step({"id": 2, "a": 2}, segment=1)
    target.writer().commit(named(staging, step, id="id@1", a="a@1"), 1, unguarded)
    renamed = Staging(target, "current", {"id": INT32, "b": INT32})
    step = renamed.step({"id": 3, "b": 3}, segment=2)
    target.writer().commit(named(renamed, step, id="id@1", b="a@1"), 2, unguarded)
    assert target.rows("id, b") == [(1, 1), (2, 2), (3, 3)]


def changes_of_keys(staging: Staging) -> list[StagedStep]:
    """Updates, deletes, and keys that move to where others were."""
    return [
        staging.step(
            {"id": 1, "name": "new", "df_absent": ["note"]},
            {"id": 2, "df_op": "d", "df_absent": ["name", "note"]},
            {"id": 9, "name": "unknown", "df_absent": ["note"]},
            {"id": 8, "df_op": "d", "df_absent": ["name", "note"]},
            segment=1,
        ),
        staging.step(
            {"id": 4, "name": "was 3", "df_old_id": 3, "df_absent": ["note"]},
            {"id": 5, "name": "was 4", "df_old_id": 4, "df_absent": ["note"]},
            {"id": 6, "name": "was 5", "df_old_id": 5, "note": "own"},
            segment=2,
            rekey=True,
        ),
    ]


def test_a_current_table_has_the_source_s_rows(target: Target) -> None:
    """Inserts, updates, deletes, changes of keys and truncates; what a change lacks stays as it is."""
    staging, writer = Staging(target, "current"), target.writer()
    inserts = staging.step(*numbered("n1", "n2", "n3", "n4", "n5"), inserts_only=True)
    writer.commit(staging.table(inserts), 0, unguarded)
    changes = staging.table(*changes_of_keys(staging), absent=["name", "note"])
    writer.commit(changes, 2, unguarded)
    expected = [
        (1, "new", "x1"), (4, "was 3", "x3"), (5, "was 4", "x4"), (6, "was 5", "own"), (9, "unknown", None),
    ]  # fmt: skip
    assert target.rows() == expected
    target.writer().commit(changes, 2, unguarded)
    assert target.rows() == expected
    assert target.types() == {"id": "bigint", "name": "text", "note": "text"}
    emptied = staging.table(
        staging.truncate(3, 5), staging.step({"id": 1, "name": "after", "df_ordinal": 6}, segment=3)
    )
    writer.commit(emptied, 3, unguarded)
    assert target.rows() == [(1, "after", None)]


def test_documents_that_are_the_same_key(target: Target) -> None:
    """`jsonb` compares numbers, not digits: the row that has the later change counts, in its own spelling."""
    staging, writer = Staging(target, "current", {"id": types.JSON, "name": TEXT}), target.writer()

    def table(*steps: StagedStep) -> StagedTable:
        made = staging.table(*steps)
        columns = (TypedColumn("id", types.JSON, "jsonb"), *made.columns.columns[1:])
        return replace(made, columns=TypedSchema(columns))

    writer.commit(table(staging.step({"id": '{"n": 1.0}', "name": "a"})), 0, unguarded)
    deleted = {"id": '{"n": 1.0}', "df_op": "d", "df_ordinal": 7}
    changed = {"id": '{"n": 1.00}', "name": "b", "df_ordinal": 7}
    writer.commit(table(staging.step(changed, deleted, segment=1)), 1, unguarded)
    assert target.rows("id::text, name") == [('{"n": 1.00}', "b")]
    deleted |= {"id": '{"n": 1}', "df_ordinal": 8}
    writer.commit(table(staging.step(changed, deleted, segment=2)), 2, unguarded)
    assert target.rows() == []


def test_rows_are_merged_in_the_order_of_the_key(target: Target) -> None:
    """New rows lie in the table in the order of the key, whatever order they came in."""
    staging, writer = Staging(target, "current"), target.writer()
    rows = [{"id": (number * 389) % 1000, "name": str(number)} for number in range(1000)]
    writer.commit(staging.table(staging.step(*rows)), 0, unguarded)
    assert [key for key, *_ in target.rows(order="ctid")] == list(range(1000))


def test_lookups_by_key_count_as_cheap(target: Target) -> None:
    """Our sessions have our setting for that, not the one of the database."""
    database = conninfo.conninfo_to_dict(target.dsn)["dbname"]
    target.execute(f"ALTER DATABASE {database} SET random_page_cost = 4")
    with TargetServer.from_dsn(target.dsn, "copy", "test").connect() as connection:
        assert connection.execute("SHOW random_page_cost").fetchone() == ("1.1",)


def test_soft_deletes_keep_rows(target: Target) -> None:
    """With soft deletes, deletes, truncates and changes of keys mark rows, and inserts bring them back."""
    staging, writer = Staging(target, "current"), target.writer(soft_deletes=True)
    rows = staging.step(*numbered("n1", "n2", "n3", "n4", "n5"), inserts_only=True)
    writer.commit(staging.table(rows), 0, unguarded)
    again = staging.step({"id": 2, "name": "again"}, segment=3, inserts_only=True)
    steps = [*changes_of_keys(staging), again]
    writer.commit(staging.table(*steps, absent=["name", "note"]), 3, unguarded)
    assert target.rows() == [
        (1, "new", "x1", False), (2, "again", None, False), (3, "n3", "x3", True),
        (4, "was 3", "x3", False), (5, "was 4", "x4", False), (6, "was 5", "own", False),
        (9, "unknown", None, False),
    ]  # fmt: skip
    writer.commit(staging.table(staging.truncate(4, 0)), 4, unguarded)
    assert {row[3] for row in target.rows()} == {True}


def test_a_history_has_every_version(target: Target) -> None:
    """A version begins and ends with changes; what a first or later one lacks is in the version that the table has."""
    staging, writer = Staging(target, "history"), target.writer(mode="history")
    inserts = staging.step(*numbered("a", "b", "c"), reads=True)
    writer.commit(staging.table(inserts), 0, unguarded)
    steps = [
        staging.step(
            {"id": 1, "name": "a2", "df_absent": ["note"], "df_valid_to": moment(101)},
            {"id": 1, "name": "a3", "df_absent": ["note"]},
            {"id": 2, "df_op": "d", "df_absent": ["name", "note"]},
            segment=1,
        ),
        staging.step(
            {"id": 4, "name": "was 3", "df_old_id": 3, "df_absent": ["note"]}, segment=2, rekey=True
        ),
    ]
    changes = staging.table(*steps, absent=["name", "note"])
    for one in (writer, target.writer(mode="history")):
        one.commit(changes, 2, unguarded)
    names = "id, name, note, df_valid_from, df_valid_to, df_is_current"
    expected = [
        (1, "a", "x1", moment(0), moment(100), False),
        (1, "a2", "x1", moment(100), moment(101), False),
        (1, "a3", "x1", moment(101), None, True),
        (2, "b", "x2", moment(1), moment(102), False),
        (3, "c", "x3", moment(2), moment(200), False),
        (4, "was 3", "x3", moment(200), None, True),
    ]
    order = "id, df_position, df_ordinal"
    assert target.rows(names, order=order) == expected
    writer.commit(staging.table(staging.truncate(3, 0)), 3, unguarded)
    assert [row[4:] for row in target.rows(names, order=order)] == [
        (moment(100), False), (moment(101), False), (moment(300), False),
        (moment(102), False), (moment(200), False), (moment(300), False),
    ]  # fmt: skip


MIXED: Mapping[str, tuple[ValueType, list[Any]]] = {
    "boolean": (types.BOOLEAN, [True, False]),
    "int8": (types.INT8, [-128, 127]),
    "int16": (types.INT16, [-(2**15), 2**15 - 1]),
    "int32": (types.INT32, [-(2**31), 2**31 - 1]),
    "int64": (types.INT64, [-(2**63), 2**63 - 1]),
    "float32": (types.FLOAT32, [1.5, float("-inf")]),
    "float64": (types.FLOAT64, [5e-324, float("inf")]),
    "small": (types.decimal(20, 18), [Decimal("0.000000000000000001"), Decimal("-1.5")]),
    "large": (types.decimal(38, 0), [Decimal("9" * 38), Decimal(0)]),
    "text": (types.TEXT, ["", 'a\\N\t"\n\r,{}é😀']),
    "json": (types.JSON, ['{"a": [1.0,  null]}', "[]"]),
    "binary": (types.BINARY, [b"", b"\x00\\x\xff"]),
    "uuid": (types.UUID, [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)]),
    "date": (types.DATE, [dt.date.min, dt.date.max]),
    "time": (types.TIME, [dt.time.min, dt.time.max]),
    "timestamp": (types.TIMESTAMP, [dt.datetime.combine(day, time) for day, time in ((dt.date.min, dt.time.min), (dt.date.max, dt.time.max))]),
    "timestamptz": (types.TIMESTAMPTZ, [moment(0), dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.UTC)]),
    "texts": (types.list_of(types.TEXT), [[], ["", None, 'a"b\\c,{}', "NULL"]]),
    "bytes": (types.list_of(types.BINARY), [[b"\x00\\"], [None]]),
    "floats": (types.list_of(types.FLOAT64), [[0.1, -0.0], [float("inf")]]),
    "moments": (types.list_of(types.TIMESTAMPTZ), [[moment(1)], [None]]),
    "nested": (types.list_of(types.list_of(types.INT32)), [[[1, 2], [3, None]], [[4]]]),
}  # fmt: skip
"""A type for each column, and two values."""


def test_values_are_kept_as_they_are(target: Target) -> None:
    """Every type, its extremes and null; empty text is not null."""
    staging = Staging(
        target, "current", {"id": INT64} | {name: one for name, (one, _) in MIXED.items()}
    )
    rows: list[dict[str, Any]] = [
        {"id": number, **{name: values[number] for name, (_, values) in MIXED.items()}}
        for number in range(2)
    ]
    writer = target.writer()
    writer.commit(staging.table(staging.step(*rows, {"id": 2})), 0, unguarded)

    names = ", ".join(f'"{name}"' if name != "json" else "json::text" for name in MIXED)
    found = target.rows(f"id, {names}")
    for row, wanted in zip(found, rows, strict=False):
        assert dict(zip(wanted, row, strict=True)) == wanted
    assert set(found[2][1:]) == {None}
    assert list(target.types().values()) == [
        "bigint", "boolean", "smallint", "smallint", "integer", "bigint", "real", "double precision",
        "numeric(20,18)", "numeric(38,0)", "text", "json", "bytea", "uuid", "date", "time without time zone",
        "timestamp without time zone", "timestamp with time zone", "text[]", "bytea[]", "double precision[]",
        "timestamp with time zone[]", "integer[]",
    ]  # fmt: skip
    nan = {"id": 3, "float64": float("nan"), "floats": [float("nan")]}
    writer.commit(staging.table(staging.step(nan, segment=1)), 1, unguarded)
    assert target.rows("float64::text, floats::text", order="id")[3] == ("NaN", "{NaN}")


def test_types_of_postgresql_are_kept(target: Target) -> None:
    """What typed rows have as text, and what a column of the same type takes, has the source's type."""
    declared: Any = {"public.orders": {"plain": "text"}}
    writer = target.writer(types=declared)
    sources = {
        "n": "numeric", "i": "interval", "a": "inet", "b": "bit(3)", "z": "time with time zone",
        "plain": "numeric",
    }  # fmt: skip
    columns = [TypedColumn(name, TEXT, source) for name, source in sources.items()]
    columns.append(TypedColumn("j", types.JSON, "jsonb"))
    staging = Staging(target, "current", {"id": INT64} | {one.name: one.type for one in columns})
    values = {
        "n": "123456789012345678901234567890.000000000000000000001", "i": "1 mon -02:00:00", "a": "10.0.0.0/8",
        "b": "101", "z": "10:00:00+02", "plain": "1", "j": '{"a": 1}',
    }  # fmt: skip
    made = staging.table(staging.step({"id": 1, **values}, {"id": 2, "n": "NaN", "i": None}))
    schema = TypedSchema((TypedColumn("id", INT64, "bigint"), *columns))
    writer.commit(replace(made, columns=schema), 0, unguarded)

    assert list(target.types().values())[1:] == [*[*sources.values()][:-1], "text", "jsonb"]
    names = ", ".join(f"{name}::text" for name in values)
    assert target.rows(names, order="id")[0] == tuple(values.values())
    nul = staging.step({"id": 3, "j": '{"a": "\\u0000"}'}, segment=1)
    with pytest.raises(TableRejected, match="which jsonb cannot have"):
        writer.commit(replace(staging.table(nul), columns=schema), 1, unguarded)
    wrong = replace(staging.table(staging.step({"id": 3, "n": "x-1"}, segment=1)), columns=schema)
    with pytest.raises(TableRejected, match="declare the column as text under `types`") as raised:
        writer.commit(wrong, 1, unguarded)
    assert "x-1" not in str(raised.value)


def test_an_existing_table_is_used(target: Target) -> None:
    """A table that is empty keeps its own columns, types that take the values, views and defaults."""
    target.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE orders (id numeric(20) UNIQUE, name varchar, mood mood, more int DEFAULT 7)",
        "CREATE VIEW names AS SELECT name FROM orders",
    )
    staging = Staging(target, "current", {"id": INT64, "name": TEXT, "mood": TEXT, "extra": INT16})
    writer = target.writer()
    row = {"id": 1, "name": "a", "mood": "ok", "extra": 3}
    writer.commit(staging.table(staging.step(row)), 0, unguarded)
    changed = staging.step({"id": 1, "name": "b", "mood": "sad"}, segment=1)
    writer.commit(staging.table(changed), 1, unguarded)
    assert target.rows() == [(1, "b", "sad", 7, None)]
    unknown = staging.step({"id": 1, "name": "b", "mood": "other-1"}, segment=2)
    with pytest.raises(TableRejected, match="no value of its column's type") as raised:
        writer.commit(staging.table(unknown), 2, unguarded)
    assert "other-1" not in str(raised.value)


def test_columns_are_added_and_widened(target: Target) -> None:
    """New columns are added; a type becomes larger; a smaller type fits into a wider one; a dropped column stays."""
    staging = Staging(target, "current", {"id": INT64, "n": INT32, "wide": INT64, "gone": TEXT})
    writer = target.writer()
    first = staging.step({"id": 1, "n": 1, "wide": 2, "gone": "g"})
    writer.commit(staging.table(first), 0, unguarded)
    staging.types = {"id": INT64, "n": INT64, "wide": INT16, 'Odd, "%s"': types.decimal(5, 2)}
    row = {"id": 2, "n": 2**40, "wide": 3, 'Odd, "%s"': Decimal(1)}
    writer.commit(staging.table(staging.step(row, segment=1)), 1, unguarded)
    assert target.rows() == [(1, 1, 2, "g", None), (2, 2**40, 3, None, 1)]
    assert target.types() == {
        "id": "bigint", "n": "bigint", "wide": "bigint", "gone": "text", 'Odd, "%s"': "numeric(5,2)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [(TEXT, types.FLOAT64), (types.decimal(5, 2), types.decimal(5, 3)), (types.DATE, types.TIMESTAMP)],
)  # fmt: skip
def test_a_type_that_does_not_hold_the_values_is_rejected(
    target: Target, old: ValueType, new: ValueType
) -> None:
    """The message names the column, both types and the remedies, and nothing is written."""
    staging = Staging(target, "changelog", {"id": INT64, "some": old})
    writer = target.writer(mode="changelog")
    writer.commit(staging.table(staging.step({"id": 1})), 0, unguarded)
    staging.types = {"id": INT64, "some": new}
    resync = "deltaforge resync shop --sink copy --tables public.orders"
    with pytest.raises(TableRejected, match=rf"column some has the type .* `types`.*{resync}"):
        writer.commit(staging.table(staging.step({"id": 2}, segment=1)), 1, unguarded)
    assert target.rows("id") == [(1,)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE orders DROP COLUMN n", "its column n is gone"),
        ("ALTER TABLE orders RENAME n TO m", "its column n is gone"),
        ("ALTER TABLE orders ALTER n TYPE smallint", "column n had the type integer and has smallint"),
        ("CREATE TABLE copy AS TABLE orders; DROP TABLE orders; ALTER TABLE copy RENAME TO orders", "is another table"),
        ("CREATE TABLE new (LIKE orders INCLUDING ALL); DROP TABLE orders; ALTER TABLE new RENAME TO orders", "is gone"),
        ("ALTER TABLE orders DROP CONSTRAINT orders_pkey", "no primary key"),
    ],
)  # fmt: skip
def test_what_somebody_has_changed(target: Target, change: str, said: str) -> None:
    """A table that is not as the sink has left it gets nothing, until it is loaded again."""
    staging, writer = Staging(target, "current", {"id": INT32, "n": INT32}), target.writer()
    before = named(staging, staging.step({"id": 1, "n": 1}), id="id@1", n="n@1")
    left = dict(writer.commit(before, 0, unguarded).columns)
    target.execute(change)
    found = target.rows()
    step = staging.step({"id": 2, "n": 2}, segment=1)
    after = replace(named(staging, step, id="id@1", n="n@1"), left=left)
    for _ in range(2):
        with pytest.raises(TableRejected, match=rf"{said}.*deltaforge resync shop --sink copy"):
            writer.commit(after, 1, unguarded, exists=True)
    assert target.rows() == found
    assert writer.recreate(replace(after, steps=()), unguarded) == list(left.items())
    writer.commit(after, 1, unguarded)
    assert target.rows("id, n") == [(2, 2)]


def test_what_somebody_may_change(target: Target) -> None:
    """A larger type, a column more, and another table that its owner has declared to be the sink's."""
    staging, writer = Staging(target, "current", {"id": INT32, "n": INT32}), target.writer()
    before = named(staging, staging.step({"id": 1, "n": 1}), id="id@1", n="n@1")
    left = dict(writer.commit(before, 0, unguarded).columns)
    target.execute(
        "ALTER TABLE orders ALTER n TYPE bigint, ADD more int DEFAULT 7",
        "CREATE TABLE new (LIKE orders INCLUDING ALL)", "INSERT INTO new TABLE orders",
        "DROP TABLE orders", "ALTER TABLE new RENAME TO orders",
    )  # fmt: skip
    step = staging.step({"id": 2, "n": 2}, segment=1)
    after = replace(named(staging, step, id="id@1", n="n@1"), left=left)
    with pytest.raises(TableRejected, match="is another table") as raised:
        writer.commit(after, 1, unguarded, exists=True)
    target.execute(str(raised.value).partition("execute ")[2].partition("; otherwise")[0])
    writer.commit(after, 1, unguarded, exists=True)
    assert target.rows() == [(1, 1, 7), (2, 2, 7)]


@pytest.mark.parametrize("name", ["df_x", "ID", "", "ctid", "ä" * 32])
def test_names_that_a_table_cannot_have(target: Target, name: str) -> None:
    """A table with such a column is rejected, before anything is made; so is one with a long name."""
    staging = Staging(target, "current", {"id": INT64, name: TEXT})
    writer = target.writer()
    with pytest.raises(TableRejected, match="cannot have the column"):
        writer.commit(staging.table(), 0, unguarded)
    staging = Staging(target, "current", destination=("public", "n" * 64))
    with pytest.raises(TableRejected, match="has 64 bytes"):
        writer.commit(staging.table(), 0, unguarded)
    assert target.rows("relname", "pg_class", "1") == target.rows("relname", "pg_class WHERE relname <> 'orders'")  # fmt: skip


def test_odd_names(target: Target) -> None:
    """Quotes, spaces, percent signs and words of SQL are parts of names like others."""
    odd = "select \"%s\" 'x' \\"
    for mode in ("current", "history", "changelog"):
        staging = Staging(
            target, mode, {odd: INT64, "a.b": TEXT, "c0": TEXT}, (odd,), ("Odd %s \"'", f"{mode} %(a)s")
        )  # fmt: skip
        first = staging.step({odd: 1, "a.b": "x", "c0": "y"})
        writer = target.writer(mode=mode)
        writer.commit(staging.table(first), 0, unguarded)
        writer.commit(staging.table(staging.truncate(1, 0)), 1, unguarded)
        second = staging.step({odd: 1, "a.b": "z", "c0": "y"}, segment=2)
        writer.commit(staging.table(second), 2, unguarded)
        assert target.rows('"a.b"', f'"Odd %s ""\'"."{mode} %(a)s"')[-1:] != []


def test_whose_a_table_is(target: Target) -> None:
    """A table of another source table, of another sink or of others is rejected; a new series of commits keeps it.

    So is one that is gone, although it has been written before, or was made anew by somebody.
    """
    staging = Staging(target, "history")
    first = staging.table(staging.step({"id": 1, "name": "a"}, segment=7))
    writer = target.writer(mode="history")
    gone = r"is gone.*deltaforge resync shop --sink copy --tables public\.orders$"
    with pytest.raises(TableRejected, match=gone):
        writer.commit(first, 7, unguarded, exists=True)
    writer.commit(first, 7, unguarded)
    one = staging.table(staging.step({"id": 1, "name": "b"}, segment=0))
    with pytest.raises(TableRejected, match="belongs to sink copy of pipeline shop") as raised:
        target.writer(pipeline="other", mode="history").commit(one, 0, unguarded)
    claim = str(raised.value).partition("execute ")[2]
    staging.source = ("shop", "public", "others")
    other = staging.table(staging.step({"id": 1}, segment=8))
    with pytest.raises(TableRejected, match=r"has the rows of shop\.public\.orders"):
        writer.commit(other, 8, unguarded)
    target.writer(uid="uid-2", mode="history").commit(one, 0, unguarded)
    positions = "name, df_position"
    assert target.rows(positions) == [("a", 7), ("b", 8)]
    target.execute(claim)
    staging.source = ("shop", "public", "orders")
    target.writer(pipeline="other", mode="history").commit(one, 0, unguarded)
    assert target.rows(positions, order="2")[-1] == ("b", 9)

    target.execute("DROP TABLE orders", "CREATE TABLE orders (id bigint, df_position int)")
    again = target.writer(pipeline="other", mode="history")
    with pytest.raises(TableRejected, match=gone.replace("shop", "other")):
        again.commit(one, 1, unguarded, exists=True)


def test_a_table_of_others(target: Target) -> None:
    """A table with rows of others is rejected until it is claimed; so are views, and a table without the key."""
    target.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)", "INSERT INTO orders VALUES (1, 'x')",
        "CREATE TABLE keyless (id bigint)", "CREATE VIEW seen AS SELECT 1 AS id",
    )  # fmt: skip
    staging, writer = Staging(target, "current"), target.writer()
    one = staging.table(staging.step({"id": 1, "name": "a"}))
    with pytest.raises(TableRejected, match="exists, with rows that are not from") as raised:
        writer.commit(one, 0, unguarded)
    with pytest.raises(TableRejected, match="exists, with rows that are not from"):
        writer.recreate(staging.table(), unguarded)
    target.execute(str(raised.value).partition("execute ")[2])
    writer.commit(one, 0, unguarded)
    assert target.rows("id, name") == [(1, "a")]
    staging.destination = ("public", "keyless")
    with pytest.raises(TableRejected, match=r'no primary key.*ADD UNIQUE \("id"\)'):
        writer.commit(staging.renamed(one), 0, unguarded)
    staging.destination = ("public", "seen")
    with pytest.raises(TableRejected, match="is no table"):
        writer.commit(staging.renamed(one), 0, unguarded)


def test_the_source_itself_is_no_target(target: Target) -> None:
    """A published table with database, schema and name of the source's is never written, whether it has rows or not."""
    target.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY)", "CREATE PUBLICATION all_of_it FOR ALL TABLES"
    )
    database = str(conninfo.conninfo_to_dict(target.dsn)["dbname"])
    staging = Staging(target, "current", source=(database, "public", "orders"))
    for number in range(2):
        with pytest.raises(TableRejected, match="would write to its own source"):
            target.writer().commit(staging.table(), 0, unguarded)
        target.execute(f"INSERT INTO orders VALUES ({number})")


def test_a_table_is_recreated(target: Target) -> None:
    """It is emptied if it has today's columns, and keeps its views; else it is made again, with today's types."""
    staging = Staging(target, "current", {"id": INT64, "n": INT64})
    writer = target.writer()
    staged = staging.table(staging.step({"id": 1, "n": 1}, segment=3))
    writer.commit(staged, 3, unguarded)
    target.execute("CREATE VIEW seen AS SELECT n FROM orders")
    empty = staging.table()
    with pytest.raises(TableRejected, match="belongs to sink copy of pipeline shop"):
        target.writer(pipeline="other").recreate(empty, unguarded)
    for _ in range(2):
        writer.recreate(empty, unguarded)
        assert target.rows() == []
    writer.commit(staged, 3, unguarded, exists=True)
    assert target.rows("n", "seen") == [(1,)]
    staging.types = {"id": INT64, "n": types.DATE}
    with pytest.raises(TableRejected, match="depend"):
        writer.recreate(staging.table(), unguarded)
    target.execute("DROP VIEW seen")
    writer.recreate(staging.table(), unguarded)
    assert target.types() == {"id": "bigint", "n": "date"}


def test_two_writers_at_once(target: Target) -> None:
    """The second waits for the first, and then sees its commit."""
    staging = Staging(target, "changelog")
    one = staging.table(staging.step(*numbered(*"abc")))
    target.writer(mode="changelog").commit(staging.table(), 0, unguarded)
    barrier = threading.Barrier(2)
    writers = [target.writer(mode="changelog") for _ in range(2)]

    def commit(writer: Any) -> None:
        barrier.wait()
        writer.commit(one, 1, unguarded)

    threads = [threading.Thread(target=commit, args=[writer]) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(target.rows()) == 3


def test_a_frozen_writer_keeps_no_lock(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amid a COPY: the writer of the next run ends its transaction and commits at once; nothing of it stays."""
    staging, first = Staging(target, "changelog"), target.writer(mode="changelog")
    first.commit(staging.table(), 0, unguarded)
    one = staging.table(staging.step({"id": 1, "name": "x" * 100_000}))
    goes_on, errors = threading.Event(), list[Exception]()

    def frozen(*args: Any) -> Iterator[pa.RecordBatch]:
        yield from staged_batches(*args)
        goes_on.wait()

    def commit() -> None:
        try:
            first.commit(one, 1, unguarded)
        except SinkUnavailable as error:
            errors.append(error)

    monkeypatch.setattr(writer_module, "staged_batches", frozen)
    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    begun = (
        "application_name LIKE 'deltaforge:%' AND wait_event = 'ClientRead'"
        " AND xact_start < clock_timestamp() - interval '1 s' AND datname = current_database()"
    )
    eventually(lambda: target.rows("1", f"pg_stat_activity WHERE {begun}"), what="the writer")
    monkeypatch.undo()

    target.writer(mode="changelog").commit(one, 1, unguarded)

    goes_on.set()
    thread.join()
    assert [type(error) for error in errors] == [SinkUnavailable]
    assert target.rows("id") == [(1,)]
    first.commit(one, 1, unguarded)
    assert target.rows("id") == [(1,)]


def test_nothing_is_left_of_a_commit_that_ends_early(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is lost before the end, a connection that breaks, and `close` from another thread change nothing."""
    staging, writer = Staging(target, "current"), target.writer()
    writer.commit(staging.table(staging.step({"id": 1, "name": "a"})), 0, unguarded)
    one = staging.table(staging.step({"id": 1, "name": "b"}, segment=1))
    calls = iter([None, LeaseLost("lost")])

    def guard() -> None:
        error = next(calls)
        if error is not None:
            raise error

    with pytest.raises(LeaseLost):
        writer.commit(one, 1, guard)
    apply = writer_module.StepApplication.apply

    def ended(application: Any, step: StagedStep) -> None:
        apply(application, step)
        target.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name LIKE 'deltaforge:%' AND datname = current_database()")  # fmt: skip

    def closed(application: Any, step: StagedStep) -> None:
        apply(application, step)
        thread = threading.Thread(target=writer.close)
        thread.start()
        thread.join()

    for broken in (ended, closed):
        monkeypatch.setattr(writer_module.StepApplication, "apply", broken)
        with pytest.raises(SinkUnavailable):
            writer.commit(one, 1, unguarded)
        assert target.rows("name") == [("a",)]
        monkeypatch.undo()
    writer.commit(one, 1, unguarded)
    assert target.rows("name") == [("b",)]


def test_what_the_table_refuses(target: Target) -> None:
    """NUL in text, and constraints that others have made, hold the table; the error has no value."""
    staging, writer = Staging(target, "current"), target.writer()
    nul = staging.table(staging.step({"id": 1, "name": "a-secret\0"}))
    with pytest.raises(TableRejected, match="column name has the character NUL") as raised:
        writer.commit(nul, 0, unguarded)
    assert "a-secret" not in str(raised.value)
    writer.commit(staging.table(staging.step({"id": 1, "name": "a"})), 0, unguarded)
    for change, said in (
        ("ADD CHECK (name <> 'a-secret')", "its constraint orders_name_check refuses a row"),
        ("ADD UNIQUE (name)", "its unique index orders_name_key refuses"),
        ("ALTER note SET NOT NULL", "column note must not be null"),
    ):
        if "note" in change:
            target.execute("UPDATE orders SET note = ''")
        target.execute(f"ALTER TABLE orders {change}")
        rows = [{"id": 2, "name": "a-secret"}]
        if "UNIQUE" in change:
            target.execute("ALTER TABLE orders DROP CONSTRAINT orders_name_check")
            rows.append({"id": 3, "name": "a-secret"})
        with pytest.raises(TableRejected, match=said) as raised:
            writer.commit(staging.table(staging.step(*rows, segment=1)), 1, unguarded)
        assert "a-secret" not in str(raised.value)


def test_a_lock_of_others_is_waited_for(target: Target) -> None:
    """A table that somebody has locked for a minute is tried again."""
    staging, writer = Staging(target, "current"), target.writer()
    one = staging.table(staging.step({"id": 1, "name": "a"}))
    writer.commit(one, 0, unguarded)
    assert writer._connection is not None
    writer._connection.execute("SET lock_timeout = '50ms'")
    with psycopg.connect(target.dsn) as connection:
        connection.execute("LOCK TABLE orders")
        with pytest.raises(SinkUnavailable, match="somebody else holds a lock"):
            writer.commit(one, 1, unguarded)


def test_rows_and_bytes_are_estimates(target: Target) -> None:
    """They are what the server knows of the table before a commit; a commit that it has already has none."""
    staging, writer = Staging(target, "current"), target.writer()
    rows = [{"id": number, "name": "a"} for number in range(100)]
    writer.commit(staging.table(staging.step(*rows)), 0, unguarded)
    writer.close()  # whereupon the server counts what it has written
    target.execute("ANALYZE orders")
    writer = target.writer()
    more = staging.table(staging.step({"id": 100, "name": "b"}, segment=1))
    made = writer.commit(more, 1, unguarded)
    assert made.figures is not None
    assert (made.figures.rows, made.figures.estimated) == (100, True)
    assert (made.figures.bytes or 0) > 0
    assert writer.commit(more, 1, unguarded).figures is None


def test_who_may_not_write(target: Target) -> None:
    """Rights that a role lacks are named, with the statement that gives them."""
    staging = Staging(target, "current")
    one = staging.table(staging.step({"id": 1, "name": "a"}))
    name = f"writer_{uuid.uuid4().hex[:8]}"
    with target.role(name=name) as dsn:
        with pytest.raises(PermissionMissing, match="CREATE SCHEMA deltaforge AUTHORIZATION"):
            target.writer(dsn=dsn).commit(one, 0, unguarded)
        target.execute(f"CREATE SCHEMA deltaforge AUTHORIZATION {name}")

        def given(staged: StagedTable, number: int, statement: str) -> None:
            """Execute the statement that the error names."""
            with pytest.raises(TableRejected) as raised:
                target.writer(dsn=dsn).commit(staged, number, unguarded)
            assert raised.value.remedy == (statement.format(role=f'"{name}"'),)
            target.execute(*raised.value.remedy)

        target.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
        given(one, 0, 'GRANT USAGE, CREATE ON SCHEMA "public" TO {role}')
        target.writer(dsn=dsn).commit(one, 0, unguarded)
        elsewhere = replace(one, destination=("sales", "orders"))
        given(elsewhere, 0, 'CREATE SCHEMA "sales" AUTHORIZATION {role}')
        target.writer(dsn=dsn).commit(elsewhere, 0, unguarded)
        target.execute(f"ALTER TABLE orders OWNER TO {conninfo.conninfo_to_dict(target.dsn)['user']}")  # fmt: skip
        rights = "GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {table} TO {{role}}"
        given(one, 1, rights.format(table='"public"."orders"'))
        target.execute(f"REVOKE ALL ON deltaforge.commits FROM {name}")
        given(one, 1, rights.format(table='"deltaforge"."commits"'))
        target.writer(dsn=dsn).commit(one, 1, unguarded)
        staging.types = {**staging.types, "more": TEXT}
        added = staging.table(staging.step({"id": 2, "more": "b"}, segment=2))
        given(added, 2, 'ALTER TABLE "public"."orders" OWNER TO {role}')
        target.writer(dsn=dsn).commit(added, 2, unguarded)
        assert target.rows("id, more") == [(1, None), (2, "b")]
        wrong = conninfo.make_conninfo(dsn, password="not-it")
        with pytest.raises(AuthFailed, match=f"wrong password for role '{name}'") as raised:
            target.writer(dsn=wrong).commit(one, 1, unguarded)
        assert "not-it" not in str(raised.value)


def test_where_no_database_is(target: Target) -> None:
    """A database that is missing needs a person; a port on which nobody listens may open later."""
    one = Staging(target, "current").table()
    missing = conninfo.make_conninfo(target.dsn, dbname="not_there")
    with pytest.raises(SinkRejected, match="database does not exist; create it"):
        target.writer(dsn=missing).commit(one, 0, unguarded)
    closed = conninfo.make_conninfo(target.dsn, port="1")
    with pytest.raises(SinkUnavailable, match="sink copy: PostgreSQL"):
        target.writer(dsn=closed).commit(one, 0, unguarded)


@pytest.mark.soak("versions")
def test_an_old_server_is_refused(target: Target, postgres_version: PostgresVersion) -> None:
    """A server without MERGE is refused, with the version that is needed."""
    old = postgres_version(14)
    with pytest.raises(SinkRejected, match="has version 14, and the sink needs 15 or newer"):
        target.writer(dsn=old.dsn).commit(Staging(target, "current").table(), 0, unguarded)
