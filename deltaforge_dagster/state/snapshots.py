"""What becomes of snapshots and their chunks in the store (`snapshot_records` says what they are).

A chunk becomes `read` by compare-and-swap: of two runs that read it the first counts, and the other's
file is an orphan. It becomes `spliced` in the transaction that adds the segment with its rows, which
is fenced; so each reading of a chunk gets into the journal once.
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
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.rows import read_checkpoints
from deltaforge_dagster.state.snapshot_records import (
    UNFINISHED,
    ChunkRow,
    ChunkState,
    PlannedChunk,
    SnapshotProgress,
    SnapshotRow,
    StagedChunk,
)
from deltaforge_dagster.state.tables import checkpoints, chunks, segments, snapshots
from deltaforge_dagster.state.tables import relocated_rows as relocated_table

_PROBLEM_LENGTH = 2000
_NOT_READ: dict[str, None] = dict.fromkeys(
    (
        *("path", "checksum", "rows", "bytes", "sight", "position"),
        *("described", "first_segment", "read_at", "seconds"),
    )
)
_NOT_SPLICED: dict[str, None] = dict.fromkeys(("segment", "spliced_rows"))


def create(
    connection: Connection,
    pipeline: str,
    *,
    tables: Sequence[str],
    condition: str | None,
    cause: str,
    spec_hash: str,
    sinks: Sequence[str] = (),
) -> SnapshotRow:
    """Request a snapshot; one of all rows is also the one that its sinks were due to get.

    Raises:
        NotAllowed: Another one is not finished, or there is no such sink.
    """
    for row in read_snapshots(connection, pipeline, newest=1):
        if row.state in UNFINISHED:
            raise NotAllowed(
                f"pipeline {pipeline!r}: snapshot {row.snapshot} is not finished; wait for it, or "
                "cancel it (deltaforge snapshot cancel)"
            )
    last = connection.execute(
        select(func.max(snapshots.c.snapshot)).where(snapshots.c.pipeline == pipeline)
    ).scalar()
    since = _since(connection, pipeline, sinks, whole=not tables and condition is None)
    connection.execute(
        insert(snapshots).values(
            pipeline=pipeline,
            snapshot=(last or 0) + 1,
            sinks=list(sinks),
            since_segment=since,
            tables=list(tables),
            condition=condition,
            cause=cause,
            spec_hash=spec_hash,
            state="wanted",
            created_at=clock(),
        )
    )
    return read_snapshots(connection, pipeline, newest=1)[0]


def _since(connection: Connection, pipeline: str, sinks: Sequence[str], *, whole: bool) -> int:
    """Return with which segment the last sink begins that a snapshot is to bring everything to.

    With a snapshot of all rows nothing is due to these sinks any more.
    """
    known = read_checkpoints(connection, pipeline)
    unknown = sorted(set(sinks) - set(known))
    if unknown:
        names = ", ".join(known) or "none"
        raise NotAllowed(f"pipeline {pipeline!r} has no sink {unknown[0]!r} (there is: {names})")
    due = [row.sink for row in known.values() if row.snapshot_due and row.sink in (sinks or known)]
    if whole:
        connection.execute(
            update(checkpoints)
            .where(checkpoints.c.pipeline == pipeline, checkpoints.c.sink.in_(due))
            .values(snapshot_due=False)
        )
    return max((known[sink].first_segment for sink in (*sinks, *due)), default=0)


def read_snapshots(
    connection: Connection, pipeline: str, *, newest: int | None = None
) -> list[SnapshotRow]:
    """Return a pipeline's snapshots, the newest first."""
    query = _select(SnapshotRow, snapshots).where(snapshots.c.pipeline == pipeline)
    query = query.order_by(snapshots.c.snapshot.desc()).limit(newest)
    return [SnapshotRow(**row) for row in connection.execute(query).mappings()]


def read_chunks(
    connection: Connection,
    pipeline: str,
    snapshot: int,
    *,
    table: str | None = None,
    state: ChunkState | None = None,
    limit: int | None = None,
) -> list[ChunkRow]:
    """Return chunks of a snapshot, by table and number; those `read` in the order of reading."""
    query = _select(ChunkRow, chunks).where(_of(pipeline, snapshot))
    if table is not None:
        query = query.where(chunks.c.table_name == table)
    order: tuple[Any, ...] = (chunks.c.table_name, chunks.c.number)
    if state is not None:
        query = query.where(chunks.c.state == state)
        order = (chunks.c.read_at, *order) if state == "read" else order
    query = query.order_by(*order).limit(limit)
    return [ChunkRow(**row) for row in connection.execute(query).mappings()]


