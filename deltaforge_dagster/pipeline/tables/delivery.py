"""The delivery of changes to the tables of one sink: commits, planned before anything is written.

A commit adds consecutive segments to all tables. It is due once the oldest of them is `commit_seconds` old, or they have
`commit_changes` changes (`CommitLimits`), or at once if the run only catches up. Its steps:

1. the plan, which segments it covers, is stored;
2. Spark's tasks make files of the changes, by table (`stage`);
3. they are added to one table after the other (`writer`), each at once and with a mark of the commit, so that a table
   recognizes a commit that it has already;
4. front and checkpoint move (`state.lake_commits`).

A planned commit that was not finished, because the run was killed or something failed, is repeated exactly. A table that
cannot be written is held, and the others go on: it is tried again after a while, first with the commit that failed, then
with what follows, until it has reached the front. Meanwhile the checkpoint stays before what it lacks.

With pending changes, a commit goes beside a table, which is stored first, unless it is large or more than rows. They are
folded into the table (`writer`) when there are many or they are old: with a commit, or between commits.

A table that is to be loaded again (a *resync*) is held at the front while no commit is planned, and a snapshot for this
sink is requested with that. Then the table is recreated, without rows and without pending changes, and is no longer held:
commits bring the changes behind the front and the snapshot's rows, as for a new sink. The other tables notice nothing. A
fold that was not finished needs no end: it would have moved what both tables have lost.

Where the sink's `table` has changed, the new table of a source's table lacks what the former one has, or was to get. It is
held until it is loaded again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, cast

from deltaforge_dagster.errors import (
    Commands,
    DeltaforgeError,
    JournalDamaged,
    NotAllowed,
    StoreUnavailable,
    TableRejected,
)
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.delivery import AwaitsCapture, DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.tables.typed_files import TableName
from deltaforge_dagster.sinks.tables.config import PendingChanges
from deltaforge_dagster.sinks.tables.staged import StagedCommit, StagedTable
from deltaforge_dagster.sinks.tables.writer import (
    CommitWriter,
    PendingWriter,
    TableWriter,
    WrittenTable,
)
from deltaforge_dagster.state.lake_commits import (
    TO_BE_RECREATED,
    Destination,
    HeldTable,
    LakeCommits,
    LakeFront,
    LakeResync,
    PendingTable,
    Rejection,
    TableWrite,
)
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import FencedWriter
from deltaforge_dagster.typed_rows.schema import TypedSchema

MOST_SEGMENTS = 2000
"""Maximum number of segments in a commit."""


class Stager(Protocol):
    """Makes files of changes (`stage.TableStager`)."""

    def stage(
        self,
        segments: Sequence[SegmentRow],
        *,
        only: frozenset[Destination] | None = None,
        skip: frozenset[Destination] = frozenset(),
    ) -> StagedCommit:
        """Return what segments contain, for some tables only, or without some."""
        ...

    def without_changes(self, destination: Destination) -> StagedTable:
        """Return a table with the columns and the key that the source has now, and no changes.

        Raises:
            TableRejected: There is no such table, or it cannot have these columns.
        """
        ...

    def destinations(self) -> Mapping[TableName, Destination]:
        """Return where the rows of each table of the source go."""
        ...

    def elsewhere(self, table: TableName, former: Destination) -> TableRejected:
        """Return the error for a table whose rows from before went, or were to go, to another destination than now."""
        ...

    @property
    def is_log(self) -> bool:
        """Whether tables have changes as they were, so that a new one needs none from before."""
        ...


class Skips(Protocol):
    """Moves the checkpoint of a sink that already has some segments (`deliver.resumption.Resumption`)."""

    looked_up_to: str | None

    def skip_segments(self, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Return the checkpoint after them, None while more must be captured first."""
        ...


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """When a commit is due.

    Attributes:
        seconds: When its oldest segment is this old.
        changes: When there are this many changes; a commit of several segments has no more.
        at_once: Whether it is due as soon as there is anything.
        until: It contains nothing after this segment.
        pending: When pending changes are folded, None if there are to be none.
        bytes: When the files of its segments have this many bytes, and it has no more either; None for any number.
        idle_seconds: When its newest segment is this old; None for never.
    """

    seconds: float
    changes: int
    at_once: bool = False
    until: int | None = None
    pending: PendingChanges | None = None
    bytes: int | None = None
    idle_seconds: float | None = None

    def full(self, changes: int, size: int) -> bool:
        """Return whether a commit with this many changes, and bytes of segment files, is due."""
        return changes >= self.changes or (self.bytes is not None and size >= self.bytes)

    def exceeded(self, changes: int, size: int) -> bool:
        """Return whether this is too much for a commit of several segments."""
        return changes > self.changes or (self.bytes is not None and size > self.bytes)

    def folds(self, changes: int, since: float, now: float) -> bool:
        """Return whether pending changes of this number and age are to be folded."""
        return self.pending is None or self.pending.due(changes, now - since)


