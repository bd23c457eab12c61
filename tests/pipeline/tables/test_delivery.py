"""Commits of a sink that writes tables: when they are due, that they are repeated exactly, and held tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import pytest
from sqlalchemy import update

from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    NotAllowed,
    SparkUnavailable,
    StoreUnavailable,
    TableRejected,
)
from deltaforge_dagster.pipeline.deliver.deliverer import Retries
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.delivery import AwaitsCapture, DeliveryThread
from deltaforge_dagster.pipeline.tables import committer, delivery, recorder
from deltaforge_dagster.pipeline.tables.delivery import TableDelivery
from deltaforge_dagster.pipeline.tables.planner import CommitLimits
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.tables.config import PendingChanges
from deltaforge_dagster.sinks.tables.staged import (
    ChangePlace,
    StagedCommit,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.sinks.tables.writer import FoldTime, WrittenTable
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    segments,
    table_commits,
    table_pending,
)
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.table_commits import Destination, TableFigures
from deltaforge_dagster.typed_rows.schema import TypedSchema
from tests.pipeline.deliver.scene import NAME, SINK, Scene, lsn, place, scene

__all__ = ["scene"]

ORDERS, ITEMS = ("public", "orders"), ("public", "items")
COLUMNS = (("id", "bigint"), ("df_position", "bigint"))
NEVER = 1e9
BACKOFF_SECONDS = 40
"""What failed is not tried again by itself while a test lasts: `retry` ends the waits."""
AT_ONCE = CommitLimits(NEVER, 1000, at_once=True)


class Killed(BaseException):
    """What stands for a kill."""


@dataclass
class Lake:
    """Two tables that get something of every segment, and recognize a commit by its end, as real ones do.

    Attributes:
        rows: The segments that each table has got, in order.
        versions: The end of each table's last commit.
        commits: The segments of each commit that was staged, and for which tables.
        rejects: Tables that cannot be written.
        unstaged: Tables whose changes cannot be staged.
        fault: Called with the table before each write, and None before staging.
        opened: The series of commits for which a writer was opened.
        known: For each write, whether the table must exist.
        pending: The segments that are pending beside each table.
        added: The end of the last commit that was added to them.
        unfolded: Tables whose pending changes cannot be folded.
        kind: The kind of the steps that are staged.
        folds: Each fold: the table, up to which segment, when, and whether there must be something.
        folded: By table the number of its last fold; as Delta does, it skips one without a larger number.
        recreated: The tables that were recreated.
        moved: By name of a table of the source, where its rows go now, if not to a table of its name.
        unregistered: Tables that only a processor names.
    """

    rows: dict[Destination, list[int]] = field(default_factory=lambda: {ORDERS: [], ITEMS: []})
    versions: dict[Destination, int] = field(default_factory=lambda: {ORDERS: 0, ITEMS: 0})
    commits: list[tuple[list[int], list[Destination]]] = field(default_factory=list)
    rejects: set[Destination] = field(default_factory=set)
    unstaged: set[Destination] = field(default_factory=set)
    fault: Callable[[Destination | None], None] = lambda _table: None
    opened: list[str] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)
    pending: dict[Destination, list[int]] = field(default_factory=lambda: {ORDERS: [], ITEMS: []})
    added: dict[Destination, int] = field(default_factory=lambda: {ORDERS: 0, ITEMS: 0})
    unfolded: set[Destination] = field(default_factory=set)
    kind: Literal["rows", "rekey"] = "rows"
    folds: list[tuple[str, int, str, bool]] = field(default_factory=list)
    folded: dict[Destination, tuple[int, int]] = field(default_factory=dict)
    recreated: list[Destination] = field(default_factory=list)
    moved: dict[str, Destination] = field(default_factory=dict)
    unregistered: set[Destination] = field(default_factory=set)
    is_log: bool = False
    closed: int = 0
    discarded: int = 0

    def stage(
        self,
        rows: Sequence[SegmentRow],
        *,
        only: frozenset[Destination] | None = None,
        skip: frozenset[Destination] = frozenset(),
    ) -> StagedCommit:
        """Return the tables, with the segments' numbers as files."""
        self.fault(None)
        there = [*self.destinations().values(), *sorted(self.unregistered)]
        wanted = [one for one in there if one not in skip and (only is None or one in only)]
        self.commits.append(([row.segment for row in rows], wanted))
        step = StagedStep(self.kind, [str(row.segment) for row in rows], 1, True, ChangePlace(0, 0))
        tables = [self._table(one, step) for one in wanted if one not in self.unstaged]
        failed: dict[Destination, Exception] = {
            one: TableRejected("cannot be staged") for one in wanted if one in self.unstaged
        }
        return StagedCommit(tables, failed, self._discard)

    def commit(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
        required: bool = False,
    ) -> WrittenTable:
        """Add the segments behind the pending ones, unless the table has a commit that ends there or later."""
        self._write(table, guard, exists=exists)
        self._fold(table.destination, through, "before", required=required)
        if self.versions[table.destination] < through:
            (step,) = table.steps
            added = [int(segment) for segment in step.files]
            if step.inserts_only:  # as a lake does, without looking whether it has them
                self.rows[table.destination] += added
            else:
                self._put(table.destination, added)
            self.versions[table.destination] = through
        return WrittenTable(COLUMNS, TableFigures(through))

    def append(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        *,
        exists: bool = False,
        required: bool = False,
    ) -> WrittenTable:
        """Add the segments to the pending ones, unless that has been done."""
        self._write(table, guard, exists=exists)
        assert not required or self.added[table.destination]
        if self.added[table.destination] < through:
            self.pending[table.destination] += [int(one) for one in table.steps[0].files]
            self.added[table.destination] = through
        return WrittenTable(COLUMNS)

    def fold(
        self,
        table: StagedTable,
        through: int,
        guard: SendGuard,
        time: FoldTime,
        *,
        required: bool = False,
    ) -> WrittenTable:
        """Add what is pending to the table."""
        guard()
        if table.destination in self.unfolded:
            raise TableRejected("cannot be folded")
        self._fold(table.destination, through, time, required=required)
        return WrittenTable(COLUMNS, TableFigures(through))

    def _write(self, table: StagedTable, guard: SendGuard, *, exists: bool) -> None:
        guard()
        self.known += [exists]
        self.fault(table.destination)
        if table.destination in self.rejects:
            raise TableRejected("cannot be written")

    def _fold(self, table: Destination, through: int, time: FoldTime, *, required: bool) -> None:
        waiting = self.pending[table]
        if waiting or time != "before":
            self.folds.append((table[1], through, time, required))
        number = (through, ("before", "after", "later").index(time))
        if not waiting or number <= self.folded.get(table, (0, 0)):
            return
        self.folded[table] = number
        self._put(table, [segment for segment in waiting if segment <= through])
        self.pending[table] = [segment for segment in waiting if segment > through]

    def _put(self, table: Destination, segments: Sequence[int]) -> None:
        """Add segments; if the table has the first of them, what came after it is undone by that.

        A row that a later segment has deleted is there again, for example.
        """
        before = [segment for segment in self.rows[table] if segment < min(segments, default=0)]
        self.rows[table] = [*before, *segments] if segments else self.rows[table]

    def without_changes(self, destination: Destination) -> StagedTable:
        """Return the table without steps."""
        if destination in self.unstaged:
            raise TableRejected("cannot be staged")
        return self._table(destination)

    def destinations(self) -> Mapping[tuple[str, str | None, str], Destination]:
        """Return where the two tables go."""
        return {("shop", one[0], one[1]): self.moved.get(one[1], one) for one in (ORDERS, ITEMS)}

    def elsewhere(self, table: tuple[str, str | None, str], former: Destination) -> TableRejected:
        """Return an error that names both."""
        return TableRejected(f"{table[2]} was {former[1]}", remedy="resync")

    def recreate(self, table: StagedTable, guard: SendGuard) -> Sequence[tuple[str, str]]:
        """Forget the rows, but not which commits the table had, as Delta does; of what is pending, forget both."""
        guard()
        self.fault(table.destination)
        if table.destination in self.rejects:
            raise TableRejected("cannot be written")
        self.rows[table.destination].clear()
        self.pending[table.destination].clear()
        self.folded.pop(table.destination, None)
        self.added[table.destination] = 0
        self.recreated.append(table.destination)
        return COLUMNS

    @contextmanager
    def writer(self, owner: str) -> Iterator[Lake]:
        """Open and close."""
        self.opened.append(owner)
        yield self
        self.close()

    def close(self) -> None:
        """Count."""
        self.closed += 1

    def _table(self, name: Destination, *steps: StagedStep) -> StagedTable:
        columns = cast("TypedSchema", None)
        changes = sum(len(one.files) for one in steps)
        sources = {there: table for table, there in self.destinations().items()}
        source = sources.get(name, ("shop", name[0], name[1]))
        return StagedTable(name, source, columns, (), frozenset(), steps, changes)

    def _discard(self) -> None:
        self.discarded += 1


