"""Records in the state store what has become of the work on a sink's tables, and shows it.

What a commit has added to the tables, how far they have come, the sink's checkpoint and its metrics
are written in one transaction, so that a run that is killed has recorded all of it or nothing. Then
a commit is repeated, which its tables recognize, and recorded once.

While tables are suspended, the sink counts as failing, although its other tables go on: the
checkpoint's row has the errors, and the run shows them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from deltaforge_dagster.errors import Commands, DeltaforgeError, NotAllowed, TableRejected
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.delivery import DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.tables.planner import (
    LastWrites,
    PendingFold,
    PlannedCommit,
    source_key,
)
from deltaforge_dagster.pipeline.tables.typed_files import TableName
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import FencedWriter
from deltaforge_dagster.state.table_commits import (
    TO_BE_RECREATED,
    Destination,
    Rejection,
    SuspendedTable,
    TableCommits,
    TableWrite,
)


@dataclass(slots=True)
class TableProgress:
    """How far the tables have come; implements `delivery.DeliveryProgress`."""

    checkpoint: CheckpointRow
    moved_at: float
    rows: int = 0


class TableRecorder:
    """Records the outcome of the work on one sink's tables; used by one thread.

    Args:
        context: The sink.
        checkpoint: Its checkpoint.
        thread: The thread, which shows the sink's error.
    """

    def __init__(
        self, context: DeliveryContext, checkpoint: CheckpointRow, thread: DeliveryThread
    ) -> None:
        self.progress = TableProgress(checkpoint, time.monotonic())
        self._context = context
        self._sink_id = context.sink_id
        self._store = context.run.store
        self._lease = context.run.lease
        self._meter = context.meter
        self._thread = thread
        self._suspended_error: TableRejected | None = None

    def last_writes(self) -> LastWrites:
        """Return the newest write of each table of the source."""
        stored = self._store.table_commits.tables(self._lease.pipeline)
        return LastWrites([write for write in stored if write.sink == self._sink_id])

    def plan(self, commit: PlannedCommit) -> None:
        """Store what a commit covers, unless that is stored, before anything of it is written."""
        if not commit.planned:
            self._lease.write(
                lambda writer: writer.table_commits.plan(
                    self._sink_id, commit.last, commit.destination
                )
            )
        failpoint("table-commit-planned")

    def plan_pending(self, tables: Mapping[Destination, TableName], through: int) -> None:
        """Store that a commit goes beside tables, before it is added to their pending changes.

        Args:
            tables: Names of the source's tables, by destination.
            through: The last segment of the commit.
        """
        self._lease.write(
            lambda writer: writer.table_commits.plan_pending(self._sink_id, tables, through)
        )
        failpoint("table-pending-planned")

    def wrote(self, changes: int) -> None:
        """Count what was added to a table; it is recorded with the commit."""
        self._meter.wrote(changes)
        self.progress.rows += changes
        self.progress.moved_at = time.monotonic()

    def front_moved(
        self,
        commit: PlannedCommit,
        commits: TableCommits,
        segments: Sequence[SegmentRow],
        writes: Sequence[TableWrite],
        rejected: Mapping[Destination, Exception],
    ) -> None:
        """Move the front to the end of a commit, and suspend the tables that could not be written.

        Args:
            commit: The commit.
            commits: How far the tables had come.
            segments: All segments of the commit.
            writes: What it has added to the other tables.
            rejected: Why tables could not be written.
        """
        now = self._store.now()
        rejections = [
            self._rejection(destination, error, 0, now) for destination, error in rejected.items()
        ]
        suspended = {
            rejection.destination: _suspended_table(rejection, commit.after, commit.last, now)
            for rejection in rejections
        }
        front = replace(commits.front, segment=commit.last, planned_to=None)
        self._record(
            lambda writer: writer.table_commits.advance(
                self._sink_id, commit.last, rejections, writes
            ),
            TableCommits(front, {**commits.suspended, **suspended}),
            segments,
        )

    def table_moved(
        self,
        table: SuspendedTable,
        through: int,
        commits: TableCommits,
        writes: Sequence[TableWrite] = (),
    ) -> None:
        """Record that a suspended table has everything up to a segment.

        At the front, it is no longer suspended.

        Args:
            table: The table.
            through: The segment.
            commits: How far the tables had come.
            writes: What the commit has added to it, if anything.
        """
        suspended = _without(commits.suspended, table.destination)
        if through < commits.front.segment:
            suspended[table.destination] = replace(
                table, segment=through, planned_to=None, failures=0
            )
        self._record(
            lambda writer: writer.table_commits.wrote(
                self._sink_id, table.destination, through, writes
            ),
            replace(commits, suspended=suspended),
            released=True,
        )

    def table_failed(self, table: SuspendedTable, error: Exception, commits: TableCommits) -> None:
        """Record that a suspended table could not be written, or recreated, again."""
        rejection = self._rejection(table.destination, error, table.failures, self._store.now())
        failed = replace(
            table,
            error=rejection.error,
            remedy=rejection.remedy,
            next_attempt_at=rejection.next_attempt_at,
            failures=table.failures + 1,
        )
        self._record(
            lambda writer: writer.table_commits.tried(self._sink_id, rejection),
            replace(commits, suspended={**commits.suspended, table.destination: failed}),
        )

    def folded(self, fold: PendingFold) -> None:
        """Record that a table has no pending changes any more."""
        self._lease.write(
            lambda writer: writer.table_commits.folded(self._sink_id, fold.table.destination)
        )

    def fold_ended(
        self, fold: PendingFold, error: TableRejected | None, commits: TableCommits
    ) -> None:
        """Record a fold between commits; suspend the table if it could not be folded.

        Args:
            fold: What was to be folded.
            error: Why it could not be; None if it was.
            commits: How far the tables have come.
        """
        if error is None:
            self.folded(fold)
            self._record(lambda _writer: None, commits)
            return
        now = self._store.now()
        rejection = self._rejection(fold.table.destination, error, 0, now)
        suspended = _suspended_table(rejection, commits.front.segment, None, now)
        self._record(
            lambda writer: writer.table_commits.suspend(self._sink_id, rejection),
            replace(commits, suspended={**commits.suspended, suspended.destination: suspended}),
        )

    def abandoned(
        self,
        table: SuspendedTable,
        commits: TableCommits,
        successors: Mapping[TableName, tuple[Destination, TableRejected]],
    ) -> None:
        """Suspend other tables in place of a suspended one to which no rows go any more.

        Args:
            table: The suspended table.
            commits: How far the tables had come.
            successors: The tables of the source whose new destinations may lack what it lacked:
                these destinations, and why they are suspended.
        """
        name, front, now = table.destination, commits.front.segment, self._store.now()
        rejections = [
            self._rejection(destination, error, 0, now)
            for destination, error in successors.values()
        ]
        suspended = _without(commits.suspended, name)
        for rejection in rejections:
            suspended[rejection.destination] = _suspended_table(rejection, front, None, now)
        last = self._context.segments.segment(front)
        position = self.progress.checkpoint.source_position if last is None else last.end_position
        assert position is not None, "only a segment that the sink has is gone"
        changed_at = now if last is None else last.last_ts_us / 1e6
        # These writes record where the rows were to go. Without them, nothing would tell at the
        # next attempt that rows are missing, and the tables would no longer be suspended.
        writes = [
            TableWrite(source_key(source), name, (), 0, position, changed_at)
            for source in successors
        ]

        def change(writer: FencedWriter) -> None:
            writer.table_commits.wrote(self._sink_id, name, front, writes)
            for rejection in rejections:
                writer.table_commits.suspend(self._sink_id, rejection)

        self._record(change, replace(commits, suspended=suspended), released=True)

    def resyncs_began(self, tables: Sequence[Destination], commits: TableCommits) -> None:
        """Suspend the tables that are to be loaded again, and request their snapshot.

        Nothing happens if another snapshot has been requested meanwhile.
        """
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

    def recreated(
        self,
        table: SuspendedTable,
        empty: StagedTable,
        columns: Sequence[tuple[str, str]],
        commits: TableCommits,
    ) -> None:
        """Record that a suspended table is empty.

        It is still suspended if the front has moved on meanwhile.

        Args:
            table: The table.
            empty: The same without changes.
            columns: Name and type of each of its columns.
            commits: How far the tables have come.
        """
        name = table.destination
        suspended = _without(commits.suspended, name)
        if table.segment < commits.front.segment:
            suspended[name] = replace(table, recreate=False, failures=0)
        self._record(
            lambda writer: writer.table_commits.recreated(
                self._sink_id, source_key(empty.source), name, columns
            ),
            replace(commits, suspended=suspended),
            released=True,
        )

    def show_suspended(self, suspended: Mapping[Destination, SuspendedTable]) -> None:
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

    def _record(
        self,
        change: Callable[[FencedWriter], object],
        after: TableCommits,
        segments: Sequence[SegmentRow] = (),
        *,
        released: bool = False,
    ) -> None:
        """Write an outcome with the checkpoint, the counts, and the failure of suspended tables.

        Args:
            change: Writes the outcome; returns False if it was written already.
            after: How far the tables have come afterwards.
            segments: The segments that the front has passed.
            released: Whether a table may no longer be suspended; if no other is, the failure has
                ended.
        """
        checkpoint = self.progress.checkpoint
        moves = after.reached > checkpoint.whole_segment
        reached = self._context.segments.segment(after.reached) if moves else None
        if reached is not None:
            checkpoint = replace(
                checkpoint,
                segment=reached.segment,
                ordinal=reached.rows - 1,
                complete=True,
                source_position=reached.end_position,
            )
        tally = self._meter.passed(segments)

        def write(writer: FencedWriter) -> None:
            changed = change(writer)
            ends_failure = released and not after.suspended
            if reached is not None or (changed is not False and ends_failure):
                writer.checkpoints.advance(
                    self._sink_id,
                    checkpoint.segment,
                    checkpoint.ordinal,
                    complete=checkpoint.complete,
                    source_position=None if reached is None else reached.end_position,
                    tally=tally,
                )
            if reached is None and changed is not False:  # `advance` counts only what it moves
                writer.metrics.count(tally)
            self._write_suspended(writer, _failing(after.suspended))

        self._lease.write(write)
        self.progress.checkpoint = checkpoint
        self.progress.moved_at = time.monotonic()
        self._thread.attempts.succeeded()
        if self._thread.stop.is_set():
            self.show_suspended(
                after.suspended
            )  # no later call of `due` will show why the sink is behind
        failpoint("checkpoint-written")

    def _write_suspended(
        self, writer: FencedWriter, failing: Mapping[Destination, SuspendedTable]
    ) -> None:
        """Write that the sink fails because of suspended tables, if any fails."""
        suspended = failing.values()
        if not suspended:
            return
        writer.checkpoints.suspended(
            self._sink_id,
            _suspended_text(self._sink_id, failing),
            remedy=_suspended_remedy(failing),
            failures=max(1, *(table.failures for table in suspended)),
            since=min(table.since for table in suspended),
            next_attempt_at=min(table.next_attempt_at for table in suspended),
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


def _without(
    suspended: Mapping[Destination, SuspendedTable], destination: Destination
) -> dict[Destination, SuspendedTable]:
    return {name: table for name, table in suspended.items() if name != destination}


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
    """Return the suspended tables that fail: not those that only wait to be recreated."""
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
