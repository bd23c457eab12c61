"""Applying staged changes to ClickHouse's tables, with its engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.errors import AuthFailed, LeaseLost, SinkUnavailable, TableRejected
from deltaforge_dagster.sinks.clickhouse.client import ClickhouseClient
from deltaforge_dagster.sinks.tables.staged import StagedSegment
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.value_types import (
    FLOAT64,
    INT16,
    INT32,
    INT64,
    TEXT,
    decimal,
    list_of,
)
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.sinks.clickhouse.tables import World, placed, unguarded

pytestmark = pytest.mark.clickhouse


@pytest.fixture
def world(clickhouse_server: ClickhouseServer, clickhouse_database: str, tmp_path: Path) -> World:
    """An empty database, and a table with one row per key."""
    return World(clickhouse_server, clickhouse_database, tmp_path)


@pytest.fixture
def log(world: World) -> World:
    """An empty database, and a changelog."""
    world.mode = "changelog"
    return world


def test_current_rows(world: World) -> None:
    """Rows are replaced and deleted by key, and commits that are repeated change nothing, whatever came after them."""
    first = [world.step({"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"})]
    second = [world.step({"id": 1, "name": "A", "note": "x"}, {"id": 2, "df_op": "d"}, segment=1)]
    for steps in (first, first, second, first, second):
        world.commit(*steps)

    assert world.rows("id", "name", "note") == [(1, "A", "x"), (3, "c", None)]
    assert world.rows("id", "_op", "_deleted", "_source_ts") == [
        (1, "u", 0, "2024-01-01 00:01:40.000000"),
        (3, "u", 0, "2024-01-01 00:00:02.000000"),
    ]
    figures = world.commit(*second).figures
    assert figures is not None
    assert figures.estimated
    assert (figures.rows or 0) >= 2, "replaced and deleted rows count until they are merged"
    assert (figures.bytes or 0) > 0


def test_columns_that_get_other_names(world: World) -> None:
    """They keep their values, wherever a writer dies; a dropped one whose name another column gets has a name of its own."""
    for died_at in range(1, 30):
        world.name = f"t{died_at}"
        world.types = {"id": INT64, "a": INT32, "b": TEXT}
        first = world.table(world.step({"id": 1, "a": 1, "b": "x"}))
        identities = {"id": "id@1", "a": "a@1", "b": "b@1"}
        world.writer().commit(replace(first, identities=identities), 0, unguarded)

        # a and b have each other's names, b is dropped, and a new column has its name
        world.types = {"id": INT64, "a": TEXT, "b": INT32}
        second = world.table(world.step({"id": 2, "a": "y", "b": 2}, segment=1))
        second = replace(second, identities={"id": "id@1", "a": "b@1", "b": "b@3"})
        calls = 0

        def guard(last: int = died_at) -> None:
            nonlocal calls
            calls += 1
            if calls == last:
                raise LeaseLost("killed")

        try:
            world.writer().commit(second, 1, guard)
        except LeaseLost:
            world.writer().commit(second, 1, unguarded)
        expected = [(1, "x", None, 1), (2, "y", 2, None)]
        assert world.rows("id", "a", "b", "a_dropped_1") == expected
        if calls < died_at:
            break
    assert calls > 5


def test_what_rows_have_in_added_columns(world: World) -> None:
    """Rows that are there have what the source gave them, those that follow what they say."""
    world.types = {"id": INT64}
    world.commit(world.step({"id": 1}, {"id": 2}))
    world.types = {"id": INT64, "n": INT32, "t": TEXT, "d": decimal(6, 2)}
    added = world.table(world.step({"id": 2, "n": 5}, {"id": 3}, segment=1))
    for _ in range(2):
        world.writer().commit(
            replace(added, fills={"n": "7", "t": "it's", "d": "-1.50"}), 1, unguarded
        )
    world.server.query(f"OPTIMIZE TABLE {world.database}.orders FINAL")
    assert world.rows("id", "n", "t", "toString(d)") == [
        (1, 7, "it's", "-1.5"), (2, 5, None, None), (3, None, None, None),
    ]  # fmt: skip


def test_a_renamed_key(world: World) -> None:
    """The table is sorted by it, so it is held, and the reason says what to do."""
    first = world.table(world.step({"id": 1, "name": "a"}))
    world.writer().commit(replace(first, identities={"id": "id@1"}), 0, unguarded)
    world.types, world.key = {"key": INT64, "name": TEXT}, ("key",)
    second = world.table(world.step({"key": 1, "name": "b"}, segment=1))
    with pytest.raises(TableRejected, match="renamed column id to key, and the table is sorted"):
        world.writer().commit(replace(second, identities={"key": "id@1"}), 1, unguarded)


def test_a_row_comes_back_after_its_delete(world: World) -> None:
    """An insert after a delete is later than it."""
    world.commit(world.step({"id": 1, "name": "a"}))
    world.commit(world.step({"id": 1, "df_op": "d"}, segment=1))
    assert world.rows("id") == []
    world.commit(world.step({"id": 1, "name": "b"}, segment=2))
    assert world.rows("id", "name") == [(1, "b")]


def test_a_truncate_removes_what_was_before_it(world: World) -> None:
    """Also if the commit is repeated after later ones, and if an INSERT from before it arrives after it."""
    before = world.step({"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    steps = [world.truncate(1, 0), world.step({"id": 2, "name": "c", "df_ordinal": 1}, segment=1)]
    world.commit(before)
    world.commit(*steps)
    assert world.rows("id", "name") == [(2, "c")]
    world.commit(world.step({"id": 3, "name": "d"}, segment=2))
    world.commit(*steps)
    world.commit(before)
    assert world.rows("id", "name") == [(2, "c"), (3, "d")]


def test_values_that_a_change_lacks_stay(world: World) -> None:
    """Columns in `df_absent` keep their values; the others of these rows, and other rows, do not."""
    world.commit(
        world.step({"id": 1, "name": "a", "note": "x"}, {"id": 2, "name": "b", "note": "y"})
    )
    lacking = world.step(
        {"id": 1, "name": "A", "df_absent": ["note"]},
        {"id": 2, "name": "B"},
        {"id": 9, "name": "new", "df_absent": ["note"]},
        segment=1,
    )
    for _ in range(2):
        world.commit(lacking, absent=["note"])
    expected = [(1, "A", "x"), (2, "B", None), (9, "new", None)]
    assert world.rows("id", "name", "note") == expected
    assert world.server.query(f"SHOW TABLES FROM {world.database}") == b"orders\n"


def test_zeros_are_one_key(world: World) -> None:
    """A row whose key becomes -0 is still the same row, and keeps what the change lacks."""
    world.types = {**world.types, "id": FLOAT64}
    world.commit(world.step({"id": 0.0, "name": "a", "note": "x"}))
    lacking = world.step({"id": -0.0, "name": "b", "df_absent": ["note"]}, segment=1)
    world.commit(lacking, absent=["note"])
    assert world.rows("id", "name", "note") == [(0.0, "b", "x")]
    moved = {"id": 7.0, "name": "c", "df_absent": ["note"], "df_old_id": 0.0}
    world.commit(world.step(moved, segment=2, rekey=True), absent=["note"])
    assert world.rows("id", "name", "note") == [(7.0, "c", "x")]


def test_a_key_changes_and_the_rest_stays(world: World) -> None:
    """An update of the key that lacks values takes them from the row of the old key, however often it is tried."""
    world.commit(world.step({"id": 1, "name": "a", "note": "x"}))
    rekey = world.step(
        {"id": 5, "name": "A", "df_absent": ["note"], "df_old_id": 1, "df_ordinal": 3},
        segment=1,
        rekey=True,
    )
    after = world.step({"id": 5, "name": "B", "df_absent": ["note"], "df_ordinal": 4}, segment=1)
    for _ in range(2):
        world.commit(rekey, after, absent=["note"])
        assert world.rows("id", "name", "note") == [(5, "B", "x")]
    world.commit(rekey, absent=["note"])
    assert world.rows("id", "name", "note") == [(5, "B", "x")]


def test_a_killed_rekey_is_finished(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new row was added and the old one not yet deleted, the commit that is repeated deletes it."""
    world.commit(world.step({"id": 1, "name": "a", "note": "x"}))
    row = {"id": 5, "name": "A", "df_absent": ["note"], "df_old_id": 1}
    rekey = world.step(row, segment=1, rekey=True)
    calls = 0

    def guard() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # drop, create, add, complete, and then the delete
            raise LeaseLost("lost")

    with pytest.raises(LeaseLost):
        world.writer().commit(world.table(rekey, absent=["note"]), 1, guard)
    assert world.rows("id", "note") == [(1, "x"), (5, "x")]
    world.commit(rekey, absent=["note"])
    assert world.rows("id", "name", "note") == [(5, "A", "x")]


