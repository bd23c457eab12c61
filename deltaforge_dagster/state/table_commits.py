"""How far the tables of sinks that write tables have come, and which commits are planned.

Such a sink adds consecutive segments to all of its tables in one *commit*. What a commit covers is
stored before anything is written (`plan`). So the run after a killed one repeats exactly this
commit, which the tables recognize.

The *front* is the last segment that is in all tables, except for the *suspended* ones, which could
not be written. A suspended table has everything up to a segment of its own; its commits are
planned, and repeated, separately. It is suspended until it has reached the front. The sink's
checkpoint is the minimum of all of these. If it is elsewhere, it was set by a user or a rebuilt
journal, and `restart` puts everything there.

A table may have *pending changes*, which are kept in a separate table until they are folded into
it. Before a commit is written there, this is stored, so that the changes are folded even if the run
is killed.

A table that is to be loaded again (`TableResync`) is recreated where the front is, between two
commits. Then it gets the commits that follow, with the rows of a snapshot that is requested in the
same transaction as the resync begins. Until it was recreated, it is suspended; its pending changes
are forgotten then.

What a commit has added to a table (`TableWrite`) is stored in the transaction that moves the front,
or the suspended table. Each is published in Dagster; the last one of a table is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias
from uuid import uuid4

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    delete,
    func,
    insert,
    select,
    update,
)

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.tables import (
    table_commits,
    table_pending,
    table_resyncs,
    table_writes,
)
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.snapshots import insert_snapshot, unfinished_snapshot

Destination: TypeAlias = tuple[str, ...]
"""Name of a table of a sink, outermost part first."""

TO_BE_RECREATED = "it is to be loaded again, and is recreated first"
"""The `error` of a table that a resync has suspended, until the first attempt to recreate it."""

_FRONT = ""
_ERROR_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class TableFront:
    """The segment that all tables have reached, except those that are suspended.

    Attributes:
        segment: The segment.
        planned_to: The last segment of the commit that is planned after it, None for none.
        owner: Random id of the series of commits. A restored store and a rebuilt or reset journal
            begin another one, because their segments may differ from those of the same number that
            tables have.
        ends: Later segments at which a commit must end, because commits before a restart have ended
            there.
    """

    segment: int
    planned_to: int | None
    owner: str
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SuspendedTable:
    """A table that could not be written.

    Attributes:
        destination: Name of the table.
        segment: The table has everything up to this segment.
        planned_to: The last segment of the commit that failed or is planned, None if none is
            planned.
        error: Why it cannot be written.
        since: When it was suspended, by the database's clock.
        next_attempt_at: When to try again, by the same clock.
        failures: How often it failed in a row.
        remedy: The commands that fix it; empty if the error says what to do.
        recreate: Whether it must be recreated, without rows, before it gets anything; no commit is
            planned then.
    """

    destination: Destination
    segment: int
    planned_to: int | None
    error: str
    since: float
    next_attempt_at: float
    failures: int
    remedy: Sequence[str] = ()
    recreate: bool = False


@dataclass(frozen=True, slots=True)
class TableResync:
    """A table that is to be loaded again.

    Attributes:
        sink: The sink.
        destination: Name of the table.
        table_name: Full name of the source's table.
        begun: Whether its snapshot was requested, so that the table is suspended until it was
            recreated.
    """

    sink: str
    destination: Destination
    table_name: str
    begun: bool


@dataclass(frozen=True, slots=True)
class PendingTable:
    """A table that has, or may have, pending changes.

    Attributes:
        sink: The sink.
        destination: Name of the table.
        source: Name of the source's table: database, schema (None without schemas), table.
        segment: The last segment of the last commit that was to be added to them.
        changes: Number of changes in the commits that are sure to be among them.
        since: When the first of them was added, by the database's clock.
    """

    sink: str
    destination: Destination
    source: tuple[str, str | None, str]
    segment: int
    changes: int
    since: float


@dataclass(frozen=True, slots=True)
class TableCommits:
    """How far the tables of one sink have come: the front, and the tables that are behind it."""

    front: TableFront
    suspended: Mapping[Destination, SuspendedTable]
    pending: Mapping[Destination, PendingTable] = field(default_factory=dict)

    @property
    def reached(self) -> int:
        """The last segment that all tables have."""
        return min([self.front.segment, *(table.segment for table in self.suspended.values())])


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a table cannot be written, and when to try again."""

    destination: Destination
    error: str
    next_attempt_at: float
    remedy: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TableFigures:
    """What a table consists of, as its format or database counts it; other figures are None.

    Attributes:
        version: Version of the table (Delta), or its newest snapshot (Iceberg); databases have
            none.
        files: Number of files that have rows.
        bytes: Their size, including the data that marks rows as deleted, if the format counts that.
        rows: Number of rows.
        deleted: Number of rows in the files that are deleted.
        estimated: Whether rows and bytes are what a database assumes, which may lag behind, or
            count rows that it will remove.
    """

    version: int | None = None
    files: int | None = None
    bytes: int | None = None
    rows: int | None = None
    deleted: int | None = None
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class TableWrite:
    """What a commit has added to a table.

    Attributes:
        source: Schema (the database if there are no schemas) and name of the source's table.
        destination: Name of the sink's table.
        columns: Name and type of each of its columns, as Spark names types.
        changes: Number of changes of the source.
        position: Position in the source up to which the table has everything, JSON text.
        changed_at: When the last change before this position was committed, in seconds since 1970.
        pending: Whether the changes are pending; otherwise the table has them, and everything
            before them.
        figures: What the table consists of then, if known.
        lacking: Identities (`identities`) of the columns in which older rows lack the source's
            value, which is not known. They remain until the table is recreated.
        int64_timestamps: Whether none of its files has timestamps as INT96.
    """

    source: tuple[str, str]
    destination: Destination
    columns: Sequence[tuple[str, str]]
    changes: int
    position: str
    changed_at: float
    pending: bool = False
    figures: TableFigures | None = None
    lacking: tuple[str, ...] = ()
    int64_timestamps: bool = True