NEW = ("public", "new")


def moved(lake: Lake) -> None:
    """Let the rows of ORDERS go to another table from now on."""
    lake.moved["orders"] = NEW
    lake.rows[NEW], lake.versions[NEW], lake.pending[NEW], lake.added[NEW] = [], 0, [], 0


def writes(scene: Scene) -> list[tuple[str, int, int]]:
    """Return what is to be published: table, end of the commit, and segments in it."""
    return [
        (one.write.destination[1], one.segment, one.write.changes)
        for one in scene.store.table_commits.unpublished(NAME)
    ]


@dataclass
class Work:
    """A delivery, run by the test instead of a thread."""

    scene: Scene
    lake: Lake
    limits: CommitLimits = AT_ONCE
    by_store: bool = False

    def __post_init__(self) -> None:
        context = self.scene.context()
        self.thread = DeliveryThread(Retries(context, self.scene.checkpoint.failures))
        self.resumption = Resumption(context)
        self.delivery = TableDelivery(
            context,
            self.scene.checkpoint,
            self.thread,
            limits=self.limits,
            stager=self.lake,
            open_writer=self.lake.writer,
            skips=self.resumption,
            by_store=self.by_store,
        )

    def go(self, most: int = 100) -> None:
        """Deliver what is due, and no more than some commits."""
        for _ in range(most):
            if not self.delivery.due():
                return
            self.delivery.deliver()

    def fail(self, expected: type[BaseException]) -> None:
        """Deliver until something fails, as the thread would see it."""
        with pytest.raises(expected) as caught:
            self.go()
        if isinstance(caught.value, DeltaforgeError):
            self.delivery.failed(caught.value)


def capture(scene: Scene, segments: int, changes: int = 3) -> None:
    """Add segments of some changes each."""
    row = scene.store.pipelines.get(NAME)
    assert row is not None
    for number in range(row.next_segment, row.next_segment + segments):
        first = 1 + (number - 1) * changes
        scene.capture(first, first + changes - 1)


def wait(scene: Scene, until: float) -> None:
    """Let held tables, and the sink, be tried again at a time."""
    with scene.store.database.write() as connection:
        connection.execute(update(checkpoints).values(next_attempt_at=until))
        connection.execute(update(table_commits).values(next_attempt_at=until))


def retry(scene: Scene) -> None:
    """Let the waits of held tables be over."""
    wait(scene, 0.0)