def test_a_changelog_has_every_change_once(log: World) -> None:
    """Whoever repeats a commit, and also a part of it; a truncate is a row without values."""
    first = [log.step({"id": 1, "name": "a", "df_op": "c"}, {"id": 1, "name": "b"})]
    second = [
        log.step(
            {"df_op": "t"}, {"id": 2, "name": "c", "df_op": "c"}, {"id": 2, "df_op": "d"}, segment=1
        )
    ]
    log.commit(*first)
    log.commit(*second)
    log.server.query(f"DELETE FROM {log.database}.orders WHERE _op = 'c' AND id = 2")
    for steps in (second, first, second):
        log.commit(*steps)

    assert log.rows("_op", "_deleted", "id", "name", "_event_id") == [
        ("c", 0, 1, "a", "e0-0"),
        ("u", 0, 1, "b", "e0-1"),
        ("t", 0, None, None, "e1-0"),
        ("c", 0, 2, "c", "e1-1"),
        ("d", 1, 2, None, "e1-2"),
    ]


def test_a_changelog_knows_changes_of_segments_that_are_cut_otherwise(log: World) -> None:
    """After a rebuild of the journal or with another state store, segments end elsewhere; event ids are the same."""
    row = {"id": 1, "name": "a", "df_op": "c", "df_event_id": "x"}
    log.commit(log.step(row))
    log.segments[7] = placed(50, 300, 1_800_000_000.0)
    log.commit(log.step(row, {"id": 2, "df_op": "c"}, segment=7), uid="uid-2")
    assert log.rows("id", "_event_id") == [(1, "x"), (2, "e7-1")]


