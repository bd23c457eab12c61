"""Tables of Delta and Iceberg compared with staged rows: at the version of a front, and as a commit would apply them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from deltaforge_dagster.pipeline.lake.comparer import LakeComparer
from deltaforge_dagster.sinks.tables.comparer import ComparedRows
from deltaforge_dagster.sinks.tables.staged import StagedStep, StagedTable
from deltaforge_dagster.sinks.tables.writer import TableOwner
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import FORMATS, Lake, Staging, dialect_of, moment

pytestmark = [pytest.mark.spark, pytest.mark.soak("reconcile")]

FIRST = [
    {"id": 1, "name": "a", "note": "x"},
    {"id": 2, "name": "b", "note": "y"},
    {"id": 3, "name": "c"},
]


@pytest.fixture(params=FORMATS)
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, spark_server: SparkAddress
) -> Iterator[Lake]:
    """An empty folder for tables of each format."""
    made = Lake(request.param, tmp_path, spark_server.remote)
    yield made
    made.close()


def unguarded() -> None:
    """A guard that lets everything pass."""


def compared(lake: Lake, mode: str = "current") -> LakeComparer:
    """What compares the table that the lake's writer writes."""
    config = lake.config(mode=mode)
    owner = TableOwner("uid-1", "shop", "lake")
    sessions = lake.sessions()
    return LakeComparer(
        lambda: nullcontext(sessions), dialect_of(config), config, owner, ("public", "orders")
    )


def kinds(found: ComparedRows) -> dict[str | None, tuple[str, list[str]]]:
    """What is wrong with each key."""
    return {row.key["id"]: (row.kind, list(row.columns)) for row in found.listed}


def test_a_view_has_the_commits_up_to_the_front(lake: Lake) -> None:
    """Later commits are not in it; a repair takes effect only if there are none, and later changes are made after it."""
    writer, staging, comparer = (
        lake.writer(mode="current"),
        Staging(lake, "current"),
        compared(lake),
    )
    first = staging.table(staging.step(*FIRST, segment=1))
    update = {"id": 1, "name": "new", "note": "x"}
    second = staging.table(staging.step(update, segment=2))
    writer.commit(first, 1, unguarded)
    writer.commit(second, 2, unguarded)

    with comparer.view(1) as view:
        view.load(first)
        assert (view.through, view.differences()) == (1, ComparedRows(3))
    with comparer.view(2) as view:
        view.load(first)
        assert kinds(view.differences()) == {"1": ("different", ["name"])}
        view.change(second)
        assert view.differences() == ComparedRows(3)

    for front, name, first_to_commit in (
        (1, "other", False),
        (2, "other", True),
        (2, "third", True),
    ):
        expected = staging.step({"id": 1, "name": name}, {"id": 4, "name": "d"}, segment=1)
        with comparer.view(front, locked=True) as view:
            view.load(staging.table(expected))
            assert view.repair() is first_to_commit
            if first_to_commit:
                assert view.differences() == ComparedRows(2)
    writer.commit(second, 2, unguarded)
    assert sorted(lake.rows("id", "name")) == [(1, "third"), (2, "b"), (3, "c"), (4, "d")]
    writer.commit(staging.table(staging.step(update, segment=3)), 3, unguarded)
    assert sorted(lake.rows("id", "name")) == [(1, "new"), (2, "b"), (3, "c"), (4, "d")]


Steps = Callable[[Staging], Sequence[StagedStep]]
GONE = {"id": 2, "df_op": "d"}
CHANGES: dict[str, Steps] = {
    "deletes, and values that are not there": lambda staging: [
        staging.step(
            {"id": 1, "name": "new", "df_absent": ["note"]}, GONE, {"id": 9, "name": "z"}, segment=2
        )
    ],
    "moved keys": lambda staging: [
        staging.step({"id": 3, "name": "c2"}, segment=2),
        staging.step(
            {"id": 8, "name": "moved", "df_old_id": 1, "df_absent": ["note"], "df_ordinal": 5},
            {"id": 1, "name": "taken", "df_old_id": 2, "df_absent": ["note"], "df_ordinal": 6},
            segment=2,
            rekey=True,
        ),
        staging.step({"id": 8, "name": "again", "df_absent": ["note"], "df_ordinal": 7}, segment=2),
    ],
    "a truncate": lambda staging: [
        staging.truncate(2, 0),
        staging.step({"id": 2, "name": "back", "df_ordinal": 1}, segment=2),
    ],
}


@pytest.mark.parametrize("mode", ["current", "history"])
@pytest.mark.parametrize("changes", CHANGES)
def test_rows_are_as_a_commit_makes_them(lake: Lake, mode: str, changes: str) -> None:
    """Changes that are applied to the rows of a window make what they make of the table, which has no other rows."""
    writer, staging, comparer = lake.writer(mode=mode), Staging(lake, mode), compared(lake, mode)
    first = staging.table(staging.step(*FIRST, segment=1))
    table: StagedTable = staging.table(*CHANGES[changes](staging), absent=["note"])
    writer.commit(first, 1, unguarded)
    writer.commit(table, 2, unguarded)
    with comparer.view(2) as view:
        view.load(first)
        view.change(table)
        assert view.differences() == ComparedRows(3)
    with comparer.view(2) as view:
        view.change(table)
        assert view.extra_rows() == ComparedRows()


def test_only_the_last_version_of_a_key_counts(lake: Lake) -> None:
    """In a history, a key that came and went in one commit is not there; one that changed twice is as it was last."""
    writer, staging = lake.writer(mode="history"), Staging(lake, "history")
    comparer = compared(lake, "history")
    first = staging.table(staging.step(*FIRST, segment=1))
    later = staging.table(
        staging.step(
            {"id": 1, "name": "once", "df_valid_to": moment(201)},
            {"id": 1, "name": "twice"},
            {"id": 7, "name": "short", "df_valid_to": moment(203)},
            segment=2,
        )
    )
    writer.commit(first, 1, unguarded)
    writer.commit(later, 2, unguarded)
    with comparer.view(2) as view:
        view.load(first)
        view.change(later)
        assert view.differences() == ComparedRows(3)
        assert view.extra_rows() == ComparedRows()