def kill_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Let the run die at a step."""

    def failpoint(name: str) -> None:
        if name == step:
            raise Killed

    with_each(monkeypatch, failpoint)


def with_each(monkeypatch: pytest.MonkeyPatch, failpoint: Callable[[str], None]) -> None:
    """Have this called at each step."""
    for module in (committer, delivery, recorder):
        monkeypatch.setattr(module, "failpoint", failpoint)


def test_a_commit_waits_for_age_or_size(scene: Scene) -> None:
    """It covers as many segments as fit; without either, nothing is due."""
    lake = Lake()
    work = Work(scene, lake, CommitLimits(3600, 7))
    capture(scene, 2)
    work.go()
    assert (lake.commits, place(scene.checkpoint)) == ([], (0, -1, True))

    capture(scene, 3)
    work.go()
    assert [numbers for numbers, _ in lake.commits] == [[1, 2], [3, 4]]
    assert place(scene.checkpoint) == (4, 2, True)

    with scene.store.database.write() as connection:
        connection.execute(update(segments).values(created_at=segments.c.created_at - 4000))
    assert not work.delivery.due()  # it knows the segment already
    other = Work(scene, lake, CommitLimits(3600, 7))
    other.go()
    assert lake.rows == {ORDERS: [1, 2, 3, 4, 5], ITEMS: [1, 2, 3, 4, 5]}
    assert other.delivery.progress.rows == 2
    assert lake.discarded == 3


def test_rows_that_go_to_another_table_now(scene: Scene) -> None:
    """The new table is held until it is loaded again, because it lacks what the former one has; a log has no past."""
    lake = Lake()
    work = Work(scene, lake)
    capture(scene, 1)
    work.go()
    moved(lake)
    capture(scene, 1)
    work.go()
    assert (lake.rows[NEW], lake.rows[ITEMS]) == ([], [1, 2])
    assert (
        scene.checkpoint.last_error
        == "sink redis: table public.new has everything up to segment 1 and is held: orders was orders"
    )
    assert list(scene.checkpoint.remedy or ()) == ["resync"]

    resync(scene, NEW)
    retry(scene)
    Work(scene, lake).go()
    assert lake.recreated == [NEW]
    capture(scene, 1)
    Work(scene, lake).go()
    assert not scene.checkpoint.last_error
    assert lake.rows[NEW] == [3]

    lake.is_log = True
    del lake.moved["orders"]
    capture(scene, 1)
    Work(scene, lake).go()
    assert lake.rows[ORDERS] == [1, 4]


def test_a_held_table_to_which_nothing_goes_any_more(scene: Scene) -> None:
    """What it lacked is lacking in the table to which its rows go now, which is held until it is loaded again."""
    lake = Lake(rejects={ORDERS})
    work = Work(scene, lake)
    capture(scene, 2)
    work.go()
    moved(lake)
    retry(scene)
    Work(scene, lake).go()
    assert lake.rows[NEW] == []
    assert "table public.new has everything up to segment 2 and is held: orders was orders" in str(
        scene.checkpoint.last_error
    )
    retry(scene)
    capture(scene, 1)
    Work(scene, lake).go()
    assert lake.rows[NEW] == []

    resync(scene, NEW)
    retry(scene)
    Work(scene, lake).go()
    capture(scene, 1)
    Work(scene, lake).go()
    assert not scene.checkpoint.last_error
    assert lake.rows[NEW] == [4]


def test_a_held_table_that_only_a_processor_names(scene: Scene) -> None:
    """It is not among the registered tables, and gets what it lacks all the same."""
    lake = Lake(rejects={ORDERS}, unregistered={ORDERS})
    capture(scene, 2)
    Work(scene, lake).go()
    retry(scene)
    Work(scene, lake).go()
    assert "table public.orders has everything up to segment 0" in str(scene.checkpoint.last_error)

    lake.rejects.clear()
    retry(scene)
    capture(scene, 1)
    Work(scene, lake).go()
    assert not scene.checkpoint.last_error
    assert lake.rows[ORDERS] == [1, 2, 3]


def test_a_commit_waits_for_bytes(scene: Scene) -> None:
    """It is due when there are so many, and has no more."""
    lake = Lake()
    capture(scene, 1)
    (row,) = scene.store.segments.read(NAME)
    work = Work(scene, lake, CommitLimits(NEVER, 1000, bytes=row.bytes * 5 // 2))
    capture(scene, 1)
    work.go()
    assert lake.commits == []
    capture(scene, 2)
    work.go()
    assert [numbers for numbers, _ in lake.commits] == [[1, 2]]


def test_a_commit_when_nothing_has_come_for_a_while(scene: Scene) -> None:
    """It is due once its newest segment is so old, however long the oldest may wait."""
    limits = CommitLimits(NEVER, 1000, idle_seconds=60)
    lake = Lake()
    capture(scene, 2)
    Work(scene, lake, limits).go()
    assert lake.commits == []
    with scene.store.database.write() as connection:
        older = segments.c.created_at - 61
        connection.execute(update(segments).where(segments.c.segment == 1).values(created_at=older))
    Work(scene, lake, limits).go()
    assert lake.commits == []
    with scene.store.database.write() as connection:
        connection.execute(update(segments).values(created_at=segments.c.created_at - 61))
    Work(scene, lake, limits).go()
    assert [numbers for numbers, _ in lake.commits] == [[1, 2]]


def test_tables_that_cannot_tell_what_they_have(scene: Scene) -> None:
    """After the checkpoint was set back, the store tells it: they get nothing again, and nothing is missing."""
    lake = Lake()
    for number in range(3):
        lake.rejects = {ITEMS} if number == 2 else set()
        capture(scene, 1)
        Work(scene, lake, by_store=True).go()
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2]}
    lake.rejects.clear()
    reset(scene, 0)
    lake.versions = {ORDERS: 0, ITEMS: 0}
    capture(scene, 1)
    Work(scene, lake, by_store=True).go()
    assert lake.rows == {ORDERS: [1, 2, 3, 4], ITEMS: [1, 2, 3, 4]}
    assert place(scene.checkpoint) == (4, 2, True)


def test_a_suspended_table_that_cannot_tell_what_it_has(scene: Scene) -> None:
    """The store tells it for its own commits as well, after its changes could not be staged."""
    lake = Lake()
    capture(scene, 3)
    Work(scene, lake, by_store=True).go()
    reset(scene, 0)
    lake.versions = {ORDERS: 0, ITEMS: 0}
    lake.unstaged = {ITEMS}
    limits = CommitLimits(NEVER, 6, at_once=True)
    Work(scene, lake, limits, by_store=True).go()
    written = len(lake.known)
    lake.unstaged.clear()
    retry(scene)
    Work(scene, lake, limits, by_store=True).go()
    assert place(scene.checkpoint) == (3, 2, True)
    assert len(lake.known) == written


def test_a_segment_larger_than_a_commit(scene: Scene) -> None:
    """It is a commit of its own."""
    lake = Lake()
    capture(scene, 3, changes=9)
    Work(scene, lake, CommitLimits(NEVER, 5)).go()
    assert [numbers for numbers, _ in lake.commits] == [[1], [2], [3]]


def test_nothing_for_the_sink_is_no_commit(scene: Scene) -> None:
    """Segments of other sinks are passed at once."""
    lake = Lake()
    capture(scene, 2)
    with scene.store.database.write() as connection:
        connection.execute(update(segments).values(sinks=["other"]))
    Work(scene, lake, CommitLimits(NEVER, 100)).go()
    assert (lake.commits, place(scene.checkpoint)) == ([], (2, 2, True))


def test_nothing_after_the_last_segment(scene: Scene) -> None:
    """`until` is committed at once, and no more."""
    lake = Lake()
    capture(scene, 3)
    Work(scene, lake, CommitLimits(NEVER, 100, until=2)).go()
    assert place(scene.checkpoint) == (2, 2, True)


@pytest.mark.parametrize(
    "step",
    ["table-commit-planned", "table-commit-staged", "table-committed", "table-commit-complete"],
)
def test_a_killed_run_is_repeated_exactly(
    scene: Scene, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although there is more by then that would fit into the commit."""
    lake = Lake()
    capture(scene, 2)
    kill_at(monkeypatch, step)
    Work(scene, lake).fail(Killed)
    monkeypatch.undo()
    assert place(scene.checkpoint) == (0, -1, True)
    capture(scene, 2)

    Work(scene, lake).go()

    assert [numbers for numbers, _ in lake.commits][-2:] == [[1, 2], [3, 4]]
    assert lake.rows == {ORDERS: [1, 2, 3, 4], ITEMS: [1, 2, 3, 4]}
    assert writes(scene) == [("items", 2, 2), ("orders", 2, 2), ("items", 4, 2), ("orders", 4, 2)]
    assert len(set(lake.opened)) == 1


