"""What is done next for a sink that keeps tables, decided from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from deltaforge_dagster.pipeline.tables.planner import (
    MOST_SEGMENTS,
    CommitLimits,
    LastWrites,
    PendingFold,
    PlannedCommit,
    ResyncStart,
    TablePlanner,
    TableRecreation,
    TableStates,
    is_abandoned,
    tables_in_place_of,
)
from deltaforge_dagster.pipeline.tables.typed_files import TableName
from deltaforge_dagster.sinks.tables.config import PendingChanges
from deltaforge_dagster.sinks.tables.staged import ChangePlace, StagedStep, StagedTable
from deltaforge_dagster.state.table_commits import (
    Destination,
    PendingTable,
    StoredWrite,
    SuspendedTable,
    TableCommits,
    TableFront,
    TableResync,
    TableWrite,
)
from deltaforge_dagster.typed_rows.schema import TypedSchema

SINK = "lake"
ORDERS, ITEMS = ("public", "orders"), ("public", "items")
NOW = 1000.0
SOON = CommitLimits(60, 100)
AT_ONCE = replace(SOON, at_once=True)


@dataclass(frozen=True)
class Segment:
    """A segment, as its row in the store has it."""

    segment: int
    rows: int = 10
    bytes: int = 1000
    created_at: float = NOW
    sinks: tuple[str, ...] = ()

    def is_for(self, sink: str) -> bool:
        """Return whether a sink receives its rows."""
        return not self.sinks or sink in self.sinks


def segments(first: int, last: int, **fields: Any) -> list[Segment]:
    """Return segments with these numbers."""
    return [Segment(number, **fields) for number in range(first, last + 1)]


def held(segment: int = 3, **fields: Any) -> SuspendedTable:
    """Return ORDERS, held after a segment, to be tried later than now."""
    table = SuspendedTable(ORDERS, segment, None, "cannot be written", NOW - 9, NOW + 9, 1)
    return replace(table, **fields)


def pending(segment: int = 5, changes: int = 10, since: float = NOW) -> PendingTable:
    """Return the pending changes of ORDERS."""
    return PendingTable(SINK, ORDERS, ("shop", *ORDERS), segment, changes, since)


def states(
    new: Sequence[Segment] = (),
    *,
    planned_to: int | None = None,
    ends: tuple[int, ...] = (),
    tables: Sequence[SuspendedTable] = (),
    beside: Sequence[PendingTable] = (),
    **fields: Any,
) -> TableStates:
    """Return tables whose front is at segment 5, and the new segments."""
    commits = TableCommits(
        TableFront(5, planned_to, "uid", ends),
        {table.destination: table for table in tables},
        {table.destination: table for table in beside},
    )
    return replace(TableStates(commits, new, (), in_snapshot=False, now=NOW), **fields)


def resync(table: Destination = ORDERS, *, begun: bool = False) -> TableResync:
    """Return a resync of a table."""
    return TableResync(SINK, table, ".".join(table), begun)


def commit(last: int, *, planned: bool = False) -> PlannedCommit:
    """Return a commit of all tables after the front."""
    return PlannedCommit(None, 5, last, planned)


@pytest.mark.parametrize(
    ("limits", "new", "last"),
    [
        pytest.param(SOON, segments(6, 7), None, id="young and small"),
        pytest.param(SOON, segments(6, 7, created_at=NOW - 60), 7, id="old"),
        pytest.param(AT_ONCE, segments(6, 7), 7, id="at once"),
        pytest.param(AT_ONCE, [], None, id="nothing new"),
        pytest.param(replace(SOON, until=7), segments(6, 7), 7, id="up to a segment"),
        pytest.param(SOON, segments(6, 15), 15, id="as many changes as a commit has"),
        pytest.param(SOON, segments(6, 16), 15, id="no more changes than a commit has"),
        pytest.param(SOON, segments(6, 7, rows=200), 6, id="a segment larger than a commit"),
        pytest.param(replace(SOON, bytes=2500), segments(6, 8), 7, id="bytes"),
        pytest.param(SOON, segments(6, 7, sinks=("other",)), 7, id="nothing for the sink"),
        pytest.param(
            replace(SOON, idle_seconds=5), segments(6, 7, created_at=NOW - 5), 7, id="idle"
        ),
        pytest.param(
            replace(SOON, idle_seconds=5),
            [Segment(6, created_at=NOW - 9), Segment(7, created_at=NOW - 4)],
            None,
            id="not idle for long enough",
        ),
        pytest.param(
            replace(SOON, changes=10**9),
            segments(6, 5 + MOST_SEGMENTS),
            5 + MOST_SEGMENTS,
            id="many segments",
        ),
    ],
)
def test_when_a_commit_is_due(
    limits: CommitLimits, new: Sequence[Segment], last: int | None
) -> None:
    """When its segments are old, many or large, and with as many as fit into it."""
    expected = None if last is None else commit(last)
    assert TablePlanner(SINK, limits).next_work(states(new)) == expected


def test_commits_end_where_those_before_a_reset_ended() -> None:
    """A table may have a commit that ends there, and recognizes it by its end."""
    planner = TablePlanner(SINK, AT_ONCE)
    assert planner.next_work(states(segments(6, 12), ends=(8, 10))) == commit(8)


RETRIED = frozenset({ORDERS})


@pytest.mark.parametrize(
    ("limits", "present", "work"),
    [
        pytest.param(
            AT_ONCE,
            states(segments(6, 9), planned_to=7, tables=[held(next_attempt_at=0)]),
            commit(7, planned=True),
            id="a planned commit comes before held tables",
        ),
        pytest.param(
            AT_ONCE,
            states(segments(6, 9), planned_to=7, resyncs=[resync()]),
            commit(7, planned=True),
            id="a resync waits for a planned commit",
        ),
        pytest.param(
            AT_ONCE,
            states(segments(6, 9), tables=[held(next_attempt_at=NOW)]),
            held(next_attempt_at=NOW),
            id="a held table is tried when its time has come",
        ),
        pytest.param(
            AT_ONCE, states(segments(6, 9), tables=[held()]), commit(9), id="others go on"
        ),
        pytest.param(
            AT_ONCE, states(tables=[held()], retried=RETRIED), held(), id="tried on request"
        ),
        pytest.param(
            AT_ONCE,
            states(tables=[held(recreate=True, next_attempt_at=0)]),
            TableRecreation(held(recreate=True, next_attempt_at=0)),
            id="a held table is recreated",
        ),
        pytest.param(
            AT_ONCE,
            states(segments(6, 9), resyncs=[resync(), resync(ITEMS, begun=True)]),
            ResyncStart([ORDERS]),
            id="resyncs that were requested begin",
        ),
        pytest.param(
            AT_ONCE,
            states(resyncs=[resync()], in_snapshot=True),
            None,
            id="a resync waits for a snapshot",
        ),
        pytest.param(
            replace(AT_ONCE, until=5),
            states(resyncs=[resync()]),
            None,
            id="no resync begins in a catch-up",
        ),
        pytest.param(
            AT_ONCE,
            states(segments(6, 9), beside=[pending()]),
            PendingFold(pending(), 5),
            id="pending changes are folded when the option is gone",
        ),
        pytest.param(
            replace(AT_ONCE, pending=PendingChanges(fold_changes=10)),
            states(beside=[pending()]),
            PendingFold(pending(), 5),
            id="many pending changes",
        ),
        pytest.param(
            replace(AT_ONCE, pending=PendingChanges(fold_seconds=60)),
            states(beside=[pending(since=NOW - 60)]),
            PendingFold(pending(since=NOW - 60), 5),
            id="old pending changes",
        ),
        pytest.param(
            replace(AT_ONCE, pending=PendingChanges()), states(beside=[pending()]), None, id="few"
        ),
        pytest.param(
            AT_ONCE, states(beside=[pending(changes=0)]), None, id="none that is sure to be there"
        ),
        pytest.param(
            AT_ONCE, states(beside=[pending()], tables=[held()]), None, id="those of a held table"
        ),
    ],
)
def test_what_comes_first(limits: CommitLimits, present: TableStates, work: object) -> None:
    """Resyncs, then a planned commit, then held tables, then folds, then new segments."""
    assert TablePlanner(SINK, limits).next_work(present) == work


def test_a_held_table_catches_up() -> None:
    """With the commit that failed, then with the segments up to the front, and up to an end."""
    planner = TablePlanner(SINK, SOON)
    front = TableFront(9, None, "uid", (7,))
    planned, free = held(planned_to=4), held()
    assert planner.catch_up(planned, front, ()) == PlannedCommit(planned, 3, 4, planned=True)
    assert planner.catch_up(free, front, segments(4, 9)) == PlannedCommit(free, 3, 7, False)
    there = held(9)
    assert planner.catch_up(there, front, ()) == PlannedCommit(there, 9, 9, planned=False)


def test_a_held_table_without_changes_is_folded_up_to_its_commit() -> None:
    """And not up to the front, behind which its own commits are still to come."""
    planner = TablePlanner(SINK, SOON)
    table = held(3)
    own = PlannedCommit(table, 3, 4, planned=False)
    commits = states(tables=[table], beside=[pending(3)]).commits
    assert planner.fold_of(own, commits) == PendingFold(pending(3), 4)
    assert planner.fold_of(own, states(tables=[table]).commits) is None
    assert planner.fold_of(commit(6), commits) is None


def staged(
    changes: int = 1, *, kind: Any = "rows", destination: Destination = ORDERS
) -> StagedTable:
    """Return inserts of a table of the source named as ORDERS."""
    step = StagedStep(kind, ["file"], changes, inserts_only=True, last=ChangePlace(6, 0))
    return StagedTable(
        destination, ("shop", *ORDERS), TypedSchema(()), ("id",), frozenset(), [step], changes
    )


def written(segment: int, destination: Destination = ORDERS) -> LastWrites:
    """Return the last write of the table of the source named as ORDERS."""
    columns = (("id", "bigint"),)
    write = TableWrite(("public", "orders"), destination, columns, 1, "{}", 0.0)
    return LastWrites([StoredWrite(SINK, segment, write, 0.0)])


NEW = LastWrites([])
BESIDE = TablePlanner(SINK, replace(SOON, pending=PendingChanges(fold_changes=100)))
INTO = TablePlanner(SINK, SOON)


@pytest.mark.parametrize(
    ("planner", "changes", "kind", "row", "way"),
    [
        pytest.param(BESIDE, 99, "rows", None, "beside, stored first", id="few changes"),
        pytest.param(BESIDE, 99, "rows", pending(5), "beside, stored first", id="others before"),
        pytest.param(BESIDE, 100, "rows", pending(5), "into", id="many changes"),
        pytest.param(BESIDE, 1, "rekey", None, "into", id="changes of keys"),
        pytest.param(INTO, 1, "rows", pending(5), "into", id="without the option"),
        pytest.param(INTO, 1, "rows", pending(7), "beside", id="once planned"),
        pytest.param(BESIDE, 100, "rows", pending(7), "beside", id="once planned, if many"),
    ],
)
def test_which_changes_go_beside_their_table(
    planner: TablePlanner, changes: int, kind: str, row: PendingTable | None, way: str
) -> None:
    """Few that are all rows; and those of a commit that was planned so, whatever the limits say."""
    commits = states(beside=[] if row is None else [row]).commits
    plan = planner.plan_commit([staged(changes, kind=kind)], commit(7), commits, NEW)
    (table,) = plan.tables
    assert (table.beside, table.pending, table.again) == (way != "into", row, False)
    assert plan.beside == ({ORDERS: ("shop", *ORDERS)} if way == "beside, stored first" else {})
    assert table.table.steps[0].inserts_only


@pytest.mark.parametrize("row", [None, pending(9), pending(7, 0)])
def test_what_a_table_may_have_goes_into_it(row: PendingTable | None) -> None:
    """After a reset, up to where the table was; inserts are applied by key. Then as always."""
    commits = states(ends=(7,), beside=[] if row is None else [row]).commits
    plan = BESIDE.plan_commit([staged()], commit(7), commits, written(7))
    (table,) = plan.tables
    assert (table.beside, table.again, table.exists, plan.beside) == (False, True, False, {})
    assert [step.inserts_only for step in table.table.steps] == [False]
    (later,) = BESIDE.plan_commit([staged()], commit(8), commits, written(7)).tables
    assert (later.beside, later.again) == (True, False)


@pytest.mark.parametrize(("segment", "exists"), [(4, True), (5, True), (6, False)])
def test_a_table_that_was_written_exists(segment: int, exists: bool) -> None:
    """With the columns that it was left with, unless it has later changes than those before it."""
    (table,) = INTO.plan_commit([staged()], commit(7), states().commits, written(segment)).tables
    assert table.exists == exists
    assert table.table.left == ({"id": "bigint"} if exists else {})


def test_rows_that_went_elsewhere() -> None:
    """Their new table is not written, and nothing goes beside it; a log may begin with any change."""
    moved, commits = staged(destination=ITEMS), states().commits
    plan = BESIDE.plan_commit([moved], commit(7), commits, written(5))
    assert (plan.tables, plan.beside) == ([], {})
    assert plan.elsewhere == {ITEMS: (("shop", *ORDERS), ORDERS)}
    log = replace(INTO, is_log=True).plan_commit([moved], commit(7), commits, written(5))
    assert (len(log.tables), log.elsewhere) == (1, {})


@pytest.mark.parametrize(
    ("segment", "ends", "skipped"),
    [(7, (9,), True), (9, (9,), True), (6, (9,), False), (7, (), False), (10, (9,), False)],
)
def test_what_the_store_says_of_objects(segment: int, ends: tuple[int, ...], skipped: bool) -> None:
    """They are not written again after a reset, up to where the front was in this series."""
    planner = TablePlanner(SINK, SOON, by_store=True, is_log=True)
    plan = planner.plan_commit([staged()], commit(7), states(ends=ends).commits, written(segment))
    assert len(plan.tables) == (not skipped)
    own = replace(commit(7), table=held(5))
    plan = planner.plan_commit([staged()], own, states(ends=ends).commits, written(segment))
    assert len(plan.tables) == (not skipped)


def test_a_held_table_to_which_no_rows_go_any_more() -> None:
    """It is abandoned if they go elsewhere now; of names that only processors make it is unknown."""
    source = ("shop", *ORDERS)
    assert is_abandoned(held(), {source: ORDERS}, written(3)) is False
    assert is_abandoned(held(), {source: ITEMS}, written(3)) is True
    assert is_abandoned(held(), {source: ITEMS}, NEW) is None


def test_what_may_lack_the_changes_of_an_abandoned_table() -> None:
    """What was never written, or else what takes its rows now; unless it is held itself."""
    orders, others = ("shop", *ORDERS), ("shop", "public", "others")
    to: dict[TableName, Destination] = {orders: ITEMS, others: ("public", "others")}
    assert tables_in_place_of(ORDERS, to, [ORDERS], written(3)) == [others]
    assert tables_in_place_of(ORDERS, to, [("public", "others")], written(3)) == [orders]
    assert tables_in_place_of(ORDERS, to, [ITEMS], NEW) == [others]
