"""Delivers changes to the tables of one sink in commits, each planned before anything is written.

A commit adds consecutive segments to all tables. It is due once the oldest of them is
`commit_seconds` old, or they have `commit_changes` changes (`CommitLimits`), or at once if the run
only catches up. The steps of a commit:

1. the plan, that is, which segments the commit covers, is stored in the state store;
2. Spark's tasks write the changes to files, by table (`stage`);
3. the files are added to one table after the other (`committer`), to each atomically and with a
   mark of the commit, so that a table recognizes a commit that it already has;
4. the front and the checkpoint move (`recorder`).

A planned commit that was not finished, because the run was killed or something failed, is repeated
with exactly the same segments. A table that cannot be written is *suspended*, while the other
tables go on: it is tried again after a while, first with the commit that failed, then with the
segments after it, until it has reached the front. Meanwhile the checkpoint stays before the first
segment that a suspended table lacks.

With pending changes, a commit is not applied to a table but kept beside it, unless the commit is
large or has steps of another kind than `rows`. The state store records first that the commit goes
beside the table. Pending changes are folded into the table when there are many or they are old:
with a commit, or between commits.

A table that is to be loaded again (a *resync*) is suspended at the front while no commit is
planned, and in the same transaction a snapshot for this sink is requested. Then the table is
recreated, without rows and without pending changes, and is no longer suspended: commits bring the
changes after the front and the snapshot's rows, as for a new sink. The other tables are not
affected. A fold that was interrupted need not be finished: it would have moved rows that recreating
removes from both the table and its pending changes.

If the sink's option `table` has changed, the new table for a table of the source lacks the rows
that the former one has, or was to get. The new table is suspended until it is loaded again.

`planner` decides what is done next, `committer` writes to the tables, and `recorder` writes to the
state store. `TableDelivery` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    StoreUnavailable,
    TableRejected,
)
from deltaforge_dagster.pipeline.delivery import AwaitsCapture, DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.tables.committer import Stager, TableCommitter, WrittenCommit
from deltaforge_dagster.pipeline.tables.planner import (
    MOST_SEGMENTS,
    CommitLimits,
    PendingFold,
    PlannedCommit,
    ResyncStart,
    TablePlanner,
    TableRecreation,
    TableStates,
    TableWork,
    is_abandoned,
    tables_in_place_of,
)
from deltaforge_dagster.pipeline.tables.recorder import TableProgress, TableRecorder
from deltaforge_dagster.sinks.tables.writer import CommitWriter
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.table_commits import Destination, SuspendedTable, TableCommits


class Skips(Protocol):
    """Skips segments that a sink already has (`deliver.resumption.Resumption`)."""

    looked_up_to: str | None

    def skip_segments(self, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Return the checkpoint after these segments; None while more must be captured first."""
        ...


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
        by_store: See `TablePlanner`.
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
        self.begins_at = checkpoint.next_attempt_at
        self.redriving = True
        self._context = context
        self._store = context.run.store
        self._lease = context.run.lease
        self._thread = thread
        self._stager = stager
        self._skips = skips
        self._planner = TablePlanner(context.sink_id, limits, by_store, stager.is_log)
        self._recorder = TableRecorder(context, checkpoint, thread)
        self._committer = TableCommitter(
            context,
            thread,
            self._planner,
            self._recorder,
            stager=stager,
            open_writer=open_writer,
        )
        self._commits: TableCommits | None = None
        self._segments: list[SegmentRow] = []
        self._next: TableWork | None = None
        # A delivery with `until` was requested: it tries each suspended table once at once.
        self._retried: set[Destination] | None = None if limits.until is not None else set()
        self._busy = self._winding_up = False

    @property
    def progress(self) -> TableProgress:
        """How far the tables have come."""
        return self._recorder.progress

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
        self._read_segments(commits.front.segment)
        self._next = None if self._winding_up else self._next_work(commits)
        self.redriving = isinstance(self._next, ResyncStart) or any(
            table.recreate for table in commits.suspended.values()
        )
        # While there is work, the sink is not stuck, and the run waits for it.
        self._recorder.show_suspended({} if self._next or self._segments else commits.suspended)
        return self._next is not None

    def deliver(self) -> None:
        """Do what `due` has found: a commit, a fold, or a step of a resync."""
        work, commits = self._next, self._commits
        assert work is not None
        assert commits is not None
        self._busy = True
        try:
            self._commits = None  # read again, whether this succeeds or not
            match work:
                case ResyncStart(tables):
                    self._recorder.resyncs_began(tables, commits)
                case PendingFold():
                    error = self._committer.fold(work, commits.front.owner)
                    self._recorder.fold_ended(work, error, commits)
                case TableRecreation(table):
                    self._recreate(table, commits)
                case PlannedCommit():
                    self._commit(work, commits)
        finally:
            self._busy = False

    def failed(self, error: DeltaforgeError) -> None:
        """Close the writer, unless only the store failed; the commit is repeated."""
        self._commits = None
        self._segments.clear()
        if not isinstance(error, StoreUnavailable):
            self.close()

    def stuck(self, captured: str | None) -> bool:
        """Whether the sink fails, or tables are suspended while the others have everything."""
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
        self._committer.close()

    def _load(self) -> TableCommits | None:
        """Return how far the tables have come; None while it is unknown what the sink has."""
        pipeline, sink_id = self._lease.pipeline, self._context.sink_id
        if self.progress.checkpoint.skip is not None and not self._skip_segments():
            return None
        commits = self._store.table_commits.read(pipeline, sink_id)
        segment = self.progress.checkpoint.whole_segment
        # The sink is new, or something other than a commit has set the checkpoint.
        if commits is None or commits.reached != segment:
            self._lease.write(lambda writer: writer.table_commits.restart(sink_id, segment))
            commits = self._store.table_commits.read(pipeline, sink_id)
        assert commits is not None
        if self._retried is None:
            self._retried = set(commits.suspended)
        return commits

    def _skip_segments(self) -> bool:
        """Move the checkpoint past segments that the sink has; return whether it knows them all."""
        checkpoint, attempts = self.progress.checkpoint, self._thread.attempts
        if self._context.segments.segment(checkpoint.whole_segment + 1) is None:
            return False
        moved = self._skips.skip_segments(checkpoint)
        if moved is None:
            attempts.error = AwaitsCapture(self._context.sink_id)
            return False
        if isinstance(attempts.error, AwaitsCapture):
            attempts.error = None
        self.progress.checkpoint = moved
        return True

    def _next_work(self, commits: TableCommits) -> TableWork | None:
        pipeline = self._lease.pipeline
        resyncs = self._store.table_commits.resyncs(pipeline, self._context.sink_id)
        requested = any(not resync.begun for resync in resyncs)
        # An idle sink asks the store no more than it must.
        timed = bool(self._segments or commits.suspended or commits.pending)
        states = TableStates(
            commits,
            self._segments,
            resyncs,
            in_snapshot=requested and self._store.snapshots.unfinished(pipeline) is not None,
            now=self._store.now() if timed else 0.0,
            retried=frozenset(self._retried or ()),
        )
        work = self._planner.next_work(states)
        if not isinstance(work, SuspendedTable):
            return work
        front = commits.front
        segments: Sequence[SegmentRow] = ()
        if work.planned_to is None:
            segments = self._read(work.segment, front.segment, limit=MOST_SEGMENTS)
        return self._planner.catch_up(work, front, segments)

    def _read_segments(self, front: int) -> None:
        """Make `_segments` the segments after the front, up to `MOST_SEGMENTS`."""
        self._segments = [row for row in self._segments if row.segment > front]
        if len(self._segments) < MOST_SEGMENTS:
            after = self._segments[-1].segment if self._segments else front
            room = MOST_SEGMENTS - len(self._segments)
            self._segments += self._read(after, self._planner.limits.until, limit=room)

    def _read(self, after: int, last: int | None, *, limit: int | None = None) -> list[SegmentRow]:
        """Return the segments after one that are ready.

        Raises:
            JournalDamaged: The segment after `after` is no longer in the journal.
        """
        rows = self._context.segments.segments(first=after + 1, last=last, limit=limit)
        if rows and rows[0].segment != after + 1:
            raise JournalDamaged(
                f"{self._lease.pipeline}: segment {after + 1} is not in the journal any more, and "
                f"sink {self._context.sink_id} lacks it"
            )
        return rows

    def _commit(self, commit: PlannedCommit, commits: TableCommits) -> None:
        """Plan a commit unless it is planned, write it, and record what has become of it."""
        segments = self._read(commit.after, commit.last)
        if len(segments) != commit.last - commit.after:
            raise JournalDamaged(
                f"{self._lease.pipeline}: segments {commit.after + 1} to {commit.last} of the "
                f"commit that sink {self._context.sink_id} has planned are not all in the journal"
            )
        own, table = self._planner.own_segments(segments), commit.table
        if table is not None and self._is_abandoned(table, own):
            self._abandon(table, commits)
            return
        if own:
            self._recorder.plan(commit)
            written = self._committer.write(own, commit, commits)
            if written is None:
                return
            failpoint("table-commit-complete")
        else:
            written = self._fold_suspended(commit, commits)
        if table is None:
            self._recorder.front_moved(commit, commits, segments, written.writes, written.rejected)
            return
        self._tried(table)
        if (error := written.rejected.get(table.destination)) is not None:
            self._recorder.table_failed(table, error, commits)
        else:
            self._recorder.table_moved(table, commit.last, commits, written.writes)

    def _fold_suspended(self, commit: PlannedCommit, commits: TableCommits) -> WrittenCommit:
        """Fold what is pending of a suspended table for which a commit without changes is."""
        fold = self._planner.fold_of(commit, commits)
        if fold is None:
            return WrittenCommit()
        error = self._committer.fold(fold, commits.front.owner)
        if error is not None:
            return WrittenCommit(rejected={fold.table.destination: error})
        self._recorder.folded(fold)
        return WrittenCommit()

    def _recreate(self, table: SuspendedTable, commits: TableCommits) -> None:
        self._tried(table)
        try:
            empty, columns = self._committer.recreate(table, commits.front.owner)
        except TableRejected as error:
            self._recorder.table_failed(table, error, commits)
            return
        self._recorder.recreated(table, empty, columns, commits)

    def _tried(self, table: SuspendedTable) -> None:
        if self._retried is not None:
            self._retried.discard(table.destination)

    def _is_abandoned(self, table: SuspendedTable, segments: Sequence[SegmentRow]) -> bool:
        """Return whether no rows go to a suspended table now: the sink's `table` has changed."""
        last_writes = self._recorder.last_writes()
        answer = is_abandoned(table, self._stager.destinations(), last_writes)
        if answer is None and table.planned_to is not None and segments:
            return not self._committer.has_changes(segments, table.destination)
        return bool(answer)

    def _abandon(self, table: SuspendedTable, commits: TableCommits) -> None:
        """Suspend other tables in place of a suspended one to which no rows go any more."""
        name, destinations = table.destination, self._stager.destinations()
        sources = tables_in_place_of(
            name, destinations, commits.suspended, self._recorder.last_writes()
        )
        successors = {
            source: (destinations[source], self._stager.elsewhere(source, name))
            for source in sources
        }
        self._recorder.abandoned(table, commits, successors)