def test_current_rows_survive_another_cut(world: World) -> None:
    """Re-cut segments deliver old changes with other versions, and the newest one of each row wins."""
    world.commit(world.step({"id": 1, "name": "old"}, segment=1))
    world.commit(world.step({"id": 1, "name": "new"}, segment=3))
    world.segments = {
        8: placed(100, 250, 1_800_000_000.0),
        9: placed(250, 420, 1_800_000_001.0),
    }
    world.commit(world.step({"id": 1, "name": "old"}, segment=8), uid="uid-2")
    assert world.rows("name") == [("new",)]
    world.commit(
        world.step({"id": 1, "name": "new"}, {"id": 2, "name": "x"}, segment=9), uid="uid-2"
    )
    assert world.rows("name") == [("new",), ("x",)]


def test_deleted_changes_are_missed(log: World) -> None:
    """An INSERT that ClickHouse does not repeat, though its rows were deleted, is no success."""
    step = log.step({"id": 1, "df_op": "c"})
    log.commit(step)
    log.server.query(f"DELETE FROM {log.database}.orders WHERE id = 1")
    with pytest.raises(TableRejected, match="has had changes that were deleted from it"):
        log.commit(step)


@pytest.mark.parametrize("mode", ["current", "changelog"])
def test_a_log_that_begins_again_stops_the_table(world: World, mode: str) -> None:
    """Later changes with earlier positions, as after a failover, would lose against older rows."""
    world.mode = mode
    world.commit(world.step({"id": 1, "name": "a"}, segment=50))
    later = world.step({"id": 1, "name": "b"}, segment=60)
    world.segments[60] = placed(3, 4, 1_700_000_100.0)
    with pytest.raises(
        TableRejected,
        match=r"the log has begun again.*deltaforge resync shop --sink click --tables public.orders",
    ):
        world.commit(later, exists=True)
    with pytest.raises(TableRejected, match="begun again"):
        world.commit(later, log="server-2")
    read = world.step({"id": 1, "name": "b", "df_op": "u"}, segment=60, reads=True)
    with pytest.raises(TableRejected, match="begun again"):
        world.commit(read, uid="uid-2")
    assert world.rows("name") == [("a",)]
    world.commit(later)  # a commit that is delivered again
    assert world.rows("name")[0] == (("a",) if mode == "current" else ("b",))


