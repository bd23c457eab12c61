"""Applying staged changes to tables: what both formats must do, with Spark and the formats themselves."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deltaforge_dagster.errors import LeaseLost, TableRejected
from deltaforge_dagster.pipeline.lake.target import TableCommit
from deltaforge_dagster.pipeline.lake.writer import LakeWriter
from deltaforge_dagster.sinks.lake.dialect import INT64_TIMESTAMPS
from deltaforge_dagster.sinks.tables.staged import StagedStep, StagedTable
from deltaforge_dagster.sources.value_types import (
    DATE,
    FLOAT32,
    FLOAT64,
    INT16,
    INT32,
    INT64,
    TEXT,
    TIMESTAMP,
    decimal,
    list_of,
)
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import FORMATS, Lake, Staging, dialect_of, moment
from tests.pipeline.tables.recipes import current_rows

pytestmark = pytest.mark.spark


@pytest.fixture(params=[pytest.param("delta", marks=pytest.mark.soak("formats")), "iceberg"])
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, spark_server: SparkAddress
) -> Iterator[Lake]:
    """An empty folder for tables of each format."""
    made = Lake(request.param, tmp_path, spark_server.remote)
    yield made
    made.close()


BOTH_FORMATS = pytest.mark.parametrize("lake", FORMATS, indirect=True)
"""For what makes commits exact, which differs between the formats; the rest is the same, and takes long with Delta."""


DEATHS = pytest.mark.parametrize(
    "deaths",
    [range(2, 40, 3), pytest.param(range(1, 40), marks=pytest.mark.soak("kills"))],
    ids=["some", "all"],
)
"""The calls of its guard at which a writer dies: each is a table of its own, until one survives them all."""


def unguarded() -> None:
    """A guard that lets everything pass."""


@dataclass
class DyingGuard:
    """A guard that kills its run at a call, given by its number, and counts the calls."""

    dies_at: int
    calls: int = 0

    def __call__(self) -> None:
        """Let the run go on, or kill it."""
        self.calls += 1
        if self.calls == self.dies_at:
            raise LeaseLost("killed")


def test_a_changelog_has_every_change(lake: Lake) -> None:
    """A changelog has each change once, and a row for a truncate, whoever repeats a commit."""
    staging, writer = Staging(lake, "changelog"), lake.writer(mode="changelog")
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
    writer.commit(second, 4, unguarded)
    writer.commit(second, 4, unguarded)
    lake.writer(mode="changelog").commit(second, 4, unguarded)
    lake.writer(mode="changelog").commit(first, 2, unguarded)
    names = ["id", "name", "df_op", "df_position", "df_ordinal", "df_event_id", "df_tx_id"]
    assert lake.rows(*names) == [
        (1, "a", "c", 0, 0, "e0", None),
        (None, None, "t", 3, 0, None, None),
        (2, "b", "u", 4, 1, "e1", None),
        (2, None, "d", 4, 2, "e2", "7"),
    ]


def test_current_rows_from_a_changelog(lake: Lake) -> None:
    """The documented query finds the last row of each key: neither deleted ones nor those before a truncate."""
    staging, writer = Staging(lake, "changelog"), lake.writer(mode="changelog")
    query = current_rows("lakehouse.md", "public.orders", dialect_of(lake.config()).table(staging.destination))  # fmt: skip
    before = [
        {"id": 1, "name": "a", "df_op": "c"}, {"id": 2, "name": "b", "df_op": "c"}, {"id": 3, "name": "c", "df_op": "c"},
        {"id": 3, "df_op": "d", "df_ordinal": 3}, {"id": 4, "name": "moved", "df_ordinal": 3},
        {"id": 2, "df_op": "d", "df_ordinal": 4},
    ]  # fmt: skip
    writer.commit(staging.table(staging.step(*before)), 0, unguarded)
    session = lake.reading()

    def found() -> list[tuple[Any, ...]]:
        return sorted((row.id, row.name) for row in session.sql(query).collect())

    assert found() == [(1, "a"), (4, "moved")]
    truncate = {"df_op": "t", "df_ordinal": 0}
    after = staging.step(truncate, {"id": 2, "name": "new", "df_op": "c"}, segment=1)
    writer.commit(staging.table(after), 1, unguarded)
    assert found() == [(2, "new")]


def test_a_current_table_has_the_source_s_rows(lake: Lake) -> None:
    """Inserts, updates, deletes, changes of keys and truncates; what a change lacks stays as it is."""
    staging, writer = Staging(lake, "current"), lake.writer()
    inserts = [{"id": key, "name": f"n{key}", "note": f"x{key}"} for key in range(1, 6)]
    writer.commit(staging.table(staging.step(*inserts, inserts_only=True)), 0, unguarded)
    changes = staging.table(
        staging.step(
            {"id": 1, "name": "new", "df_absent": ["note"]},
            {"id": 2, "df_op": "d", "df_absent": ["name", "note"]},
            {"id": 9, "name": "unknown", "df_absent": ["note"]},
            {"id": 8, "df_op": "d", "df_absent": ["name", "note"]},
            segment=1,
        ),
        # Each key moves to where another one was, so all of them read what was there before.
        staging.step(
            {"id": 4, "name": "was 3", "df_old_id": 3, "df_absent": ["note"]},
            {"id": 5, "name": "was 4", "df_old_id": 4, "df_absent": ["note"]},
            {"id": 6, "name": "was 5", "df_old_id": 5, "note": "own"},
            segment=2,
            rekey=True,
        ),
        absent=["name", "note"],
    )
    writer.commit(changes, 2, unguarded)
    expected = [
        (1, "new", "x1"), (4, "was 3", "x3"), (5, "was 4", "x4"), (6, "was 5", "own"), (9, "unknown", None),
    ]  # fmt: skip
    assert sorted(lake.rows("id", "name", "note")) == expected
    lake.writer().commit(changes, 2, unguarded)
    assert sorted(lake.rows("id", "name", "note")) == expected
    emptied = staging.table(
        staging.truncate(3, 5), staging.step({"id": 1, "name": "after", "df_ordinal": 6}, segment=3)
    )
    writer.commit(emptied, 3, unguarded)
    assert lake.rows("id", "name", "note", "df_position") == [(1, "after", None, 3)]


@BOTH_FORMATS
@pytest.mark.parametrize("soft_deletes", [False, True])
def test_a_table_that_is_filled_again_is_never_empty(lake: Lake, soft_deletes: bool) -> None:
    """A truncate and the rows behind it are one version of the table, also for keys that it had before."""
    staging, writer = Staging(lake, "current"), lake.writer(soft_deletes=soft_deletes)
    rows = [{"id": key, "name": f"n{key}", "note": f"x{key}"} for key in range(4)]
    writer.commit(staging.table(staging.step(*rows, inserts_only=True)), 0, unguarded)
    before = lake.versions()
    again = staging.table(
        staging.truncate(1, 5),
        staging.step(
            {"id": 1, "name": "again", "df_ordinal": 6, "df_absent": ["note"]},
            {"id": 2, "df_op": "d", "df_ordinal": 8, "df_absent": ["name", "note"]},
            {"id": 7, "name": "new", "df_ordinal": 9},
            segment=1,
        ),
        absent=["name", "note"],
    )
    for _ in range(2):
        writer.commit(again, 1, unguarded)
    lake.writer(soft_deletes=soft_deletes).commit(again, 1, unguarded)

    assert lake.versions() == before + 1
    if not soft_deletes:
        assert sorted(lake.rows("id", "name", "note")) == [(1, "again", None), (7, "new", None)]
        return
    assert sorted(lake.rows("id", "name", "df_deleted", "df_position", "df_ordinal")) == [
        (0, "n0", True, 1, 5), (1, "again", False, 1, 6), (2, "n2", True, 1, 8), (3, "n3", True, 1, 5),
        (7, "new", False, 1, 9),
    ]  # fmt: skip


@pytest.mark.soak("formats")
def test_soft_deletes_keep_rows(lake: Lake) -> None:
    """With soft deletes, deletes, truncates and changes of keys mark rows, and inserts bring them back."""
    staging, writer = Staging(lake, "current"), lake.writer(soft_deletes=True)
    rows = [{"id": key, "name": f"n{key}"} for key in range(4)]
    writer.commit(staging.table(staging.step(*rows, inserts_only=True)), 0, unguarded)
    changes = staging.table(
        staging.step(
            {"id": 1, "df_op": "d", "df_absent": ["name", "note"]},
            {"id": 2, "df_op": "d", "df_absent": ["name", "note"]},
            segment=1,
        ),
        staging.step({"id": 2, "name": "again"}, segment=2, inserts_only=True),
        staging.step(
            {"id": 7, "df_old_id": 3, "df_absent": ["name", "note"]}, segment=3, rekey=True
        ),
        absent=["name", "note"],
    )
    writer.commit(changes, 3, unguarded)
    assert sorted(lake.rows("id", "name", "df_deleted")) == [
        (0, "n0", False), (1, "n1", True), (2, "again", False), (3, "n3", True), (7, "n3", False),
    ]  # fmt: skip
    writer.commit(staging.table(staging.truncate(4, 0)), 4, unguarded)
    assert [row[0] for row in lake.rows("df_deleted")] == [True] * 5


def test_a_history_has_every_version(lake: Lake) -> None:
    """A history has each version with its validity, also of keys that change and of truncated rows."""
    staging, writer = Staging(lake, "history"), lake.writer(mode="history")
    first = staging.step(
        {"id": 1, "name": "a", "note": "x", "df_valid_to": moment(1)},
        {"id": 1, "name": "b", "note": "x"},
        {"id": 2, "name": "c", "note": "y"},
        {"id": 3, "name": "d", "note": "z"},
        {"id": 5, "name": "e", "note": "q"},
    )
    writer.commit(staging.table(first), 0, unguarded)
    changes = staging.table(
        staging.step(
            {"id": 1, "name": "b2", "df_absent": ["note"], "df_valid_to": moment(101)},
            {"id": 1, "df_op": "d", "df_absent": ["name", "note"], "df_valid_to": moment(102)},
            {"id": 1, "name": "again", "note": "w"},
            {"id": 2, "df_op": "d", "df_absent": ["name", "note"]},
            {"id": 5, "name": "e2", "df_absent": ["note"], "df_valid_to": moment(105)},
            {"id": 5, "name": "e3", "df_absent": ["note"]},
            segment=1,
        ),
        staging.step(
            {"id": 4, "name": "moved", "df_old_id": 3, "df_absent": ["note"]}, segment=2, rekey=True
        ),
        staging.truncate(3, 0),
        absent=["name", "note"],
    )
    writer.commit(changes, 3, unguarded)
    lake.writer(mode="history").commit(changes, 3, unguarded)
    names = ["id", "name", "note", "df_valid_from", "df_valid_to", "df_is_current"]
    assert sorted(lake.rows(*names)) == [
        (1, "a", "x", moment(0), moment(1), False),
        (1, "again", "w", moment(102), moment(300), False),
        (1, "b", "x", moment(1), moment(100), False),
        (1, "b2", "x", moment(100), moment(101), False),
        (2, "c", "y", moment(2), moment(103), False),
        (3, "d", "z", moment(3), moment(200), False),
        (4, "moved", "z", moment(200), moment(300), False),
        (5, "e", "q", moment(4), moment(104), False),
        (5, "e2", "q", moment(104), moment(105), False),
        (5, "e3", "q", moment(105), moment(300), False),
    ]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of the statements that add or merge rows."""
    found: list[str] = []
    execute = TableCommit.execute

    def noted(commit: TableCommit, *texts: str) -> None:
        found.extend(one.split()[0] for one in texts if one.startswith(("INSERT", "MERGE")))
        execute(commit, *texts)

    monkeypatch.setattr(TableCommit, "execute", noted)
    return found


