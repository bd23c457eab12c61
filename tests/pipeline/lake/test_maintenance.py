"""Maintenance of tables, with Spark and the formats themselves: nothing changes for readers, nor for what is committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.pipeline.lake.maintenance import LakeMaintenance, MaintainedTable
from deltaforge_dagster.sinks.lake.config import LakeMaintenanceConfig
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
    known = 50 if lake.format == "iceberg" else None
    assert (made.figures.files, made.figures.deleted, made.figures.rows) == (5, 0, known)
    assert (made.figures.bytes or 0) > 0
    rows = [{"id": key, "df_op": "d", "df_absent": ["name", "note"]} for key in range(0, 50, 10)]
    deleted = staging.table(staging.step(*rows, segment=5), absent=["name", "note"])
    writer.commit(deleted, 5, unguarded)
    expected = lake.rows("id", "name")

    looked = maintenance(lake).maintain(ORDERS, dry_run=True)
    assert (looked.due, looked.done, figures(looked)) == (True, [], (5, 5, 5, 5, 5, 5))
    done = maintenance(lake).maintain(ORDERS)
    assert (done.done, done.problems) == (["compacted", "cleaned"], [])
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


def test_commits_are_known_after_their_snapshots(lake: Lake) -> None:
    """A commit that is repeated after no snapshot of a commit is left is skipped, later ones are not."""
    staging, writer = Staging(lake, "changelog"), lake.writer(mode="changelog")
    commits = [
        staging.table(
            staging.step({"id": number, "df_op": "c"}, segment=number), staging.truncate(number, 1)
        )
        for number in range(8)
    ]
    for number in range(7):
        writer.commit(commits[number], number, unguarded)
    expected = lake.rows("id", "df_op")
    assert maintenance(lake, mode="changelog").maintain(ORDERS).problems == []
    # A branch of a writer that may live is kept, if it is not old: now it is.
    made = maintenance(lake, mode="changelog").maintain(ORDERS)
    assert made.problems == []
    if lake.format == "iceberg":
        stamped = "SELECT 1 FROM {t}.snapshots WHERE summary['deltaforge.version'] IS NOT NULL"
        assert query(lake, stamped) == []
        assert made.after is not None
        assert made.after.snapshots == 1
    for number in (6, 5):
        lake.writer(mode="changelog").commit(commits[number], number, unguarded)
    assert lake.rows("id", "df_op") == expected
    writer.commit(commits[6], 6, unguarded)
    writer.commit(commits[7], 7, unguarded)
    assert len(lake.rows("id")) == len(expected) + 2


@ICEBERG
def test_a_table_that_was_put_back_lacks_later_commits(lake: Lake) -> None:
    """Somebody rolls a table back to before the copy of a stamp was made: its commits are made again."""
    staging = Staging(lake, "current")
    commits = [
        staging.table(staging.step({"id": number, "name": "a"}, segment=number))
        for number in range(2)
    ]
    keeps = AT_ONCE.model_copy(update={"retention_hours": 1})
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
    assert maintenance(lake, keeps).maintain(ORDERS).problems == []