def test_a_commit_of_another_server_is_repeated(world: World) -> None:
    """Positions that grow are followed wherever they come from, and the commit that was added is recognized."""
    world.commit(world.step({"id": 1, "name": "a"}, segment=1))
    step = world.step({"id": 1, "name": "b"}, {"id": 2, "name": "c"}, segment=2)
    for _ in range(2):
        world.commit(step, log="server-2", exists=True)
    assert world.rows("name") == [("b",), ("c",)]


def test_times_as_versions(world: World) -> None:
    """With `ts_ms` the time of a change decides, also across positions that begin again."""
    options: dict[str, Any] = {"version_source": "ts_ms"}
    world.commit(world.step({"id": 1, "name": "a"}, segment=50), **options)
    world.segments[60] = placed(3, 4, 1_700_000_100.0)
    world.commit(world.step({"id": 1, "name": "b"}, segment=60), exists=True, **options)
    assert world.rows("name", "bitShiftRight(_version, 64)") == [("b", 1_704_073_200_000)]


def test_positions_without_numbers(world: World) -> None:
    """Without a number of the position there is no version."""
    unnumbered = BinlogPosition(f"bin.{1 << 24}", 4).to_json()
    world.segments[0] = StagedSegment(unnumbered, unnumbered, 1.0)
    with pytest.raises(TableRejected, match="set `version_source: ts_ms`"):
        world.commit(world.step({"id": 1}))


def test_columns_are_added_and_widened(world: World) -> None:
    """A table gets the columns that the source has got, and types that hold their values."""
    few = world.with_types(id=INT64, amount=INT32)
    few.commit(few.step({"id": 1, "amount": 5}))
    more = world.with_types(id=INT64, amount=INT64, tags=list_of(TEXT), price=decimal(38, 10))
    written = more.commit(more.step({"id": 2, "amount": 1 << 40, "tags": ["x"]}, segment=1))
    assert more.rows("amount", "tags", "price") == [(5, [], None), (1 << 40, ["x"], None)]
    assert (
        world.schema()
        == dict(written.columns)
        == {
            "id": "Int64",
            "amount": "Nullable(Int64)",
            "_op": "LowCardinality(String)",
            "_version": "UInt128",
            "_deleted": "UInt8",
            "_source_ts": "DateTime64(6, 'UTC')",
            "tags": "Array(Nullable(String))",
            "price": "Nullable(Decimal(38, 10))",
        }
    )


def test_a_type_that_does_not_hold_the_values(world: World) -> None:
    """It is not changed: the table is held, and the error says what to do."""
    world.commit(world.step({"id": 1}))
    other = world.with_types(id=INT64, name=INT64)
    with pytest.raises(
        TableRejected,
        match=r"its column name has the type Nullable\(String\), which does not hold the values of Int64",
    ):
        other.commit(other.step({"id": 1, "name": 7}, segment=1))


MADE = "CREATE TABLE {}.orders ({}, _op String, _version UInt128, _deleted UInt8, _source_ts DateTime64(6)) ENGINE = {}"
REPLACING = "ReplacingMergeTree(_version, _deleted) ORDER BY id"