@dataclass(frozen=True, slots=True)
class StoredWrite:
    """What a commit has added to a table, as it is stored.

    Attributes:
        sink: The sink.
        segment: The last segment of the commit.
        write: What it has added.
        written_at: When that was recorded, by the database's clock.
    """

    sink: str
    segment: int
    write: TableWrite
    written_at: float


class TableCommitRepository:
    """The commits of all sinks that write tables: `StateStore.table_commits`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str, sink: str) -> TableCommits | None:
        """Return how far a sink's tables have come, None before its first `restart`."""
        with self._database.read() as connection:
            return _read(connection, name, sink)

    def pending(self, name: str) -> list[PendingTable]:
        """Return the tables of a pipeline's sinks that have pending changes."""
        with self._database.read() as connection:
            return _pending(connection, table_pending.c.pipeline == name)

    def resync(self, name: str, sink: str, tables: Mapping[Destination, str]) -> None:
        """Request that tables of a sink are loaded again; the next run with the sink begins it.

        Args:
            name: The pipeline.
            sink: The sink.
            tables: Full names of the source's tables, by destination.

        Raises:
            NotAllowed: A resync of one of them has begun, and it was not recreated yet.
        """
        with self._database.write() as connection:
            lock_lease(connection, name)
            requested = {resync.destination: resync for resync in _resyncs(connection, name, sink)}
            for destination, table_name in tables.items():
                if destination in requested and requested[destination].begun:
                    raise NotAllowed(
                        f"pipeline {name!r}: the resync of {'.'.join(destination)} of sink "
                        f"{sink!r} has begun already; deltaforge status {name} says what it "
                        "waits for"
                    )
                if destination in requested:
                    continue
                _insert_resync(connection, name, sink, destination, table_name)

    def resyncs(self, name: str, sink: str | None = None) -> list[TableResync]:
        """Return the tables that are to be loaded again, of one sink or of all."""
        with self._database.read() as connection:
            return _resyncs(connection, name, sink)

    def tables(self, name: str) -> list[StoredWrite]:
        """Return the last write of each table of a pipeline's sinks, by sink and source."""
        newest: dict[tuple[str, tuple[str, str]], StoredWrite] = {}
        for stored in self._writes(table_writes.c.pipeline == name):
            newest[stored.sink, stored.write.source] = stored
        return [newest[key] for key in sorted(newest)]

    def unpublished(self, name: str) -> list[StoredWrite]:
        """Return the writes that are not published in Dagster yet, in the order of the journal."""
        return self._writes(
            and_(table_writes.c.pipeline == name, table_writes.c.published.is_(False))
        )

    def mark_published(self, name: str, stored: StoredWrite) -> None:
        """Record that a write, and all before it to the same table, are published in Dagster."""
        with self._database.write() as connection:
            connection.execute(
                update(table_writes)
                .where(
                    _of_table(name, stored.sink, stored.write),
                    table_writes.c.segment <= stored.segment,
                )
                .values(published=True)
            )

    def _writes(self, where: ColumnElement[bool]) -> list[StoredWrite]:
        query = (
            select(table_writes)
            .where(where)
            .order_by(table_writes.c.segment, table_writes.c.sink, table_writes.c.source)
        )
        with self._database.read() as connection:
            return [_stored(row) for row in connection.execute(query).mappings()]


