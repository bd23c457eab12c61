"""Holds of a run: events that capture keeps back, and what was released since the last run.

Keeping: the cutter writes held events into a file for each table (`open`), and the file becomes part
of its hold in the same fenced write that moves the captured position past them (`parts`).

Releasing: before anything is read, the events of each released hold are decoded into one segment. It
stands where the journal ends, so it begins and ends at the captured position: positions of segments
never go back, and what sinks keep as their own position stays in order. Since nothing of a held
table is captured before that, its held events come first in every sink. What still cannot be decoded
is held again, with the new reason, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, Retryable
from deltaforge_dagster.journal.files import Journal, SegmentWriter
from deltaforge_dagster.journal.held import HeldWriter
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import HeldEvent, Source, SourceNotes
from deltaforge_dagster.state.records import HeldPart, HoldRow
from deltaforge_dagster.state.store import StateStore

TABLE = "table"
"""Kind of the holds that a source asks for."""


@dataclass(slots=True)
class OpenPart:
    """A file of held events of one table, being written."""

    event: HeldEvent
    since: Position
    writer: HeldWriter

    @property
    def size(self) -> int:
        """Bytes of the events so far."""
        return self.writer.bytes

    def write(self, event: bytes) -> None:
        """Append an event."""
        self.writer.write(event)

    def abort(self) -> None:
        """Remove what was written."""
        self.writer.abort()

    def close(self) -> HeldPart:
        """Make the file durable, and return its row."""
        checksum, size = self.writer.close()
        return HeldPart(
            kind=TABLE,
            subject=self.event.table,
            reason=self.event.reason,
            since_position=self.since.to_json(),
            path=self.writer.path,
            checksum=checksum,
            events=self.writer.events,
            bytes=size,
        )


class Holds:
    """What one run keeps back and releases.

    Args:
        store: Where holds are recorded.
        journal: Where their events are kept.
        lease: The run's lease; every write is fenced by it.
    """

    def __init__(self, store: StateStore, journal: Journal, lease: HeldLease) -> None:
        self._store = store
        self._journal = journal
        self._lease = lease

    def open(self, event: HeldEvent, since: Position) -> OpenPart:
        """Begin a file for the events of a table, which all stand after `since`."""
        writer = self._journal.held_writer(self._lease.pipeline, self._lease.epoch)
        return OpenPart(event, since, writer)

    def keep(self, parts: Sequence[HeldPart], end: Position) -> None:
        """Record files of held events where there is no segment to go with them."""
        reached = end.to_json()
        self._lease.write(lambda writer: writer.keep(parts, reached))

    def release(
        self,
        source: Source,
        registry: SourceNotes,
        position: Position,
        *,
        open_writer: Callable[[], SegmentWriter],
        seal: Callable[[SegmentWriter, HoldRow], None],
    ) -> None:
        """Write a segment for each released hold.

        Args:
            source: Decodes the events.
            registry: For the source.
            position: Where the journal ends.
            open_writer: Makes the writer of the next segment.
            seal: Makes it durable, and the hold's events journaled with it.
        """
        for hold in self._store.holds(self._lease.pipeline):
            if hold.state != "released":
                continue
            writer = open_writer()
            try:
                events = self._events(hold)
                for rows in source.decode_held(events, hold.mend or "{}", position, registry):
                    writer.write(rows)
            except (Retryable, LeaseLost):
                writer.abort()
                raise
            except DeltaforgeError as error:
                writer.abort()
                self._hold_back(hold, str(error))
                continue
            if writer.rows:
                seal(writer, hold)
            else:
                writer.abort()
                self._empty(hold)

    def _events(self, hold: HoldRow) -> Iterator[bytes]:
        for part in self._store.held_parts(self._lease.pipeline, hold.kind, hold.subject):
            yield from self._journal.read_held(part.path, part.checksum)

    def _hold_back(self, hold: HoldRow, reason: str) -> None:
        self._lease.write(lambda writer: writer.hold_back(hold, reason))

    def _empty(self, hold: HoldRow) -> None:
        """There was nothing but statements: what is captured next may follow."""
        self._lease.write(lambda writer: writer.hold_journaled(hold, 0))
