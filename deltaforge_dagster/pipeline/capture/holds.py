"""Holds of a run: keep events that cannot be captured yet, and capture them after their release.

Holding: the cutter writes parked events into one file per table (`open`). The file becomes part of
its hold in the same fenced write that moves the captured position past the events (`parts`).

Releasing: before the log is read, the events of each released hold are decoded into one segment at
the end of the journal. This segment starts and ends at the captured position, so that the positions
of segments never go back and the positions that sinks keep stay in order. Nothing else of such a
table is captured before, so its parked events come first in every sink. Events that still cannot be
decoded are parked again, with the new reason, and the run continues.

A table may have two holds: one of rows that wait for approval (`schemas.approval`), and one of
later events that cannot be decoded. The approved rows are released first; the events, once they can
be decoded, then pass schema approval like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, Retryable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.parked_files import ParkedWriter
from deltaforge_dagster.journal.writer import SegmentWriter
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.pipeline.schemas.approval import SchemaApproval, Waiting, unpacked
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent, Source, SourceNotes
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.records import HoldPart, HoldRow
from deltaforge_dagster.state.store import StateStore

TABLE = "table"
"""Kind of hold of events that a source cannot decode."""


def kind_of(event: ParkedEvent) -> str:
    """Return the kind of the hold that an event belongs to."""
    return SCHEMA if isinstance(event, Waiting) else TABLE


@dataclass(slots=True)
class OpenPart:
    """A file of parked events of one table, being written."""

    event: ParkedEvent
    since: Position
    writer: ParkedWriter
    changes: int = 0

    @property
    def size(self) -> int:
        """Bytes of the events so far."""
        return self.writer.bytes

    def write(self, event: ParkedEvent) -> None:
        """Append an event."""
        self.writer.write(event.data)
        self.changes += event.changes if isinstance(event, Waiting) else 1

    def abort(self) -> None:
        """Remove what was written."""
        self.writer.abort()

    def close(self) -> HoldPart:
        """Make the file durable, and return its row."""
        checksum, size = self.writer.close()
        return HoldPart(
            kind=kind_of(self.event),
            subject=self.event.table,
            reason=self.event.reason,
            since_position=self.since.to_json(),
            path=self.writer.path,
            checksum=checksum,
            events=self.changes,
            bytes=size,
        )


class Holds:
    """What one run keeps back and releases.

    Args:
        store: Where holds are recorded.
        journal: Where their events are kept.
        lease: The run's lease; every write is fenced by it.
    """

    def __init__(self, store: StateStore, journal: Journal, lease: ActiveLease) -> None:
        self._store = store
        self._journal = journal
        self._lease = lease

    def open(self, event: ParkedEvent, since: Position) -> OpenPart:
        """Open a file for parked events of a table, all of which come after `since` in the log."""
        writer = self._journal.parked_writer(self._lease.pipeline, self._lease.epoch)
        return OpenPart(event, since, writer)

    def release(
        self,
        source: Source,
        registry: SourceNotes,
        approval: SchemaApproval,
        position: Position,
        *,
        open_writer: Callable[[], SegmentWriter],
        seal: Callable[[SegmentWriter, HoldRow, Sequence[HoldPart]], None],
    ) -> None:
        """Write a segment for each released hold, and start the schema approval.

        Args:
            source: Decodes the events.
            registry: The table versions, for the source's decoder.
            approval: Holds rows that wait for approval.
            position: Where the journal ends.
            open_writer: Makes the writer of the next segment.
            seal: Makes the segment durable and marks the hold as journaled, except for the given
                files of events that are parked again.
        """
        holds = self._store.holds.read(self._lease.pipeline)
        approval.begin({hold.subject: hold.reason for hold in holds if _waits(hold)})
        released = [hold for hold in holds if hold.state == "released"]
        for hold in sorted(released, key=lambda hold: hold.kind != SCHEMA):
            again = _ParkedAgain(partial(self.open, since=parse_position(hold.since_position)))
            writer = open_writer()
            try:
                batches: Iterable[pa.RecordBatch]
                if hold.kind == SCHEMA:
                    batches = map(unpacked, self._events(hold))
                else:
                    fix = hold.remedy or "{}"
                    batches = source.decode_parked(self._events(hold), fix, position, registry)
                for rows in batches:
                    again.write(approval.accept(ChangeBatch(rows, None)), writer)
                again.write(approval.accept(ChangeBatch(None, position)), writer)
            except (Retryable, LeaseLost):
                writer.abort()
                again.abort()
                raise
            except DeltaforgeError as error:
                writer.abort()
                again.abort()
                self._hold_back(hold, str(error))
                continue
            if writer.rows:
                seal(writer, hold, again.close())
                continue
            writer.abort()
            if hold.kind == SCHEMA and again.part is not None:
                again.abort()
                self._hold_back(hold, again.part.event.reason)
            else:
                self._empty(hold, again.close())

    def _events(self, hold: HoldRow) -> Iterator[bytes]:
        for part in self._store.holds.parts(self._lease.pipeline, hold.kind, hold.subject):
            yield from self._journal.read_parked(part.path, part.checksum)

    def _hold_back(self, hold: HoldRow, reason: str) -> None:
        self._lease.write(lambda writer: writer.holds.revoke_release(hold, reason))

    def _empty(self, hold: HoldRow, again: Sequence[HoldPart]) -> None:
        """Record that a released hold contained no rows for the journal.

        Events in `again` stay parked.
        """
        self._lease.write(lambda writer: writer.holds.replace(hold, again))


class _ParkedAgain:
    """The events of a released hold that are parked again; all are of one table."""

    def __init__(self, open_part: Callable[[ParkedEvent], OpenPart]) -> None:
        self.part: OpenPart | None = None
        self._open = open_part

    def write(self, batches: Iterator[ChangeBatch], writer: SegmentWriter) -> None:
        """Write rows that may be captured to the segment, the others to a file of parked events."""
        for batch in batches:
            if batch.rows is not None:
                writer.write(batch.rows)
            for event in batch.parked:
                self.part = self.part or self._open(event)
                self.part.write(event)

    def close(self) -> list[HoldPart]:
        """Make the file of parked events durable; return its row.

        Return an empty list if no event is parked again.
        """
        return [] if self.part is None else [self.part.close()]

    def abort(self) -> None:
        """Remove what was written."""
        if self.part is not None:
            self.part.abort()


def _waits(hold: HoldRow) -> bool:
    return hold.kind == SCHEMA and hold.state == "held"
