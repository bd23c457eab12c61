"""Reads and writes snapshots and their chunks in the state store (`snapshot_records` defines them).

A chunk becomes `read` by compare-and-swap: of two runs that read it, the first one wins, and the
other's file is orphaned. It becomes `complete` in the fenced transaction that adds the segment with
its rows, so the rows of a chunk get into the journal exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import relocated_rows
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    chunks,
    known_pipeline,
    read_checkpoints,
    segments,
    snapshots,
    table_resyncs,
)
from deltaforge_dagster.state.database.tables import relocated_rows as relocated_table
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.snapshot_records import (
    UNFINISHED,
    ChunkRow,
    ChunkState,
    PlannedChunk,
    SnapshotProgress,
    SnapshotRow,
    StagedChunk,
)

_PROBLEM_LENGTH = 2000
_NOT_READ: dict[str, None] = dict.fromkeys(
    (
        *("path", "checksum", "rows", "bytes", "read_view", "position"),
        *("described", "first_segment", "read_at", "seconds"),
    )
)
_NOT_COMPLETE: dict[str, None] = dict.fromkeys(("segment", "journaled_rows"))


class SnapshotRepository:
    """The snapshots of all pipelines and their chunks: `StateStore.snapshots`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def request(
        self,
        name: str,
        *,
        tables: Sequence[str] = (),
        condition: str | None = None,
        cause: str,
        sinks: Sequence[str] = (),
    ) -> SnapshotRow:
        """Request a snapshot of these tables for these sinks, by default of all for all.

        A snapshot of all rows also satisfies the `snapshot_due` of its sinks.

        Raises:
            NotAllowed: Another snapshot is not finished, there is no such sink, or the pipeline was
                never registered.
        """
        with self._database.write() as connection:
            lock_lease(connection, name)
            known_pipeline(connection, name)
            row = unfinished_snapshot(connection, name)
            if row is not None:
                raise NotAllowed(
                    f"pipeline {name!r}: snapshot {row.snapshot} is not finished; wait for it, or "
                    "cancel it (deltaforge snapshot cancel)"
                )
            since = _since(connection, name, sinks, whole=not tables and condition is None)
            insert_snapshot(
                connection,
                name,
                tables=tables,
                condition=condition,
                cause=cause,
                sinks=sinks,
                since=since,
            )
            return read_snapshots(connection, name, newest=1)[0]

    def read(self, name: str, *, newest: int | None = None) -> list[SnapshotRow]:
        """Return a pipeline's snapshots, newest first."""
        with self._database.read() as connection:
            return read_snapshots(connection, name, newest=newest)

    def unfinished(self, name: str) -> SnapshotRow | None:
        """Return the snapshot that is `wanted` or `reading`, or None; there is at most one."""
        with self._database.read() as connection:
            return unfinished_snapshot(connection, name)

    def chunks(
        self,
        name: str,
        snapshot: int,
        *,
        table: str | None = None,
        state: ChunkState | None = None,
        limit: int | None = None,
    ) -> list[ChunkRow]:
        """Return a snapshot's chunks by table and number; with `state="read"` by reading time."""
        query = _select(ChunkRow, chunks).where(_of(name, snapshot))
        if table is not None:
            query = query.where(chunks.c.table_name == table)
        order: tuple[Any, ...] = (chunks.c.table_name, chunks.c.number)
        if state is not None:
            query = query.where(chunks.c.state == state)
            order = (chunks.c.read_at, *order) if state == "read" else order
        query = query.order_by(*order).limit(limit)
        with self._database.read() as connection:
            return [ChunkRow(**row) for row in connection.execute(query).mappings()]

    def progress(self, name: str, snapshot: int) -> dict[str, SnapshotProgress]:
        """Return the progress of each table of a snapshot."""
        total = func.sum
        query = (
            select(
                chunks.c.table_name,
                total(case((chunks.c.state == "planned", 1), else_=0)),
                total(case((chunks.c.state == "read", 1), else_=0)),
                total(case((chunks.c.state == "complete", 1), else_=0)),
                total(func.coalesce(chunks.c.rows, 0)),
                total(case((chunks.c.state == "read", func.coalesce(chunks.c.bytes, 0)), else_=0)),
            )
            .where(_of(name, snapshot))
            .group_by(chunks.c.table_name)
            .order_by(chunks.c.table_name)
        )
        with self._database.read() as connection:
            return {
                table: SnapshotProgress(*map(int, numbers))
                for table, *numbers in connection.execute(query)
            }

    def staged_paths(self, name: str) -> set[str]:
        """Return the staging files that are still needed."""
        query = select(chunks.c.path).where(
            chunks.c.pipeline == name, chunks.c.state == "read", chunks.c.path.is_not(None)
        )
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    def plan(self, name: str, snapshot: int, planned: Iterable[PlannedChunk]) -> bool:
        """Store the chunks of a requested snapshot; return False if it has any or was cancelled."""
        with self._database.write() as connection:
            begun = connection.execute(
                update(snapshots)
                .where(_this(name, snapshot), snapshots.c.state == "wanted")
                .values(state="reading")
            )
            if begun.rowcount == 0:
                return False
            rows = [_planned(name, snapshot, chunk) for chunk in planned]
            if rows:
                connection.execute(insert(chunks), rows)
            _finish(connection, name, snapshot)
            return True

    def stage(self, name: str, snapshot: int, chunk: PlannedChunk, staged: StagedChunk) -> bool:
        """Record a chunk that was read.

        Returns False if another run was faster or the snapshot was cancelled.
        """
        reading = select(snapshots.c.snapshot).where(
            _this(name, snapshot), snapshots.c.state == "reading"
        )
        values = {field.name: getattr(staged, field.name) for field in fields(StagedChunk)}
        with self._database.write() as connection:
            done = connection.execute(
                update(chunks)
                .where(_chunk(name, snapshot, chunk), chunks.c.state == "planned", reading.exists())
                .values(state="read", read_at=clock(), **values)
            )
            return done.rowcount == 1

    def plan_relocated_rows(
        self, name: str, snapshot: int, chunk: PlannedChunk, *, keys: Collection[str], attempts: int
    ) -> None:
        """Add a chunk that looks for relocated rows of a table, unless it already exists."""
        with self._database.write() as connection:
            existing = select(chunks.c.number).where(_chunk(name, snapshot, chunk))
            reading = select(snapshots.c.snapshot).where(
                _this(name, snapshot), snapshots.c.state == "reading"
            )
            if connection.execute(existing).first() or not connection.execute(reading).first():
                return
            relocated_rows.drop(connection, name, snapshot, chunk.table_name, keys)
            row = _planned(name, snapshot, chunk) | {"attempts": attempts}
            connection.execute(insert(chunks), [row])

    def reopen(self, name: str, snapshot: int, names: Iterable[tuple[str, int]]) -> None:
        """Let `complete` chunks of a snapshot, given by table and number, be read again."""
        with self._database.write() as connection:
            reopened = 0
            for table_name, number in names:
                again = connection.execute(
                    update(chunks)
                    .where(
                        _of(name, snapshot),
                        chunks.c.table_name == table_name,
                        chunks.c.number == number,
                        chunks.c.state == "complete",
                    )
                    .values(state="planned", **_NOT_READ, **_NOT_COMPLETE)
                )
                reopened += again.rowcount
            if reopened:
                connection.execute(
                    update(snapshots)
                    .where(_this(name, snapshot), snapshots.c.state == "complete")
                    .values(state="reading", ended_at=None)
                )

    def cancel(self, name: str, snapshot: int, problem: str) -> bool:
        """Cancel a snapshot for good; return False if it is already finished."""
        with self._database.write() as connection:
            return _cancel(connection, name, snapshot, problem)

    def expire_chunks(self, name: str, *, before: float) -> int:
        """Delete chunks of snapshots that ended before a time, except the newest; return how many.

        Chunks whose segment is still in the journal are kept, because a sink may not have it yet.
        """
        newest = select(func.max(snapshots.c.snapshot)).where(snapshots.c.pipeline == name)
        ended = select(snapshots.c.snapshot).where(
            snapshots.c.pipeline == name,
            snapshots.c.snapshot < newest.scalar_subquery(),
            snapshots.c.ended_at < before,
        )
        journaled = select(segments.c.segment).where(
            segments.c.pipeline == name, segments.c.segment == chunks.c.segment
        )
        with self._database.write() as connection:
            dropped = connection.execute(
                delete(chunks).where(
                    chunks.c.pipeline == name, chunks.c.snapshot.in_(ended), ~journaled.exists()
                )
            )
            return dropped.rowcount