class TableCommitWrites:
    """Plans and finishes commits of a lease holder's sinks: `FencedWriter.table_commits`.

    Every method has the same effect if it is called again, as after an answer of the database was
    lost.
    """

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def restart(self, sink: str, segment: int) -> None:
        """Put the front at a segment, with no commit planned and no table suspended.

        Commits that follow end where those before have ended or should have, so that a table that
        has a part of the segments already recognizes the commits that it has.
        """
        before = _rows(self._connection, self._pipeline, sink)
        ends = {end for row in before.values() for end in (row["segment"], *row["ends"])}
        ends |= {row["planned_to"] for row in before.values() if row["planned_to"] is not None}
        self._connection.execute(delete(table_commits).where(_of(self._pipeline, sink)))
        self._insert(
            sink,
            _FRONT,
            segment=segment,
            owner=before[_FRONT]["owner"] if before else uuid4().hex,
            ends=sorted(end for end in ends if end > segment),
        )
        if before and segment < before[_FRONT]["segment"]:
            # The commits that follow add the dropped changes again; none are sure to be there now.
            condition = _of_pending(self._pipeline, sink)
            self._connection.execute(update(table_pending).where(condition).values(changes=0))
        if not before:
            # A commit of this series may have the number of one of a former series that was to go
            # beside the table: it must not be taken for that one.
            condition = _of_pending(self._pipeline, sink)
            self._connection.execute(update(table_pending).where(condition).values(segment=segment))
        for resync in _resyncs(self._connection, self._pipeline, sink):
            if resync.begun:
                self._suspend_recreated(sink, resync.destination, segment)

    def begin_resyncs(self, sink: str, tables: Collection[Destination]) -> None:
        """Begin requested resyncs: suspend the tables at the front, and request their snapshot.

        A change that is not in the snapshot is behind the front, and so the tables get it after
        they were recreated.

        Raises:
            NotAllowed: A snapshot is unfinished, or a commit planned.
        """
        resyncs = _resyncs(self._connection, self._pipeline, sink)
        wanted = [resync for resync in resyncs if not resync.begun and resync.destination in tables]
        if not wanted:
            return
        front = self._row(sink, _FRONT)
        if front["planned_to"] is not None or unfinished_snapshot(self._connection, self._pipeline):
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: a resync of sink {sink!r} cannot begin before the "
                "commit that is planned, and the snapshot that is unfinished"
            )
        for resync in wanted:
            self._suspend_recreated(sink, resync.destination, front["segment"])
            condition = and_(
                _resyncs_of(self._pipeline, sink),
                table_resyncs.c.destination == _key(resync.destination),
            )
            self._connection.execute(update(table_resyncs).where(condition).values(begun=True))
        insert_snapshot(
            self._connection,
            self._pipeline,
            tables=[resync.table_name for resync in wanted],
            cause="resync",
            sinks=[sink],
            since=front["segment"] + 1,
        )

    def recreated(
        self,
        sink: str,
        source: tuple[str, str],
        destination: Destination,
        columns: Sequence[tuple[str, str]],
    ) -> None:
        """Record that a table is empty now, without pending changes.

        It is no longer suspended if it has reached the front.

        Args:
            sink: The sink.
            source: Schema and name of the source's table whose rows it gets. Before, these rows may
                have gone to another destination.
            destination: The table.
            columns: Name and type of each of its columns.
        """
        self.folded(sink, destination)
        condition = and_(table_writes.c.pipeline == self._pipeline, table_writes.c.sink == sink)
        key = orjson.dumps(source).decode()
        for stored in self._connection.execute(select(table_writes).where(condition)).mappings():
            if stored["source"] == key or tuple(stored["destination"]) == destination:
                of_source = table_writes.c.source == stored["source"]
                values = {
                    "destination": destination,
                    "lacking": None,
                    "columns": [list(column) for column in columns],
                }
                self._connection.execute(
                    update(table_writes).where(condition, of_source).values(**values)
                )
        self._connection.execute(
            delete(table_resyncs).where(
                _resyncs_of(self._pipeline, sink),
                table_resyncs.c.destination == _key(destination),
                table_resyncs.c.begun,
            )
        )
        row = _rows(self._connection, self._pipeline, sink).get(_key(destination))
        if row is not None and row["segment"] >= self._row(sink, _FRONT)["segment"]:
            self._delete(sink, _key(destination))
        elif row is not None:
            self._update(sink, _key(destination), {"next_attempt_at": 0.0, "failures": 0})

    def plan(self, sink: str, to: int, destination: Destination | None = None) -> None:
        """Store what the next commit covers, before anything is written.

        Args:
            sink: The sink.
            to: The last segment of the commit.
            destination: The suspended table that it is for; None for the tables that are not
                suspended.
        """
        row = self._row(sink, _key(destination))
        if row["planned_to"] not in {None, to} or to <= row["segment"]:
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: sink {sink!r} cannot plan a commit up to "
                f"segment {to} after segment {row['segment']} (planned: {row['planned_to']})"
            )
        self._update(sink, _key(destination), {"planned_to": to})

    def plan_pending(
        self, sink: str, tables: Mapping[Destination, tuple[str, str | None, str]], to: int
    ) -> None:
        """Store that a commit goes to some tables' pending changes, before it is added to them.

        Args:
            sink: The sink.
            tables: The tables, with the names of the source's tables (`PendingTable.source`).
            to: The last segment of the commit.
        """
        rows = _pending(self._connection, _of_pending(self._pipeline, sink))
        segments = {row.destination: row.segment for row in rows}
        for destination, source in tables.items():
            condition = _of_pending(self._pipeline, sink, destination)
            if destination in segments:
                last = max(segments[destination], to)
                self._connection.execute(
                    update(table_pending).where(condition).values(segment=last)
                )
                continue
            self._connection.execute(
                insert(table_pending).values(
                    pipeline=self._pipeline,
                    sink=sink,
                    destination=_key(destination),
                    source=source,
                    segment=to,
                    changes=0,
                    since=clock(),
                )
            )

    def folded(self, sink: str, destination: Destination) -> None:
        """Record that a table has no pending changes any more."""
        self._connection.execute(
            delete(table_pending).where(_of_pending(self._pipeline, sink, destination))
        )

    def advance(
        self,
        sink: str,
        to: int,
        rejected: Iterable[Rejection] = (),
        writes: Iterable[TableWrite] = (),
    ) -> bool:
        """Move the front to the end of a commit, and suspend the tables that could not be written.

        Args:
            sink: The sink.
            to: The last segment of the commit.
            rejected: The tables that could not be written.
            writes: What the commit has added to the others.

        Returns:
            Whether the front has moved; False if it was there already.
        """
        row = self._row(sink, _FRONT)
        if row["segment"] == to:
            return False
        for rejection in rejected:
            self._insert(
                sink,
                _key(rejection.destination),
                segment=row["segment"],
                planned_to=to,
                error=rejection.error[:_ERROR_LENGTH],
                remedy=list(rejection.remedy),
                since=clock(),
                next_attempt_at=rejection.next_attempt_at,
                failures=1,
            )
        self._update(sink, _FRONT, {"segment": to, "planned_to": None})
        self._record_writes(sink, to, writes)
        self._forget_ends(sink)
        return True

    def suspend(self, sink: str, rejection: Rejection) -> None:
        """Suspend a table that has reached the front: its pending changes cannot be folded."""
        if _key(rejection.destination) in _rows(self._connection, self._pipeline, sink):
            return
        self._insert(
            sink,
            _key(rejection.destination),
            segment=self._row(sink, _FRONT)["segment"],
            error=rejection.error[:_ERROR_LENGTH],
            remedy=list(rejection.remedy),
            since=clock(),
            next_attempt_at=rejection.next_attempt_at,
            failures=1,
        )

    def tried(self, sink: str, rejection: Rejection) -> None:
        """Record that a suspended table could not be written again."""
        row = self._row(sink, _key(rejection.destination))
        self._update(
            sink,
            _key(rejection.destination),
            {
                "error": rejection.error[:_ERROR_LENGTH],
                "remedy": list(rejection.remedy),
                "next_attempt_at": rejection.next_attempt_at,
                "failures": row["failures"] + 1,
            },
        )

    def wrote(
        self,
        sink: str,
        destination: Destination,
        to: int,
        writes: Iterable[TableWrite] = (),
    ) -> bool:
        """Record that a suspended table has everything up to a segment.

        It is no longer suspended once it has reached the front.

        Args:
            sink: The sink.
            destination: The table.
            to: The segment.
            writes: What the commit has added to it; nothing if the segments have no changes of it.

        Returns:
            Whether the table has moved; False if it was there already.
        """
        row = _rows(self._connection, self._pipeline, sink).get(_key(destination))
        front = self._row(sink, _FRONT)["segment"]
        if row is None or row["segment"] > to or row["segment"] == to < front:
            return False
        if to >= front:
            self._delete(sink, _key(destination))
        else:
            self._update(
                sink,
                _key(destination),
                {"segment": to, "planned_to": None, "next_attempt_at": 0.0, "failures": 0},
            )
        self._record_writes(sink, to, writes)
        self._forget_ends(sink)
        return True

    def _record_writes(self, sink: str, to: int, writes: Iterable[TableWrite]) -> None:
        """Store writes, and how many pending changes tables have after them."""
        for write in writes:
            if write.pending:
                self._connection.execute(
                    update(table_pending)
                    .where(_of_pending(self._pipeline, sink, write.destination))
                    .values(changes=table_pending.c.changes + write.changes)
                )
            else:
                self.folded(sink, write.destination)
        self._add_writes(sink, to, writes)

    def _add_writes(self, sink: str, to: int, writes: Iterable[TableWrite]) -> None:
        """Store writes, except those of commits that a table already has.

        A table skips such commits after a `restart`.
        """
        for write in writes:
            condition = _of_table(self._pipeline, sink, write)
            last = select(func.max(table_writes.c.segment)).where(condition)
            before = self._connection.execute(last).scalar()
            if before is not None and before >= to:
                continue
            lacked = self._connection.execute(
                select(table_writes.c.lacking).where(condition, table_writes.c.segment == before)
            ).scalar()
            lacking = sorted({*(lacked or ()), *write.lacking})
            self._connection.execute(
                delete(table_writes).where(condition, table_writes.c.published)
            )
            self._connection.execute(
                insert(table_writes).values(
                    pipeline=self._pipeline,
                    sink=sink,
                    source=_source_key(write),
                    segment=to,
                    destination=write.destination,
                    columns=write.columns,
                    changes=write.changes,
                    position=write.position,
                    changed_at=write.changed_at,
                    figures=None if write.figures is None else asdict(write.figures),
                    int64_timestamps=write.int64_timestamps,
                    written_at=clock(),
                    published=False,
                    lacking=lacking or None,
                )
            )

    def _forget_ends(self, sink: str) -> None:
        rows = _rows(self._connection, self._pipeline, sink)
        reached = min(row["segment"] for row in rows.values())
        ends = rows[_FRONT]["ends"]
        later = [end for end in ends if end > reached]
        if later != ends:
            self._update(sink, _FRONT, {"ends": later})

    def _row(self, sink: str, key: str) -> RowMapping:
        row = _rows(self._connection, self._pipeline, sink).get(key)
        if row is None:
            problem = (
                f"table {key} of sink {sink!r} is not held"
                if key
                else f"sink {sink!r} has no front"
            )
            raise NotAllowed(f"pipeline {self._pipeline!r}: {problem}")
        return row

    def _insert(self, sink: str, key: str, **values: Any) -> None:
        row = {"planned_to": None, "ends": [], "next_attempt_at": 0.0, "failures": 0, **values}
        self._connection.execute(
            insert(table_commits).values(pipeline=self._pipeline, sink=sink, destination=key, **row)
        )

    def _suspend_recreated(self, sink: str, destination: Destination, segment: int) -> None:
        self._delete(sink, _key(destination))
        self._insert(
            sink,
            _key(destination),
            segment=segment,
            error=TO_BE_RECREATED,
            since=clock(),
        )

    def _delete(self, sink: str, key: str) -> None:
        self._connection.execute(
            delete(table_commits).where(
                _of(self._pipeline, sink), table_commits.c.destination == key
            )
        )

    def _update(self, sink: str, key: str, values: Mapping[str, Any]) -> None:
        self._connection.execute(
            update(table_commits)
            .where(_of(self._pipeline, sink), table_commits.c.destination == key)
            .values(**values)
        )