def test_a_failure_of_everything(scene: Scene) -> None:
    """The writer is closed, and the same commit is repeated, unless only the store failed."""
    lake = Lake()
    work = Work(scene, lake)
    capture(scene, 2)

    def fail(error: DeltaforgeError) -> None:
        lake.fault = lambda _table: None
        raise error

    lake.fault = lambda table: fail(SparkUnavailable("gone")) if table == ITEMS else None
    work.fail(SparkUnavailable)
    capture(scene, 1)
    lake.fault = lambda table: fail(StoreUnavailable("gone")) if table == ITEMS else None
    work.fail(StoreUnavailable)
    assert (lake.opened, lake.closed) == (lake.opened[:1] * 2, 1)
    work.go()

    assert [numbers for numbers, _ in lake.commits] == [[1, 2], [1, 2], [1, 2], [3]]
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]}


def test_a_stop_ends_a_commit_between_two_tables(scene: Scene) -> None:
    """The next run repeats it."""
    lake = Lake()
    work = Work(scene, lake)
    capture(scene, 1)
    lake.fault = lambda table: work.thread.stop.set() if table == ORDERS else None
    work.go(1)
    assert (lake.rows[ORDERS], lake.rows[ITEMS]) == ([1], [])
    assert place(scene.checkpoint) == (0, -1, True)

    lake.fault = lambda _table: None
    Work(scene, lake).go()
    assert lake.rows == {ORDERS: [1], ITEMS: [1]}


def test_winding_up(scene: Scene) -> None:
    """What is under way goes on; nothing else begins."""
    lake = Lake()
    work = Work(scene, lake)
    capture(scene, 1)
    answers: list[bool] = []
    lake.fault = lambda _table: answers.append(work.delivery.wind_up())
    work.go()
    capture(scene, 1)
    work.go()
    assert (answers, work.delivery.wind_up()) == ([False] * 3, True)
    assert place(scene.checkpoint) == (1, 2, True)


@pytest.mark.parametrize("which", ["rejects", "unstaged"])
def test_a_held_table_does_not_stop_the_others(scene: Scene, which: str) -> None:
    """The checkpoint stays before what it lacks; the sink fails with the reason; then the table catches up."""
    lake = Lake()
    getattr(lake, which).add(ITEMS)
    work = Work(scene, lake)
    capture(scene, 2)
    work.go(1)
    wait(scene, NEVER * 10)
    capture(scene, 1)
    work.go()
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: []}
    stored = scene.checkpoint
    assert place(stored) == (0, -1, True)
    assert stored.failures >= 1
    assert stored.last_error is not None
    assert (
        "table public.items has everything up to segment 0 and is held: cannot be"
        in stored.last_error
    )

    assert not work.delivery.due()
    assert str(work.thread.attempts.error) == stored.last_error
    assert work.delivery.stuck(None)

    getattr(lake, which).clear()
    retry(scene)
    work = Work(scene, lake)
    work.go()
    assert [one for one in lake.commits if one[1] == [ITEMS]][-2:] == [
        ([1, 2], [ITEMS]),
        ([3], [ITEMS]),
    ]
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]}
    stored = scene.checkpoint
    assert (place(stored), stored.failures, stored.last_error) == ((3, 2, True), 0, None)
    assert (work.thread.attempts.error, work.delivery.stuck(None)) == (None, False)
    assert writes(scene) == [("items", 2, 2), ("orders", 2, 2), ("items", 3, 1), ("orders", 3, 1)]