@pytest.mark.parametrize(
    "mode", ["current", pytest.param("history", marks=pytest.mark.soak("formats"))]
)
def test_rows_of_a_snapshot_are_added_where_there_are_none(
    lake: Lake, statements: list[str], mode: str
) -> None:
    """Without a look at what is outside their range; where the table has a key of it, they are merged."""
    soft: dict[str, Any] = {"soft_deletes": True} if mode == "current" else {}
    staging, writer = Staging(lake, mode), lake.writer(mode=mode, **soft)

    def chunk(segment: int, *keys: int) -> StagedStep:
        rows = [{"id": key, "name": f"read {segment}"} for key in keys]
        return staging.step(*rows, segment=segment, reads=True)

    live = staging.step({"id": 35, "name": "inserted meanwhile"}, segment=2)
    for segment, steps in enumerate(
        [[chunk(1, 1, 9)], [chunk(2, 10, 19), live], [chunk(3, 20, 29)], [chunk(4, 30, 35, 39)], [chunk(5, 19)]],
        start=1,
    ):  # fmt: skip
        writer.commit(staging.table(*steps), segment, unguarded)

    assert statements == ["INSERT", "INSERT", "MERGE", "INSERT", "MERGE", "MERGE"]
    history = mode == "history"
    shown = lake.rows("id", "name", "df_is_current" if history else "df_deleted")
    assert sorted(one for one in shown if one[2] is history) == [
        (key, f"read {segment}", history)
        for key, segment in [(1, 1), (9, 1), (10, 2), (19, 5), (20, 3), (29, 3), (30, 4), (35, 4), (39, 4)]
    ]  # fmt: skip
    assert len(shown) == (11 if history else 9)


