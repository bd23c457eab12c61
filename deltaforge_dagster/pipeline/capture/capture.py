"""Capture: one thread reads the source's log and puts it into the journal, until it is stopped.

This module owns the thread, its retries, and what other threads see of it. `log_reader` reads one
stream after another, and `committer` says in which order what was read becomes durable.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.capture.committer import Ranges, SegmentCommitter
from deltaforge_dagster.pipeline.capture.holds import Holds
from deltaforge_dagster.pipeline.capture.log_reader import (
    LogReader,
    ReadControl,
    RowFilters,
    SinkDemand,
)
from deltaforge_dagster.pipeline.control.unread_log import ReadAhead
from deltaforge_dagster.pipeline.meters import read_again, read_failed
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.pipeline.schemas.approval import FencedRegistry, SchemaApproval
from deltaforge_dagster.pipeline.snapshots.chunk_deduplicator import ChunkDeduplicator
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.metrics import Tally, panic
from deltaforge_dagster.state.records import PipelineRow

if TYPE_CHECKING:  # Spark takes a second to import
    from deltaforge_dagster.pipeline.capture.backlog import Backlog

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """Why nothing is captured now.

    Attributes:
        error: What failed last.
        since: Monotonic time since which nothing could be captured.
        next_attempt_at: Monotonic time of the next attempt; None if the error is one that no retry
            can fix, so that capture has ended.
        attempts: How many attempts have failed in a row.
    """

    error: DeltaforgeError
    since: float
    next_attempt_at: float | None
    attempts: int


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
        failure: Why nothing is captured now; None while capture works. Other threads read it once
            and use what they have got: the next read may return another failure, or None.
        reading: Whether the log is being read and all released holds are in the journal.
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
        self.failure: CaptureFailure | None = None
        self.reading = False
        self._lease = run.lease
        self._source_id = options.source_id
        self._build_source = build_source
        self._find_start = find_start
        self._filters = _filters(run, options)
        self._committer = SegmentCommitter(
            run,
            options.row,
            options.source_id,
            ranges,
            watch=self._filters.deduplicator.watch,
            captured=captured,
        )
        self._control = ReadControl()
        self._reader = LogReader(
            options.limits,
            self._committer,
            self._filters,
            self._control,
            SinkDemand(someone_waits, segment_wanted),
            accepted=self._recover,
            backlog=backlog,
        )
        self._backlog = backlog
        self._backoff = Backoff()
        self._read_before = False
        self._confirmed: Position | None = None  # during this run
        self._source: Source | None = None
        self._source_lock = threading.Lock()
        self.pause(options.paused)
        self._thread = threading.Thread(
            target=in_context(self._run), name=f"capture {run.lease.pipeline}", daemon=True
        )
        self._thread.start()

    @property
    def error(self) -> DeltaforgeError | None:
        """Why nothing is captured now; None while capture works."""
        failure = self.failure
        return None if failure is None else failure.error

    @property
    def failed(self) -> bool:
        """Whether capture ended with an error that no retry can fix."""
        failure = self.failure
        return failure is not None and failure.next_attempt_at is None

    @property
    def position(self) -> Position:
        """End of the journal: everything committed before it is durable."""
        return self._committer.position

    @property
    def passed(self) -> Position | None:
        """A position that the log has passed without a change for this pipeline.

        It is newer than everything captured; None if there is none.
        """
        return self._reader.received.passed

    @property
    def received(self) -> ReadAhead:
        """What was read of the log, and is not captured yet."""
        return self._reader.received

    @property
    def in_transaction(self) -> bool:
        """Whether changes were read whose commit was not read yet."""
        return self._reader.in_transaction

    @property
    def moved_at(self) -> float:
        """Monotonic time of the last capture."""
        return self._committer.moved_at

    @property
    def segments(self) -> int:
        """Number of segments written."""
        return self._committer.segments

    @property
    def rows(self) -> int:
        """Number of changes written."""
        return self._committer.rows

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
        return self._committer.has_written

    @property
    def chunks_waiting(self) -> bool:
        """Whether chunks of a snapshot wait to be merged."""
        return self._filters.deduplicator.waits

    def confirm(self, position: Position) -> None:
        """Confirm a committed position to the source, now or as soon as it is read."""
        with self._source_lock:
            confirmed = self._confirmed
            self._confirmed = position if confirmed is None else max(confirmed, position)
            if self._source is not None:
                self._source.confirm(self._confirmed)

    def pause(self, paused: bool) -> None:
        """Pause or resume reading. Complete transactions read so far become a segment.

        While paused, the stream stays open and keeps answering the server, which waits.
        """
        if paused:
            self._control.paused.set()
        else:
            self._control.paused.clear()

    def stop(self) -> None:
        """End the thread; complete transactions read so far become the last segment."""
        self._control.stopped.set()
        self._thread.join()
        if self._backlog is not None:
            self._backlog.close()

    def _run(self) -> None:
        while True:
            self._control.wait_while_paused()
            if self._control.stopped.is_set():
                return
            try:
                self._lease.guard()  # a run that was overtaken must not cut its successor's stream
                self._read()
            except LeaseLost:
                return
            except Retryable as error:
                delay = self._backoff.next_delay()
                self._fail(error, time.monotonic() + delay)
                self._report("now", error, sleep_seconds=round(delay, 1))
                self._control.stopped.wait(delay)
            except DeltaforgeError as error:
                self._fail(error, None)
                self._report("until its cause is removed", error)
                return
            except Exception as error:
                broken = DeltaforgeError(f"{self._lease.pipeline}: capture broke: {error!r}")
                broken.__cause__ = error
                self._fail(broken, None)
                self._count(panic())
                logger.exception("capture broke")
                return

    def _fail(self, error: DeltaforgeError, next_attempt_at: float | None) -> None:
        """Publish that nothing can be captured, in one step (see `failure`)."""
        failure = self.failure
        since = time.monotonic() if failure is None else failure.since
        attempts = 0 if failure is None else failure.attempts
        attempts += next_attempt_at is not None
        self.failure = CaptureFailure(error, since, next_attempt_at, attempts)

    def _report(self, until: str, error: DeltaforgeError, **more: Any) -> None:
        """Log why capture waits, and count failures of the source."""
        message = f"the source cannot be read {until}"
        if isinstance(error, StoreUnavailable | JournalDamaged):
            message = f"the journal or the state store cannot be used {until}"
        else:
            self._count(read_failed(self._source_id, error))
        attempts = None if self.failure is None else self.failure.attempts or None
        fields = {"source_id": self._source_id, "reason": str(error), "kind": error.kind, **more}
        logger.warning(message, extra={"fields": {**fields, "attempt": attempts}})

    def _count(self, tally: Tally) -> None:
        with contextlib.suppress(DeltaforgeError):  # the capture loop will meet the same error
            self._lease.write(lambda writer: writer.metrics.count(tally))

    def _read(self) -> None:
        source = self._build_source()
        start = self._committer.position
        with self._source_lock:
            self._source = source
            if self._confirmed is not None:
                # Nobody confirms it again, and the source before this one may not have told the
                # server.
                source.confirm(self._confirmed)
                # While nothing is captured, positions beyond the journal's end are confirmed: the
                # source may have discarded its log up to there.
                start = max(start, self._confirmed)
        try:
            self._reader.release_holds(source, start)
            self.reading = True
            position = self._find_start(source, start)
            if position != start:
                self._reader.relocate(position)
            if self._read_before:
                self._count(read_again(self._source_id))
            self._read_before = True
            self._reader.read(source, position)
        finally:
            self.reading = False
            with self._source_lock:
                self._source = None
            source.close()

    def _recover(self) -> None:
        """Note that a batch was read, which ends a failure unless that may persist.

        A batch read proves that an error of the source is over. An error of the journal or the
        state store is over only after a write. The source repeats changes that could not be
        written, but may send empty batches first; these prove nothing.
        """
        failure = self.failure
        if (
            failure is not None
            and isinstance(failure.error, StoreUnavailable | JournalDamaged)
            and self._reader.unwritten
            and self._committer.moved_at < failure.since
        ):
            return
        self._backoff.reset()
        self.failure = None


def _filters(run: LeasedRun, options: CaptureOptions) -> RowFilters:
    """Return what rows pass before they are in a segment."""
    registry = FencedRegistry(run.store, run.lease, options.tenant, pauses=options.pauses_tables)
    approval = SchemaApproval(registry.pending, pauses=options.pauses_tables)
    deduplicator = ChunkDeduplicator(
        run.store, run.journal, run.lease, registry, options.limits, approval=approval
    )
    return RowFilters(registry, approval, Holds(run.store, run.journal, run.lease), deduplicator)