def test_a_run_that_ends_amid_a_commit_knows_which_table_is_held(scene: Scene) -> None:
    """Nothing is looked for after that commit, and the sink is behind: so the run has the reason."""
    lake = Lake(rejects={ITEMS})
    work = Work(scene, lake)
    capture(scene, 1)
    lake.fault = lambda table: work.thread.stop.set() if table == ITEMS else None
    work.go(1)
    assert "table public.items" in str(work.thread.attempts.error)


def test_what_a_commit_added_is_stored(scene: Scene) -> None:
    """With the columns of the table, and where the commit ends in the source."""
    capture(scene, 2)
    Work(scene, Lake()).go()

    (items, orders) = scene.store.table_commits.tables(NAME)

    assert (items.sink, items.write.source, orders.write.source) == (SINK, ITEMS, ORDERS)
    assert (orders.write.columns, orders.write.position) == (COLUMNS, lsn(6))
    assert orders.write.figures == TableFigures(2)
    (last,) = scene.store.segments.read(NAME, first=2)
    assert orders.write.changed_at == last.last_ts_us / 1e6


def test_a_table_that_was_written_must_exist(scene: Scene) -> None:
    """Not so when its changes come again from before what it had, as after a checkpoint was reset."""
    lake = Lake()
    for _ in range(2):
        capture(scene, 1)
        Work(scene, lake).go()
    assert lake.known == [False, False, True, True]
    with scene.store.database.write() as connection:
        connection.execute(update(checkpoints).values(segment=0))
    Work(scene, lake).go()
    assert lake.known[4:] == [False, False]


def test_a_sink_with_a_held_table_has_work(scene: Scene) -> None:
    """While the others lack something it is not stuck, so the run waits for their commit."""
    lake = Lake(rejects={ITEMS})
    capture(scene, 1)
    Work(scene, lake).go(1)
    work = Work(scene, lake, CommitLimits(NEVER, 1000))
    work.go()
    assert work.delivery.stuck(None)
    capture(scene, 1)
    work.go()
    assert not work.delivery.stuck(None)


def test_who_asks_for_a_catch_up_does_not_wait(scene: Scene) -> None:
    """A held table is tried at once, and once."""
    lake = Lake(rejects={ITEMS})
    capture(scene, 1)
    Work(scene, lake).go(1)
    wait(scene, NEVER * 10)
    lake.commits.clear()

    Work(scene, lake, CommitLimits(NEVER, 1000, until=1)).go()

    assert lake.commits == [([1], [ITEMS])]


def test_segments_that_a_sink_has(scene: Scene) -> None:
    """They are skipped once they are captured; until then the sink waits."""
    lake = Lake()
    capture(scene, 1)
    with scene.store.database.write() as connection:
        connection.execute(update(checkpoints).values(skip=lsn(6)))
    work = Work(scene, lake)
    work.go()
    assert isinstance(work.thread.attempts.error, AwaitsCapture)
    assert work.delivery.stuck(lsn(3))
    assert not work.delivery.stuck(lsn(6))

    capture(scene, 2)
    work.go()
    assert lake.rows == {ORDERS: [3], ITEMS: [3]}
    assert place(scene.checkpoint) == (3, 2, True)
    assert work.delivery.due() is work.delivery.stuck(None) is False