def begin_resyncs(
    connection: Connection, pipeline: str, sink: str, tables: Mapping[Destination, str]
) -> None:
    """Have the next run recreate tables of a sink; the caller requests the snapshot of them."""
    for destination, table_name in tables.items():
        _insert_resync(connection, pipeline, sink, destination, table_name, begun=True)


def _insert_resync(
    connection: Connection,
    pipeline: str,
    sink: str,
    destination: Destination,
    table_name: str,
    *,
    begun: bool = False,
) -> None:
    connection.execute(
        insert(table_resyncs).values(
            pipeline=pipeline,
            sink=sink,
            destination=_key(destination),
            table_name=table_name,
            begun=begun,
        )
    )


def _read(connection: Connection, pipeline: str, sink: str) -> TableCommits | None:
    rows = _rows(connection, pipeline, sink)
    front = rows.pop(_FRONT, None)
    if front is None:
        return None
    recreated = {
        _key(resync.destination) for resync in _resyncs(connection, pipeline, sink) if resync.begun
    }
    tables = [
        SuspendedTable(
            _destination(key),
            row["segment"],
            row["planned_to"],
            row["error"],
            row["since"],
            row["next_attempt_at"],
            row["failures"],
            tuple(row["remedy"] or ()),
            key in recreated,
        )
        for key, row in rows.items()
    ]
    return TableCommits(
        TableFront(front["segment"], front["planned_to"], front["owner"], tuple(front["ends"])),
        {table.destination: table for table in tables},
        {table.destination: table for table in _pending(connection, _of_pending(pipeline, sink))},
    )


