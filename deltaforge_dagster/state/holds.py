"""Holds: events that are kept back, in order, until they are released.

A hold is identified by its kind (`table`: its events cannot be decoded; `schema`: the table's
newest version waits for approval) and its subject (`shop.orders`). It goes through three states:

=============  ====================================================================================
`held`         events of the subject are *parked*: kept in files of the journal's folder
               (`hold_part`)
`released`     the problem was fixed or the version approved; the next run turns the events into
               segments
`journaled`    the events are in the journal, the last one in `last_segment`; the files are not
               needed any more
=============  ====================================================================================

Until every attached sink has that segment, the source must not discard the events, so the row is
kept. Writes to holds share a transaction with the captured position, so that an event is kept if
and only if capture will not read it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import schemas
from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.tables import hold_parts, holds, read_rows
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.pipelines import PipelineWrites
from deltaforge_dagster.state.records import HoldPart, HoldPartRow, HoldRow

SCHEMA = "schema"
"""Kind of holds for tables whose version waits for approval; their files contain decoded rows."""

_REASON_LENGTH = 2000


class HoldRepository:
    """The holds of all pipelines: `StateStore.holds`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str) -> list[HoldRow]:
        """Return a pipeline's holds, oldest first."""
        with self._database.read() as connection:
            return read_holds(connection, name)

    def parts(
        self, name: str, kind: str | None = None, subject: str | None = None
    ) -> list[HoldPartRow]:
        """Return the files of one hold, or of all holds, in the order of their events."""
        where = [hold_parts.c.pipeline == name]
        if kind is not None and subject is not None:
            where += [hold_parts.c.kind == kind, hold_parts.c.subject == subject]
        with self._database.read() as connection:
            parts = read_rows(connection, HoldPartRow, *where)
        return sorted(parts, key=lambda row: row.number)

    def release(self, name: str, kind: str, subject: str, remedy: str) -> HoldRow:
        """Release a hold, so that the next run writes its events to the journal.

        `remedy` is what the source needs to decode the events, JSON text in a format of the source.

        Raises:
            NotAllowed: There is no such hold, or its events are already in the journal.
        """
        with self._database.write() as connection:
            lock_lease(connection, name)
            _release(connection, name, kind, subject, remedy)
            return read_rows(connection, HoldRow, _same_hold(name, kind, subject))[0]

    def approve_table(self, name: str, table: str) -> int:
        """Approve all pending versions of a table; the next run delivers the parked changes.

        Returns:
            The number of parked changes.

        Raises:
            NotAllowed: No version of the table waits for approval.
        """
        with self._database.write() as connection:
            lock_lease(connection, name)
            approved = schemas.approve(connection, name, table)
            waiting = [
                hold
                for hold in read_holds(connection, name)
                if (hold.kind, hold.subject) == (SCHEMA, table) and hold.state == "held"
            ]
            if not approved and not waiting:
                raise NotAllowed(
                    f"pipeline {name!r}: no form of table {table!r} waits for approval"
                )
            for hold in waiting:
                _release(connection, name, hold.kind, hold.subject, "{}")
            return sum(hold.events for hold in waiting)


