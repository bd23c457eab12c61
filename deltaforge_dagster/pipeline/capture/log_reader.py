"""Read the log of a source into the journal, with one reader or, while much lies ahead, several.

Each batch of the stream passes schema approval and is cut into segments (`segments`), which the
committer makes durable (`committer`). Between two transactions, due chunks of a snapshot are merged
(`snapshots.chunk_deduplicator`), and a backlog may be left to several readers (`backlog`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost
from deltaforge_dagster.journal.writer import SegmentWriter, WrittenSegment
from deltaforge_dagster.pipeline.capture.committer import SegmentCommit, SegmentCommitter
from deltaforge_dagster.pipeline.capture.holds import Holds
from deltaforge_dagster.pipeline.capture.segments import Hold, SegmentCutter
from deltaforge_dagster.pipeline.control.unread_log import NOTHING
from deltaforge_dagster.pipeline.schemas.approval import FencedRegistry, SchemaApproval
from deltaforge_dagster.pipeline.snapshots.chunk_deduplicator import ChunkDeduplicator
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, SectionedSource, Source
from deltaforge_dagster.state.records import HoldPart, HoldRow
from deltaforge_dagster.state.snapshot_records import ChunkRow

if TYPE_CHECKING:  # Spark takes a second to import
    from deltaforge_dagster.pipeline.capture.backlog import Backlog

_PAUSE_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ReadControl:
    """Pauses and stops the capture thread from other threads.

    Attributes:
        stopped: Set once nothing more may be read.
        paused: Set while nothing may be read, because the journal is full.
    """

    stopped: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)

    def goes_on(self) -> bool:
        """Return whether the log may be read now."""
        return not (self.stopped.is_set() or self.paused.is_set())

    def wait_while_paused(self) -> None:
        """Return once the log may be read again, or nothing more may be read."""
        while self.paused.is_set() and not self.stopped.wait(_PAUSE_POLL_SECONDS):
            pass


@dataclass(frozen=True, slots=True)
class SinkDemand:
    """What the sinks of a run need from capture.

    Attributes:
        someone_waits: Returns whether a sink at the journal's end waits for work.
        segment_wanted: Returns whether the next segment would be delivered or encoded as soon as it
            is captured.
    """

    someone_waits: Callable[[], bool]
    segment_wanted: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class RowFilters:
    """What rows pass on their way from the log to a segment; used by the capture thread alone.

    Attributes:
        registry: Makes table versions durable before their rows.
        approval: Holds the rows of versions that wait for approval.
        holds: The events that are kept back.
        deduplicator: Merges the chunks of a snapshot.
    """

    registry: FencedRegistry
    approval: SchemaApproval
    holds: Holds
    deduplicator: ChunkDeduplicator


class LogReader:
    """Reads the log for one run; the capture thread alone calls its methods.

    Args:
        limits: When a segment ends.
        committer: Makes segments durable.
        filters: What rows pass before they are in a segment.
        control: Whether the log may be read.
        demand: What sinks need.
        accepted: Called after each batch that was read and did not fail to be written.
        backlog: Reads with several readers while much log lies ahead; None for a single reader.

    Attributes:
        received: What was read of the log, and is not captured yet.
        in_transaction: Whether changes were read whose commit was not read yet.
    """

    def __init__(
        self,
        limits: SegmentLimits,
        committer: SegmentCommitter,
        filters: RowFilters,
        control: ReadControl,
        demand: SinkDemand,
        *,
        accepted: Callable[[], None],
        backlog: Backlog | None,
    ) -> None:
        self.received = NOTHING
        self.in_transaction = False
        self._limits = limits
        self._committer = committer
        self._filters = filters
        self._control = control
        self._demand = demand
        self._accepted = accepted
        self._backlog = backlog
        self._changes_at = float("-inf")  # when changes were read last

    @property
    def unwritten(self) -> bool:
        """Whether any changes were read since the last write."""
        return self._changes_at > self._committer.moved_at

    def release_holds(self, source: Source, start: Position) -> None:
        """Write released holds to the journal, before any other change of their tables.

        Call it before `read`.
        """
        filters = self._filters
        filters.holds.release(
            source,
            filters.registry,
            filters.approval,
            start,
            open_writer=self._committer.open_writer,
            seal=lambda writer, hold, parked: self._commit_released(writer, start, parked, hold),
        )

    def relocate(self, position: Position) -> None:
        """Begin at the position on another server that follows everything captured."""
        self._changes_at = float("-inf")
        self._committer.skip_to(position)
        self._filters.deduplicator.lose_positions()

    def read(self, source: Source, start: Position) -> None:
        """Capture the log after `start` until capture is stopped.

        Raises:
            DeltaforgeError: The source cannot be read, or the journal cannot be written; everything
                up to the committer's position is durable.
        """
        while True:
            start = self._follow(source, start)
            if self._control.stopped.is_set():
                return
            start = self._read_backlog(source, start)

    def _follow(self, source: Source, start: Position) -> Position:
        """Cut one stream into segments; return the position where it stopped.

        It stops for a backlog, or on request.
        """
        cutter = SegmentCutter(
            self._limits,
            self._committer.open_writer,
            lambda writer, holds, end: self._seal(writer, holds, end, cutter),
            self._demand.segment_wanted,
            open_hold=self._filters.holds.open,
            start=start,
        )
        # A batch holds at most as many changes as a segment; short waits let segments end on time.
        reading = ReadLimits(
            max_events=self._limits.max_events, max_wait=self._limits.min_ms / 1000
        )
        try:
            with closing(source.read(start, reading, self._filters.registry)) as stream:
                for batch in stream:
                    if self._control.stopped.is_set():
                        break
                    self._accept(batch, cutter)
                    if self._control.paused.is_set():
                        cutter.cut()
                        self._control.wait_while_paused()
                    elif self._is_backlog(source, batch):
                        assert batch.end is not None
                        start = batch.end
                        break
            cutter.cut()
        except LeaseLost:
            raise
        except DeltaforgeError:
            cutter.cut("cancelled")  # the transactions before the error are whole
            raise
        finally:
            self.in_transaction = False
            self.received = replace(self.received, rows=0, since=None)
            cutter.abandon()
        return start

    def _accept(self, batch: ChangeBatch, cutter: SegmentCutter) -> None:
        for part in self._filters.approval.accept(batch):
            if part.rows is not None or part.parked:
                self._changes_at = time.monotonic()
            cutter.accept(part)
        self._accepted()
        self._take_over_chunks(cutter)
        self.received = cutter.received
        self.in_transaction = cutter.in_transaction

    def _is_backlog(self, source: Source, batch: ChangeBatch) -> bool:
        """Return whether several readers should take over after a batch."""
        if self._backlog is None or not isinstance(source, SectionedSource):
            return False
        self._backlog.passed(batch.log_bytes)
        return batch.end is not None and self._backlog.due(source, batch.end)

    def _read_backlog(self, source: Source, start: Position) -> Position:
        """Capture a backlog with several readers; return where a single one must continue."""
        assert self._backlog is not None
        assert isinstance(source, SectionedSource)
        return self._backlog.read(
            source,
            self._filters.approval.beside(self._filters.registry),
            start,
            self._committer.next_segment,
            add=self._commit_section,
            going_on=self._control.goes_on,
        )

    def _seal(
        self,
        writer: SegmentWriter | None,
        holds: Sequence[Hold],
        end: Position,
        cutter: SegmentCutter,
    ) -> None:
        received_at = time.time() - cutter.age
        awaited = self._demand.someone_waits()
        written = self._committer.seal(
            writer, holds, end, received_at=received_at, trigger=cutter.trigger
        )
        if written is not None and self._backlog is not None:
            self._backlog.sealed(written.rows, written.memory, awaited=awaited)

    def _commit_released(
        self, writer: SegmentWriter, start: Position, parked: Sequence[HoldPart], hold: HoldRow
    ) -> None:
        self._committer.commit(SegmentCommit(writer.close(), start, parked, released=hold))

    def _commit_section(self, written: WrittenSegment, end: Position) -> bool:
        """Commit a segment that a task has written; return whether a sink waited for it."""
        awaited = self._demand.someone_waits()
        self._committer.commit(SegmentCommit(written, end))
        return awaited

    def _take_over_chunks(self, cutter: SegmentCutter) -> None:
        """Merge the snapshot chunks that are due after everything read so far."""
        deduplicator = self._filters.deduplicator
        if cutter.in_transaction or self._control.paused.is_set():
            return
        if deduplicator.due(cutter.reached):
            cutter.cut()
            deduplicator.take_over(
                cutter.reached,
                open_writer=self._committer.open_writer,
                seal=lambda writer, chunks: self._commit_chunks(writer, cutter.reached, chunks),
            )

    def _commit_chunks(
        self, writer: SegmentWriter, end: Position, chunks: Sequence[tuple[ChunkRow, int]]
    ) -> None:
        self._committer.skip_to(end)  # nothing is captured between the last segment and here
        self._committer.commit(SegmentCommit(writer.close(), end, chunks=chunks))