@pytest.mark.soak("formats")
def test_rows_of_a_snapshot_are_added_once(lake: Lake, statements: list[str]) -> None:
    """A successor adds them after the first writer has seen that they are not there, before it adds them itself."""
    staging = Staging(lake, "current")
    commit = staging.table(staging.step({"id": 1}, {"id": 2}, segment=1, reads=True))
    made: list[LakeWriter] = []

    def guard() -> None:
        if statements and not made:  # it is about to execute its INSERT
            made.append(lake.writer())
            made[0].commit(commit, 1, unguarded)

    lake.writer().commit(commit, 1, guard)
    assert statements[:2] == ["INSERT", "INSERT"]
    assert sorted(lake.rows("id")) == [(1,), (2,)]


def two_commits(staging: Staging) -> Sequence[Any]:
    """Two commits of a changelog, each with two statements."""
    return [
        staging.table(
            staging.step({"id": 10 * segment, "df_op": "c"}, segment=segment),
            staging.truncate(segment, 1),
        )
        for segment in (1, 2)
    ]


ONCE = [(10, "c", 1), (None, "t", 1), (20, "c", 2), (None, "t", 2)]


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.soak("kills"))])
def test_a_commit_takes_effect_once_wherever_its_writer_is_replaced(
    lake: Lake, *, dies: bool
) -> None:
    """Before each statement of a commit, a successor makes the same one and the next; the first goes on, or dies."""
    staging = Staging(lake, "changelog")
    old, new = two_commits(staging)
    interrupted = 0
    for number in range(100):
        staging.destination = ("public", f"t{number}")
        first, second = (staging.renamed(one) for one in (old, new))
        calls = 0
        successor = lake.writer(mode="changelog")

        def guard() -> None:
            nonlocal calls
            calls += 1
            if calls == number + 1:  # noqa: B023 - called in this round
                successor.commit(first, 1, unguarded)  # noqa: B023
                successor.commit(second, 2, unguarded)  # noqa: B023
                if dies:
                    raise LeaseLost("somebody else has it")

        try:
            lake.writer(mode="changelog").commit(first, 1, guard)
        except LeaseLost:
            assert dies
        if calls <= number:
            break
        interrupted += 1
        rows = lake.rows("id", "df_op", "df_position", destination=staging.destination)
        assert sorted(rows, key=lambda row: (row[2], row[1])) == ONCE, f"before statement {number}"
    assert interrupted >= 3


