"""Decides what is done next for a sink that keeps tables; everything here works on values only.

`TablePlanner.next_work` chooses among the pieces of work that are due:

=========================  =====================================================================
there is                   what is done
=========================  =====================================================================
a requested resync         its tables are suspended until they were recreated (`ResyncStart`),
unless
                           a commit is planned, a snapshot is unfinished, or the delivery is for
                           a catch-up
a planned commit           exactly this commit is repeated
a suspended table that is due   it is recreated (`TableRecreation`) or tried again (`catch_up`)
old or many pending        they are folded (`PendingFold`)
changes of a table
enough new segments        a commit of them (`PlannedCommit`)
=========================  =====================================================================

`TablePlanner.plan_commit` says how the changes of each table in a commit are written (`TablePlan`):
into the table, or beside it as pending changes.

After the checkpoint was set back, tables get changes that they already have, up to the last of
`TableFront.ends`, and in other commits than before. A table skips a commit into it that ends before
the last one that it has, and the table of its pending changes does the same for what goes beside
it; neither knows of the other's. So if both ways were used again, one commit could be applied a
second time, which brings back a row that a later segment has deleted, and the commit with that
segment be skipped. Therefore all these commits go into the table, which then has applied either
none of them or all after some segment. Rows that are inserts may be there already, so they are
applied by key as updates are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from deltaforge_dagster.pipeline.tables.typed_files import TableName
from deltaforge_dagster.sinks.tables.config import PendingChanges
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.state.table_commits import (
    Destination,
    PendingTable,
    StoredWrite,
    SuspendedTable,
    TableCommits,
    TableFront,
    TableResync,
)

MOST_SEGMENTS = 2000
"""Maximum number of segments in a commit."""


class CommitSegment(Protocol):
    """The fields of a segment's row in the state store that decisions depend on."""

    @property
    def segment(self) -> int:
        """Number of the segment."""
        ...

    @property
    def rows(self) -> int:
        """How many changes it has."""
        ...

    @property
    def bytes(self) -> int:
        """Size of its file."""
        ...

    @property
    def created_at(self) -> float:
        """When it was added to the journal, by the store's clock."""
        ...

    def is_for(self, sink: str) -> bool:
        """Return whether a sink receives its rows."""
        ...


_Segment = TypeVar("_Segment", bound=CommitSegment)


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


@dataclass(frozen=True, slots=True)
class PlannedCommit:
    """A commit of the segments after `after` up to `last`.

    Attributes:
        table: The suspended table that it is for; None for all tables that are not suspended.
        after: The last segment before it.
        last: Its last segment.
        planned: Whether it is stored already, because it was begun before.
    """

    table: SuspendedTable | None
    after: int
    last: int
    planned: bool

    @property
    def destination(self) -> Destination | None:
        """The suspended table that it is for, if it is for one."""
        return None if self.table is None else self.table.destination


@dataclass(frozen=True, slots=True)
class PendingFold:
    """The pending changes of a table up to a segment are to be folded, without a commit.

    `through` is never beyond a commit that the table may still get: a fold after that commit would
    have a smaller number, and Delta skips a statement whose number is not larger than the last one.
    """

    table: PendingTable
    through: int


@dataclass(frozen=True, slots=True)
class TableRecreation:
    """A suspended table is to be replaced by one without rows."""

    table: SuspendedTable


@dataclass(frozen=True, slots=True)
class ResyncStart:
    """Tables whose resync is requested are to be suspended, and their snapshot to be requested."""

    tables: Sequence[Destination]


TableWork = PlannedCommit | PendingFold | TableRecreation | ResyncStart


@dataclass(frozen=True, slots=True)
class TableStates:
    """What the next piece of work depends on.

    Attributes:
        commits: How far the tables have come.
        segments: The segments after the front that are ready, at most `MOST_SEGMENTS`.
        resyncs: The resyncs of the sink's tables.
        in_snapshot: Whether a snapshot of the pipeline is unfinished.
        now: The time by the store's clock.
        retried: Held tables that are tried although the time of their next attempt has not come.
    """

    commits: TableCommits
    segments: Sequence[CommitSegment]
    resyncs: Sequence[TableResync]
    in_snapshot: bool
    now: float
    retried: AbstractSet[Destination] = frozenset()


@dataclass(frozen=True, slots=True)
class LastWrites:
    """The last write of each table of the source to a sink.

    Attributes:
        writes: One for each table of the source.
    """

    writes: Sequence[StoredWrite]

    @property
    def by_destination(self) -> Mapping[Destination, StoredWrite]:
        """The write of each table of the sink."""
        return {stored.write.destination: stored for stored in self.writes}

    @property
    def destinations(self) -> Mapping[tuple[str, str], Destination]:
        """Where the rows of each table of the source went, by schema and name."""
        return {stored.write.source: stored.write.destination for stored in self.writes}


