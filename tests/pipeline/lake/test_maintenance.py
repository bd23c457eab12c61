"""Maintenance of tables, with Spark and the formats themselves: nothing changes for readers, nor for what is committed."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb
import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pydantic import SecretStr

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.lake.maintenance import LakeMaintenance, MaintainedTable
from deltaforge_dagster.sinks.lake.config import LakeMaintenanceConfig
from deltaforge_dagster.sinks.lake.dialect import CLUSTERED
from deltaforge_dagster.sinks.lake.pending import pending_name
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import Lake, Staging, dialect_of

pytestmark = pytest.mark.spark

ORDERS = ("public", "orders")
FORMATS = [pytest.param("delta", marks=pytest.mark.soak("formats")), "iceberg"]
AT_ONCE = LakeMaintenanceConfig(small_files=5).model_copy(update={"retention_hours": 0})
"""Options that keep nothing for readers of what was there before."""


@pytest.fixture(params=FORMATS)
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, spark_server: SparkAddress
) -> Iterator[Lake]:
    """An empty folder for tables of a format."""
    made = Lake(request.param, tmp_path, spark_server.remote)
    yield made
    made.close()


ICEBERG = pytest.mark.parametrize("lake", ["iceberg"], indirect=True)


def unguarded() -> None:
    """A guard that lets everything pass."""


def maintenance(
    lake: Lake, options: LakeMaintenanceConfig = AT_ONCE, uid: str = "uid-1", **more: Any
) -> LakeMaintenance:
    """Maintenance of the tables that `lake.writer` writes, with a session of its own."""
    writer = lake.writer(uid=uid, **more)
    config = writer.config.model_copy(update={"maintenance": options})
    return LakeMaintenance(writer.sessions, dialect_of(config), config, writer.owner)


def query(lake: Lake, text: str) -> list[Any]:
    """Return the rows of a query in a new session; `{t}` is the table."""
    table = dialect_of(lake.config()).table(ORDERS)
    return lake.reading().sql(text.replace("{t}", table)).collect()


def clustered(lake: Lake) -> list[str]:
    """Return the columns by which the table is clustered."""
    if lake.format == "delta":
        (detail,) = query(lake, "DESCRIBE DETAIL {t}")
        return list(detail.clusteringColumns)
    properties = {row.key: row.value for row in query(lake, "SHOW TBLPROPERTIES {t}")}
    return list(orjson.loads(properties.get(CLUSTERED, "[]")))


def figures(made: MaintainedTable) -> tuple[Any, ...]:
    """Return files, small files and deleted rows before, and the same afterwards."""
    assert made.before
    assert made.after
    found: list[int | None] = []
    for one in (made.before, made.after):
        assert one.figures
        found += [one.figures.files, one.small_files, one.figures.deleted]
    return tuple(found)


def test_small_files_and_deletes(lake: Lake) -> None:
    """Files are compacted once enough of them are small or enough rows are deleted, and readers see no difference."""
    staging, writer = Staging(lake, "current"), lake.writer()
    for number in range(5):
        rows = [{"id": 10 * number + key, "name": f"n{key}"} for key in range(10)]
        made = writer.commit(
            staging.table(staging.step(*rows, segment=number, inserts_only=True)), number, unguarded
        )
    assert made.figures is not None
    assert (made.figures.files, made.figures.deleted, made.figures.rows) == (5, 0, 50)
    assert (made.figures.bytes or 0) > 0
    rows = [{"id": key, "df_op": "d", "df_absent": ["name", "note"]} for key in range(0, 50, 10)]
    deleted = staging.table(staging.step(*rows, segment=5), absent=["name", "note"])
    made = writer.commit(deleted, 5, unguarded)
    assert made.figures is not None
    assert (made.figures.deleted, made.figures.rows) == (5, 45)
    expected = lake.rows("id", "name")

    looked = maintenance(lake).maintain(ORDERS, dry_run=True)
    assert (looked.due, looked.done, figures(looked)) == (True, "", (5, 5, 5, 5, 5, 5))
    done = maintenance(lake).maintain(ORDERS)
    assert (done.done, done.problems) == ("compacted and cleaned", [])
    assert figures(done) == (5, 5, 5, 1, 1, 0)
    again = maintenance(lake).maintain(ORDERS, dry_run=True)
    assert (again.due, figures(again)) == (False, (1, 1, 0, 1, 1, 0))

    rows = [{"id": key, "df_op": "d", "df_absent": ["name", "note"]} for key in range(1, 50, 5)]
    deleted = staging.table(staging.step(*rows, segment=6), absent=["name", "note"])
    writer.commit(deleted, 6, unguarded)
    again = maintenance(lake).maintain(ORDERS)
    assert (again.due, again.problems, figures(again)) == (True, [], (1, 1, 10, 1, 1, 0))
    writer.commit(deleted, 6, unguarded)
    gone = {0, 10, 20, 30, 40, *range(1, 50, 5)}
    assert sorted(lake.rows("id", "name")) == [
        row for row in sorted(expected) if row[0] not in gone
    ]
    if lake.format == "delta":
        files = [one.name for one in (lake.folder / "lake/public/orders").glob("*.parquet")]
        assert len(files) == 1


@pytest.mark.soak("formats")
def test_commits_are_known_after_their_snapshots(lake: Lake) -> None:
    """A commit that is repeated after no snapshot of a commit is left is skipped, a later one is not."""
    staging, writer = Staging(lake, "changelog"), lake.writer(mode="changelog")
    commits = [
        staging.table(staging.step({"id": number, "df_op": "c"}, segment=number))
        for number in range(6)
    ]
    for number in range(5):
        writer.commit(commits[number], number, unguarded)
    made = maintenance(lake, mode="changelog").maintain(ORDERS)
    assert (made.done, made.problems) == ("compacted and cleaned", [])
    if lake.format == "iceberg":
        assert made.after is not None
        assert made.after.snapshots == 1
        stamped = "SELECT 1 FROM {t}.snapshots WHERE summary['deltaforge.version'] IS NOT NULL"
        assert query(lake, stamped) == []
    # In a commit of its own, whose last row is not in the table, only the copy tells.
    for number in (3, 4):
        other = staging.table(staging.step({"id": 9, "df_ordinal": 9}, segment=number))
        lake.writer(mode="changelog").commit(other, number, unguarded)
    assert lake.rows("id") == [(number,) for number in range(5)]
    writer.commit(commits[4], 4, unguarded)
    writer.commit(commits[5], 5, unguarded)
    assert lake.rows("id") == [(number,) for number in range(6)]


@pytest.mark.soak("formats")
def test_beside_a_writer(lake: Lake) -> None:
    """Maintenance goes on while commits are made; neither loses anything, and no commit is held up for good."""
    # Delta's files have no branch that keeps them while they are written.
    hours = 24 if lake.format == "delta" else 0
    options = AT_ONCE.model_copy(update={"retention_hours": hours})
    staging, writer = Staging(lake, "current"), lake.writer()
    rows = [{"id": key, "name": "old"} for key in range(100)]
    writer.commit(staging.table(staging.step(*rows, inserts_only=True)), 0, unguarded)
    written = threading.Event()
    made: list[MaintainedTable] = []

    def maintain() -> None:
        session = maintenance(lake, options)
        while not written.is_set():
            made.append(session.maintain(ORDERS))

    beside = threading.Thread(target=maintain)
    beside.start()
    try:
        number, expected = 0, dict.fromkeys(range(100), "old")
        while number < 8 or not any(one.compacted for one in made):
            number += 1
            changed, gone, new = number * 7 % 100, number * 11 % 100, 100 + number
            step = staging.step(
                {"id": changed, "name": f"n{number}"},
                {"id": new, "name": "new"},
                {"id": gone, "df_op": "d", "df_absent": ["name", "note"]},
                segment=number,
            )
            expected |= {changed: f"n{number}", new: "new"}
            expected.pop(gone, None)
            writer.commit(staging.table(step, absent=["name", "note"]), number, unguarded)
    finally:
        written.set()
        beside.join()
    assert dict(lake.rows("id", "name")) == expected
    assert [problem for one in made for problem in one.problems] == []


@pytest.mark.soak("formats")
@ICEBERG
def test_a_table_that_was_put_back_lacks_later_commits(lake: Lake) -> None:
    """Somebody rolls a table back to before the copy of a stamp was made: its commits are made again."""
    staging = Staging(lake, "current")
    commits = [
        staging.table(staging.step({"id": number, "name": "a"}, segment=number))
        for number in range(2)
    ]
    lake.writer().commit(commits[0], 0, unguarded)
    (first,) = query(lake, "SELECT snapshot_id AS id FROM {t}.refs WHERE name = 'main'")
    lake.writer().commit(commits[1], 1, unguarded)
    query(lake, "ALTER TABLE {t} CREATE TAG kept AS OF VERSION " + str(first["id"]))
    query(lake, "ALTER TABLE {t} SET TBLPROPERTIES ('history.expire.min-snapshots-to-keep' = '9')")
    assert maintenance(lake).maintain(ORDERS).problems == []
    (kept,) = query(lake, "SHOW TBLPROPERTIES {t} ('deltaforge.committed')")
    assert '"version":1' in kept["value"]
    query(lake, f"CALL lake.system.set_current_snapshot('public.orders', {first['id']})")
    assert lake.rows("id") == [(0,)]
    lake.writer().commit(commits[1], 1, unguarded)
    assert lake.rows("id") == [(0,), (1,)]


@ICEBERG
@pytest.mark.soak("formats")
def test_a_table_recreated_lacks_the_commits_of_its_copy(lake: Lake) -> None:
    """It keeps the properties of its predecessor, but not what they say about commits."""
    staging = Staging(lake, "current")
    commits = [
        staging.table(staging.step({"id": number, "name": "a"}, segment=number))
        for number in range(2)
    ]
    for number, commit in enumerate(commits):
        lake.writer().commit(commit, number, unguarded)
    assert maintenance(lake).maintain(ORDERS).problems == []
    (kept,) = query(lake, "SHOW TBLPROPERTIES {t} ('deltaforge.committed')")
    assert '"version":1' in kept["value"]
    lake.writer().recreate(staging.table(), unguarded)
    for number, commit in enumerate(commits):
        lake.writer().commit(commit, number, unguarded, exists=True)
    assert lake.rows("id") == [(0,), (1,)]


@ICEBERG
@pytest.mark.soak("formats")
def test_pending_changes_are_maintained(lake: Lake) -> None:
    """Like a table: readers of the view see the same, and a commit that is repeated is not added again."""
    staging, writer = Staging(lake, "current"), lake.writer()
    beside = dialect_of(lake.config()).table(pending_name(ORDERS))
    assert maintenance(lake).maintain_pending(ORDERS) is None
    for number in range(6):
        step = staging.step({"id": number, "name": "a"}, segment=number)
        last = staging.table(step)
        writer.append(last, number, unguarded)
    made = maintenance(lake).maintain_pending(ORDERS)
    assert made is not None
    assert (made.compacted, made.cleaned, made.notes, made.problems) == (True, True, [], [])
    assert (made.before is not None, made.after is not None) == (True, True)
    lake.writer().append(last, 5, unguarded, exists=True)
    assert query(lake, f"SELECT count(*) AS n FROM {beside}")[0]["n"] == 6
    lake.writer().fold(last, 5, unguarded, "later", required=True)
    assert sorted(lake.rows("id")) == [(number,) for number in range(6)]


@ICEBERG
@pytest.mark.soak("formats")
def test_what_dead_writers_have_left(lake: Lake) -> None:
    """Their branches and files go once they are old; a commit that is under way is made again if its branch went, too."""
    staging, writer = Staging(lake, "current"), lake.writer()
    commits = [
        staging.table(staging.step({"id": number, "name": "a"}, segment=number))
        for number in range(3)
    ]
    writer.commit(commits[0], 0, unguarded)
    query(lake, "ALTER TABLE {t} CREATE BRANCH deltaforge_0_dead")
    query(lake, "ALTER TABLE {t} CREATE BRANCH mine")
    writer.commit(commits[1], 1, unguarded)
    folder = lake.folder / "lake/public/orders/data"
    for name, days in (("old", 4), ("young", 2)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - days * 86400,) * 2)
    calls: list[str] = []

    def guard() -> None:
        calls.append(",".join(maintenance(lake).maintain(ORDERS).problems) if calls == [""] else "")

    writer.commit(commits[2], 2, guard)
    assert calls[:2] == ["", ""]
    assert len(calls) > 2
    assert sorted(lake.rows("id")) == [(0,), (1,), (2,)]
    branches = {one["name"] for one in query(lake, "SELECT name FROM {t}.refs")}
    assert {"main", "mine"} < branches
    assert "deltaforge_0_dead" not in branches
    assert {one.name for one in folder.iterdir()} >= {"young"}
    assert not (folder / "old").exists()


@ICEBERG
def test_tables_that_are_left_alone(lake: Lake) -> None:
    """Tables of others, and of a sink before it has written to them again, are not touched, nor is one that is gone."""
    staging, writer = Staging(lake, "current"), lake.writer()
    for number in range(5):
        step = staging.step({"id": number, "name": "a"}, segment=number)
        writer.commit(staging.table(step), number, unguarded)
    before = query(lake, "SELECT committed_at FROM {t}.snapshots")
    others: list[dict[str, Any]] = [
        {"uid": "uid-2"}, {"sink_id": "other"}, {"pipeline": "other"},
    ]  # fmt: skip
    for other in others:
        made = maintenance(lake, **other).maintain(ORDERS)
        assert (made.before, made.done, made.problems) == (None, "", [])
        assert "left alone" in made.notes[0]
    assert query(lake, "SELECT committed_at FROM {t}.snapshots") == before
    assert maintenance(lake).maintain(("public", "none")).notes == ["the table is gone"]


@pytest.mark.soak("formats")
@ICEBERG
def test_files_of_deletes(lake: Lake) -> None:
    """Tables of format version 2 have no deletion vectors: their files of deletes go as well, so that rows are counted right."""
    options: dict[str, Any] = {"properties": {"format-version": "2"}}
    staging, writer = Staging(lake, "current"), lake.writer(**options)
    rows = [{"id": key, "name": "a"} for key in range(100)]
    writer.commit(staging.table(staging.step(*rows, inserts_only=True)), 0, unguarded)
    for number in range(1, 4):
        gone = [
            {"id": 10 * number + key, "df_op": "d", "df_absent": ["name", "note"]}
            for key in range(10)
        ]
        step = staging.step(*gone, segment=number)
        writer.commit(staging.table(step, absent=["name", "note"]), number, unguarded)
    made = maintenance(lake, **options).maintain(ORDERS)
    assert made.compacted
    assert query(lake, "SELECT 1 FROM {t}.files WHERE content <> 0") == []
    assert made.after
    assert made.after.figures
    assert (made.after.figures.rows, made.after.figures.deleted) == (70, 0)
    assert len(lake.rows("id")) == 70


@pytest.mark.soak("formats")
@pytest.mark.parametrize("columns", [("id",), ("name", "id")])
def test_compaction_clusters_rows(lake: Lake, columns: tuple[str, ...]) -> None:
    """Rows with near values come to lie near each other in the files, and readers see no difference."""
    staging = Staging(lake, "current")
    options: dict[str, Any] = {"cluster_by": {"public.orders": columns}}
    for number in range(6):
        rows = [{"id": 6 * key + number, "name": f"n{key}"} for key in range(10)]
        changes = staging.table(staging.step(*rows, segment=number, inserts_only=True))
        lake.writer(**options).commit(changes, number, unguarded)
    expected = sorted(lake.rows("id", "name"))
    done = maintenance(lake, **options).maintain(ORDERS)

    assert (done.compacted, done.problems) == (True, [])
    assert sorted(lake.rows("id", "name")) == expected
    assert clustered(lake) == list(columns)
    if lake.format == "iceberg":
        (file,) = query(lake, "SELECT file_path FROM {t}.files")
        found = duckdb.sql(f"SELECT id FROM '{file[0].removeprefix('file:')}'").fetchall()
        near = sum(abs(one - other) for (one,), (other,) in itertools.pairwise(found))
        assert near < 60 * 3  # unsorted, 6 rows of each step lie 6 apart
    else:
        (optimized,) = [
            row for row in query(lake, "DESCRIBE HISTORY {t}") if row.operation == "OPTIMIZE"
        ]
        assert optimized.operationParameters["clusterBy"] == orjson.dumps(columns).decode()
        table = DeltaTable(str(lake.folder / "lake" / "public" / "orders"))  # another reader
        counted = QueryBuilder().register("t", table).execute("SELECT count(*) AS n FROM t")
        assert pa.table(counted.read_all()).to_pylist() == [{"n": 60}]


@pytest.mark.soak("formats")
def test_clustering_is_for_new_tables(lake: Lake) -> None:
    """A table that exists is written on as it is, whatever the option says later, until it is recreated."""
    staging = Staging(lake, "current")
    later: dict[str, Any] = {"cluster_by": {"public.orders": ("id",)}}
    for number, options in enumerate(({}, later)):
        changes = staging.table(staging.step({"id": number, "name": "n"}, segment=number))
        lake.writer(**options).commit(changes, number, unguarded)
    assert sorted(lake.rows("id", "name")) == [(0, "n"), (1, "n")]
    assert clustered(lake) == []
    assert maintenance(lake, **later).maintain(ORDERS).problems == []

    for options, columns in ((later, ["id"]), ({}, [])):
        lake.writer(**options).recreate(staging.table(), unguarded)
        assert clustered(lake) == columns


@ICEBERG
@pytest.mark.postgres
def test_a_catalog_in_a_database(
    lake: Lake, spark_server: SparkAddress, postgres_server: PostgresServer
) -> None:
    """It has no views, and says so when it is asked for a table that it does not have."""
    if spark_server.folder is None:
        pytest.skip("only our own server has the driver of the catalog's database")
    dsn = urlsplit(postgres_server.create_database())
    where = {
        "type": "jdbc",
        "uri": f"jdbc:postgresql://{dsn.hostname}:{dsn.port}{dsn.path}",
        "jdbc.user": dsn.username or "",
        "jdbc.password": dsn.password or "",
        "warehouse": str(lake.folder / "warehouse"),
    }
    options: dict[str, Any] = {
        "catalog_properties": {name: SecretStr(value) for name, value in where.items()}
    }
    staging, writer = Staging(lake, "current"), lake.writer(**options)
    for number in range(2):
        step = staging.step({"id": number, "name": "x"}, segment=number)
        writer.commit(staging.table(step), number, unguarded, exists=number > 0)
    found = writer.sessions.session().sql("SELECT id FROM lake.public.orders ORDER BY id")
    assert [row.id for row in found.collect()] == [0, 1]

    made = maintenance(lake, **options)
    assert not made.maintain(ORDERS).problems
    assert made.maintain_pending(ORDERS) is None
    staging.destination = ("public", "gone")
    with pytest.raises(TableRejected, match="is gone"):
        writer.commit(staging.table(step), 2, unguarded, exists=True)