@BOTH_FORMATS
def test_two_writers_at_once(lake: Lake) -> None:
    """Two sessions make the same commits at the same time; both succeed, and the rows are there once."""
    staging = Staging(lake, "changelog")
    commits = two_commits(staging)
    errors: list[BaseException] = []
    ready = threading.Barrier(2)

    def work() -> None:
        try:
            writer = lake.writer(mode="changelog")
            writer.sessions.session()
            ready.wait()
            for segment, one in enumerate(commits, start=1):
                writer.commit(one, segment, unguarded)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors
    rows = lake.rows("id", "df_op", "df_position")
    assert sorted(rows, key=lambda row: (row[2], row[1])) == ONCE


@pytest.mark.parametrize("lake", ["iceberg"], indirect=True)
def test_branches_of_others_are_kept_for_a_while(lake: Lake) -> None:
    """A statement may still be on its way to a branch that is young: dropped, it would be made again without the steps before."""
    staging, table = Staging(lake, "changelog"), ("public", "orders")
    commits = two_commits(staging)
    lake.writer(mode="changelog").commit(commits[0], 1, unguarded)
    session, name = lake.reading(), lake.writer().dialect.table(table)
    query = f"SELECT name FROM {name}.refs WHERE name <> 'main'"
    (young,) = (row["name"] for row in session.sql(query).collect())
    owner, _, token = young.rpartition("_")
    old = f"{owner.rpartition('_')[0]}_{int(time.time()) - 4000:x}_{token}"
    session.sql(f"ALTER TABLE {name} CREATE BRANCH {old}")

    lake.writer(mode="changelog").commit(commits[1], 2, unguarded)

    left = {row["name"] for row in lake.reading().sql(query).collect()}
    assert (young in left, old in left, len(left)) == (True, False, 2)


def test_a_table_is_recreated(lake: Lake) -> None:
    """With today's types and without rows, also if it is gone; what follows is added, and nobody else's table is touched."""
    staging = Staging(lake, "current", {"id": INT64, "n": INT64})
    writer = lake.writer()
    writer.commit(staging.table(staging.step({"id": 1, "n": 1}, segment=3)), 3, unguarded)
    staging.types = {"id": INT64, "n": DATE}
    row = {"id": 1, "n": moment(0).date()}
    following = staging.table(staging.step(row, segment=4, inserts_only=True))
    with pytest.raises(
        TableRejected, match="or have the table loaded again; run: deltaforge resync"
    ):
        writer.commit(following, 4, unguarded)
    with pytest.raises(TableRejected, match="belongs to sink lake of pipeline shop"):
        lake.writer(pipeline="other").recreate(staging.table(), unguarded)
    assert lake.rows("id", "n") == [(1, 1)]

    for _ in range(2):
        writer.recreate(staging.table(), unguarded)
        assert lake.rows("id", "n") == []
    for one in (writer, lake.writer()):
        one.commit(following, 4, unguarded, exists=True)
        assert lake.rows("id", "n") == [(1, moment(0).date())]
    staging.destination = ("public", "others")
    writer.recreate(staging.table(), unguarded)
    assert lake.rows("id", destination=staging.destination) == []