def _pending(connection: Connection, where: ColumnElement[bool]) -> list[PendingTable]:
    columns = table_pending.c
    query = (
        select(table_pending)
        .where(where)
        .order_by(columns.since, columns.sink, columns.destination)
    )
    return [
        PendingTable(
            row["sink"],
            tuple(orjson.loads(row["destination"])),
            tuple(row["source"]),
            row["segment"],
            row["changes"],
            row["since"],
        )
        for row in connection.execute(query).mappings()
    ]


def _rows(connection: Connection, pipeline: str, sink: str) -> dict[str, RowMapping]:
    query = (
        select(table_commits)
        .where(_of(pipeline, sink))
        .order_by(table_commits.c.segment, table_commits.c.destination)
    )
    return {row["destination"]: row for row in connection.execute(query).mappings()}


def _resyncs(connection: Connection, pipeline: str, sink: str | None) -> list[TableResync]:
    query = (
        select(table_resyncs)
        .where(_resyncs_of(pipeline, sink))
        .order_by(table_resyncs.c.sink, table_resyncs.c.destination)
    )
    return [
        TableResync(row.sink, _destination(row.destination), row.table_name, row.begun)
        for row in connection.execute(query)
    ]


def _resyncs_of(pipeline: str, sink: str | None) -> ColumnElement[bool]:
    condition = table_resyncs.c.pipeline == pipeline
    return condition if sink is None else and_(condition, table_resyncs.c.sink == sink)