class SnapshotWrites:
    """Records the chunks that a lease holder merges into the journal: `FencedWriter.snapshots`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def complete(self, chunk: ChunkRow, *, segment: int | None, rows: int) -> None:
        """Record that a chunk's rows are in the journal, and in which segment, if any remained.

        Raises:
            NotAllowed: The snapshot was cancelled, or the chunk is being read again.
        """
        done = self._connection.execute(
            update(chunks)
            .where(_chunk(self._pipeline, chunk.snapshot, chunk), _same_reading(chunk))
            .values(state="complete", segment=segment, journaled_rows=rows)
        )
        if done.rowcount == 0 and not _is_complete(
            self._connection, self._pipeline, chunk, segment
        ):
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: chunk {chunk.partition} is not to be taken over now"
            )
        _address(self._connection, self._pipeline, chunk.snapshot, segment)
        _finish(self._connection, self._pipeline, chunk.snapshot)

    def plan_again(self, chunk: ChunkRow) -> None:
        """Let a chunk be read again, because the rows that were read cannot be used."""
        self._connection.execute(
            update(chunks)
            .where(_chunk(self._pipeline, chunk.snapshot, chunk), _same_reading(chunk))
            .values(state="planned", attempts=chunks.c.attempts + 1, **_NOT_READ)
        )


def read_snapshots(
    connection: Connection, pipeline: str, *, newest: int | None = None
) -> list[SnapshotRow]:
    """Return a pipeline's snapshots, newest first."""
    query = _select(SnapshotRow, snapshots).where(snapshots.c.pipeline == pipeline)
    query = query.order_by(snapshots.c.snapshot.desc()).limit(newest)
    return [SnapshotRow(**row) for row in connection.execute(query).mappings()]


