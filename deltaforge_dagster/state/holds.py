"""Holds: events that are kept back, in order, until they are released.

A hold is identified by its kind (`table`: its events cannot be decoded; `schema`: the table's newest
form waits for approval) and its subject (`shop.orders`). It goes through three states:

=============  ====================================================================================
`held`         events of the subject are kept in files of the journal's folder (`hold_part`)
`released`     the problem was fixed or the form approved; the next run turns the events into
               segments
`journaled`    the events are in the journal, the last one in `last_segment`; the files are not needed
               any more
=============  ====================================================================================

Until every attached sink has that segment, the source must not discard the events, so the row is kept.
Writes to holds share a transaction with the captured position, so that an event is kept if and only if
capture will not read it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.database import clock, upsert
from deltaforge_dagster.state.records import HeldPart, HoldPartRow, HoldRow
from deltaforge_dagster.state.rows import read_rows
from deltaforge_dagster.state.tables import hold_parts, holds

SCHEMA = "schema"
"""Kind of holds for tables whose form waits for approval; their files contain decoded rows."""

_REASON_LENGTH = 2000


def read_holds(connection: Connection, pipeline: str) -> list[HoldRow]:
    """Return a pipeline's holds, oldest first."""
    found = read_rows(connection, HoldRow, holds.c.pipeline == pipeline)
    return sorted(found, key=lambda row: (row.since, row.kind, row.subject))


def read_parts(
    connection: Connection, pipeline: str, kind: str | None = None, subject: str | None = None
) -> list[HoldPartRow]:
    """Return the files of one hold, or of all holds, in the order of their events."""
    where = [hold_parts.c.pipeline == pipeline]
    if kind is not None and subject is not None:
        where += [hold_parts.c.kind == kind, hold_parts.c.subject == subject]
    found = read_rows(connection, HoldPartRow, *where)
    return sorted(found, key=lambda row: row.number)


def keep(connection: Connection, pipeline: str, parts: Iterable[HeldPart]) -> None:
    """Add durable files of events to their holds; files that were already added are ignored."""
    for part in parts:
        _keep(connection, pipeline, part)


def _keep(connection: Connection, pipeline: str, part: HeldPart) -> None:
    known = select(hold_parts.c.path).where(
        hold_parts.c.pipeline == pipeline, hold_parts.c.path == part.path
    )
    if connection.execute(known).first() is not None:
        return
    last = connection.execute(
        select(func.max(hold_parts.c.number)).where(hold_parts.c.pipeline == pipeline)
    ).scalar()
    connection.execute(
        insert(hold_parts).values(
            pipeline=pipeline,
            path=part.path,
            kind=part.kind,
            subject=part.subject,
            number=1 + (last or 0),
            checksum=part.checksum,
            events=part.events,
            bytes=part.bytes,
        )
    )
    _add(connection, pipeline, part)


def begin(connection: Connection, pipeline: str, part: HeldPart) -> None:
    """Begin a hold that has no events yet; `part` names the subject and no file."""
    _add(connection, pipeline, part)


def _add(connection: Connection, pipeline: str, part: HeldPart) -> None:
    """Begin a part's hold, or add the part's events to the existing one."""
    this = _this(pipeline, part.kind, part.subject)
    # A hold that is already `journaled` starts again, but keeps its `since_position`.
    connection.execute(
        update(holds)
        .where(this, holds.c.state == "journaled")
        .values(state="held", reason=part.reason[:_REASON_LENGTH], since=clock(), events=0, bytes=0)
    )
    connection.execute(
        upsert(connection, holds)
        .values(
            pipeline=pipeline,
            kind=part.kind,
            subject=part.subject,
            state="held",
            reason=part.reason[:_REASON_LENGTH],
            since=clock(),
            since_position=part.since_position,
            events=part.events,
            bytes=part.bytes,
        )
        .on_conflict_do_update(
            index_elements=["pipeline", "kind", "subject"],
            set_={
                "events": holds.c.events + part.events,
                "bytes": holds.c.bytes + part.bytes,
            },
        )
    )


def release(connection: Connection, pipeline: str, kind: str, subject: str, mend: str) -> HoldRow:
    """Release a hold, so that the next run writes its events to the journal.

    Args:
        connection: A transaction that has locked the lease row.
        pipeline: The pipeline.
        kind: Kind of the hold.
        subject: Subject of the hold.
        mend: Remedy that the source needs to decode the events, JSON text.

    Raises:
        NotAllowed: There is no such hold, or its events are already in the journal.
    """
    released = connection.execute(
        update(holds)
        .where(_this(pipeline, kind, subject), holds.c.state != "journaled")
        .values(state="released", mend=mend)
    )
    if released.rowcount == 0:
        raise NotAllowed(f"pipeline {pipeline!r} holds no {kind} {subject!r}")
    return _row(connection, pipeline, kind, subject)


def hold_back(connection: Connection, pipeline: str, kind: str, subject: str, reason: str) -> None:
    """Revoke a release, because the events still cannot be decoded, for this reason."""
    connection.execute(
        update(holds)
        .where(_this(pipeline, kind, subject), holds.c.state == "released")
        .values(state="held", mend=None, reason=reason[:_REASON_LENGTH])
    )


def journaled(
    connection: Connection, pipeline: str, kind: str, subject: str, last_segment: int
) -> None:
    """Record that all held events are in the journal, the last one in `last_segment`."""
    connection.execute(
        delete(hold_parts).where(
            hold_parts.c.pipeline == pipeline,
            hold_parts.c.kind == kind,
            hold_parts.c.subject == subject,
        )
    )
    connection.execute(
        update(holds)
        .where(_this(pipeline, kind, subject))
        .values(state="journaled", mend=None, last_segment=last_segment)
    )


def forget(connection: Connection, pipeline: str, delivered: int) -> None:
    """Delete holds whose events all attached sinks have, given that they have segment `delivered`."""
    connection.execute(
        delete(holds).where(
            holds.c.pipeline == pipeline,
            holds.c.state == "journaled",
            holds.c.last_segment <= delivered,
        )
    )


def drop_all(connection: Connection, pipeline: str) -> None:
    """Delete all holds and the rows of their files."""
    for table in (holds, hold_parts):
        connection.execute(delete(table).where(table.c.pipeline == pipeline))


def _row(connection: Connection, pipeline: str, kind: str, subject: str) -> HoldRow:
    return read_rows(connection, HoldRow, _this(pipeline, kind, subject))[0]


def _this(pipeline: str, kind: str, subject: str) -> ColumnElement[bool]:
    return and_(holds.c.pipeline == pipeline, holds.c.kind == kind, holds.c.subject == subject)