def _of(pipeline: str, sink: str) -> ColumnElement[bool]:
    return and_(table_commits.c.pipeline == pipeline, table_commits.c.sink == sink)


def _of_pending(
    pipeline: str, sink: str, destination: Destination | None = None
) -> ColumnElement[bool]:
    of_sink = and_(table_pending.c.pipeline == pipeline, table_pending.c.sink == sink)
    if destination is None:
        return of_sink
    return and_(of_sink, table_pending.c.destination == _key(destination))


def _stored(row: RowMapping) -> StoredWrite:
    schema, table = orjson.loads(row["source"])
    write = TableWrite(
        (schema, table),
        tuple(row["destination"]),
        tuple((name, type_) for name, type_ in row["columns"]),
        row["changes"],
        row["position"],
        row["changed_at"],
        figures=None if row["figures"] is None else TableFigures(**row["figures"]),
        lacking=tuple(row["lacking"] or ()),
        int64_timestamps=row["int64_timestamps"],
    )
    return StoredWrite(row["sink"], row["segment"], write, row["written_at"])


def _of_table(pipeline: str, sink: str, write: TableWrite) -> ColumnElement[bool]:
    return and_(
        table_writes.c.pipeline == pipeline,
        table_writes.c.sink == sink,
        table_writes.c.source == _source_key(write),
    )


def _source_key(write: TableWrite) -> str:
    return orjson.dumps(write.source).decode()


def _destination(key: str) -> Destination:
    return tuple(orjson.loads(key))


def _key(destination: Destination | None) -> str:
    """Return the text by which a table is stored: a JSON array, as names may contain dots."""
    return _FRONT if destination is None else orjson.dumps(destination).decode()