def staged_paths(connection: Connection, pipeline: str) -> set[str]:
    """Return the staging files that are still needed."""
    query = select(chunks.c.path).where(
        chunks.c.pipeline == pipeline, chunks.c.state == "read", chunks.c.path.is_not(None)
    )
    return set(connection.execute(query).scalars())


def plan(
    connection: Connection, pipeline: str, snapshot: int, planned: Iterable[PlannedChunk]
) -> bool:
    """Give a wanted snapshot its chunks; False when it has them already, or was cancelled."""
    begun = connection.execute(
        update(snapshots)
        .where(_this(pipeline, snapshot), snapshots.c.state == "wanted")
        .values(state="reading")
    )
    if begun.rowcount == 0:
        return False
    rows = [_planned(pipeline, snapshot, one) for one in planned]
    if rows:
        connection.execute(insert(chunks), rows)
    finish(connection, pipeline, snapshot)
    return True


def stage(
    connection: Connection, pipeline: str, snapshot: int, chunk: PlannedChunk, staged: StagedChunk
) -> bool:
    """Note what was read of a chunk; False when somebody else was faster, or it was cancelled."""
    reading = select(snapshots.c.snapshot).where(
        _this(pipeline, snapshot), snapshots.c.state == "reading"
    )
    values = {field.name: getattr(staged, field.name) for field in fields(StagedChunk)}
    done = connection.execute(
        update(chunks)
        .where(_chunk(pipeline, snapshot, chunk), chunks.c.state == "planned", reading.exists())
        .values(state="read", read_at=clock(), **values)
    )
    return done.rowcount == 1


def complete_chunk(
    connection: Connection, pipeline: str, chunk: ChunkRow, *, segment: int | None, rows: int
) -> None:
    """Note that what was read of a chunk is in the journal now.

    Raises:
        NotAllowed: It was cancelled, or is read once more.
    """
    done = connection.execute(
        update(chunks)
        .where(_chunk(pipeline, chunk.snapshot, chunk), _same_reading(chunk))
        .values(state="spliced", segment=segment, spliced_rows=rows)
    )
    if done.rowcount == 0 and not _is_complete(connection, pipeline, chunk, segment):
        raise NotAllowed(
            f"pipeline {pipeline!r}: chunk {chunk.partition} is not to be taken over now"
        )
    _address(connection, pipeline, chunk.snapshot, segment)
    finish(connection, pipeline, chunk.snapshot)


def _address(connection: Connection, pipeline: str, snapshot: int, segment: int | None) -> None:
    """Let a segment of chunks be for the sinks that its snapshot is for."""
    sinks = connection.execute(select(snapshots.c.sinks).where(_this(pipeline, snapshot))).scalar()
    if sinks and segment is not None:
        connection.execute(
            update(segments)
            .where(segments.c.pipeline == pipeline, segments.c.segment == segment)
            .values(sinks=sinks)
        )


def plan_again(connection: Connection, pipeline: str, chunk: ChunkRow) -> None:
    """Let a chunk be read once more, since what was read of it cannot be used."""
    connection.execute(
        update(chunks)
        .where(_chunk(pipeline, chunk.snapshot, chunk), _same_reading(chunk))
        .values(state="planned", attempts=chunks.c.attempts + 1, **_NOT_READ)
    )


def reopen(
    connection: Connection, pipeline: str, snapshot: int, names: Iterable[tuple[str, int]]
) -> None:
    """Let spliced chunks of a snapshot be read once more, because somebody asks for it."""
    reopened = 0
    for table_name, number in names:
        again = connection.execute(
            update(chunks)
            .where(
                _of(pipeline, snapshot),
                chunks.c.table_name == table_name,
                chunks.c.number == number,
                chunks.c.state == "spliced",
            )
            .values(state="planned", **_NOT_READ, **_NOT_SPLICED)
        )
        reopened += again.rowcount
    if reopened:
        connection.execute(
            update(snapshots)
            .where(_this(pipeline, snapshot), snapshots.c.state == "spliced")
            .values(state="reading", ended_at=None)
        )


