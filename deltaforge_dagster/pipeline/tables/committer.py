"""Writes to the tables of a sink: the commits, folds and recreations that `planner` decides.

A commit is written in this order, so that a run that is killed anywhere is repeated without loss
and without a second copy:

1. Spark's tasks write the changes to files (`stage`);
2. the state store records which tables get their changes as pending ones (`recorder`): the next run
   must add them to the same place, which tells whether it has them;
3. one table after the other gets its changes, together with the mark by which it recognizes the
   commit; pending changes are folded when they are due.

What the tables have got is recorded only then (`recorder`). A table that rejects its changes does
not keep the others from getting theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.delivery import DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.tables.planner import (
    PendingFold,
    PlannedCommit,
    TablePlan,
    TablePlanner,
    source_key,
)
from deltaforge_dagster.pipeline.tables.recorder import TableRecorder
from deltaforge_dagster.pipeline.tables.typed_files import TableName
from deltaforge_dagster.sinks.tables.staged import StagedCommit, StagedTable
from deltaforge_dagster.sinks.tables.writer import (
    CommitWriter,
    PendingWriter,
    TableWriter,
    WrittenTable,
)
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.table_commits import (
    Destination,
    SuspendedTable,
    TableCommits,
    TableWrite,
)
from deltaforge_dagster.typed_rows.schema import TypedSchema


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


@dataclass(frozen=True, slots=True)
class WrittenCommit:
    """What has become of a commit.

    Attributes:
        writes: What it has added to each table.
        rejected: Why the other tables could not be written, by destination.
    """

    writes: Sequence[TableWrite] = ()
    rejected: Mapping[Destination, Exception] = field(default_factory=dict)


class TableCommitter:
    """Writes to the tables of one sink; used by one thread.

    Args:
        context: The sink.
        thread: The thread; its `stop` ends a commit between two tables.
        planner: Decides how the changes of a table are written.
        recorder: Records that changes go beside tables, and counts what was written.
        stager: Writes changes to files.
        open_writer: Opens the writer of the tables, given the id of the series of commits; closing
            it ends what is under way.
    """

    def __init__(
        self,
        context: DeliveryContext,
        thread: DeliveryThread,
        planner: TablePlanner,
        recorder: TableRecorder,
        *,
        stager: Stager,
        open_writer: Callable[[str], AbstractContextManager[CommitWriter]],
    ) -> None:
        self._store = context.run.store
        self._lease = context.run.lease
        self._meter = context.meter
        self._stop = thread.stop
        self._planner = planner
        self._recorder = recorder
        self._stager = stager
        self._open_writer = open_writer
        self._opened = contextlib.ExitStack()
        self._writer: CommitWriter | None = None

    def write(
        self, segments: Sequence[SegmentRow], commit: PlannedCommit, commits: TableCommits
    ) -> WrittenCommit | None:
        """Write a commit to its tables.

        Args:
            segments: Its segments that have changes for the sink.
            commit: The commit, which is stored as planned.
            commits: How far the tables have come.

        Returns:
            What was written; None if the thread was asked to stop before all tables had it.
        """
        self._lease.guard()
        destination = commit.destination
        staged = self._stager.stage(
            segments,
            only=None if destination is None else frozenset({destination}),
            skip=frozenset(commits.suspended) if destination is None else frozenset(),
        )
        try:
            failpoint("table-commit-staged")
            return self._write(staged, segments[-1], commit, commits)
        finally:
            staged.discard()

    def fold(self, fold: PendingFold, owner: str) -> TableRejected | None:
        """Fold pending changes of a table without a commit; return the error if it is rejected.

        Args:
            fold: What is folded.
            owner: The series of commits.
        """
        pending = fold.table
        columns = TypedSchema(())
        table = StagedTable(pending.destination, pending.source, columns, (), frozenset(), (), 0)
        writer = _pending_writer(self._opened_writer(owner))
        required = pending.changes > 0
        try:
            writer.fold(table, fold.through, self._lease.guard, "later", required=required)
        except TableRejected as error:
            return error
        return None

    def recreate(
        self, table: SuspendedTable, owner: str
    ) -> tuple[StagedTable, Sequence[tuple[str, str]]]:
        """Replace a table by one without rows or pending changes.

        Args:
            table: The table.
            owner: The series of commits.

        Returns:
            The table, and name and type of each of its columns.

        Raises:
            TableRejected: It cannot be recreated.
        """
        self._lease.guard()
        writer = cast("TableWriter", self._opened_writer(owner))
        empty = self._stager.without_changes(table.destination)
        columns = writer.recreate(empty, self._lease.guard)
        failpoint("table-recreated")
        return empty, columns

    def has_changes(self, segments: Sequence[SegmentRow], destination: Destination) -> bool:
        """Return whether segments have changes that go to a table."""
        staged = self._stager.stage(segments, only=frozenset({destination}))
        staged.discard()
        return bool(staged.failed or staged.tables)

    def close(self) -> None:
        """Close the writer, which ends what is under way."""
        self._writer = None
        self._opened.close()

    def _write(
        self, staged: StagedCommit, last: SegmentRow, commit: PlannedCommit, commits: TableCommits
    ) -> WrittenCommit | None:
        last_writes = self._recorder.last_writes()
        plan = self._planner.plan_commit(staged.tables, commit, commits, last_writes)
        rejected: dict[Destination, Exception] = dict(staged.failed)
        for destination, (source, former) in plan.elsewhere.items():
            rejected[destination] = self._stager.elsewhere(source, former)
        if plan.beside:
            self._recorder.plan_pending(plan.beside, commit.last)
        writes: list[TableWrite] = []
        for table_plan in plan.tables:
            if self._stop.is_set():
                return None
            self._lease.guard()
            self._meter.sends()
            writer = self._opened_writer(commits.front.owner)
            try:
                written, pending = self._apply(writer, table_plan, commit.last)
            except TableRejected as error:
                rejected[table_plan.table.destination] = error
                continue
            failpoint("table-committed")
            writes.append(_table_write(table_plan.table, written, last, pending=pending))
            self._recorder.wrote(table_plan.table.changes)
        return WrittenCommit(writes, rejected)

    def _apply(
        self, writer: CommitWriter, plan: TablePlan, through: int
    ) -> tuple[WrittenTable, bool]:
        """Write the changes of a table; return its new state, and whether changes are pending."""
        guard, pending, table = self._lease.guard, plan.pending, plan.table
        required = pending is not None and pending.changes > 0
        if not plan.beside and pending is None:
            return writer.commit(table, through, guard, exists=plan.exists), False
        folding = _pending_writer(writer)
        add = folding.append if plan.beside else folding.commit
        written = add(table, through, guard, exists=plan.exists, required=required)
        if plan.beside:
            return self._fold_if_due(folding, plan, written, through)
        if plan.again and pending is not None:
            # A table that has the commit skips it, without folding what is pending. And what is
            # pending may be of later segments than the commit.
            rest = max(through, pending.segment)
            folded = folding.fold(table, rest, guard, "after", required=required)
            written = replace(folded, figures=folded.figures or written.figures)
        return written, False

    def _fold_if_due(
        self, writer: PendingWriter, plan: TablePlan, written: WrittenTable, through: int
    ) -> tuple[WrittenTable, bool]:
        """Fold the pending changes of a table, to which a commit was added, if they are due."""
        now, pending = self._store.now(), plan.pending
        changes, since = (0, now) if pending is None else (pending.changes, pending.since)
        if not self._planner.limits.folds(changes + plan.table.changes, since, now):
            return written, True
        failpoint("table-pending-added")
        return writer.fold(plan.table, through, self._lease.guard, "after", required=True), False

    def _opened_writer(self, owner: str) -> CommitWriter:
        if self._writer is None:
            self._writer = self._opened.enter_context(self._open_writer(owner))
            self._meter.opened()
        return self._writer


def _pending_writer(writer: CommitWriter) -> PendingWriter:
    """Return the writer as one that folds: only sinks with such a writer have pending changes."""
    return cast("PendingWriter", writer)


def _table_write(
    table: StagedTable, written: WrittenTable, last: SegmentRow, *, pending: bool
) -> TableWrite:
    """Return what a commit, whose last segment with changes is `last`, has added to a table."""
    return TableWrite(
        source_key(table.source),
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