@pytest.mark.parametrize("lake", ["delta"], indirect=True)
def test_a_table_of_an_earlier_release_says_so_until_it_is_recreated(lake: Lake) -> None:
    """Its files have timestamps as INT96, which later commits do not change; a table that is made today has none."""
    staging = Staging(lake, "current")
    made = lake.writer().commit(staging.table(staging.step({"id": 1})), 0, unguarded)
    assert made.int64_timestamps
    name = dialect_of(lake.config()).table(staging.destination)
    lake.reading().sql(f"ALTER TABLE {name} UNSET TBLPROPERTIES ('{INT64_TIMESTAMPS}')")
    writer = lake.writer()
    for segment in (1, 2):
        changes = staging.table(staging.step({"id": 1}, segment=segment))
        assert not writer.commit(changes, segment, unguarded).int64_timestamps
    writer.recreate(staging.table(), unguarded)
    changes = staging.table(staging.step({"id": 1}, segment=3))
    assert writer.commit(changes, 3, unguarded).int64_timestamps


def test_columns_are_added_and_widened(lake: Lake) -> None:
    """New columns are added; a smaller type fits into a wider one; a dropped column stays."""
    staging = Staging(lake, "current", {"id": INT64, "n": INT32, "wide": INT64, "gone": TEXT})
    options: dict[str, Any] = {"type_widening": True} if lake.format == "delta" else {}
    writer = lake.writer(**options)
    writer.commit(
        staging.table(staging.step({"id": 1, "n": 1, "wide": 2, "gone": "g"})), 0, unguarded
    )
    staging.types = {
        "id": INT64, "n": INT64, "wide": INT16, "Odd, `name`": decimal(5, 2), "ts": TIMESTAMP,
    }  # fmt: skip
    later = moment(0).replace(tzinfo=None)
    row = {"id": 2, "n": 2**40, "wide": 3, "Odd, `name`": 1, "ts": later}
    made = writer.commit(staging.table(staging.step(row, segment=1)), 1, unguarded)
    columns = dict(made.columns)
    assert (columns["n"], columns["gone"]) == ("bigint", "string")
    assert (columns["Odd, `name`"], columns["df_position"]) == ("decimal(5,2)", "bigint")
    assert sorted(lake.rows("id", "n", "wide", "gone", "Odd, `name`", "ts")) == [
        (1, 1, 2, "g", None, None),
        (2, 2**40, 3, None, 1, later),
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [(TEXT, FLOAT64), (INT64, TEXT), (decimal(5, 2), decimal(5, 3)), (DATE, TIMESTAMP)],
)
def test_a_type_that_does_not_hold_the_values_is_rejected(lake: Lake, old: Any, new: Any) -> None:
    """The message names the column and both types, and nothing is written."""
    staging = Staging(lake, "changelog", {"id": INT64, "some": old})
    writer = lake.writer(mode="changelog")
    writer.commit(staging.table(staging.step({"id": 1})), 0, unguarded)
    staging.types = {"id": INT64, "some": new}
    with pytest.raises(TableRejected, match=r"column some has the type .* `types`"):
        writer.commit(staging.table(staging.step({"id": 2}, segment=1)), 1, unguarded)
    assert lake.rows("id") == [(1,)]


@BOTH_FORMATS
def test_what_somebody_has_changed(lake: Lake) -> None:
    """A table without a column that it had, or made again without rows, gets nothing, until it is loaded again."""
    staging, sessions = Staging(lake, "current", {"id": INT64, "n": INT64}), lake.sessions()
    identities = {"id": "id@1", "n": "n@1"}

    def staged(number: int) -> StagedTable:
        step = staging.step({"id": number, "n": number}, segment=number)
        return replace(staging.table(step), identities=identities)

    def rejected(number: int, said: str) -> None:
        with pytest.raises(TableRejected, match=rf"{said}.*deltaforge resync shop --sink lake"):
            lake.writer(sessions).commit(staged(number), number, unguarded, exists=True)

    lake.writer(sessions).commit(staged(0), 0, unguarded)
    reading, name = lake.reading(), dialect_of(lake.config()).table(("public", "orders"))
    if lake.format == "delta":
        mapped = "'delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '5'"
        reading.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({mapped})")
    reading.sql(f"ALTER TABLE {name} DROP COLUMN n")
    rejected(1, "its column n is gone")
    lake.writer(sessions).recreate(replace(staged(1), steps=()), unguarded)
    lake.writer(sessions).commit(staged(1), 1, unguarded)
    assert lake.rows("id", "n") == [(1, 1)]

    columns = ", ".join(f"{one} bigint" for one in ("id", "n", "df_position"))
    shutil.rmtree(lake.folder / "lake" / "public" / "orders")
    reading.sql(f"CREATE TABLE {name} ({columns}) USING {lake.format}")
    rejected(2, "is gone, with everything")
    lake.writer(sessions).recreate(replace(staged(2), steps=()), unguarded)
    lake.writer(sessions).commit(staged(2), 2, unguarded)
    assert lake.rows("id", "n") == [(2, 2)]