@dataclass(frozen=True, slots=True)
class TablePlan:
    """How the changes of one table in a commit are written.

    Attributes:
        table: The changes.
        exists: Whether the table has everything before them, so that it must exist.
        beside: Whether they go beside the table, as pending changes.
        pending: The pending changes that the table has, or may have; None if it has none.
        again: Whether the table may have them already, in whole or in part, because the checkpoint
            was set back.
    """

    table: StagedTable
    exists: bool
    beside: bool
    pending: PendingTable | None
    again: bool


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """How the changes of a commit are written.

    Attributes:
        tables: The tables to write, in this order.
        elsewhere: The tables that must not be written, because their earlier rows went to another
            destination: table of the source and that destination, by destination.
        beside: Names of the source's tables whose changes go beside their tables, and for which
            that must be stored first, by destination.
    """

    tables: Sequence[TablePlan]
    elsewhere: Mapping[Destination, tuple[TableName, Destination]]
    beside: Mapping[Destination, TableName]


@dataclass(frozen=True, slots=True)
class TablePlanner:
    """Decides what is done for the tables of one sink.

    Attributes:
        sink_id: The sink.
        limits: When a commit is due.
        by_store: Whether only the state store knows how far each table has come, because the tables
            themselves cannot tell (objects). Then changes that a table has are not written to it
            again after the checkpoint was set back.
        is_log: Whether tables keep each change as a row. The earlier rows of such a table may be
            elsewhere.
    """

    sink_id: str
    limits: CommitLimits
    by_store: bool = False
    is_log: bool = False

    def resync_start(self, states: TableStates) -> ResyncStart | None:
        """Return the resyncs that begin now: those that were requested, if none must wait."""
        if (
            self.limits.until is not None
            or states.in_snapshot
            or states.commits.front.planned_to is not None
        ):
            return None
        wanted = [resync.destination for resync in states.resyncs if not resync.begun]
        return ResyncStart(wanted) if wanted else None

    def next_work(self, states: TableStates) -> TableWork | SuspendedTable | None:
        """Return the next piece of work; None if nothing is due.

        A suspended table that is to be tried again is returned as such: its next commit depends on
        segments that the caller reads first, and passes to `catch_up`.
        """
        if (start := self.resync_start(states)) is not None:
            return start
        front = states.commits.front
        if front.planned_to is not None:
            return PlannedCommit(None, front.segment, front.planned_to, planned=True)
        if (table := _table_to_try(states)) is not None:
            return TableRecreation(table) if table.recreate else table
        if (fold := self._overdue_fold(states)) is not None:
            return fold
        if not states.segments or not self._is_due(states.segments, states.now):
            return None
        last = self._last(states.segments, front.ends)
        return PlannedCommit(None, front.segment, last, planned=False)

    def catch_up(
        self, table: SuspendedTable, front: TableFront, segments: Sequence[CommitSegment]
    ) -> PlannedCommit:
        """Return the next commit of a suspended table.

        Args:
            table: The table.
            front: The front.
            segments: The segments after those that the table has, up to the front, at most
                `MOST_SEGMENTS`; not needed if a commit of the table is planned.
        """
        if table.planned_to is not None:
            return PlannedCommit(table, table.segment, table.planned_to, planned=True)
        last = self._last(segments, front.ends) if segments else front.segment
        return PlannedCommit(table, table.segment, last, planned=False)

    def fold_of(self, commit: PlannedCommit, commits: TableCommits) -> PendingFold | None:
        """Return what is to be folded instead of a suspended table's commit that has no changes."""
        pending = None if commit.destination is None else commits.pending.get(commit.destination)
        if pending is None:
            return None
        return PendingFold(pending, max(commit.last, pending.segment))

    def plan_commit(
        self,
        staged: Sequence[StagedTable],
        commit: PlannedCommit,
        commits: TableCommits,
        last_writes: LastWrites,
    ) -> CommitPlan:
        """Return how the changes of a commit are written.

        Args:
            staged: The changes, by table.
            commit: The commit.
            commits: How far the tables have come.
            last_writes: What the tables have got before.
        """
        tables: list[TablePlan] = []
        elsewhere: dict[Destination, tuple[TableName, Destination]] = {}
        beside: dict[Destination, TableName] = {}
        by_destination, former = last_writes.by_destination, last_writes.destinations
        had_to = max(commits.front.ends, default=0)
        again = commit.last <= had_to
        for table in staged:
            destination = table.destination
            stored = by_destination.get(destination)
            if self.by_store and stored and commit.last <= stored.segment <= had_to:
                continue
            before = former.get(source_key(table.source), destination)
            if before != destination and not self.is_log:
                elsewhere[destination] = (table.source, before)
                continue
            plan = self._plan_table(table, commit, commits.pending.get(destination), stored, again)
            tables.append(plan)
            if plan.beside and (plan.pending is None or plan.pending.segment < commit.last):
                beside[destination] = table.source
        return CommitPlan(tables, elsewhere, beside)

    def own_segments(self, segments: Sequence[_Segment]) -> list[_Segment]:
        """Return the segments that have changes for this sink."""
        return [segment for segment in segments if segment.rows and segment.is_for(self.sink_id)]

    def _plan_table(
        self,
        table: StagedTable,
        commit: PlannedCommit,
        pending: PendingTable | None,
        stored: StoredWrite | None,
        again: bool,
    ) -> TablePlan:
        exists = stored is not None and stored.segment <= commit.after
        left = dict(stored.write.columns) if exists and stored is not None else {}
        table = replace(table, left=left)
        if again:  # rows that are inserts may be in the table, so they are applied by key
            table = replace(
                table, steps=[replace(step, inserts_only=False) for step in table.steps]
            )
        beside = not again and self._goes_beside(table, commit, pending)
        return TablePlan(table, exists, beside, pending, again)

    def _goes_beside(
        self, table: StagedTable, commit: PlannedCommit, pending: PendingTable | None
    ) -> bool:
        """Return whether changes go beside their table; once they did, they do when repeated."""
        if any(step.kind != "rows" for step in table.steps):
            return False
        if pending is not None and pending.segment >= commit.last:
            return True
        return self.limits.pending is not None and table.changes < self.limits.pending.fold_changes

    def _overdue_fold(self, states: TableStates) -> PendingFold | None:
        """Return a fold of pending changes that are due to be folded between commits."""
        if self.limits.until is not None:
            return None
        for table in states.commits.pending.values():
            due = table.changes > 0 and self.limits.folds(table.changes, table.since, states.now)
            if due and table.destination not in states.commits.suspended:
                return PendingFold(table, max(states.commits.front.segment, table.segment))
        return None

    def _is_due(self, segments: Sequence[CommitSegment], now: float) -> bool:
        limits = self.limits
        if limits.at_once or limits.until is not None or len(segments) == MOST_SEGMENTS:
            return True
        own = self.own_segments(segments)
        changes = sum(segment.rows for segment in segments)
        size = sum(segment.bytes for segment in segments)
        if limits.full(changes, size) or not own:
            return True
        idle = limits.idle_seconds
        if idle is not None and now - own[-1].created_at >= idle:
            return True
        return now - segments[0].created_at >= limits.seconds

    def _last(self, segments: Sequence[CommitSegment], ends: Collection[int]) -> int:
        """Return the last segment of the commit that begins with the first of `segments`."""
        changes, size, last = segments[0].rows, segments[0].bytes, segments[0]
        for segment in segments[1:]:
            changes += segment.rows
            size += segment.bytes
            if self.limits.exceeded(changes, size) or last.segment in ends:
                break
            last = segment
        return last.segment


