"""Capture: one thread reads the source's log and cuts it into the journal's segments.

`cutter.Cutter` decides where a segment ends; this module owns the thread, its retries, and the
order in which a segment becomes durable: file, then row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from deltaforge_dagster.config.model import SegmentLimits
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, Retryable
from deltaforge_dagster.journal.files import Journal, SegmentWriter
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.cutter import Cutter, Hold
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.holds import Holds
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.ranges import Ranges
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ReadLimits, Source, SourceNotes
from deltaforge_dagster.state.records import HeldPart, HoldRow

_PAUSE_POLL_SECONDS = 0.05


class Capture:
    """The capture thread of a run.

    `find_start` is asked before each stream where to read on; it moves the end of the journal only
    when another server has taken the place of the source's (`failover`).

    Attributes:
        error: Why capture stopped for good, or the newest reason it is trying again.
        failed: Capture ended with an error that only a person can mend.
        passed: A position that the log has passed without a change for us, newer than
            everything captured, or None.
        in_transaction: Changes were read whose commit was not.
        reading: The log is being read, and what was released before is in the journal.
        moved_at: Monotonic time when something was captured last.
        segments: Segments written so far.
        rows: Changes written so far.
    """

    def __init__(
        self,
        *,
        build_source: Callable[[], Source],
        registry: SourceNotes,
        journal: Journal,
        pipeline: str,
        uid: str,
        lease: HeldLease,
        ranges: Ranges,
        holds: Holds,
        limits: SegmentLimits,
        start: Position,
        next_segment: int,
        someone_waits: Callable[[], bool],
        captured: Callable[[int], None],
        find_start: Callable[[Source, Position], Position] = lambda _source, start: start,
        paused: bool = False,
    ) -> None:
        self.error: DeltaforgeError | None = None
        self.failed = False
        self.passed: Position | None = None
        self.in_transaction = False
        self.reading = False
        self.moved_at = time.monotonic()
        self.segments = 0
        self.rows = 0
        self._build_source = build_source
        self._registry = registry
        self._journal = journal
        self._pipeline = pipeline
        self._uid = uid
        self._lease = lease
        self._ranges = ranges
        self._holds = holds
        self._limits = limits
        self._position = start
        self._confirmed = start
        self._next_segment = next_segment
        self._someone_waits = someone_waits
        self._captured = captured
        self._find_start = find_start
        self._stop = threading.Event()
        self._paused = threading.Event()
        self.pause(paused)
        self._source: Source | None = None
        self._source_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"capture {pipeline}", daemon=True)
        self._thread.start()

    @property
    def position(self) -> Position:
        """End of the journal: everything committed before it is durable there."""
        return self._position

    @property
    def alive(self) -> bool:
        """Whether the thread still reads or tries to."""
        return self._thread.is_alive()

    def confirm(self, position: Position) -> None:
        """Pass a committed position on to the source, if it is being read."""
        with self._source_lock:
            self._confirmed = max(self._confirmed, position)
            if self._source is not None:
                self._source.confirm(position)

    def pause(self, paused: bool) -> None:
        """Read nothing more, or go on. Whole transactions read so far become a segment.

        A stream stays open meanwhile and answers its server, which waits.
        """
        if paused:
            self._paused.set()
        else:
            self._paused.clear()

    def stop(self) -> None:
        """End the thread: whole transactions read so far become a last segment."""
        self._stop.set()
        self._thread.join()

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
                self.error = error
                self._stop.wait(backoff.next_delay())
            except DeltaforgeError as error:
                self.error = error
                self.failed = True
                return
            except Exception as error:  # noqa: BLE001 - a defect must end capture visibly, not hang the run
                self.error = DeltaforgeError(f"{self._pipeline}: capture broke: {error!r}")
                self.error.__cause__ = error
                self.failed = True
                return

    def _read(self, backoff: Backoff) -> None:
        source = self._build_source()
        with self._source_lock:
            self._source = source
            # Idle progress may be confirmed beyond the journal's end: the source has let go of it.
            start = max(self._position, self._confirmed)
        cutter = Cutter(
            self._limits,
            self._open_writer,
            self._seal,
            self._someone_waits,
            open_hold=self._holds.open,
            start=start,
        )
        try:
            self._release_holds(source, start)
            self.reading = True
            found = self._find_start(source, start)
            if found != start:
                start = self._position = found
            # As many changes a batch as fit a segment; small waits keep the cut prompt.
            reading = ReadLimits(
                max_events=self._limits.max_events, max_wait=self._limits.min_ms / 1000
            )
            for batch in source.read(start, reading, self._registry):
                if self._stop.is_set():
                    break
                backoff.reset()
                self.error = None
                cutter.take(batch)
                self.passed = cutter.passed
                self.in_transaction = cutter.in_transaction
                if self._paused.is_set():
                    cutter.cut()
                    self._wait_while_paused()
            cutter.cut()
        except LeaseLost:
            raise
        except DeltaforgeError:
            cutter.cut()  # the transactions before the error are whole
            raise
        finally:
            self.in_transaction = self.reading = False
            cutter.abandon()
            with self._source_lock:
                self._source = None
            source.close()

    def _wait_while_paused(self) -> None:
        while self._paused.is_set() and not self._stop.wait(_PAUSE_POLL_SECONDS):
            pass

    def _open_writer(self) -> SegmentWriter:
        return self._journal.writer(
            self._pipeline, self._uid, self._next_segment, self._lease.epoch
        )

    def _seal(self, writer: SegmentWriter | None, holds: Sequence[Hold], end: Position) -> None:
        held = [hold.close() for hold in holds]
        if writer is not None:
            self._add_segment(writer, end, held)
            return
        self._holds.keep(held, end)
        self._position = end
        self.moved_at = time.monotonic()

    def _release_holds(self, source: Source, start: Position) -> None:
        """Put into the journal what was released, before anything else of its tables."""
        self._holds.release(
            source,
            self._registry,
            start,
            open_writer=self._open_writer,
            seal=lambda writer, hold: self._add_segment(writer, start, released=hold),
        )

    def _add_segment(
        self,
        writer: SegmentWriter,
        end: Position,
        held: Sequence[HeldPart] = (),
        released: HoldRow | None = None,
    ) -> None:
        written = writer.close()
        failpoint("segment-file-written")
        number = self._next_segment
        self._ranges.add(number, written, self._position, end, held=held, released=released)
        self._next_segment = number + 1
        self._position = end
        self.segments += 1
        self.rows += written.rows
        self.moved_at = time.monotonic()
        self._captured(number)