def test_delta_widens_by_choice_only(lake: Lake) -> None:
    """Few readers understand Delta's type widening, so it needs an option."""
    staging = Staging(lake, "changelog", {"id": INT32, "list": list_of(FLOAT32)})
    writer = lake.writer(mode="changelog")
    writer.commit(staging.table(staging.step({"id": 1, "list": [1.5]})), 0, unguarded)
    staging.types = {"id": INT64, "list": list_of(FLOAT32)}
    wider = staging.table(staging.step({"id": 2**40, "list": None}, segment=1))
    if lake.format == "delta":
        with pytest.raises(TableRejected, match="column id has the type int"):
            writer.commit(wider, 1, unguarded)
    else:
        writer.commit(wider, 1, unguarded)
        assert sorted(lake.rows("id", "list")) == [(1, [1.5]), (2**40, None)]


def named(staging: Staging, step: StagedStep, **identities: str) -> StagedTable:
    """The changes of a commit whose columns are identified like that."""
    return replace(staging.table(step), identities=identities)


@BOTH_FORMATS
@pytest.mark.parametrize(
    "mode", ["current", pytest.param("history", marks=pytest.mark.soak("formats"))]
)
def test_renamed_columns_keep_their_values(lake: Lake, mode: str) -> None:
    """Whoever repeats the commit; the table is partitioned or clustered by the column as before."""
    first = Staging(lake, mode, {"id": INT32, "a": INT32, "b": TEXT})
    options: dict[str, Any] = {"mode": mode, "cluster_by": {"public.orders": ("a",)}}
    before = first.step({"id": 1, "a": 1, "b": "x"}, {"id": 2, "a": 2, "b": "y"})
    writer = lake.writer(**options)
    writer.commit(named(first, before, id="id@1", a="a@1", b="b@1"), 0, unguarded)

    # a is c now, and b has the name that a had
    second = Staging(lake, mode, {"id": INT32, "c": INT32, "a": TEXT})
    after = second.step({"id": 2, "c": 5, "a": "z"}, {"id": 3, "c": 6, "a": "n"}, segment=1)
    commit = named(second, after, id="id@1", c="a@1", a="b@1")
    for one in (writer, writer, lake.writer(**options)):
        one.commit(commit, 1, unguarded)
    replaced = [(2, 2, "y")] if mode == "history" else []
    assert sorted(lake.rows("id", "c", "a")) == sorted(
        [(1, 1, "x"), (2, 5, "z"), (3, 6, "n"), *replaced]
    )


@DEATHS
def test_a_rename_takes_effect_once_wherever_its_writer_dies(
    lake: Lake, deaths: Sequence[int]
) -> None:
    """Before each statement; the successor goes on with it. One column gets the name that another one had."""
    first = Staging(lake, "current", {"id": INT32, "a": INT32, "b": TEXT})
    second = Staging(lake, "current", {"id": INT32, "b": INT32, "c": TEXT})
    for number in deaths:
        first.destination = second.destination = ("public", f"t{number}")
        made = named(first, first.step({"id": 1, "a": 1, "b": "x"}), id="id@1", a="a@1", b="b@1")
        lake.writer().commit(made, 0, unguarded)
        step = second.step({"id": 2, "b": 2, "c": "y"}, segment=1)
        commit = named(second, step, id="id@1", b="a@1", c="b@1")
        guard = DyingGuard(number)
        with contextlib.suppress(LeaseLost):
            lake.writer().commit(commit, 1, guard)
            break
        lake.writer().commit(commit, 1, unguarded)
        found = lake.rows("id", "b", "c", destination=first.destination)
        assert sorted(found) == [(1, 1, "x"), (2, 2, "y")]
    assert guard.calls > 4


