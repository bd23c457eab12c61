"""Delivers changes to the tables of one sink in commits, each planned before anything is written.

A commit adds consecutive segments to all tables. It is due once the oldest of them is
`commit_seconds` old, or they have `commit_changes` changes (`CommitLimits`), or at once if the run
only catches up. The steps of a commit:

1. the plan, that is, which segments the commit covers, is stored in the state store;
2. Spark's tasks write the changes to files, by table (`stage`);
3. the files are added to one table after the other (`writer`), to each atomically and with a mark
   of the commit, so that a table recognizes a commit that it already has;
4. the front and the checkpoint move (`state.table_commits`).

A planned commit that was not finished, because the run was killed or something failed, is repeated
with exactly the same segments. A table that cannot be written is *suspended*, while the other
tables go on: it is tried again after a while, first with the commit that failed, then with the
segments after it, until it has reached the front. Meanwhile the checkpoint stays before the first
segment that a suspended table lacks.

With pending changes, a commit is not applied to a table but kept beside it, unless the commit is
large or has steps of another kind than `rows`. The state store records first that the commit goes
beside the table. Pending changes are folded into the table (`writer`) when there are many or they
are old: with a commit, or between commits.

A table that is to be loaded again (a *resync*) is suspended at the front while no commit is
planned, and in the same transaction a snapshot for this sink is requested. Then the table is
recreated, without rows and without pending changes, and is no longer suspended: commits bring the
changes after the front and the snapshot's rows, as for a new sink. The other tables are not
affected. A fold that was interrupted need not be finished: it would have moved rows that recreating
removes from both the table and its pending changes.

If the sink's option `table` has changed, the new table for a table of the source lacks the rows
that the former one has, or was to get. The new table is suspended until it is loaded again.
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
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import FencedWriter
from deltaforge_dagster.state.table_commits import (
    TO_BE_RECREATED,
    Destination,
    PendingTable,
    Rejection,
    StoredWrite,
    SuspendedTable,
    TableCommits,
    TableFront,
    TableResync,
    TableWrite,
)
from deltaforge_dagster.typed_rows.schema import TypedSchema

MOST_SEGMENTS = 2000
"""Maximum number of segments in a commit."""


class Stager(Protocol):
    """Writes changes to files (`stage.TableStager`)."""

    def stage(
        self,
        segments: Sequence[SegmentRow],
        *,
        only: frozenset[Destination] | None = None,
        skip: frozenset[Destination] = frozenset(),
    ) -> StagedCommit:
        """Return the changes of segments: of some tables only, or of all tables but some."""
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
        """Return the error for a table whose earlier rows belong to a former destination."""
        ...

    @property
    def is_log(self) -> bool:
        """Whether tables keep each change as a row, so that a new one may begin with any change."""
        ...


class Skips(Protocol):
    """Skips segments that a sink already has (`deliver.resumption.Resumption`)."""

    looked_up_to: str | None

    def skip_segments(self, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Return the checkpoint after these segments; None while more must be captured first."""
        ...


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """When a commit is due.

    Attributes:
        seconds: A commit is due when its oldest segment is this many seconds old.
        changes: A commit is due when there are this many changes; one of several segments has no
            more.
        at_once: Whether a commit is due as soon as there is anything.
        until: A commit contains nothing after this segment.
        pending: When pending changes are folded; None if there are to be none.
        bytes: A commit is due when the files of its segments have this many bytes; one of several
            segments has no more. None for any number.
        idle_seconds: A commit is due when its newest segment for this sink is this many seconds
            old; None for never.
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
        """Return whether these are too many changes or bytes for a commit of several segments."""
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
    """The segments after `after` up to `last`, for one suspended table or for all others."""

    table: SuspendedTable | None
    after: int
    last: int
    planned: bool

    @property
    def destination(self) -> Destination | None:
        return None if self.table is None else self.table.destination


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a commit up to segment `through` goes: beside the table or into it.

    `exists` is whether the table must exist already.
    """

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
        stager: Writes changes to files.
        open_writer: Opens the writer of the tables, given the id of the series of commits; closing
            it ends what is under way.
        skips: Moves the checkpoint past segments that the sink already has.
        by_store: Whether only the state store knows how far each table has come, because the tables
            themselves cannot tell. Then segments that a table has are not written to it again after
            the checkpoint was set back.
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
        self._commits: TableCommits | None = None
        self._pending: list[SegmentRow] = []
        self._next: _Commit | PendingTable | None = None
        self._begins: Sequence[TableResync] = ()
        self.redriving = True
        self._retry_at_once: set[Destination] | None = None if limits.until is not None else set()
        self._suspended_error: TableRejected | None = None
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
        self.redriving = bool(self._begins) or any(
            table.recreate for table in commits.suspended.values()
        )
        self._show_suspended(
            {} if self._next or self._pending or self._begins else commits.suspended
        )
        return bool(self._begins) or self._next is not None

    def deliver(self) -> None:
        """Plan a commit unless it is planned, write it, and move the front and the checkpoint.

        If something else is due instead: fold pending changes, recreate a table, or begin resyncs.
        """
        work, commits = self._next, self._commits
        assert commits is not None
        self._busy = True
        try:
            self._commits = None  # read again, whether this succeeds or not
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
        """Return whether the sink fails, or only suspended tables lack anything."""
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

    def _load(self) -> TableCommits | None:
        """Return how far the tables have come; None while it is unknown what the sink has."""
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
        commits = self._store.table_commits.read(self._pipeline, self._sink_id)
        segment = checkpoint.whole_segment
        # The sink is new, or something other than a commit has set the checkpoint.
        if commits is None or commits.reached != segment:
            self._lease.write(lambda writer: writer.table_commits.restart(self._sink_id, segment))
            commits = self._store.table_commits.read(self._pipeline, self._sink_id)
        assert commits is not None
        # With `limits.until`, this delivery was requested: suspended tables are tried at once.
        if self._retry_at_once is None:
            self._retry_at_once = set(commits.suspended)
        return commits

    def _resync_begins(self, commits: TableCommits) -> Sequence[TableResync]:
        """Return the resyncs that were requested, have not begun, and can begin now."""
        if (
            self._winding_up
            or self._limits.until is not None
            or commits.front.planned_to is not None
        ):
            return ()
        resyncs = self._store.table_commits.resyncs(self._pipeline, self._sink_id)
        wanted = [resync for resync in resyncs if not resync.begun]
        if wanted and self._store.snapshots.unfinished(self._pipeline) is not None:
            return ()
        return wanted

    def _find(self, commits: TableCommits) -> _Commit | PendingTable | None:
        """Return the commit that is due, or the table whose pending changes are to be folded."""
        front = commits.front
        self._read_pending(front.segment)
        if self._winding_up:
            return None
        if front.planned_to is not None:
            return _Commit(None, front.segment, front.planned_to, planned=True)
        if commits.suspended and (table := self._table_due(commits)) is not None:
            return self._commit_of(table, front)
        if commits.pending and (overdue := self._overdue(commits)) is not None:
            return overdue
        if not self._pending or not self._is_due(self._pending):
            return None
        last = self._last(self._pending, front.ends)
        return _Commit(None, front.segment, last, planned=False)

    def _table_due(self, commits: TableCommits) -> SuspendedTable | None:
        """Return the suspended table that is to be tried now."""
        now = self._store.now()
        asked = self._retry_at_once or set()
        for table in sorted(
            commits.suspended.values(), key=lambda suspended: suspended.next_attempt_at
        ):
            if table.next_attempt_at <= now or table.destination in asked:
                return table
        return None

    def _overdue(self, commits: TableCommits) -> PendingTable | None:
        """Return a table whose pending changes are due to be folded between commits."""
        if self._limits.until is not None:
            return None
        now = self._store.now()
        for table in commits.pending.values():
            due = table.changes > 0 and self._limits.folds(table.changes, table.since, now)
            if due and table.destination not in commits.suspended:
                return table
        return None

    def _commit_of(self, table: SuspendedTable, front: TableFront) -> _Commit:
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
            JournalDamaged: The segment after `after` is no longer in the journal.
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
        own = self._segments_for_sink(rows)
        if limits.full(sum(row.rows for row in rows), sum(row.bytes for row in rows)) or not own:
            return True
        now, idle = self._store.now(), limits.idle_seconds
        if idle is not None and now - own[-1].created_at >= idle:
            return True
        return now - rows[0].created_at >= limits.seconds

    def _last(self, rows: Sequence[SegmentRow], ends: Sequence[int]) -> int:
        """Return the last segment of the commit that begins with the first of `rows`."""
        changes, size, last = rows[0].rows, rows[0].bytes, rows[0]
        for row in rows[1:]:
            changes += row.rows
            size += row.bytes
            if self._limits.exceeded(changes, size) or last.segment in ends:
                break
            last = row
        return last.segment

    def _segments_for_sink(self, rows: Sequence[SegmentRow]) -> list[SegmentRow]:
        """Return the segments that have rows for this sink."""
        return [row for row in rows if row.rows and row.is_for(self._sink_id)]

    def _deliver(self, commit: _Commit, commits: TableCommits) -> None:
        rows = self._rows(commit.after, commit.last)
        if len(rows) != commit.last - commit.after:
            raise JournalDamaged(
                f"{self._pipeline}: segments {commit.after + 1} to {commit.last} of the commit "
                f"that sink {self._sink_id} has planned are not all in the journal"
            )
        own = self._segments_for_sink(rows)
        if commit.table is not None and self._is_abandoned(commit.table, own):
            self._abandon(commit.table, commits)
            return
        rejected: Mapping[Destination, Exception] = {}
        writes: Sequence[TableWrite] = ()
        if own:
            if not commit.planned:
                self._lease.write(
                    lambda writer: writer.table_commits.plan(
                        self._sink_id, commit.last, commit.destination
                    )
                )
            failpoint("table-commit-planned")
            written = self._write(own, commit, commits)
            if written is None:
                return
            writes, rejected = written
            failpoint("table-commit-complete")
        elif commit.table is not None and commit.table.destination in commits.pending:
            rejected = self._folded(commits.pending[commit.table.destination], commits)
        if commit.table is None:
            self._front_moves(commit, commits, rows, rejected, writes)
        else:
            self._table_moves(commit, commit.table, commits, rejected, writes)

    def _is_abandoned(self, table: SuspendedTable, rows: Sequence[SegmentRow]) -> bool:
        """Return whether no rows go to a suspended table any more: the sink's `table` has changed.

        Tables whose names only a processor creates are not registered. Whether rows still go to
        such a table is decided by staging the commit that is repeated, which had rows of it.
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
        """Return the destination to which the sink last wrote each table of the source."""
        return {stored.write.source: stored.write.destination for stored in self._stored_writes()}

    def _stored_writes(self) -> list[StoredWrite]:
        """Return the newest write of each table of the source."""
        return [
            stored
            for stored in self._store.table_commits.tables(self._pipeline)
            if stored.sink == self._sink_id
        ]

    def _abandon(self, table: SuspendedTable, commits: TableCommits) -> None:
        """Suspend other tables in place of a suspended one to which nothing goes any more.

        The others are those that may lack the changes that it lacked: the tables of the source of
        which the sink has written nothing yet, or if there are none, the table whose rows the
        suspended one had.
        """
        name, front = table.destination, commits.front.segment
        former, destinations = self._former_destinations(), self._stager.destinations()
        free = [
            source
            for source, destination in destinations.items()
            if destination not in commits.suspended
        ]
        moved = [source for source in free if _source(source) not in former] or [
            source for source in free if former[_source(source)] == name
        ]
        now = self._store.now()
        rejections = [
            self._rejection(destinations[source], self._stager.elsewhere(source, name), 0, now)
            for source in moved
        ]
        suspended = {
            destination: row
            for destination, row in commits.suspended.items()
            if destination != name
        }
        suspended |= {
            rejection.destination: _suspended_table(rejection, front, None, now)
            for rejection in rejections
        }
        last = self._context.segments.segment(front)
        position = self.progress.checkpoint.source_position if last is None else last.end_position
        assert position is not None, "only a segment that the sink has is gone"
        changed_at = now if last is None else last.last_ts_us / 1e6
        # These writes record where the rows were to go. Without them, nothing would tell at the
        # next attempt that rows are missing, and the tables would no longer be suspended.
        writes = [
            TableWrite(_source(source), name, (), 0, position, changed_at) for source in moved
        ]

        def change(writer: FencedWriter) -> None:
            writer.table_commits.wrote(self._sink_id, name, front, writes)
            for rejection in rejections:
                writer.table_commits.suspend(self._sink_id, rejection)

        self._record(change, replace(commits, suspended=suspended), released=True)

    def _begin_resyncs(self, commits: TableCommits) -> None:
        """Suspend the tables that are to be loaded again, and request their snapshot.

        Nothing happens if another snapshot has been requested meanwhile.
        """
        tables = [resync.destination for resync in self._begins]
        now, front = self._store.now(), commits.front.segment
        recreated = {
            name: SuspendedTable(name, front, None, TO_BE_RECREATED, now, 0.0, 0, recreate=True)
            for name in tables
        }
        with contextlib.suppress(NotAllowed):
            self._record(
                lambda writer: writer.table_commits.begin_resyncs(self._sink_id, tables),
                replace(commits, suspended={**commits.suspended, **recreated}),
            )
            failpoint("table-resync-begun")

    def _recreate(self, table: SuspendedTable, commits: TableCommits) -> None:
        """Replace a suspended table by one without rows or pending changes.

        The table is no longer suspended then, unless the front has moved on meanwhile.
        """
        name = table.destination
        self._lease.guard()
        writer = cast("TableWriter", self._writer or self._open(commits.front.owner))
        try:
            empty = self._stager.without_changes(name)
            columns = writer.recreate(empty, self._lease.guard)
        except TableRejected as error:
            self._table_moves(
                _Commit(table, table.segment, table.segment, planned=False),
                table, commits, {name: error}, (),
            )  # fmt: skip
            return
        failpoint("table-recreated")
        suspended = {
            destination: row
            for destination, row in commits.suspended.items()
            if destination != name
        }
        if table.segment < commits.front.segment:
            suspended[name] = replace(table, recreate=False, failures=0)
        checkpoint = self.progress.checkpoint

        def change(writer: FencedWriter) -> None:
            writer.table_commits.recreated(self._sink_id, _source(empty.source), name, columns)
            # The checkpoint does not move, but the sink may have failed because of this table.
            if not suspended:
                writer.checkpoints.advance(
                    self._sink_id,
                    checkpoint.segment,
                    checkpoint.ordinal,
                    complete=checkpoint.complete,
                    source_position=None,
                )

        self._record(change, replace(commits, suspended=suspended))

    def _write(
        self, rows: Sequence[SegmentRow], commit: _Commit, commits: TableCommits
    ) -> tuple[Sequence[TableWrite], Mapping[Destination, Exception]] | None:
        """Write a commit; return the writes and the rejected tables, or None if asked to stop."""
        destination = commit.destination
        self._lease.guard()
        staged = self._stager.stage(
            rows,
            only=None if destination is None else frozenset({destination}),
            skip=frozenset(commits.suspended) if destination is None else frozenset(),
        )
        rejected: dict[Destination, Exception] = dict(staged.failed)
        stored = {write.write.destination: write for write in self._stored_writes()}
        reached = {table: write.segment for table, write in stored.items()}
        written = {table for table, segment in reached.items() if segment <= commit.after}
        left = {table: dict(stored[table].write.columns) for table in written}
        former = {write.write.source: write.write.destination for write in stored.values()}
        complete = self._complete(reached, commit, commits)
        writes: list[TableWrite] = []
        try:
            failpoint("table-commit-staged")
            planned = self._plan_pending(staged.tables, commit, commits)
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
                pending_table = commits.pending.get(table.destination)
                to = _Route(commit.last, table.destination in planned, table.destination in written)
                as_left = replace(table, left=left.get(table.destination, {}))
                try:
                    written_table, pending = self._apply(writer, as_left, to, pending_table)
                except TableRejected as error:
                    rejected[table.destination] = error
                    continue
                failpoint("table-committed")
                writes.append(_table_write(table, written_table, rows[-1], pending=pending))
                self._meter.wrote(table.changes)
                self.progress.rows += table.changes
                self.progress.moved_at = time.monotonic()
        finally:
            staged.discard()
        return writes, rejected

    def _complete(
        self, reached: Mapping[Destination, int], commit: _Commit, commits: TableCommits
    ) -> AbstractSet[Destination]:
        """Return the tables that already have a commit, according to the state store.

        This concerns commits that are repeated after a `restart`. What the store says applies to
        this series of commits only up to where the front has been before (`TableFront.ends`).
        """
        before = max(commits.front.ends, default=0)
        if not self._by_store or commit.table is not None:
            return frozenset()
        return {table for table, segment in reached.items() if commit.last <= segment <= before}

    def _plan_pending(
        self, tables: Sequence[StagedTable], commit: _Commit, commits: TableCommits
    ) -> AbstractSet[Destination]:
        """Store which tables get a commit as pending changes, and return them."""
        pending_sources: dict[Destination, tuple[str, str | None, str]] = {}
        planned: set[Destination] = set()
        limits = self._limits.pending
        for table in tables:
            pending = commits.pending.get(table.destination)
            if pending is not None and pending.segment >= commit.last:
                planned.add(table.destination)
            elif limits is None or table.changes >= limits.fold_changes:
                continue
            if all(step.kind == "rows" for step in table.steps):
                pending_sources[table.destination] = table.source
        unplanned = {
            destination: source
            for destination, source in pending_sources.items()
            if destination not in planned
        }
        if unplanned:
            self._lease.write(
                lambda writer: writer.table_commits.plan_pending(
                    self._sink_id, unplanned, commit.last
                )
            )
            failpoint("table-pending-planned")
        return pending_sources.keys()

    def _apply(
        self,
        writer: CommitWriter,
        table: StagedTable,
        to: _Route,
        pending_table: PendingTable | None,
    ) -> tuple[WrittenTable, bool]:
        """Write a commit to a table; return the new state, and whether changes are pending."""
        guard = self._lease.guard
        required = pending_table is not None and pending_table.changes > 0
        if to.beside or required:
            folding = _pending_writer(writer)
            add = folding.append if to.beside else folding.commit
            written = add(table, to.through, guard, exists=to.exists, required=required)
        else:
            written = writer.commit(table, to.through, guard, exists=to.exists)
        # After the checkpoint was set back, changes after this commit may be pending.
        last = to.through if pending_table is None else max(to.through, pending_table.segment)
        if not to.beside:
            return written, last > to.through
        now = self._store.now()
        changes, since = (
            (0, now) if pending_table is None else (pending_table.changes, pending_table.since)
        )
        if not self._limits.folds(changes + table.changes, since, now):
            return written, True
        failpoint("table-pending-added")
        return _pending_writer(writer).fold(table, last, guard, "after", required=True), False

    def _fold(self, pending: PendingTable, commits: TableCommits) -> None:
        """Fold pending changes between commits, and suspend the table if it cannot be written."""
        name = pending.destination
        error = self._folded(pending, commits).get(name)
        if error is None:
            self._record(lambda _writer: None, commits)
            return
        now = self._store.now()
        rejection = self._rejection(name, error, 0, now)
        suspended = _suspended_table(rejection, commits.front.segment, None, now)
        self._record(
            lambda writer: writer.table_commits.suspend(self._sink_id, rejection),
            replace(commits, suspended={**commits.suspended, name: suspended}),
        )

    def _folded(
        self, pending: PendingTable, commits: TableCommits
    ) -> Mapping[Destination, TableRejected]:
        """Fold the pending changes of a table; return the error if it is rejected."""
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
            lambda writer: writer.table_commits.folded(self._sink_id, pending.destination)
        )
        return {}

    def _open(self, owner: str) -> CommitWriter:
        self._writer = self._opened.enter_context(self._open_writer(owner))
        self._meter.opened()
        return self._writer

    def _front_moves(
        self,
        commit: _Commit,
        commits: TableCommits,
        rows: Sequence[SegmentRow],
        rejected: Mapping[Destination, Exception],
        writes: Sequence[TableWrite],
    ) -> None:
        """Move the front to the end of a commit; suspend the tables that could not be written."""
        now = self._store.now()
        rejections = [
            self._rejection(destination, error, 0, now) for destination, error in rejected.items()
        ]
        suspended = {
            rejection.destination: _suspended_table(rejection, commit.after, commit.last, now)
            for rejection in rejections
        }
        after = TableCommits(
            replace(commits.front, segment=commit.last, planned_to=None),
            {**commits.suspended, **suspended},
        )
        self._record(
            lambda writer: writer.table_commits.advance(
                self._sink_id, commit.last, rejections, writes
            ),
            after,
            rows,
        )

    def _table_moves(
        self,
        commit: _Commit,
        table: SuspendedTable,
        commits: TableCommits,
        rejected: Mapping[Destination, Exception],
        writes: Sequence[TableWrite],
    ) -> None:
        """Record the outcome of a commit to a suspended table."""
        name = table.destination
        if self._retry_at_once is not None:
            self._retry_at_once.discard(name)
        error = rejected.get(name)
        suspended = {
            destination: row
            for destination, row in commits.suspended.items()
            if destination != name
        }
        if error is not None:
            rejection = self._rejection(name, error, table.failures, self._store.now())
            suspended[name] = replace(
                table,
                error=rejection.error,
                remedy=rejection.remedy,
                next_attempt_at=rejection.next_attempt_at,
                failures=table.failures + 1,
            )
            self._record(
                lambda writer: writer.table_commits.tried(self._sink_id, rejection),
                replace(commits, suspended=suspended),
            )
            return
        if commit.last < commits.front.segment:
            suspended[name] = replace(table, segment=commit.last, planned_to=None, failures=0)
        self._record(
            lambda writer: writer.table_commits.wrote(self._sink_id, name, commit.last, writes),
            replace(commits, suspended=suspended),
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
        after: TableCommits,
        rows: Sequence[SegmentRow] = (),
        *,
        released: bool = False,
    ) -> None:
        """Write the outcome of a commit: checkpoint, counts, and the failure of suspended tables.

        Args:
            change: Writes the outcome.
            after: How far the tables have come afterwards.
            rows: The segments that the front has passed.
            released: Whether a table may no longer be suspended; if no other is, the failure has
                ended.
        """
        checkpoint = self.progress.checkpoint
        moves = after.reached > checkpoint.whole_segment or (released and not after.suspended)
        reached = self._context.segments.segment(after.reached) if moves else None
        tally = self._meter.passed(rows)
        failing = _failing(after.suspended)
        reason, suspended = _suspended_text(self._sink_id, failing), failing.values()

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
            if suspended:
                writer.checkpoints.suspended(
                    self._sink_id,
                    reason,
                    remedy=_suspended_remedy(failing),
                    failures=max(1, *(table.failures for table in suspended)),
                    since=min(table.since for table in suspended),
                    next_attempt_at=min(table.next_attempt_at for table in suspended),
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
            self._show_suspended(
                after.suspended
            )  # no later call of `due` will show why the sink is behind
        failpoint("checkpoint-written")

    def _show_suspended(self, suspended: Mapping[Destination, SuspendedTable]) -> None:
        """Show the sink as failing because of suspended tables, or as no longer failing."""
        attempts = self._thread.attempts
        if attempts.error is not None and attempts.error is not self._suspended_error:
            return
        failing = _failing(suspended)
        self._suspended_error = None
        if failing:
            self._suspended_error = TableRejected(
                _suspended_text(self._sink_id, failing), remedy=_suspended_remedy(failing)
            )
        attempts.error = self._suspended_error


def _pending_writer(writer: CommitWriter) -> PendingWriter:
    """Return the writer as one that folds: only sinks with such a writer have pending changes."""
    return cast("PendingWriter", writer)


def _table_write(
    table: StagedTable, written: WrittenTable, last: SegmentRow, *, pending: bool
) -> TableWrite:
    """Return what a commit, whose last segment with changes is `last`, has added to a table."""
    return TableWrite(
        _source(table.source),
        table.destination,
        written.columns,
        table.changes,
        last.end_position,
        last.last_ts_us / 1e6,
        pending,
        written.figures,
        tuple(sorted(table.identities[name] for name in table.unfilled)),
        written.int64_timestamps,
    )


def _source(table: TableName) -> tuple[str, str]:
    """Return a table of the source as the state store names it."""
    database, schema, name = table
    return schema or database, name


def _suspended_table(
    rejection: Rejection, segment: int, planned_to: int | None, now: float
) -> SuspendedTable:
    """Return a table that has everything up to a segment and could not be written after it."""
    return SuspendedTable(
        rejection.destination,
        segment,
        planned_to,
        rejection.error,
        now,
        rejection.next_attempt_at,
        1,
        rejection.remedy,
    )


def _failing(
    suspended: Mapping[Destination, SuspendedTable],
) -> Mapping[Destination, SuspendedTable]:
    """Return the suspended tables that failed; waiting to be recreated is no failure."""
    return {
        name: table for name, table in suspended.items() if table.failures or not table.recreate
    }


def _suspended_text(sink_id: str, suspended: Mapping[Destination, SuspendedTable]) -> str:
    """Return which tables of a sink are suspended, and why."""
    reasons = [
        f"table {'.'.join(table.destination)} has everything up to segment {table.segment} "
        f"and is held: {table.error}"
        for table in suspended.values()
    ]
    return f"sink {sink_id}: " + "; ".join(reasons)


def _suspended_remedy(suspended: Mapping[Destination, SuspendedTable]) -> Commands:
    """Return the commands that remedy the failures of a sink's suspended tables."""
    return tuple(dict.fromkeys(command for table in suspended.values() for command in table.remedy))