def test_a_planned_segment_that_is_gone(scene: Scene) -> None:
    """Nothing is written instead."""
    lake = Lake(fault=lambda _table: (_ for _ in ()).throw(Killed()))
    capture(scene, 3)
    Work(scene, lake).fail(Killed)
    with scene.store.database.write() as connection:
        connection.execute(segments.delete().where(segments.c.segment == 3))
    Work(scene, Lake()).fail(JournalDamaged)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_change_arrives_once(
    scene: Scene, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected tables, failures, kills, other limits and checkpoints that are set: in the end, all is in order and once."""
    chance = random.Random(seed)
    lake = Lake()

    def fault(_table: Destination | None) -> None:
        if chance.random() < 0.15:
            raise chance.choice([Killed(), SparkUnavailable("gone"), StoreUnavailable("gone")])

    def failpoint(_step: str) -> None:
        if chance.random() < 0.05:
            raise Killed

    with_each(monkeypatch, failpoint)
    work = Work(scene, lake, any_limits(chance))
    for _ in range(40):
        lake.fault = fault
        lake.unfolded = {one for one in lake.rows if chance.random() < 0.2}
        lake.rejects = {one for one in lake.rows if chance.random() < 0.2}
        retry(scene)
        event = chance.random()
        if event < 0.5:
            capture(scene, 1 + int(chance.random() * 3))
        elif event < 0.6:
            reset(scene, int(chance.random() * scene.checkpoint.whole_segment))
            work = Work(scene, lake, any_limits(chance))
        try:
            work.go(1 + int(chance.random() * 4))
        except Killed:
            work = Work(scene, lake, any_limits(chance))
        except DeltaforgeError as error:
            work.delivery.failed(error)
    lake.fault, lake.rejects, lake.unfolded = lambda _table: None, set(), set()
    monkeypatch.undo()
    retry(scene)
    Work(scene, lake, any_limits(chance)).go()

    check_complete(scene, lake)


def any_limits(chance: random.Random) -> CommitLimits:
    """Return commits of one or several segments, beside the tables if they are small, or not."""
    fold_changes = chance.choice([None, 2, 4])
    pending = None if fold_changes is None else PendingChanges(fold_changes=fold_changes)
    return CommitLimits(NEVER, chance.choice([3, 9]), at_once=True, pending=pending)


def check_complete(scene: Scene, lake: Lake) -> None:
    """Check that each table has everything once and in order, and that what is pending is recorded."""
    row = scene.store.pipelines.get(NAME)
    assert row is not None
    everything = [*range(1, row.next_segment)]
    recorded = {table.destination for table in scene.store.table_commits.pending(NAME)}
    for table, segments_beside in lake.pending.items():
        assert not segments_beside or table in recorded
        lake.rows[table] += segments_beside
    assert lake.rows == {ORDERS: everything, ITEMS: everything}
    assert scene.checkpoint.whole_segment == row.next_segment - 1


def reset(scene: Scene, segment: int) -> None:
    """Set the checkpoint back, as a user does while no run is active."""
    with scene.store.database.write() as connection:
        connection.execute(
            update(checkpoints)
            .where(checkpoints.c.sink == SINK)
            .values(segment=segment, ordinal=-1, complete=True)
        )


def beside(changes: int = 100, seconds: float = NEVER) -> CommitLimits:
    """Commits at once, beside the tables; folded when there are many changes, or after a time."""
    pending = PendingChanges(fold_changes=changes, fold_seconds=seconds)
    return CommitLimits(NEVER, 1000, at_once=True, pending=pending)


def waiting(scene: Scene) -> dict[str, tuple[int, int]]:
    """Return for each table with pending changes the last commit among them, and their number."""
    return {
        one.destination[1]: (one.segment, one.changes)
        for one in scene.store.table_commits.pending(NAME)
    }


def test_small_commits_go_beside_the_tables(scene: Scene) -> None:
    """Until there are many changes; a commit with as many, or with other steps, goes to the table, behind them."""
    lake = Lake()
    work = Work(scene, lake, beside(3))  # a segment is a change of each table, to this lake
    for expected in (1, 2):
        capture(scene, 1)
        work.go()
        assert waiting(scene) == {"orders": (expected, expected), "items": (expected, expected)}
        assert (lake.rows[ORDERS], lake.folds) == ([], [])
    assert place(scene.checkpoint) == (2, 2, True)
    capture(scene, 1)
    work.go()
    assert lake.folds == [("orders", 3, "after", True), ("items", 3, "after", True)]
    assert (waiting(scene), lake.rows) == ({}, {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]})

    capture(scene, 1)
    work.go()
    capture(scene, 3)
    work.go()
    assert lake.folds[2:] == [("orders", 7, "before", True), ("items", 7, "before", True)]
    assert (waiting(scene), lake.rows[ITEMS]) == ({}, [1, 2, 3, 4, 5, 6, 7])
    lake.kind = "rekey"
    capture(scene, 1)
    work.go()
    assert (waiting(scene), lake.rows[ITEMS][7:]) == ({}, [8])


def age_pending(scene: Scene, table: str) -> None:
    """Let the pending changes of a table be older than an hour."""
    of_table = table_pending.c.destination.contains(table)
    with scene.store.database.write() as connection:
        connection.execute(
            update(table_pending).where(of_table).values(since=table_pending.c.since - 4000)
        )


def test_pending_changes_that_are_old(scene: Scene) -> None:
    """They are folded although nothing is to be committed, and whatever the option says if it is gone."""
    lake = Lake()
    capture(scene, 1)
    Work(scene, lake, beside(seconds=3600)).go()
    assert (len(waiting(scene)), lake.folds) == (2, [])
    age_pending(scene, "orders")
    Work(scene, lake, beside(seconds=3600)).go()
    assert lake.folds == [("orders", 1, "later", True)]
    assert waiting(scene) == {"items": (1, 1)}
    Work(scene, lake).go()
    assert lake.folds[1:] == [("items", 1, "later", True)]
    assert (waiting(scene), lake.rows) == ({}, {ORDERS: [1], ITEMS: [1]})


def test_a_reset_brings_back_what_was_dropped(scene: Scene) -> None:
    """After a step back nothing has to be there, and what the tables have is not added again."""
    lake = Lake()
    capture(scene, 2)
    Work(scene, lake, beside()).go()
    reset(scene, 0)
    Work(scene, lake, beside(2)).go()
    assert waiting(scene) == {}
    assert lake.rows == {ORDERS: [1, 2], ITEMS: [1, 2]}


def test_after_a_reset_commits_go_into_the_tables(scene: Scene) -> None:
    """Whichever way their segments went before: one that a table skipped would not repair what another undid."""
    lake = Lake()
    for _ in range(3):
        capture(scene, 1)
        Work(scene, lake, beside(3)).go()
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]}
    reset(scene, 0)
    limits = CommitLimits(NEVER, 6, at_once=True, pending=PendingChanges(fold_changes=2))
    Work(scene, lake, limits).go()
    assert [numbers for numbers, _ in lake.commits][-2:] == [[1, 2], [3]]
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]}
    capture(scene, 1)
    Work(scene, lake, limits).go()
    assert waiting(scene) == {"orders": (4, 1), "items": (4, 1)}


def test_after_a_reset_pending_changes_are_folded(scene: Scene) -> None:
    """They may be of later segments than the first commit that is repeated."""
    lake = Lake()
    capture(scene, 3)
    Work(scene, lake, beside()).go()
    assert waiting(scene) == {"orders": (3, 3), "items": (3, 3)}
    reset(scene, 1)
    limits = CommitLimits(NEVER, 3, at_once=True, pending=PendingChanges())
    Work(scene, lake, limits).go()
    assert (waiting(scene), lake.pending) == ({}, {ORDERS: [], ITEMS: []})
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]}


def test_a_suspended_table_is_folded_no_further_than_its_commit(scene: Scene) -> None:
    """A later fold with a smaller number would be skipped, and its changes would stay beside the table unnoticed."""
    lake = Lake(unfolded={ORDERS})
    limits = CommitLimits(
        NEVER, 3, at_once=True, pending=PendingChanges(fold_changes=2, fold_seconds=3600)
    )
    capture(scene, 1)
    Work(scene, lake, limits).go()
    age_pending(scene, "orders")
    Work(scene, lake, limits).go()
    wait(scene, NEVER * 10)
    capture(scene, 4)
    with scene.store.database.write() as connection:
        connection.execute(update(segments).where(segments.c.segment == 2).values(sinks=["other"]))
    Work(scene, lake, limits).go()
    assert (lake.rows[ORDERS], lake.pending[ORDERS]) == ([], [1])

    lake.unfolded.clear()
    retry(scene)
    Work(scene, lake, limits).go()
    Work(scene, lake).go()
    assert (lake.rows[ORDERS], lake.pending[ORDERS]) == ([1, 3, 4, 5], [])


def test_a_table_that_may_not_be_written_has_no_pending_changes(scene: Scene) -> None:
    """Nothing was added beside the new table of rows that went elsewhere before."""
    lake = Lake()
    capture(scene, 1)
    Work(scene, lake, beside()).go()
    moved(lake)
    capture(scene, 1)
    Work(scene, lake, beside()).go()
    assert waiting(scene) == {"orders": (1, 1), "items": (2, 2)}


def test_a_failure_ends_although_its_segment_is_gone(scene: Scene) -> None:
    """Retention may have deleted the last segment of a table that could not be folded for long."""
    lake = Lake(unfolded={ORDERS})
    capture(scene, 1)
    Work(scene, lake, beside(seconds=3600)).go()
    age_pending(scene, "orders")
    Work(scene, lake, beside(seconds=3600)).go()
    assert scene.checkpoint.failures == 1
    lake.unfolded.clear()
    retry(scene)
    with scene.store.database.write() as connection:
        connection.execute(segments.delete())
    Work(scene, lake, beside(seconds=3600)).go()
    assert (lake.rows[ORDERS], waiting(scene)) == ([1], {"items": (1, 1)})
    assert (scene.checkpoint.failures, scene.checkpoint.last_error) == (0, None)


@pytest.mark.parametrize(
    "lost", ["table-pending-planned", "table-pending-added", "table-commit-complete"]
)
def test_a_killed_run_that_added_pending_changes(
    scene: Scene, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor adds the commit to them, whatever the option says by then."""
    lake = Lake()
    Work(scene, lake, beside(3)).go()
    capture(scene, 2)
    Work(scene, lake, beside(3)).go()
    capture(scene, 1)
    kill_at(monkeypatch, lost)
    Work(scene, lake, beside(3)).fail(Killed)
    monkeypatch.undo()
    known = {name: one[0] for name, one in waiting(scene).items()}
    assert known == {"orders": 3, "items": 3}

    Work(scene, lake).go()

    assert (waiting(scene), lake.pending) == ({}, {ORDERS: [], ITEMS: []})
    assert lake.rows == {ORDERS: [1, 2, 3], ITEMS: [1, 2, 3]}


@pytest.mark.parametrize("between", [False, True])
def test_a_fold_that_fails_holds_its_table(scene: Scene, *, between: bool) -> None:
    """With a commit, or between two; the other table goes on, and later the held one is folded."""
    lake = Lake(unfolded={ORDERS})
    limits = beside(2, 3600)
    capture(scene, 1)
    Work(scene, lake, limits).go()
    if between:
        age_pending(scene, "orders")
    else:
        capture(scene, 1)
    Work(scene, lake, limits).go()

    commits = scene.store.table_commits.read(NAME, SINK)
    assert commits is not None
    (held,) = commits.suspended.values()
    planned = None if between else 2
    assert (held.error, held.segment, held.planned_to) == ("cannot be folded", 1, planned)
    assert "cannot be folded" in str(scene.checkpoint.last_error)
    assert (lake.rows[ORDERS], lake.rows[ITEMS]) == ([], [] if between else [1, 2])
    lake.unfolded.clear()
    retry(scene)
    Work(scene, lake, limits).go()
    commits = scene.store.table_commits.read(NAME, SINK)
    assert commits is not None
    assert commits.suspended == {}
    assert ORDERS not in commits.pending
    assert lake.rows[ORDERS] == ([1] if between else [1, 2])
    assert scene.checkpoint.last_error is None


def resync(scene: Scene, *tables: Destination) -> None:
    """Request that tables are loaded again."""
    names = {one: ".".join(one) for one in tables}
    scene.store.table_commits.resync(NAME, SINK, names)


def test_a_table_is_loaded_again(scene: Scene) -> None:
    """It is recreated where the front is, for a snapshot of what changes from there on; the other table goes on."""
    lake = Lake()
    work = Work(scene, lake)
    capture(scene, 2)
    work.go()
    owes = [work.delivery.redriving]
    resync(scene, ORDERS)
    capture(scene, 1)
    owes += [work.delivery.due() and work.delivery.redriving]
    work.go()

    assert (lake.recreated, lake.rows) == ([ORDERS], {ORDERS: [3], ITEMS: [1, 2, 3]})
    assert [numbers for numbers, _ in lake.commits] == [[1, 2], [3]]
    (snapshot,) = scene.store.snapshots.read(NAME)
    assert (snapshot.tables, snapshot.sinks) == (["public.orders"], [SINK])
    assert (snapshot.cause, snapshot.state, snapshot.since_segment) == ("resync", "wanted", 3)
    assert scene.store.table_commits.resyncs(NAME) == []
    owes += [work.delivery.redriving, work.delivery.due()]
    assert owes == [False, True, False, False]
    assert (place(scene.checkpoint), scene.checkpoint.failures) == ((3, 2, True), 0)


@pytest.mark.parametrize("step", ["table-resync-begun", "table-recreated"])
def test_a_resync_goes_on_after_a_kill(
    scene: Scene, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One snapshot is requested, and nothing is added before the table was recreated for the last time."""
    lake = Lake()
    capture(scene, 2)
    Work(scene, lake).go()
    resync(scene, ORDERS)
    capture(scene, 1)
    kill_at(monkeypatch, step)
    Work(scene, lake).fail(Killed)
    monkeypatch.undo()
    assert lake.rows[ITEMS] == [1, 2]

    Work(scene, lake).go()

    assert lake.rows == {ORDERS: [3], ITEMS: [1, 2, 3]}
    assert len(scene.store.snapshots.read(NAME)) == 1
    assert scene.store.table_commits.resyncs(NAME) == []


@pytest.mark.parametrize("step", ["", "table-resync-begun", "table-recreated"])
def test_a_resync_forgets_pending_changes(
    scene: Scene, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its table, whatever dies; later ones are counted from 0, and the other table keeps its own."""
    lake = Lake()
    capture(scene, 2)
    Work(scene, lake, beside(3)).go()
    assert waiting(scene) == {"orders": (2, 2), "items": (2, 2)}
    resync(scene, ORDERS)
    if step:
        kill_at(monkeypatch, step)
        Work(scene, lake, beside(3)).fail(Killed)
        monkeypatch.undo()
    Work(scene, lake, beside(3)).go()
    assert (waiting(scene), lake.folds) == ({"items": (2, 2)}, [])
    capture(scene, 1)
    Work(scene, lake, beside(3)).go()
    assert waiting(scene) == {"orders": (3, 1)}
    assert lake.pending == {ORDERS: [3], ITEMS: []}
    assert lake.rows == {ORDERS: [], ITEMS: [1, 2, 3]}


def test_a_resync_needs_no_fold_that_failed(scene: Scene) -> None:
    """A table that is held because it cannot be folded is recreated, without what was pending."""
    lake = Lake(unfolded={ORDERS})
    capture(scene, 1)
    Work(scene, lake, beside(seconds=3600)).go()
    age_pending(scene, "orders")
    Work(scene, lake, beside(seconds=3600)).go()
    wait(scene, NEVER * 10)
    resync(scene, ORDERS)
    work = Work(scene, lake, beside(seconds=3600))
    work.go(2)
    assert (lake.recreated, lake.pending[ORDERS]) == ([ORDERS], [])
    assert waiting(scene) == {"items": (1, 1)}
    assert (scene.checkpoint.failures, scene.checkpoint.last_error) == (0, None)


def test_a_resync_waits_for_a_snapshot_and_a_planned_commit(scene: Scene) -> None:
    """A pipeline has one snapshot at a time; a commit that is planned is made first."""
    lake = Lake()
    work = Work(scene, lake)
    capture(scene, 1)
    lake.fault = lambda table: work.thread.stop.set() if table == ORDERS else None
    work.go(1)
    lake.fault = lambda _table: None
    resync(scene, ORDERS)
    other = scene.store.snapshots.request(NAME, cause="command")
    work = Work(scene, lake)
    work.go()
    assert (lake.recreated, lake.rows[ORDERS]) == ([], [1])
    assert not work.delivery.redriving

    scene.store.snapshots.cancel(NAME, other.snapshot, "no longer wanted")
    work.go()
    assert (lake.recreated, lake.rows[ORDERS]) == ([ORDERS], [])
    assert [one.since_segment for one in scene.store.snapshots.read(NAME)] == [2, 0]


def test_a_held_table_is_loaded_again(scene: Scene) -> None:
    """What it lacks is no longer needed; while it cannot be recreated, it is held, and the others go on."""
    lake = Lake(rejects={ITEMS})
    work = Work(scene, lake)
    capture(scene, 2)
    work.go(1)
    wait(scene, NEVER * 10)
    resync(scene, ITEMS)
    work = Work(scene, lake)
    work.go(2)
    wait(scene, NEVER * 10)
    capture(scene, 1)
    work.go()
    assert (lake.recreated, lake.rows) == ([], {ORDERS: [1, 2, 3], ITEMS: []})
    assert place(scene.checkpoint) == (2, 2, True)
    assert "up to segment 2 and is held: cannot be written" in str(scene.checkpoint.last_error)
    with pytest.raises(NotAllowed, match="has begun already"):
        resync(scene, ITEMS)

    lake.rejects.clear()
    retry(scene)
    work = Work(scene, lake)
    work.go()
    assert (lake.recreated, lake.rows) == ([ITEMS], {ORDERS: [1, 2, 3], ITEMS: [3]})
    stored = scene.checkpoint
    assert (place(stored), stored.failures, stored.last_error) == ((3, 2, True), 0, None)


def test_a_sink_no_longer_fails_once_its_table_is_recreated(scene: Scene) -> None:
    """Although its checkpoint does not move by that."""
    lake = Lake()
    capture(scene, 1)
    Work(scene, lake).go()
    resync(scene, ITEMS)
    lake.unstaged.add(ITEMS)
    Work(scene, lake).go(2)
    assert scene.checkpoint.failures == 1

    lake.unstaged.clear()
    retry(scene)
    work = Work(scene, lake)
    work.go()
    assert lake.recreated == [ITEMS]
    assert (scene.checkpoint.failures, scene.checkpoint.last_error) == (0, None)
    assert work.thread.attempts.error is None


def test_a_resync_outlives_a_reset_checkpoint(scene: Scene) -> None:
    """The table is recreated first, wherever the sink begins again."""
    lake = Lake()
    capture(scene, 2)
    Work(scene, lake).go()
    resync(scene, ORDERS)
    Work(scene, lake).go(1)
    with scene.store.database.write() as connection:
        connection.execute(update(checkpoints).values(segment=0))
    lake.versions.clear()
    lake.versions |= {ORDERS: 0, ITEMS: 0}
    lake.rows[ITEMS].clear()
    Work(scene, lake).go()
    assert (lake.recreated, lake.rows) == ([ORDERS], {ORDERS: [1, 2], ITEMS: [1, 2]})