def plan_relocated_rows(
    connection: Connection,
    pipeline: str,
    snapshot: int,
    chunk: PlannedChunk,
    *,
    keys: Collection[str],
    attempts: int,
) -> None:
    """Let one more chunk look for relocated rows of a table; nothing when it is there already."""
    known = select(chunks.c.number).where(_chunk(pipeline, snapshot, chunk))
    reading = select(snapshots.c.snapshot).where(
        _this(pipeline, snapshot), snapshots.c.state == "reading"
    )
    if connection.execute(known).first() or not connection.execute(reading).first():
        return
    relocated_rows.drop(connection, pipeline, snapshot, chunk.table_name, keys)
    row = _planned(pipeline, snapshot, chunk) | {"attempts": attempts}
    connection.execute(insert(chunks), [row])


def finish(connection: Connection, pipeline: str, snapshot: int) -> None:
    """Note that a snapshot is spliced when all its chunks are, and no relocated row is left."""
    left = select(chunks.c.number).where(_of(pipeline, snapshot), chunks.c.state != "spliced")
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
        .values(state="spliced", ended_at=clock())
    )


def cancel(connection: Connection, pipeline: str, snapshot: int, problem: str) -> bool:
    """Stop a snapshot for good; False when it is finished."""
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


def cancel_without_sinks(connection: Connection, pipeline: str, sinks: Collection[str]) -> None:
    """Stop the unfinished snapshot when it is for sinks none of which is there any more."""
    for row in read_snapshots(connection, pipeline, newest=1):
        if row.state in UNFINISHED and row.sinks and not set(row.sinks) & set(sinks):
            problem = f"it was for {', '.join(row.sinks)}, which the file no longer has"
            cancel(connection, pipeline, row.snapshot, problem)


def progress(connection: Connection, pipeline: str, snapshot: int) -> dict[str, SnapshotProgress]:
    """Return how far each table of a snapshot has come."""
    total = func.sum
    query = (
        select(
            chunks.c.table_name,
            total(case((chunks.c.state == "planned", 1), else_=0)),
            total(case((chunks.c.state == "read", 1), else_=0)),
            total(case((chunks.c.state == "spliced", 1), else_=0)),
            total(func.coalesce(chunks.c.rows, 0)),
            total(case((chunks.c.state == "read", func.coalesce(chunks.c.bytes, 0)), else_=0)),
        )
        .where(_of(pipeline, snapshot))
        .group_by(chunks.c.table_name)
        .order_by(chunks.c.table_name)
    )
    return {
        name: SnapshotProgress(*map(int, numbers)) for name, *numbers in connection.execute(query)
    }


def lose_journal(connection: Connection, pipeline: str, delivered: int) -> None:
    """Let what no sink has beyond a segment be read once more: the journal's files are lost."""
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
            snapshots.c.state == "spliced",
            snapshots.c.snapshot.in_(select(chunks.c.snapshot).where(again)),
        )
        .values(state="reading", ended_at=None)
    )
    connection.execute(
        update(chunks).where(again).values(state="planned", **_NOT_READ, **_NOT_SPLICED)
    )


def expire_chunks(connection: Connection, pipeline: str, *, before: float) -> int:
    """Drop the chunks of older snapshots than the newest that ended before a time; return how many.

    A chunk whose segment is still in the journal stays: some sink may lack it.
    """
    newest = select(func.max(snapshots.c.snapshot)).where(snapshots.c.pipeline == pipeline)
    ended = select(snapshots.c.snapshot).where(
        snapshots.c.pipeline == pipeline,
        snapshots.c.snapshot < newest.scalar_subquery(),
        snapshots.c.ended_at < before,
    )
    journaled = select(segments.c.segment).where(
        segments.c.pipeline == pipeline, segments.c.segment == chunks.c.segment
    )
    dropped = connection.execute(
        delete(chunks).where(
            chunks.c.pipeline == pipeline, chunks.c.snapshot.in_(ended), ~journaled.exists()
        )
    )
    return dropped.rowcount


def forget(connection: Connection, pipeline: str) -> None:
    """Drop every snapshot of a pipeline."""
    for table in (snapshots, chunks, relocated_table):
        connection.execute(delete(table).where(table.c.pipeline == pipeline))


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
        chunks.c.state == "spliced",
        chunks.c.read_at == chunk.read_at,
        chunks.c.segment.is_not_distinct_from(segment),
    )
    return connection.execute(query).first() is not None
