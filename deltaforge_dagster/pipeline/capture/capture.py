"""Capture: one thread reads the source's log and cuts it into the journal's segments.

`segments.SegmentCutter` decides where a segment ends; this module owns the thread, its retries, and
the order in which a segment becomes durable: file, then row.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    LeaseLost,
    Retryable,
    StoreUnavailable,
)
from deltaforge_dagster.journal.writer import SegmentWriter, WrittenSegment
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.capture.holds import Holds
from deltaforge_dagster.pipeline.capture.segments import Hold, Ranges, SegmentCutter
from deltaforge_dagster.pipeline.control.unread_log import NOTHING
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.meters import Versions, captured, read_again, read_failed
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.pipeline.schemas.approval import FencedRegistry, SchemaApproval
from deltaforge_dagster.pipeline.snapshots.chunk_deduplicator import ChunkDeduplicator
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import (
    ChangeBatch,
    ReadLimits,
    SectionedSource,
    Source,
)
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.metrics import Tally, panic
from deltaforge_dagster.state.records import HoldPart, HoldRow, PipelineRow, Trigger
from deltaforge_dagster.state.snapshot_records import ChunkRow

if TYPE_CHECKING:  # Spark takes a second to import
    from deltaforge_dagster.pipeline.capture.backlog import Backlog

logger = logging.getLogger(__name__)

_PAUSE_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What a run captures, from where, and in segments of which size.

    Attributes:
        row: The pipeline when the run begins: its uid, where the journal ends, and the number of
            the next segment.
        limits: When a segment ends.
        source_id: Id of the source.
        tenant: The tenant under which versions of tables are registered.
        pauses_tables: Whether the rows of a new version of a table are on hold until somebody
            approves it.
        paused: Whether nothing may be read at first, because the journal is full.
    """

    row: PipelineRow
    limits: SegmentLimits
    source_id: str
    tenant: str
    pauses_tables: bool = False
    paused: bool = False