@BOTH_FORMATS
def test_names_that_other_columns_had(lake: Lake) -> None:
    """A dropped column is called by a name of its own once another one has its name; two columns can have each other's names."""
    first = Staging(lake, "current", {"id": INT32, "a": INT32, "b": INT32})
    made = named(first, first.step({"id": 1, "a": 1, "b": 2}), id="id@1", a="a@1", b="b@1")
    writer = lake.writer()
    writer.commit(made, 0, unguarded)

    swapped = first.step({"id": 2, "a": 20, "b": 10}, segment=1)
    writer.commit(named(first, swapped, id="id@1", a="b@1", b="a@1"), 1, unguarded)
    assert lake.rows("id", "a", "b") == [(1, 2, 1), (2, 20, 10)]

    # b, which began as a, is dropped; a has the name b, and a new column the name a, with another type
    second = Staging(lake, "current", {"id": INT32, "b": INT32, "a": TEXT})
    step = second.step({"id": 3, "b": 30, "a": "x"}, segment=2)
    commit = named(second, step, id="id@1", b="b@1", a="a@3")
    for one in (writer, lake.writer()):
        one.commit(commit, 2, unguarded)
    assert lake.rows("id", "a_dropped_1", "b", "a") == [
        (1, 1, 2, None), (2, 10, 20, None), (3, None, 30, "x"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "mode", ["current", pytest.param("history", marks=pytest.mark.soak("formats"))]
)
@DEATHS
def test_what_rows_have_in_added_columns(lake: Lake, mode: str, deaths: Sequence[int]) -> None:
    """Rows that are there have what the source gave them, wherever a writer dies, and however often it is tried."""
    for number in deaths:
        destination = ("public", f"t{number}")
        first = Staging(lake, mode, {"id": INT32}, destination=destination)
        made = named(first, first.step({"id": 1}, {"id": 2}), id="id@1")
        lake.writer(mode=mode).commit(made, 0, unguarded)
        second = Staging(lake, mode, {"id": INT32, "n": INT32, "t": TEXT}, destination=destination)
        step = second.step({"id": 2, "n": None}, {"id": 3, "t": "own"}, segment=1)
        added = named(second, step, id="id@1", n="n@2", t="t@2")
        added = replace(added, fills={"n": "7", "t": "it's \\"})
        guard = DyingGuard(number)
        with contextlib.suppress(LeaseLost):
            lake.writer(mode=mode).commit(added, 1, guard)
            assert guard.calls > 5
            break
        for _ in range(2):
            lake.writer(mode=mode).commit(added, 1, unguarded)
        rows = sorted(lake.rows("id", "n", "t", destination=destination), key=str)
        ended = [(2, 7, "it's \\")] if mode == "history" else []
        assert rows == sorted(
            [(1, 7, "it's \\"), *ended, (2, None, None), (3, None, "own")], key=str
        )


def test_columns_that_may_be_others(lake: Lake) -> None:
    """The table is held, and the reason says what to do; so it is if it has a column of somebody else under a name."""
    first = Staging(lake, "current", {"id": INT32, "a": INT32, "b": INT32})
    made = named(first, first.step({"id": 1, "a": 1, "b": 2}), id="id@1", a="a@1")
    writer = lake.writer()
    writer.commit(made, 0, unguarded)
    for names, reason in (
        ({"id": "id@2?", "a": "a@2?"}, "whether its column id is one that was there before is not known"),
        ({"id": "id@1", "b": "a@1"}, "has renamed column a to b, and the table has another column b"),
    ):  # fmt: skip
        other = Staging(lake, "current", dict.fromkeys(names, INT32))
        step = other.step(dict.fromkeys(names, 5), segment=1)
        with pytest.raises(TableRejected, match=reason):
            writer.commit(named(other, step, **names), 1, unguarded)
    assert lake.rows("id", "a", "b") == [(1, 1, 2)]


@pytest.mark.parametrize("name", ["df_x", "DF_y", "ID", ""])
def test_names_that_a_table_cannot_have(lake: Lake, name: str) -> None:
    """A table with such a column is rejected, before anything is made."""
    staging = Staging(lake, "changelog", {"id": INT64, name: TEXT})
    with pytest.raises(TableRejected, match="cannot have the column"):
        lake.writer(mode="changelog").commit(staging.table(), 0, unguarded)
    assert not (lake.folder / "lake").exists()


def test_whose_a_table_is(lake: Lake) -> None:
    """A table of another source table, of another sink or of others is rejected; a reset pipeline keeps its own.

    So is one that is gone, although it has been written before.
    """
    staging = Staging(lake, "current")
    first = staging.table(staging.step({"id": 1, "name": "a"}, segment=7))
    with pytest.raises(
        TableRejected,
        match=r"is gone.* deltaforge resync shop --sink lake --tables public\.orders$",
    ):
        lake.writer().commit(first, 7, unguarded, exists=True)
    lake.writer().commit(first, 7, unguarded)
    one = staging.table(staging.step({"id": 1, "name": "b"}, segment=0))
    with pytest.raises(TableRejected, match="belongs to sink lake of pipeline shop"):
        lake.writer(pipeline="other").commit(one, 0, unguarded)
    staging.source = ("shop", "public", "others")
    with pytest.raises(TableRejected, match=r"rows of shop\.public\.orders"):
        lake.writer().commit(staging.table(staging.step({"id": 1}, segment=8)), 8, unguarded)
    lake.writer(uid="uid-2").commit(one, 0, unguarded)
    assert lake.rows("id", "name", "df_position") == [(1, "b", 8)]
    again = lake.writer(uid="uid-2")
    more = Staging(lake, "current")
    third = more.table(more.step({"id": 1, "name": "c"}, segment=1))
    again.commit(third, 1, unguarded, exists=True)
    assert lake.rows("id", "name", "df_position") == [(1, "c", 9)]


@pytest.mark.soak("formats")
def test_a_table_of_others(lake: Lake) -> None:
    """A table that somebody has made beforehand is used if it is empty, with its own columns and types."""
    writer = lake.writer()
    spark = writer.sessions.session()
    staging = Staging(lake, "current")
    writer.commit(staging.table(), 0, unguarded)  # so that the session has the catalog
    using = lake.format
    for name in ("empty", "full"):
        table = writer.dialect.table(("public", name))
        spark.sql(f"CREATE TABLE {table} (ID DECIMAL(20,0), more STRING) USING {using}")
        if name == "full":
            spark.sql(f"INSERT INTO {table} VALUES (1, 'x')")
    staging.destination = ("public", "empty")
    writer.commit(staging.table(staging.step({"id": 1, "name": "a"})), 0, unguarded)
    assert lake.rows("ID", "more", "name", destination=staging.destination) == [(1, None, "a")]
    staging.destination = ("public", "full")
    with pytest.raises(TableRejected, match="exists, with rows that are not from DeltaForge"):
        writer.commit(staging.table(staging.step({"id": 1, "name": "a"})), 0, unguarded)


def test_a_conflict_with_maintenance_is_tried_again(lake: Lake) -> None:
    """Somebody rewrites the table between two statements of a commit: it is applied to what is there then."""
    staging, writer = Staging(lake, "current"), lake.writer()
    rows = [{"id": key, "name": f"n{key}"} for key in range(3)]
    writer.commit(staging.table(staging.step(*rows)), 0, unguarded)
    other = lake.reading()
    table = writer.dialect.table(("public", "orders"))
    pending = [f"DELETE FROM {table} WHERE id = 0"]

    def guard() -> None:
        if pending:
            other.sql(pending.pop())

    changes = staging.table(
        staging.step({"id": 1, "name": "new"}, segment=1),
        staging.step({"id": 2, "name": "newer"}, segment=2),
    )
    writer.commit(changes, 2, guard)
    assert sorted(lake.rows("id", "name")) == [(1, "new"), (2, "newer")]


@pytest.mark.soak("formats")
def test_options_of_new_tables(lake: Lake) -> None:
    """Partitions, properties, copy-on-write, Delta in a catalog; a partition column that the source drops stays."""
    iceberg = lake.format == "iceberg"
    option = ("write.parquet.compression-codec", "gzip")
    options: dict[str, Any] = {"write_mode": "copy_on_write"}
    partitions = ["days(at)", "bucket(2, id)", "truncate(1, odd, x)", "NAME"]
    if not iceberg:
        option, partitions = ("delta.dataSkippingNumIndexedCols", "3"), ["NAME", "odd, x"]
        options["catalog"] = "spark_catalog"
    options |= {"partition_by": {"public.orders": tuple(partitions)}, "properties": dict([option])}
    schema = f"options_{lake.format}_{uuid4().hex}"
    types = {"id": INT64, "name": TEXT, "odd, x": TEXT, "at": TIMESTAMP}
    staging = Staging(lake, "current", types, destination=(schema, "orders"))
    day = moment(0).replace(tzinfo=None)
    writer = lake.writer(**options)
    rows = [{"id": key, "name": f"n{key % 2}", "odd, x": "ab", "at": day} for key in (1, 2, 3)]
    writer.commit(staging.table(staging.step(*rows, inserts_only=True)), 0, unguarded)
    staging.types = {"id": INT64, "name": TEXT}
    changes = staging.step({"id": 1, "name": "n0"}, {"id": 2, "df_op": "d"}, segment=1)
    lake.writer(**options).commit(staging.table(changes), 1, unguarded)

    table = writer.dialect.table(staging.destination)
    session = lake.reading()
    found = session.sql(f"SELECT id, name, `odd, x`, at FROM {table} ORDER BY id").collect()
    assert [tuple(row) for row in found] == [(1, "n0", "ab", day), (3, "n1", "ab", day)]
    known = {row.key: row.value for row in session.sql(f"SHOW TBLPROPERTIES {table}").collect()}
    assert known[option[0]] == option[1]
    if iceberg:
        (one, _) = session.sql(f"SELECT partition FROM {table}.partitions ORDER BY ALL").collect()
        assert one["partition"].asDict().keys() == {"at_day", "id_bucket", "odd, x_trunc", "name"}
        deletes = session.sql(f"SELECT 1 FROM {table}.files WHERE content <> 0").collect()
        assert (known["write.merge.mode"], deletes) == ("copy-on-write", [])
    else:
        (detail,) = session.sql(f"DESCRIBE DETAIL {table}").collect()
        assert detail["partitionColumns"] == ["name", "odd, x"]
        assert known["delta.enableDeletionVectors"] == "false"
        session.sql(f"DROP TABLE {table}")
        session.sql(f"DROP NAMESPACE spark_catalog.{schema}")