def test_a_table_of_the_users(world: World) -> None:
    """Without `auto_create` a table with wider or low-cardinality types is used as it is, and never changed."""
    columns = "id Int64, name LowCardinality(Nullable(String)), note String, more Int8 DEFAULT 7"
    world.server.query(MADE.format(world.database, columns, REPLACING))
    world.server.query(f"INSERT INTO {world.database}.orders (id, name) VALUES (9, 'mine')")
    before = world.schema()
    world.commit(
        world.step({"id": 1, "name": "a", "note": "x"}, {"id": 2, "df_op": "d"}), auto_create=False
    )
    assert world.rows("id", "name", "note", "more") == [(1, "a", "x", 7), (9, "mine", "", 7)]
    assert world.schema() == before
    with pytest.raises(
        TableRejected, match="a value is null, and the column note of the table cannot be"
    ):
        world.commit(world.step({"id": 3}, segment=1), auto_create=False)


@pytest.mark.parametrize(
    ("columns", "engine", "said"),
    [
        ("id Int64, name Nullable(String)", REPLACING, "lacks columns, or has types that do not hold their values, and `auto_create` is false: execute ALTER TABLE .* ADD COLUMN IF NOT EXISTS `note`"),
        ("id Int64, name Nullable(String), note Nullable(String)", "MergeTree ORDER BY id", "has no engine ReplacingMergeTree"),
        ("id Int64, name String, note Nullable(String)", "ReplacingMergeTree(_version, _deleted) ORDER BY name", "is sorted by name, but the key of its rows is id"),
        ("id Int64, name String, note Nullable(String)", "ReplacingMergeTree(_version, _deleted) PARTITION BY name ORDER BY id", "is partitioned by name"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used(world: World, columns: str, engine: str, said: str) -> None:
    """Each says what is wrong with it."""
    world.server.query(MADE.format(world.database, columns, engine))
    with pytest.raises(TableRejected, match=said):
        world.commit(world.step({"id": 1}), auto_create=False)


def test_whose_a_table_is(world: World) -> None:
    """A sink writes to no table that has rows of others."""
    world.server.query(MADE.format(world.database, "id Int64", REPLACING))
    world.server.query(f"INSERT INTO {world.database}.orders (id) VALUES (1)")
    with pytest.raises(TableRejected, match="exists, with rows that are not from this sink"):
        world.commit(world.step({"id": 1}))
    world.server.query(f"TRUNCATE TABLE {world.database}.orders")
    world.commit(world.step({"id": 1}))
    with pytest.raises(TableRejected, match="belongs to sink click of pipeline shop"):
        world.commit(world.step({"id": 1}), sink="other")
    world.source = ("shop", "public", "parcels")
    with pytest.raises(TableRejected, match=r"has the rows of shop\.public\.orders"):
        world.commit(world.step({"id": 1}))


def test_a_table_that_is_gone(world: World) -> None:
    """A table that had everything is not made again without a sign, nor one that the sink may not make."""
    with pytest.raises(TableRejected, match="is gone, with everything that it had"):
        world.commit(world.step({"id": 1}), exists=True)
    with pytest.raises(TableRejected, match="does not exist, and `auto_create` is false"):
        world.commit(world.step({"id": 1}), auto_create=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("ALTER TABLE {t} DROP COLUMN note",), "its column note is gone"),
        (("ALTER TABLE {t} RENAME COLUMN note TO memo",), "its column note is gone"),
        (("ALTER TABLE {t} MODIFY COLUMN n Nullable(Int8)",), r"n had the type Nullable\(Int16\) and has Nullable\(Int8\)"),
        (("DROP TABLE {t}", "CREATE TABLE {t} (id Int64) ENGINE = MergeTree ORDER BY id"), "is gone, with everything"),
    ],
)  # fmt: skip
def test_what_somebody_has_changed(world: World, changes: Sequence[str], said: str) -> None:
    """A table that is not as the sink has left it gets nothing, until it is loaded again."""
    world.types = {"id": INT64, "note": TEXT, "n": INT16}
    identities = {"id": "id@1", "note": "note@1", "n": "n@1"}
    before = replace(world.table(world.step({"id": 1, "note": "a", "n": 1})), identities=identities)
    left = dict(world.writer().commit(before, 0, unguarded).columns)
    for change in changes:
        world.server.query(change.format(t=f"`{world.database}`.`orders`"))
    step = world.step({"id": 2, "note": "b", "n": 2}, segment=1)
    after = replace(world.table(step), identities=identities, left=left)
    for _ in range(2):
        with pytest.raises(TableRejected, match=rf"{said}.*deltaforge resync shop --sink click"):
            world.writer().commit(after, 1, unguarded, exists=True)
    made = world.writer().recreate(replace(after, steps=()), unguarded)
    assert dict(made) == left
    world.writer().commit(after, 1, unguarded)
    assert world.rows("id", "note", "n") == [(2, "b", 2)]


def test_a_table_is_loaded_again(world: World) -> None:
    """It is replaced by an empty one with the columns of now, or only emptied."""
    world.commit(world.step({"id": 1}, segment=9))
    other = world.with_types(id=INT64, name=INT64)
    other.writer().recreate(other.table(), unguarded)
    assert "note" not in other.schema()
    other.commit(other.step({"id": 1, "name": 5}, segment=2))
    assert other.rows("id", "name") == [(1, 5)]
    other.writer(auto_create=False).recreate(other.table(), unguarded)
    assert other.rows("id") == []
    with pytest.raises(TableRejected, match="belongs to sink"):
        other.writer(sink="other").recreate(other.table(), unguarded)
    other.key = ()
    with pytest.raises(TableRejected, match="has no primary key, which mode current needs"):
        other.writer().recreate(other.table(), unguarded)


def test_what_the_server_refuses(world: World) -> None:
    """A wrong password, an unknown database, and no server: each has its error, and no secret in it."""
    step = world.step({"id": 1})
    with pytest.raises(AuthFailed, match="ClickHouse refuses the user or the password") as failed:
        world.commit(step, password="geheim")
    assert "geheim" not in str(failed.value)
    world.database, kept = "nowhere", world.database
    with pytest.raises(
        TableRejected, match="the database does not exist; create it with CREATE DATABASE"
    ):
        world.commit(step)
    world.database = kept
    with pytest.raises(SinkUnavailable, match="cannot be reached"):
        world.commit(step, url="http://127.0.0.1:1")


def test_a_lost_lease_stops_before_anything_changes(world: World) -> None:
    """The guard is called before each statement that changes something."""

    def guard() -> None:
        raise LeaseLost("lost")

    with pytest.raises(LeaseLost):
        world.writer().commit(world.table(world.step({"id": 1})), 0, guard)
    assert world.server.query(f"SHOW TABLES FROM {world.database}") == b""


def test_a_closed_writer_writes_no_more(world: World) -> None:
    """Whoever closes it."""
    writer = world.writer()
    writer.close()
    writer.close()
    with pytest.raises(SinkUnavailable, match="closed"):
        writer.commit(world.table(world.step({"id": 1})), 0, unguarded)


def test_names_that_need_quoting(world: World) -> None:
    """Names of tables, columns and keys may have any characters but those that others may not have either."""
    types: dict[str, Any] = {"the `id`": INT64, "select": TEXT, "a'b\\c": TEXT, "ключ": TEXT}
    world.types, world.key, world.name = types, ("the `id`", "ключ"), "ta-ble"
    key = {"the `id`": 1, "ключ": "ä"}
    world.commit(world.step({**key, "select": "x", "a'b\\c": "y"}))
    world.commit(
        world.step({**key, "select": "z", "df_absent": ["a'b\\c"]}, segment=1), absent=["a'b\\c"]
    )
    assert world.rows("`select`", r"`a'b\\c`", "`ключ`") == [("z", "y", "ä")]


def test_a_column_with_a_name_of_ours(world: World) -> None:
    """It would be mistaken for the sink's own."""
    other = world.with_types(id=INT64, _version=INT64)
    step = other.step({"id": 1})
    with pytest.raises(
        TableRejected, match="cannot have the column '_version': it is a column of the sink's own"
    ):
        other.commit(step)


def test_a_client_that_waits_is_ended(world: World) -> None:
    """Closing it from another thread ends a query that a server does not answer."""
    failures = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = world.config(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        client = ClickhouseClient(config, 300)

        def ask() -> None:
            try:
                client.execute("sink click", "SELECT 1")
            except SinkUnavailable as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            client.end()
            thread.join()
    assert len(failures) == 1