def unfinished_snapshot(connection: Connection, pipeline: str) -> SnapshotRow | None:
    """Return the snapshot that is `wanted` or `reading`, or None."""
    newest = read_snapshots(connection, pipeline, newest=1)
    return newest[0] if newest and newest[0].state in UNFINISHED else None


def insert_snapshot(
    connection: Connection,
    pipeline: str,
    *,
    tables: Sequence[str],
    condition: str | None = None,
    cause: str,
    sinks: Sequence[str],
    since: int,
) -> None:
    """Request a snapshot (see `SnapshotRow`); the caller ensures that none is unfinished."""
    last = connection.execute(
        select(func.max(snapshots.c.snapshot)).where(snapshots.c.pipeline == pipeline)
    ).scalar()
    connection.execute(
        insert(snapshots).values(
            pipeline=pipeline,
            snapshot=(last or 0) + 1,
            sinks=list(sinks),
            since_segment=since,
            tables=list(tables),
            condition=condition,
            cause=cause,
            spec_hash=known_pipeline(connection, pipeline).spec_hash,
            state="wanted",
            created_at=clock(),
        )
    )


def request_for_all(connection: Connection, pipeline: str, cause: str) -> None:
    """Request a snapshot of all rows for all sinks; the caller ensures that none is unfinished."""
    since = _since(connection, pipeline, (), whole=True)
    insert_snapshot(connection, pipeline, tables=(), cause=cause, sinks=(), since=since)


def cancel_without_sinks(connection: Connection, pipeline: str, sinks: Collection[str]) -> None:
    """Cancel the unfinished snapshot if none of the sinks that it names exists any more."""
    for row in read_snapshots(connection, pipeline, newest=1):
        if row.state in UNFINISHED and row.sinks and not set(row.sinks) & set(sinks):
            problem = f"it was for {', '.join(row.sinks)}, which the file no longer has"
            _cancel(connection, pipeline, row.snapshot, problem)


def lose_journal(connection: Connection, pipeline: str, delivered: int) -> None:
    """Let the chunks that not all sinks have be read again, because the journal's files are lost.

    `delivered` is the last segment that every attached sink has.
    """
    again = and_(
        chunks.c.pipeline == pipeline,
        or_(chunks.c.state == "read", chunks.c.segment > delivered),
        chunks.c.snapshot.in_(
            select(snapshots.c.snapshot).where(
                snapshots.c.pipeline == pipeline, snapshots.c.state != "cancelled"
            )
        ),
    )
    connection.execute(
        update(snapshots)
        .where(
            snapshots.c.pipeline == pipeline,
            snapshots.c.state == "complete",
            snapshots.c.snapshot.in_(select(chunks.c.snapshot).where(again)),
        )
        .values(state="reading", ended_at=None)
    )
    connection.execute(
        update(chunks).where(again).values(state="planned", **_NOT_READ, **_NOT_COMPLETE)
    )


def forget(connection: Connection, pipeline: str) -> None:
    """Delete all snapshots of a pipeline, and the resyncs of tables that they were to load."""
    for table in (snapshots, chunks, relocated_table, table_resyncs):
        connection.execute(delete(table).where(table.c.pipeline == pipeline))