@dataclass(slots=True)
class TableProgress:
    """How far the tables have come; implements `delivery.DeliveryProgress`."""

    checkpoint: CheckpointRow
    moved_at: float
    rows: int = 0


@dataclass(frozen=True, slots=True)
class _Commit:
    """A commit of the segments after `after` up to `last`: to one held table, or to all tables that are not held."""

    table: HeldTable | None
    after: int
    last: int
    planned: bool

    @property
    def destination(self) -> Destination | None:
        return None if self.table is None else self.table.destination


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a commit up to segment `through` goes: beside the table, or to the table, which may have to exist."""

    through: int
    beside: bool
    exists: bool


class TableDelivery:
    """Adds the changes of the journal to the tables of one sink; implements `delivery.Delivery`.

    Args:
        context: The sink.
        checkpoint: Its checkpoint.
        thread: The thread that runs it.
        limits: When a commit is due.
        stager: Makes files of changes.
        open_writer: Opens what writes them, given the id of the series of commits; its end ends what is under way.
        skips: Moves the checkpoint past segments that the sink has.
        by_store: Whether the state store alone knows how far each table has come, because the tables cannot tell. So what
            they have is not written again after the checkpoint was set back.
    """

    prompt = False  # small segments would not arrive earlier
    timeouts = 0

    def __init__(
        self,
        context: DeliveryContext,
        checkpoint: CheckpointRow,
        thread: DeliveryThread,
        *,
        limits: CommitLimits,
        stager: Stager,
        open_writer: Callable[[str], AbstractContextManager[CommitWriter]],
        skips: Skips,
        by_store: bool = False,
    ) -> None:
        self.progress = TableProgress(checkpoint, time.monotonic())
        self.begins_at = checkpoint.next_attempt_at
        self._context = context
        self._sink_id = context.sink_id
        self._pipeline = context.run.lease.pipeline
        self._store = context.run.store
        self._lease = context.run.lease
        self._meter = context.meter
        self._thread = thread
        self._limits = limits
        self._stager = stager
        self._open_writer = open_writer
        self._skips = skips
        self._by_store = by_store
        self._opened = contextlib.ExitStack()
        self._writer: CommitWriter | None = None
        self._commits: LakeCommits | None = None
        self._pending: list[SegmentRow] = []
        self._next: _Commit | PendingTable | None = None
        self._begins: Sequence[LakeResync] = ()
        self.redriving = True
        self._asked: set[Destination] | None = None if limits.until is not None else set()
        self._held_error: TableRejected | None = None
        self._busy = self._winding_up = False

    def prepare(self) -> None:
        """Do nothing: the writer is opened for each commit."""

    def due(self) -> bool:
        """Return whether a commit is due, or a table is to be loaded again."""
        self.redriving = False
        if self._commits is None:
            self._commits = self._load()
        commits = self._commits
        if commits is None:
            return False
        self._begins = self._resync_begins(commits)
        self._next = None if self._begins else self._find(commits)
        self.redriving = bool(self._begins) or any(one.recreate for one in commits.held.values())
        self._show_held({} if self._next or self._pending or self._begins else commits.held)
        return bool(self._begins) or self._next is not None

    def deliver(self) -> None:
        """Plan a commit unless it is planned, write it, and move front and checkpoint.

        Or fold pending changes, or begin to load tables again.
        """
        work, commits = self._next, self._commits
        assert commits is not None
        self._busy = True
        try:
            self._commits = None  # read again whatever happens
            if work is None:
                self._begin_resyncs(commits)
            elif isinstance(work, PendingTable):
                self._fold(work, commits)
            elif work.table is not None and work.table.recreate:
                self._recreate(work.table, commits)
            else:
                self._deliver(work, commits)
        finally:
            self._busy = False

    def failed(self, error: DeltaforgeError) -> None:
        """Close the writer, unless only the store failed; the commit is repeated."""
        self._commits = None
        self._pending.clear()
        if not isinstance(error, StoreUnavailable):
            self.close()

    def stuck(self, captured: str | None) -> bool:
        """Return whether the sink fails, or tables are held and the others have everything."""
        error = self._thread.attempts.error
        if isinstance(error, AwaitsCapture):
            return self._skips.looked_up_to == captured
        return error is not None

    def wind_up(self) -> bool:
        """Begin no further commit; return whether none is under way."""
        self._winding_up = True
        return not self._busy

    def interrupt(self) -> None:
        """End what the writer is doing; the next run repeats the commit."""
        self.close()

    def close(self) -> None:
        """Close the writer."""
        self._writer = None
        self._opened.close()

    def _load(self) -> LakeCommits | None:
        """Return how far the tables have come; None if it is not known yet which segments the sink has."""
        checkpoint, attempts = self.progress.checkpoint, self._thread.attempts
        if checkpoint.skip is not None:
            if self._context.segments.segment(checkpoint.whole_segment + 1) is None:
                return None
            moved = self._skips.skip_segments(checkpoint)
            if moved is None:
                attempts.error = AwaitsCapture(self._sink_id)
                return None
            if isinstance(attempts.error, AwaitsCapture):
                attempts.error = None
            self.progress.checkpoint = checkpoint = moved
        found = self._store.lake_commits.read(self._pipeline, self._sink_id)
        place = checkpoint.whole_segment
        if found is None or found.reached != place:  # the checkpoint was set, and not by a commit
            self._lease.write(lambda writer: writer.lake_commits.restart(self._sink_id, place))
            found = self._store.lake_commits.read(self._pipeline, self._sink_id)
        assert found is not None
        if (
            self._asked is None
        ):  # somebody has asked for this delivery: held tables are tried at once
            self._asked = set(found.held)
        return found

    def _resync_begins(self, commits: LakeCommits) -> Sequence[LakeResync]:
        """Return the tables that are to be loaded again for which that has not begun, and can begin now."""
        if (
            self._winding_up
            or self._limits.until is not None
            or commits.front.planned_to is not None
        ):
            return ()
        known = self._store.lake_commits.resyncs(self._pipeline, self._sink_id)
        wanted = [one for one in known if not one.begun]
        if wanted and self._store.snapshots.unfinished(self._pipeline) is not None:
            return ()
        return wanted

    def _find(self, commits: LakeCommits) -> _Commit | PendingTable | None:
        """Return the commit that is due, or the table whose pending changes are to be folded, if there is one."""
        front = commits.front
        self._read_pending(front.segment)
        if self._winding_up:
            return None
        if front.planned_to is not None:
            return _Commit(None, front.segment, front.planned_to, planned=True)
        if commits.held and (table := self._table_due(commits)) is not None:
            return self._commit_of(table, front)
        if commits.pending and (old := self._old(commits)) is not None:
            return old
        if not self._pending or not self._is_due(self._pending):
            return None
        last = self._last(self._pending, front.ends)
        return _Commit(None, front.segment, last, planned=False)

    def _table_due(self, commits: LakeCommits) -> HeldTable | None:
        """Return the held table that is to be tried now."""
        now = self._store.now()
        asked = self._asked or set()
        for table in sorted(commits.held.values(), key=lambda one: one.next_attempt_at):
            if table.next_attempt_at <= now or table.destination in asked:
                return table
        return None

    def _old(self, commits: LakeCommits) -> PendingTable | None:
        """Return a table whose pending changes are to be folded although no commit is due."""
        if self._limits.until is not None:
            return None
        now = self._store.now()
        for one in commits.pending.values():
            due = one.changes > 0 and self._limits.folds(one.changes, one.since, now)
            if due and one.destination not in commits.held:
                return one
        return None

    def _commit_of(self, table: HeldTable, front: LakeFront) -> _Commit:
        if table.recreate:
            return _Commit(table, table.segment, table.segment, planned=False)
        if table.planned_to is not None:
            return _Commit(table, table.segment, table.planned_to, planned=True)
        rows = self._rows(table.segment, front.segment, limit=MOST_SEGMENTS)
        last = self._last(rows, front.ends) if rows else front.segment
        return _Commit(table, table.segment, last, planned=False)

    def _read_pending(self, front: int) -> None:
        """Make `_pending` the segments after the front, up to `MOST_SEGMENTS`."""
        self._pending = [row for row in self._pending if row.segment > front]
        if len(self._pending) < MOST_SEGMENTS:
            after = self._pending[-1].segment if self._pending else front
            room = MOST_SEGMENTS - len(self._pending)
            self._pending += self._rows(after, self._limits.until, limit=room)

    def _rows(self, after: int, last: int | None, *, limit: int | None = None) -> list[SegmentRow]:
        """Return the segments after one that are ready.

        Raises:
            JournalDamaged: The first of them is not in the journal.
        """
        rows = self._context.segments.segments(first=after + 1, last=last, limit=limit)
        if rows and rows[0].segment != after + 1:
            raise JournalDamaged(
                f"{self._pipeline}: segment {after + 1} is not in the journal any more, and sink "
                f"{self._sink_id} lacks it"
            )
        return rows

    def _is_due(self, rows: Sequence[SegmentRow]) -> bool:
        limits = self._limits
        if limits.at_once or limits.until is not None or len(rows) == MOST_SEGMENTS:
            return True
        own = self._own(rows)
        if limits.full(sum(row.rows for row in rows), sum(row.bytes for row in rows)) or not own:
            return True
        now, idle = self._store.now(), limits.idle_seconds
        if idle is not None and now - own[-1].created_at >= idle:
            return True
        return now - rows[0].created_at >= limits.seconds

    def _last(self, rows: Sequence[SegmentRow], ends: Sequence[int]) -> int:
        """Return the last segment of the commit that begins with the first of some segments."""
        changes, size, last = rows[0].rows, rows[0].bytes, rows[0]
        for row in rows[1:]:
            changes += row.rows
            size += row.bytes
            if self._limits.exceeded(changes, size) or last.segment in ends:
                break
            last = row
        return last.segment

    def _own(self, rows: Sequence[SegmentRow]) -> list[SegmentRow]:
        """Return the segments that have anything for this sink."""
        return [row for row in rows if row.rows and row.is_for(self._sink_id)]

    def _deliver(self, commit: _Commit, commits: LakeCommits) -> None:
        rows = self._rows(commit.after, commit.last)
        if len(rows) != commit.last - commit.after:
            raise JournalDamaged(
                f"{self._pipeline}: segments {commit.after + 1} to {commit.last} of the commit that sink "
                f"{self._sink_id} has planned are not all in the journal"
            )
        own = self._own(rows)
        if commit.table is not None and self._is_abandoned(commit.table, own):
            self._abandon(commit.table, commits)
            return
        rejected: Mapping[Destination, Exception] = {}
        writes: Sequence[TableWrite] = ()
        if own:
            if not commit.planned:
                self._lease.write(
                    lambda writer: writer.lake_commits.plan(
                        self._sink_id, commit.last, commit.destination
                    )
                )
            failpoint("lake-planned")
            written = self._write(own, commit, commits)
            if written is None:
                return
            writes, rejected = written
            failpoint("lake-committed")
        elif commit.table is not None and commit.table.destination in commits.pending:
            rejected = self._folded(commits.pending[commit.table.destination], commits)
        if commit.table is None:
            self._front_moves(commit, commits, rows, rejected, writes)
        else:
            self._table_moves(commit, commit.table, commits, rejected, writes)

    def _is_abandoned(self, table: HeldTable, rows: Sequence[SegmentRow]) -> bool:
        """Return whether nothing goes to a held table any more, because the sink's `table` has changed.

        Tables that only a processor names are not among the registered ones. They are told by the commit that is
        repeated: it had rows of the table.
        """
        name, destinations = table.destination, self._stager.destinations()
        if name in destinations.values():
            return False
        former = self._former_destinations()
        if any(former.get(_source(source)) == name for source in destinations):
            return True
        if table.planned_to is None or not rows:
            return False
        staged = self._stager.stage(rows, only=frozenset({name}))
        staged.discard()
        return not (staged.failed or staged.tables)

    def _former_destinations(self) -> Mapping[tuple[str, str], Destination]:
        """Return where the sink has written each table of the source last."""
        return {
            one.write.source: one.write.destination
            for one in self._store.lake_commits.tables(self._pipeline)
            if one.sink == self._sink_id
        }

    def _abandon(self, table: HeldTable, commits: LakeCommits) -> None:
        """Hold tables in place of a held one to which nothing goes any more: those that may lack what it lacked.

        They are the tables of the source of which the sink has written nothing yet; if there are none, the one whose rows it
        had.
        """
        name, front = table.destination, commits.front.segment
        former, destinations = self._former_destinations(), self._stager.destinations()
        free = [source for source, there in destinations.items() if there not in commits.held]
        moved = [source for source in free if _source(source) not in former] or [
            source for source in free if former[_source(source)] == name
        ]
        now = self._store.now()
        rejections = [
            self._rejection(destinations[one], self._stager.elsewhere(one, name), 0, now)
            for one in moved
        ]
        held = {one: row for one, row in commits.held.items() if one != name}
        held |= {one.destination: _held(one, front, None, now) for one in rejections}
        last = self._context.segments.segment(front)
        position, changed_at = (
            ("", now) if last is None else (last.end_position, last.last_ts_us / 1e6)
        )
        # Without a row that says where their rows were to go, they would be let go at the next attempt.
        writes = [TableWrite(_source(one), name, (), 0, position, changed_at) for one in moved]

        def change(writer: FencedWriter) -> None:
            writer.lake_commits.wrote(self._sink_id, name, front, writes)
            for one in rejections:
                writer.lake_commits.hold(self._sink_id, one)

        self._record(change, replace(commits, held=held), released=True)

    def _begin_resyncs(self, commits: LakeCommits) -> None:
        """Hold the tables that are to be loaded again, and request their snapshot; unless another one was requested meanwhile."""
        tables = [one.destination for one in self._begins]
        now, front = self._store.now(), commits.front.segment
        recreated = {
            name: HeldTable(name, front, None, TO_BE_RECREATED, now, 0.0, 0, recreate=True)
            for name in tables
        }
        with contextlib.suppress(NotAllowed):
            self._record(
                lambda writer: writer.lake_commits.begin_resyncs(self._sink_id, tables),
                replace(commits, held={**commits.held, **recreated}),
            )
            failpoint("lake-resync-begun")

    def _recreate(self, table: HeldTable, commits: LakeCommits) -> None:
        """Replace a held table by one without rows or pending changes; it is no longer held then, unless others have gone on."""
        name = table.destination
        self._lease.guard()
        writer = cast("TableWriter", self._writer or self._open(commits.front.owner))
        try:
            empty = self._stager.without_changes(name)
            columns = writer.recreate(empty, self._lease.guard)
        except TableRejected as error:
            self._table_moves(_Commit(table, table.segment, table.segment, planned=False), table, commits, {name: error}, ())  # fmt: skip
            return
        failpoint("lake-recreated")
        held = {one: row for one, row in commits.held.items() if one != name}
        if table.segment < commits.front.segment:
            held[name] = replace(table, recreate=False, failures=0)
        checkpoint = self.progress.checkpoint

        def change(writer: FencedWriter) -> None:
            writer.lake_commits.recreated(self._sink_id, _source(empty.source), name, columns)
            if (
                not held
            ):  # the checkpoint does not move, but the sink may have failed because of this table
                writer.checkpoints.advance(
                    self._sink_id,
                    checkpoint.segment,
                    checkpoint.ordinal,
                    complete=checkpoint.complete,
                    source_position=None,
                )

        self._record(change, replace(commits, held=held))

    def _write(
        self, rows: Sequence[SegmentRow], commit: _Commit, commits: LakeCommits
    ) -> tuple[Sequence[TableWrite], Mapping[Destination, Exception]] | None:
        """Write a commit; return what tables got and which cannot be written, or None if asked to stop."""
        destination = commit.destination
        self._lease.guard()
        staged = self._stager.stage(
            rows,
            only=None if destination is None else frozenset({destination}),
            skip=frozenset(commits.held) if destination is None else frozenset(),
        )
        rejected: dict[Destination, Exception] = dict(staged.failed)
        stored = {
            one.write.destination: one
            for one in self._store.lake_commits.tables(self._pipeline)
            if one.sink == self._sink_id
        }
        reached = {table: one.segment for table, one in stored.items()}
        written = {table for table, segment in reached.items() if segment <= commit.after}
        left = {table: dict(stored[table].write.columns) for table in written}
        former = {one.write.source: one.write.destination for one in stored.values()}
        complete = self._complete(reached, commit, commits)
        writes: list[TableWrite] = []
        try:
            failpoint("lake-staged")
            beside = self._plan_pending(staged.tables, commit, commits)
            for table in staged.tables:
                if table.destination in complete:
                    continue
                before = former.get(_source(table.source), table.destination)
                if before != table.destination and not self._stager.is_log:
                    rejected[table.destination] = self._stager.elsewhere(table.source, before)
                    continue
                if self._thread.stop.is_set():
                    return None
                self._lease.guard()
                self._meter.sends()
                writer = self._writer or self._open(commits.front.owner)
                known = commits.pending.get(table.destination)
                to = _Route(commit.last, table.destination in beside, table.destination in written)
                as_left = replace(table, left=left.get(table.destination, {}))
                try:
                    made, pending = self._apply(writer, as_left, to, known)
                except TableRejected as error:
                    rejected[table.destination] = error
                    continue
                failpoint("lake-table-committed")
                writes.append(_table_write(table, made, rows[-1], pending=pending))
                self._meter.wrote(table.changes)
                self.progress.rows += table.changes
                self.progress.moved_at = time.monotonic()
        finally:
            staged.discard()
        return writes, rejected

    def _complete(
        self, reached: Mapping[Destination, int], commit: _Commit, commits: LakeCommits
    ) -> AbstractSet[Destination]:
        """Return the tables that have a commit, which is one after a `restart`, because the store says so.

        What it says is of this series of commits only up to where the front has been before (`LakeFront.ends`).
        """
        before = max(commits.front.ends, default=0)
        if not self._by_store or commit.table is not None:
            return frozenset()
        return {table for table, segment in reached.items() if commit.last <= segment <= before}

    def _plan_pending(
        self, tables: Sequence[StagedTable], commit: _Commit, commits: LakeCommits
    ) -> AbstractSet[Destination]:
        """Return the tables for which a commit is added to the pending changes, after storing which ones they are."""
        beside: dict[Destination, tuple[str, str | None, str]] = {}
        planned: set[Destination] = set()
        limits = self._limits.pending
        for one in tables:
            known = commits.pending.get(one.destination)
            if known is not None and known.segment >= commit.last:
                planned.add(one.destination)
            elif limits is None or one.changes >= limits.fold_changes:
                continue
            if all(step.kind == "rows" for step in one.steps):
                beside[one.destination] = one.source
        new = {one: source for one, source in beside.items() if one not in planned}
        if new:
            self._lease.write(
                lambda writer: writer.lake_commits.plan_pending(self._sink_id, new, commit.last)
            )
            failpoint("lake-pending-planned")
        return beside.keys()

    def _apply(
        self, writer: CommitWriter, table: StagedTable, to: _Route, known: PendingTable | None
    ) -> tuple[WrittenTable, bool]:
        """Write a commit to a table; return it as it is then, and whether it has pending changes."""
        guard = self._lease.guard
        required = known is not None and known.changes > 0
        if to.beside or required:
            folding = _pending_writer(writer)
            add = folding.append if to.beside else folding.commit
            made = add(table, to.through, guard, exists=to.exists, required=required)
        else:
            made = writer.commit(table, to.through, guard, exists=to.exists)
        # After a step back of the checkpoint, later changes may be pending.
        last = to.through if known is None else max(to.through, known.segment)
        if not to.beside:
            return made, last > to.through
        now = self._store.now()
        changes, since = (0, now) if known is None else (known.changes, known.since)
        if not self._limits.folds(changes + table.changes, since, now):
            return made, True
        failpoint("lake-pending-added")
        return _pending_writer(writer).fold(table, last, guard, "after", required=True), False

    def _fold(self, pending: PendingTable, commits: LakeCommits) -> None:
        """Fold pending changes between commits, and hold the table if that is not possible."""
        name = pending.destination
        error = self._folded(pending, commits).get(name)
        if error is None:
            self._record(lambda _writer: None, commits)
            return
        now = self._store.now()
        rejection = self._rejection(name, error, 0, now)
        held = _held(rejection, commits.front.segment, None, now)
        self._record(
            lambda writer: writer.lake_commits.hold(self._sink_id, rejection),
            replace(commits, held={**commits.held, name: held}),
        )

    def _folded(
        self, pending: PendingTable, commits: LakeCommits
    ) -> Mapping[Destination, TableRejected]:
        """Fold the pending changes of a table; return why if that is not possible."""
        table = StagedTable(
            pending.destination, pending.source, TypedSchema(()), (), frozenset(), (), 0
        )
        writer = self._writer or self._open(commits.front.owner)
        through = max(commits.front.segment, pending.segment)
        required = pending.changes > 0
        try:
            _pending_writer(writer).fold(
                table, through, self._lease.guard, "later", required=required
            )
        except TableRejected as error:
            return {pending.destination: error}
        self._lease.write(
            lambda writer: writer.lake_commits.folded(self._sink_id, pending.destination)
        )
        return {}

    def _open(self, owner: str) -> CommitWriter:
        self._writer = self._opened.enter_context(self._open_writer(owner))
        self._meter.opened()
        return self._writer

    def _front_moves(
        self,
        commit: _Commit,
        commits: LakeCommits,
        rows: Sequence[SegmentRow],
        rejected: Mapping[Destination, Exception],
        writes: Sequence[TableWrite],
    ) -> None:
        """Move the front to the end of a commit, and hold the tables that could not be written."""
        now = self._store.now()
        rejections = [self._rejection(one, error, 0, now) for one, error in rejected.items()]
        held = {one.destination: _held(one, commit.after, commit.last, now) for one in rejections}
        after = LakeCommits(
            replace(commits.front, segment=commit.last, planned_to=None), {**commits.held, **held}
        )
        self._record(
            lambda writer: writer.lake_commits.advance(
                self._sink_id, commit.last, rejections, writes
            ),
            after,
            rows,
        )

    def _table_moves(
        self,
        commit: _Commit,
        table: HeldTable,
        commits: LakeCommits,
        rejected: Mapping[Destination, Exception],
        writes: Sequence[TableWrite],
    ) -> None:
        """Record what became of a commit to a held table."""
        name = table.destination
        if self._asked is not None:
            self._asked.discard(name)
        error = rejected.get(name)
        held = {one: row for one, row in commits.held.items() if one != name}
        if error is not None:
            rejection = self._rejection(name, error, table.failures, self._store.now())
            held[name] = replace(
                table,
                error=rejection.error,
                remedy=rejection.remedy,
                next_attempt_at=rejection.next_attempt_at,
                failures=table.failures + 1,
            )
            self._record(
                lambda writer: writer.lake_commits.tried(self._sink_id, rejection),
                replace(commits, held=held),
            )
            return
        if commit.last < commits.front.segment:
            held[name] = replace(table, segment=commit.last, planned_to=None, failures=0)
        self._record(
            lambda writer: writer.lake_commits.wrote(self._sink_id, name, commit.last, writes),
            replace(commits, held=held),
            released=True,
        )

    def _rejection(
        self, destination: Destination, error: Exception, failures: int, now: float
    ) -> Rejection:
        limits = self._context.spec.spec.engine.deliver
        backoff = Backoff(limits.backoff_initial_seconds, limits.backoff_max_seconds, failures)
        at = now + backoff.next_delay()
        if isinstance(error, DeltaforgeError):
            return Rejection(destination, error.text, at, error.remedy)
        return Rejection(destination, str(error), at)

    def _record(
        self,
        change: Callable[[FencedWriter], object],
        after: LakeCommits,
        rows: Sequence[SegmentRow] = (),
        *,
        released: bool = False,
    ) -> None:
        """Write what became of a commit, with the checkpoint, counts and, if tables are held, the failure.

        Args:
            change: Writes it.
            after: How far the tables have come then.
            rows: The segments that the front has passed.
            released: Whether a table may be held no longer, so that without others the failure has ended.
        """
        checkpoint = self.progress.checkpoint
        moves = after.reached > checkpoint.whole_segment or (released and not after.held)
        reached = self._context.segments.segment(after.reached) if moves else None
        tally = self._meter.passed(rows)
        failing = _failing(after.held)
        why, held = _held_text(self._sink_id, failing), failing.values()

        def write(writer: FencedWriter) -> None:
            moved = change(writer)
            if reached is not None:
                writer.checkpoints.advance(
                    self._sink_id,
                    reached.segment,
                    reached.rows - 1,
                    complete=True,
                    source_position=reached.end_position,
                    tally=tally,
                )
            elif moved is not False:
                writer.metrics.count(tally)
            if held:
                writer.checkpoints.held(
                    self._sink_id,
                    why,
                    remedy=_held_remedy(failing),
                    failures=max(1, *(one.failures for one in held)),
                    since=min(one.since for one in held),
                    next_attempt_at=min(one.next_attempt_at for one in held),
                )

        self._lease.write(write)
        if reached is not None:
            self.progress.checkpoint = replace(
                checkpoint,
                segment=reached.segment,
                ordinal=reached.rows - 1,
                complete=True,
                source_position=reached.end_position,
            )
        self.progress.moved_at = time.monotonic()
        self._thread.attempts.succeeded()
        if self._thread.stop.is_set():
            self._show_held(after.held)  # nothing comes that would say why the sink is behind
        failpoint("checkpoint-written")

    def _show_held(self, held: Mapping[Destination, HeldTable]) -> None:
        """Show the sink as failing because of held tables, or no longer."""
        attempts = self._thread.attempts
        if attempts.error is not None and attempts.error is not self._held_error:
            return
        failing = _failing(held)
        self._held_error = None
        if failing:
            self._held_error = TableRejected(
                _held_text(self._sink_id, failing), remedy=_held_remedy(failing)
            )
        attempts.error = self._held_error


def _pending_writer(writer: CommitWriter) -> PendingWriter:
    """Return the writer of a sink that has, or had, pending changes: only kinds whose writer folds them have any."""
    return cast("PendingWriter", writer)


def _table_write(
    table: StagedTable, made: WrittenTable, last: SegmentRow, *, pending: bool
) -> TableWrite:
    """Return what a commit, whose last segment with changes is `last`, has added to a table."""
    return TableWrite(
        _source(table.source),
        table.destination,
        made.columns,
        table.changes,
        last.end_position,
        last.last_ts_us / 1e6,
        pending,
        made.figures,
        tuple(sorted(table.identities[name] for name in table.unfilled)),
        made.int64_timestamps,
    )


def _source(table: TableName) -> tuple[str, str]:
    """Return a table of the source as the state store names it."""
    database, schema, name = table
    return schema or database, name


def _held(rejection: Rejection, segment: int, planned_to: int | None, now: float) -> HeldTable:
    """Return a table that has everything up to a segment and could not be written after it."""
    return HeldTable(
        rejection.destination,
        segment,
        planned_to,
        rejection.error,
        now,
        rejection.next_attempt_at,
        1,
        rejection.remedy,
    )


def _failing(held: Mapping[Destination, HeldTable]) -> Mapping[Destination, HeldTable]:
    """Return the held tables without those that are about to be recreated, which is no failure."""
    return {name: one for name, one in held.items() if one.failures or not one.recreate}


def _held_text(sink_id: str, held: Mapping[Destination, HeldTable]) -> str:
    """Return which tables of a sink are held, and why."""
    reasons = [
        f"table {'.'.join(one.destination)} has everything up to segment {one.segment} and is held: {one.error}"
        for one in held.values()
    ]
    return f"sink {sink_id}: " + "; ".join(reasons)


def _held_remedy(held: Mapping[Destination, HeldTable]) -> Commands:
    """Return the commands that let the held tables of a sink go on."""
    return tuple(dict.fromkeys(command for one in held.values() for command in one.remedy))