def is_abandoned(
    table: SuspendedTable,
    destinations: Mapping[TableName, Destination],
    last_writes: LastWrites,
) -> bool | None:
    """Return whether no rows go to a suspended table any more, as the sink's `table` has changed.

    Args:
        table: The table.
        destinations: Where the rows of each registered table of the source go.
        last_writes: Where they went before.

    Returns:
        None if that is not known: tables whose names only a processor creates are not registered.
        Then staging the commit that failed tells whether rows still go to the table.
    """
    name = table.destination
    if name in destinations.values():
        return False
    former = last_writes.destinations
    if any(former.get(source_key(source)) == name for source in destinations):
        return True
    return None


def tables_in_place_of(
    name: Destination,
    destinations: Mapping[TableName, Destination],
    suspended: Collection[Destination],
    last_writes: LastWrites,
) -> Sequence[TableName]:
    """Return the source's tables whose new destinations may lack what a suspended table lacked.

    These are the tables of which the sink has written nothing yet, or if there are none, the one
    whose rows the suspended table had; without those whose destinations are suspended themselves.

    Args:
        name: The suspended table, to which no rows go any more.
        destinations: Where the rows of each registered table of the source go.
        suspended: The suspended tables.
        last_writes: Where they went before.
    """
    former = last_writes.destinations
    free = [source for source, destination in destinations.items() if destination not in suspended]
    unwritten = [source for source in free if source_key(source) not in former]
    return unwritten or [source for source in free if former[source_key(source)] == name]


def source_key(table: TableName) -> tuple[str, str]:
    """Return a table of the source as the state store names it: schema or database, and name."""
    database, schema, name = table
    return schema or database, name


def _table_to_try(states: TableStates) -> SuspendedTable | None:
    """Return the suspended table that is to be tried now."""
    for table in sorted(
        states.commits.suspended.values(), key=lambda suspended: suspended.next_attempt_at
    ):
        if table.next_attempt_at <= states.now or table.destination in states.retried:
            return table
    return None