def _since(connection: Connection, pipeline: str, sinks: Sequence[str], *, whole: bool) -> int:
    """Return the largest first segment of the sinks that must receive all rows of a snapshot.

    If the snapshot covers all rows (`whole`), clear `snapshot_due` of these sinks.
    """
    by_sink = read_checkpoints(connection, pipeline)
    unknown = sorted(set(sinks) - set(by_sink))
    if unknown:
        names = ", ".join(by_sink) or "none"
        raise NotAllowed(f"pipeline {pipeline!r} has no sink {unknown[0]!r} (there is: {names})")
    due = [
        row.sink for row in by_sink.values() if row.snapshot_due and row.sink in (sinks or by_sink)
    ]
    if whole:
        connection.execute(
            update(checkpoints)
            .where(checkpoints.c.pipeline == pipeline, checkpoints.c.sink.in_(due))
            .values(snapshot_due=False)
        )
    return max((by_sink[sink].first_segment for sink in (*sinks, *due)), default=0)


def _address(connection: Connection, pipeline: str, snapshot: int, segment: int | None) -> None:
    """Restrict a segment of snapshot rows to the sinks of its snapshot, if it names any."""
    sinks = connection.execute(select(snapshots.c.sinks).where(_this(pipeline, snapshot))).scalar()
    if sinks and segment is not None:
        connection.execute(
            update(segments)
            .where(segments.c.pipeline == pipeline, segments.c.segment == segment)
            .values(sinks=sinks)
        )


def _finish(connection: Connection, pipeline: str, snapshot: int) -> None:
    """Mark a snapshot as `complete` if all its chunks are and no relocated rows are left."""
    left = select(chunks.c.number).where(_of(pipeline, snapshot), chunks.c.state != "complete")
    lost = select(relocated_table.c.digest).where(
        relocated_table.c.pipeline == pipeline, relocated_table.c.snapshot == snapshot
    )
    connection.execute(
        update(snapshots)
        .where(
            _this(pipeline, snapshot),
            snapshots.c.state == "reading",
            ~left.exists(),
            ~lost.exists(),
        )
        .values(state="complete", ended_at=clock())
    )


def _cancel(connection: Connection, pipeline: str, snapshot: int, problem: str) -> bool:
    """Cancel a snapshot for good; return False if it is already finished."""
    cancelled = connection.execute(
        update(snapshots)
        .where(_this(pipeline, snapshot), snapshots.c.state.in_(UNFINISHED))
        .values(state="cancelled", problem=problem[:_PROBLEM_LENGTH], ended_at=clock())
    )
    if cancelled.rowcount:
        connection.execute(
            update(chunks)
            .where(_of(pipeline, snapshot), chunks.c.state == "read")
            .values(state="planned", **_NOT_READ)
        )
        relocated_rows.drop_all(connection, pipeline, snapshot)
    return bool(cancelled.rowcount)


def _select(kind: type, table: Table) -> Any:
    return select(*(table.c[field.name] for field in fields(kind)))


def _planned(pipeline: str, snapshot: int, chunk: PlannedChunk) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "snapshot": snapshot,
        "table_name": chunk.table_name,
        "number": chunk.number,
        "plan": chunk.plan,
        "state": "planned",
        "attempts": 0,
    }


def _this(pipeline: str, snapshot: int) -> ColumnElement[bool]:
    return and_(snapshots.c.pipeline == pipeline, snapshots.c.snapshot == snapshot)


def _of(pipeline: str, snapshot: int) -> ColumnElement[bool]:
    return and_(chunks.c.pipeline == pipeline, chunks.c.snapshot == snapshot)


def _chunk(pipeline: str, snapshot: int, chunk: PlannedChunk) -> ColumnElement[bool]:
    return and_(
        _of(pipeline, snapshot),
        chunks.c.table_name == chunk.table_name,
        chunks.c.number == chunk.number,
    )


def _same_reading(chunk: ChunkRow) -> ColumnElement[bool]:
    return and_(chunks.c.state == "read", chunks.c.read_at == chunk.read_at)


def _is_complete(
    connection: Connection, pipeline: str, chunk: ChunkRow, segment: int | None
) -> bool:
    query = select(chunks.c.number).where(
        _chunk(pipeline, chunk.snapshot, chunk),
        chunks.c.state == "complete",
        chunks.c.read_at == chunk.read_at,
        chunks.c.segment.is_not_distinct_from(segment),
    )
    return connection.execute(query).first() is not None