class HoldWrites:
    """Fills and empties the holds of a lease holder: `FencedWriter.holds`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def begin(self, part: HoldPart) -> None:
        """Begin a hold that has no events yet; `part` names the subject and no file."""
        self._count(part)
        self._release_approved([part])

    def keep(self, parked: Iterable[HoldPart], position: str) -> None:
        """Add durable files of parked events, and advance the captured position past them."""
        self.add(parked)
        PipelineWrites(self._connection, self._pipeline).set_captured(position)

    def add(self, parked: Iterable[HoldPart]) -> None:
        """Add durable files of events to their holds; files that were already added are ignored."""
        parts = list(parked)
        for part in parts:
            self._add(part)
        self._release_approved(parts)

    def replace(self, hold: HoldRow, parked: Iterable[HoldPart]) -> None:
        """Replace a hold by one for another reason, with the same events in other files."""
        self.journaled(hold, 0)
        self.add(parked)

    def revoke_release(self, hold: HoldRow, reason: str) -> None:
        """Revoke a release: the parked events still cannot be decoded, for `reason`."""
        self._connection.execute(
            update(holds)
            .where(_same_hold(self._pipeline, hold.kind, hold.subject), holds.c.state == "released")
            .values(state="held", remedy=None, reason=reason[:_REASON_LENGTH])
        )

    def journaled(self, hold: HoldRow, last_segment: int) -> None:
        """Record that all parked events are in the journal, the last one in `last_segment`."""
        self._connection.execute(
            delete(hold_parts).where(
                hold_parts.c.pipeline == self._pipeline,
                hold_parts.c.kind == hold.kind,
                hold_parts.c.subject == hold.subject,
            )
        )
        self._connection.execute(
            update(holds)
            .where(_same_hold(self._pipeline, hold.kind, hold.subject))
            .values(state="journaled", remedy=None, last_segment=last_segment)
        )

    def forget(self, delivered: int) -> None:
        """Delete holds whose events are delivered: all attached sinks have this segment."""
        self._connection.execute(
            delete(holds).where(
                holds.c.pipeline == self._pipeline,
                holds.c.state == "journaled",
                holds.c.last_segment <= delivered,
            )
        )

    def _add(self, part: HoldPart) -> None:
        existing = select(hold_parts.c.path).where(
            hold_parts.c.pipeline == self._pipeline, hold_parts.c.path == part.path
        )
        if self._connection.execute(existing).first() is not None:
            return
        last = self._connection.execute(
            select(func.max(hold_parts.c.number)).where(hold_parts.c.pipeline == self._pipeline)
        ).scalar()
        self._connection.execute(
            insert(hold_parts).values(
                pipeline=self._pipeline,
                path=part.path,
                kind=part.kind,
                subject=part.subject,
                number=1 + (last or 0),
                checksum=part.checksum,
                events=part.events,
                bytes=part.bytes,
            )
        )
        self._count(part)

    def _count(self, part: HoldPart) -> None:
        """Begin a part's hold, or add the part's events to the existing one."""
        this = _same_hold(self._pipeline, part.kind, part.subject)
        # A hold that is already `journaled` starts again, but keeps its `since_position`.
        self._connection.execute(
            update(holds)
            .where(this, holds.c.state == "journaled")
            .values(
                state="held", reason=part.reason[:_REASON_LENGTH], since=clock(), events=0, bytes=0
            )
        )
        self._connection.execute(
            upsert(self._connection, holds)
            .values(
                pipeline=self._pipeline,
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

    def _release_approved(self, parked: Iterable[HoldPart]) -> None:
        """Release holds of tables that were approved before their first part was stored."""
        for table in {part.subject for part in parked if part.kind == SCHEMA}:
            if not schemas.is_pending(self._connection, self._pipeline, table):
                _release(self._connection, self._pipeline, SCHEMA, table, "{}")


def read_holds(connection: Connection, pipeline: str) -> list[HoldRow]:
    """Return a pipeline's holds, oldest first."""
    rows = read_rows(connection, HoldRow, holds.c.pipeline == pipeline)
    return sorted(rows, key=lambda row: (row.since, row.kind, row.subject))


def drop_all(connection: Connection, pipeline: str) -> None:
    """Delete all holds and the rows of their files."""
    for table in (holds, hold_parts):
        connection.execute(delete(table).where(table.c.pipeline == pipeline))


def _release(connection: Connection, pipeline: str, kind: str, subject: str, remedy: str) -> None:
    released = connection.execute(
        update(holds)
        .where(_same_hold(pipeline, kind, subject), holds.c.state != "journaled")
        .values(state="released", remedy=remedy)
    )
    if released.rowcount == 0:
        raise NotAllowed(f"pipeline {pipeline!r} holds no {kind} {subject!r}")


def _same_hold(pipeline: str, kind: str, subject: str) -> ColumnElement[bool]:
    return and_(holds.c.pipeline == pipeline, holds.c.kind == kind, holds.c.subject == subject)