class Capture:
    """The capture thread of a run.

    Args:
        run: The run.
        options: What is captured.
        build_source: Makes a reader of the log, one for each attempt.
        ranges: Records the segments.
        someone_waits: Whether a sink at the journal's end waits for work.
        segment_wanted: Whether the next segment would be delivered or encoded as soon as it is
            captured.
        captured: Called with the number of each segment once it is in the journal.
        find_start: Called before each stream with the end of the journal; returns the position to
            read from, which is another one only after a failover to another server (`failover`).
        backlog: Reads with several readers while much log lies ahead; None for a single reader.

    Attributes:
        error: Why capture stopped for good, or why it is trying again; None while it works.
        failed: Whether capture ended with an error that a retry cannot fix.
        next_attempt_at: Monotonic time of the next attempt after `error`.
        failing_since: Monotonic time since which nothing could be captured; None while capture
            works.
        passed: A position that the log has passed without a change for this pipeline, newer than
            everything captured, or None.
        received: What was read of the log, and is not captured yet.
        in_transaction: Whether changes were read whose commit was not read yet.
        reading: Whether the log is being read and all released holds are in the journal.
        moved_at: Monotonic time of the last capture.
        segments: Number of segments written.
        rows: Number of changes written.
    """

    def __init__(
        self,
        run: LeasedRun,
        options: CaptureOptions,
        *,
        build_source: Callable[[], Source],
        ranges: Ranges,
        someone_waits: Callable[[], bool],
        segment_wanted: Callable[[], bool],
        captured: Callable[[int], None],
        find_start: Callable[[Source, Position], Position] = lambda _source, start: start,
        backlog: Backlog | None = None,
    ) -> None:
        self.error: DeltaforgeError | None = None
        self.failed = False
        self.next_attempt_at = 0.0
        self.failing_since: float | None = None
        self.passed: Position | None = None
        self.in_transaction = False
        self.received = NOTHING
        self.reading = False
        self.moved_at = self._began = time.monotonic()
        self.segments = 0
        self.rows = 0
        self._limits = options.limits
        self._source_id = options.source_id
        self._uid = options.row.uid
        self._journal = run.journal
        self._lease = run.lease
        self._pipeline = run.lease.pipeline
        self._build_source = build_source
        self._ranges = ranges
        self._someone_waits = someone_waits
        self._segment_wanted = segment_wanted
        self._captured = captured
        self._find_start = find_start
        self._backlog = backlog
        self._holds = Holds(run.store, run.journal, run.lease)
        self._registry = FencedRegistry(
            run.store, run.lease, options.tenant, pauses=options.pauses_tables
        )
        self._approval = SchemaApproval(self._registry.pending, pauses=options.pauses_tables)
        self._deduplicator = ChunkDeduplicator(
            run.store, run.journal, run.lease, self._registry, self._limits, approval=self._approval
        )
        position = options.row.captured_position or options.row.start_position
        assert position is not None
        self._position: Position = parse_position(position)
        self._confirmed = self._position
        self._next_segment = options.row.next_segment
        self._read_before = False
        self._unwritten = False  # whether anything was read since the last write
        self._seen_versions: Versions = set()
        self._attempt = 0
        self._stop = threading.Event()
        self._paused = threading.Event()
        self.pause(options.paused)
        self._source: Source | None = None
        self._source_lock = threading.Lock()
        self._thread = threading.Thread(
            target=in_context(self._run), name=f"capture {self._pipeline}", daemon=True
        )
        self._thread.start()

    @property
    def position(self) -> Position:
        """End of the journal: everything committed before it is durable."""
        return self._position

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def has_read(self) -> bool:
        """Whether it has read anything from the log yet."""
        return self.segments > 0 or self.passed is not None

    @property
    def has_written(self) -> bool:
        """Whether it has written anything to the journal yet."""
        return self.moved_at > self._began

    @property
    def chunks_waiting(self) -> bool:
        """Whether chunks of a snapshot wait to be merged."""
        return self._deduplicator.waits

    def confirm(self, position: Position) -> None:
        """Confirm a committed position to the source, if it is being read."""
        with self._source_lock:
            self._confirmed = max(self._confirmed, position)
            if self._source is not None:
                self._source.confirm(position)

    def pause(self, paused: bool) -> None:
        """Pause or resume reading. Complete transactions read so far become a segment.

        While paused, the stream stays open and keeps answering the server, which waits.
        """
        if paused:
            self._paused.set()
        else:
            self._paused.clear()

    def stop(self) -> None:
        """End the thread; complete transactions read so far become the last segment."""
        self._stop.set()
        self._thread.join()
        if self._backlog is not None:
            self._backlog.close()

    def _run(self) -> None:
        backoff = Backoff()
        while True:
            self._wait_while_paused()
            if self._stop.is_set():
                return
            try:
                self._lease.guard()  # a run that was overtaken must not cut its successor's stream
                self._read(backoff)
            except LeaseLost:
                return
            except Retryable as error:
                delay = backoff.next_delay()
                self.next_attempt_at = time.monotonic() + delay
                self.failing_since = self.failing_since or time.monotonic()
                self.error = error
                self._attempt += 1
                self._failed("now", error, sleep_seconds=round(delay, 1))
                self._stop.wait(delay)
            except DeltaforgeError as error:
                self.error = error
                self.failed = True
                self._failed("until its cause is removed", error)
                return
            except Exception as error:
                self.error = DeltaforgeError(f"{self._pipeline}: capture broke: {error!r}")
                self.error.__cause__ = error
                self.failed = True
                self._count(panic())
                logger.exception("capture broke")
                return

    def _failed(self, until: str, error: DeltaforgeError, **more: Any) -> None:
        """Log why capture waits, and count failures of the source."""
        message = f"the source cannot be read {until}"
        if isinstance(error, StoreUnavailable | JournalDamaged):
            message = f"the journal or the state store cannot be used {until}"
        else:
            self._count(read_failed(self._source_id, error))
        fields = {"source_id": self._source_id, "reason": str(error), "kind": error.kind, **more}
        logger.warning(message, extra={"fields": {**fields, "attempt": self._attempt or None}})

    def _count(self, tally: Tally) -> None:
        with contextlib.suppress(DeltaforgeError):  # the capture loop will meet the same error
            self._lease.write(lambda writer: writer.metrics.count(tally))

    def _read(self, backoff: Backoff) -> None:
        source = self._build_source()
        with self._source_lock:
            self._source = source
            # While nothing is captured, positions beyond the journal's end are confirmed: the
            # source may have discarded its log up to there.
            start = max(self._position, self._confirmed)
        try:
            self._release_holds(source, start)
            self.reading = True
            position = self._find_start(source, start)
            if position != start:
                start = self._position = position
                self._unwritten = False
                self._deduplicator.lose_positions()
            if self._read_before:
                self._count(read_again(self._source_id))
            self._read_before = True
            while True:
                start = self._follow(source, start, backoff)
                if self._stop.is_set():
                    return
                start = self._read_backlog(source, start)
        finally:
            self.in_transaction = self.reading = False
            with self._source_lock:
                self._source = None
            source.close()

    def _follow(self, source: Source, start: Position, backoff: Backoff) -> Position:
        """Cut one stream into segments; return the position where it stopped.

        It stops for a backlog, or on request.
        """
        cutter = SegmentCutter(
            self._limits,
            self._open_writer,
            lambda writer, holds, end: self._seal(writer, holds, end, cutter),
            self._segment_wanted,
            open_hold=self._holds.open,
            start=start,
        )
        # A batch holds at most as many changes as a segment; short waits let segments end on time.
        reading = ReadLimits(
            max_events=self._limits.max_events, max_wait=self._limits.min_ms / 1000
        )
        try:
            with closing(source.read(start, reading, self._registry)) as stream:
                for batch in stream:
                    if self._stop.is_set():
                        break
                    for part in self._approval.accept(batch):
                        self._unwritten |= part.rows is not None or bool(part.parked)
                        cutter.accept(part)
                    if not self._still_fails():
                        backoff.reset()
                        self.error = self.failing_since = None
                        self._attempt = 0
                    self._take_over_chunks(cutter)
                    self.passed = cutter.passed
                    self.in_transaction = cutter.in_transaction
                    self.received = cutter.received
                    if self._paused.is_set():
                        cutter.cut()
                        self._wait_while_paused()
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

    def _still_fails(self) -> bool:
        """Return whether the last error may persist.

        A batch read proves that an error of the source is over. An error of the journal or the
        state store is over only after a write. The source repeats changes that could not be
        written, but may send empty batches first; these prove nothing.
        """
        if not isinstance(self.error, StoreUnavailable | JournalDamaged):
            return False
        assert self.failing_since is not None
        return self._unwritten and self.moved_at < self.failing_since

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
            self._approval.beside(self._registry),
            start,
            self._next_segment,
            add=self._add_section,
            going_on=lambda: not (self._stop.is_set() or self._paused.is_set()),
        )

    def _wait_while_paused(self) -> None:
        while self._paused.is_set() and not self._stop.wait(_PAUSE_POLL_SECONDS):
            pass

    def _open_writer(self) -> SegmentWriter:
        return self._journal.writer(
            self._pipeline, self._uid, self._next_segment, self._lease.epoch
        )

    def _seal(
        self,
        writer: SegmentWriter | None,
        holds: Sequence[Hold],
        end: Position,
        cutter: SegmentCutter,
    ) -> None:
        received_at = time.time() - cutter.age
        parked = [hold.close() for hold in holds]
        if parked:
            failpoint("parked-file-written")
        if writer is not None:
            self._add_segment(writer, end, parked, received_at=received_at, trigger=cutter.trigger)
            return
        self._holds.keep(parked, end)
        failpoint("parked-row-written")
        self._moved_to(end)

    def _moved_to(self, end: Position) -> None:
        """Note that everything before `end` is durable."""
        self._unwritten = False
        # Set before the position: a thread that sees the new position must also see the new time
        # (`run.progress`).
        self.moved_at = time.monotonic()
        self._position = end

    def _release_holds(self, source: Source, start: Position) -> None:
        """Write released holds to the journal, before any other change of their tables."""
        self._holds.release(
            source,
            self._registry,
            self._approval,
            start,
            open_writer=self._open_writer,
            seal=lambda writer, hold, parked: self._add_segment(writer, start, parked, hold),
        )

    def _take_over_chunks(self, cutter: SegmentCutter) -> None:
        """Merge the snapshot chunks that are due after everything read so far."""
        if cutter.in_transaction or self._paused.is_set():
            return
        if self._deduplicator.due(cutter.reached):
            cutter.cut()
            self._deduplicator.take_over(
                cutter.reached,
                open_writer=self._open_writer,
                seal=lambda writer, chunks: self._add_chunks(writer, cutter.reached, chunks),
            )

    def _add_chunks(
        self, writer: SegmentWriter, end: Position, chunks: Sequence[tuple[ChunkRow, int]]
    ) -> None:
        self._position = end  # nothing is captured between the last segment and here
        self._add_written(writer.close(), end, chunks=chunks)

    def _add_segment(
        self,
        writer: SegmentWriter,
        end: Position,
        parked: Sequence[HoldPart] = (),
        released: HoldRow | None = None,
        *,
        received_at: float | None = None,
        trigger: Trigger = "limits",
    ) -> None:
        awaited = self._someone_waits()
        written = writer.close()
        if self._backlog is not None and released is None:
            self._backlog.sealed(written.rows, writer.bytes, awaited=awaited)
        self._add_written(written, end, parked, released, received_at=received_at, trigger=trigger)

    def _add_section(self, written: WrittenSegment, end: Position) -> bool:
        """Add a segment that a task has written; return whether a sink waited for it."""
        awaited = self._someone_waits()
        self._add_written(written, end)
        return awaited

    def _add_written(
        self,
        written: WrittenSegment,
        end: Position,
        parked: Sequence[HoldPart] = (),
        released: HoldRow | None = None,
        chunks: Sequence[tuple[ChunkRow, int]] = (),
        *,
        received_at: float | None = None,
        trigger: Trigger = "limits",
    ) -> None:
        failpoint("segment-file-written")
        self._deduplicator.watch(written)
        number = self._next_segment
        self._ranges.add(
            number,
            written,
            self._position,
            end,
            parked=parked,
            released=released,
            chunks=chunks,
            received_at=received_at,
            trigger=trigger,
            tally=captured(self._source_id, written, time.time(), self._seen_versions),
        )
        self._next_segment = number + 1
        self._moved_to(end)
        self.segments += 1
        self.rows += written.rows
        self._captured(number)
