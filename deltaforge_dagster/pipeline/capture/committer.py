"""Commit segments: in which order what was captured becomes durable.

`SegmentCommitter` takes these steps for each segment, and each step is complete before the next:

1. The files of parked events become durable, then the file of the segment. After a crash no row
names
   them: the journal's sweep removes them, and the source sends their changes again.
2. The snapshot's relocated rows in it are recorded. Recorded once more they change nothing.
3. One fenced transaction adds the segment to its range (a new one if none is open), sets the
   captured position and the number of the next segment, and records the held files, the released
   hold, the merged chunks and the metrics. From here on the changes are captured.
4. The committer moves its own position and number. Nothing that can fail stands between 3 and 4,
   or the changes would be read again, under the number of a segment that exists.
5. Deliverers are told, and the range is closed if it is full. If the store cannot be reached for
   that, the main thread tries again; the segment is captured nevertheless. A range that a crash
   leaves open is closed by the next run, before it adds any segment.

Parked events that come without a segment take the same steps with a transaction of their own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltaforge_dagster.config.engine import RangeLimits
from deltaforge_dagster.errors import StoreUnavailable
from deltaforge_dagster.journal.hashing import range_hash
from deltaforge_dagster.journal.writer import SegmentWriter, WrittenSegment
from deltaforge_dagster.pipeline.capture.segments import Hold
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.meters import Versions, captured
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.records import HoldPart, HoldRow, NewSegment, PipelineRow, Trigger
from deltaforge_dagster.state.snapshot_records import ChunkRow
from deltaforge_dagster.state.store import FencedWriter, StateStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentCommit:
    """A segment whose file is durable, and what is recorded with it.

    Attributes:
        written: The file and its summary.
        end: The captured position after it.
        parked: Files with parked events from before `end`.
        released: The hold whose events the segment contains.
        chunks: The snapshot chunks that the segment contains, each with the number of its rows.
        received_at: When the first change arrived, seconds since 1970.
        trigger: Why the segment ended.
    """

    written: WrittenSegment
    end: Position
    parked: Sequence[HoldPart] = ()
    released: HoldRow | None = None
    chunks: Sequence[tuple[ChunkRow, int]] = ()
    received_at: float | None = None
    trigger: Trigger = "limits"

    def row(self, number: int, start: Position) -> NewSegment:
        """Return the row of the segment with this number, which begins at `start`."""
        return NewSegment(
            segment=number,
            start_position=start.to_json(),
            end_position=self.end.to_json(),
            **self.written.recorded,
            received_at=self.received_at,
            trigger=self.trigger,
        )


class SegmentCommitter:
    """Makes the segments of one run durable, in the order that the module describes.

    The capture thread alone calls its methods; other threads read its attributes.

    Args:
        run: The run.
        pipeline: The pipeline when the run begins: its uid, where the journal ends, and the number
            of the next segment.
        source_id: Id of the source, for metrics.
        ranges: Records the segments.
        watch: Records the relocated rows of a segment that is about to be added.
        captured: Called with the number of each segment once it is in the journal.

    Attributes:
        position: End of the journal: everything committed before it is durable.
        next_segment: The number of the next segment.
        moved_at: Monotonic time of the last write; that of the beginning before the first.
        segments: Number of segments written.
        rows: Number of changes written.
    """

    def __init__(
        self,
        run: LeasedRun,
        pipeline: PipelineRow,
        source_id: str,
        ranges: Ranges,
        *,
        watch: Callable[[WrittenSegment], None],
        captured: Callable[[int], None],
    ) -> None:
        position = pipeline.captured_position or pipeline.start_position
        assert position is not None
        self.position: Position = parse_position(position)
        self.next_segment = pipeline.next_segment
        self.moved_at = self._began = time.monotonic()
        self.segments = 0
        self.rows = 0
        self._uid = pipeline.uid
        self._source_id = source_id
        self._run = run
        self._ranges = ranges
        self._watch = watch
        self._captured = captured
        self._seen_versions: Versions = set()

    @property
    def has_written(self) -> bool:
        """Whether it has written anything to the journal yet."""
        return self.moved_at > self._began

    def open_writer(self) -> SegmentWriter:
        """Return the writer of the next segment."""
        lease = self._run.lease
        return self._run.journal.writer(lease.pipeline, self._uid, self.next_segment, lease.epoch)

    def skip_to(self, position: Position) -> None:
        """Have the next segment begin at a position up to which nothing is left to capture."""
        self.position = position

    def seal(
        self,
        writer: SegmentWriter | None,
        holds: Sequence[Hold],
        end: Position,
        *,
        received_at: float,
        trigger: Trigger,
    ) -> WrittenSegment | None:
        """Make a segment and the files of parked events durable, and commit them.

        Args:
            writer: The writer of the segment; None if there were only parked events.
            holds: The files of parked events.
            end: Where they end.
            received_at: When the first change arrived, seconds since 1970.
            trigger: Why the segment ended.

        Returns:
            The segment, if there is one.

        Raises:
            StoreUnavailable: A file cannot be written, and unfinished files were removed; or as
                `commit` says.
            JournalDamaged: The folder of a file is gone.
            LeaseLost: The lease is gone.
        """
        try:
            parked = [hold.close() for hold in holds]
            if parked:
                failpoint("parked-file-written")
            written = None if writer is None else writer.close()
        except BaseException:
            # Not after this: once the transaction may have begun, a row may name the files.
            for hold in holds:
                hold.abort()
            if writer is not None:
                writer.abort()
            raise
        if written is not None:
            self.commit(
                SegmentCommit(written, end, parked, received_at=received_at, trigger=trigger)
            )
            return written
        self._run.lease.write(lambda writer: writer.holds.keep(parked, end.to_json()))
        failpoint("parked-row-written")
        self._moved_to(end)
        return None

    def commit(self, commit: SegmentCommit) -> None:
        """Add a segment whose file is durable to the journal.

        Raises:
            LeaseLost: The lease is gone.
            NotAllowed: Chunks of the segment belong to a snapshot that was cancelled.
            StoreUnavailable: The relocated rows cannot be recorded now.
        """
        failpoint("segment-file-written")
        self._watch(commit.written)
        number = self.next_segment
        tally = captured(self._source_id, commit.written, time.time(), self._seen_versions)
        self._ranges.add(number, commit, self.position, tally)
        self.next_segment = number + 1
        self._moved_to(commit.end)
        self.segments += 1
        self.rows += commit.written.rows
        self._captured(number)
        with contextlib.suppress(StoreUnavailable):  # the run's main thread tries again
            self._ranges.close_if_due()

    def _moved_to(self, end: Position) -> None:
        """Note that everything before `end` is durable."""
        # Set before the position: a thread that sees the new position must also see the new time
        # (`run.progress`).
        self.moved_at = time.monotonic()
        self.position = end


class Ranges:
    """The open range of one run, and the segments that enter it.

    A range is opened with its first segment and closed once, at its limits. The capture thread adds
    segments, and the main thread of the run closes a range that is due while nothing arrives. Both
    hold one lock, so that no segment is added to a range that is being closed.

    Args:
        store: Where ranges and segments are recorded.
        lease: The run's lease; it names the pipeline, and every write is fenced by it.
        spec_hash: Hash of the pipeline file that this run works with.
        limits: `engine.range` of the pipeline file.
        opened: Called with the number of a range right after its first segment is durable.

    Attributes:
        closed: How many ranges were closed.
        rows: How many changes entered ranges.
    """

    def __init__(
        self,
        store: StateStore,
        lease: ActiveLease,
        *,
        spec_hash: str,
        limits: RangeLimits,
        opened: Callable[[int], None],
    ) -> None:
        self._store = store
        self._lease = lease
        self._pipeline = lease.pipeline
        self._spec_hash = spec_hash
        self._limits = limits
        self._opened = opened
        self._lock = threading.Lock()
        self._open: _OpenRange | None = None
        self.closed = 0
        self.rows = 0

    def close_left_open(self) -> None:
        """Close ranges that a killed run left open; their segments are durable and complete."""
        with self._lock:
            for row in self._store.ranges.read(self._pipeline, state="open"):
                self._close_row(row.range, "recovered")

    def add(self, number: int, commit: SegmentCommit, start: Position, tally: Tally) -> None:
        """Record a segment, and set the captured position to its end, in one fenced transaction.

        The range is not closed even if it is full: call `close_if_due` afterwards.

        Args:
            number: Number of the segment.
            commit: The segment and what is recorded with it.
            start: The captured position before.
            tally: Metrics to count in the same transaction.

        Raises:
            LeaseLost: The lease is gone; nothing was recorded.
            NotAllowed: Chunks of the segment belong to a snapshot that was cancelled; nothing was
                recorded.
        """
        row = commit.row(number, start)
        with self._lock:
            is_new = self._open is None
            entered = self._lease.write(lambda writer: self._enter(writer, row, commit, tally))
            failpoint("segment-row-written")
            if self._open is None:
                self._open = _OpenRange(entered)
            self.rows += row.rows
            self._open.events += row.rows
            self._open.bytes += row.bytes
            fields = {"range": entered, "batch_id": number, "events": row.rows, "bytes": row.bytes}
            logger.debug("captured a segment", extra={"fields": fields})
            if is_new:
                self._opened(entered)

    def close_if_due(self) -> None:
        """Close the open range when it has reached one of its limits.

        Raises:
            LeaseLost: The lease is gone.
            StoreUnavailable: The store cannot be read now; the range stays open.
        """
        with self._lock:
            if self._open is None:
                return
            reason = self._open.limit_reached(self._limits)
            if reason is not None:
                self._close_open(reason)

    def close(self, reason: str) -> None:
        """Close the open range, if there is one."""
        with self._lock:
            if self._open is not None:
                self._close_open(reason)

    def _enter(
        self, writer: FencedWriter, row: NewSegment, commit: SegmentCommit, tally: Tally
    ) -> int:
        """Add a segment to the open range, opening one if need be; return the range's number."""
        if self._open is None:
            number = writer.ranges.open(row.start_position, self._spec_hash, row.segment)
        else:
            number = self._open.number
        writer.segments.add(
            row, number, parked=commit.parked, released=commit.released, tally=tally
        )
        for chunk, rows in commit.chunks:
            writer.snapshots.complete(chunk, segment=row.segment, rows=rows)
        return number

    def _close_open(self, reason: str) -> None:
        assert self._open is not None
        self._close_row(self._open.number, reason)
        self._open = None

    def _close_row(self, number: int, reason: str) -> None:
        row = self._store.ranges.get(self._pipeline, number)
        assert row is not None
        segments = self._store.segments.read(
            self._pipeline, first=row.first_segment, last=row.last_segment
        )
        content_hash = range_hash([segment.content_hash for segment in segments])
        self._lease.write(lambda writer: writer.ranges.close(number, reason, content_hash))
        failpoint("range-closed")
        fields = {"range": number, "events": row.rows, "batches": len(segments), "reason": reason}
        logger.info("closed a range", extra={"fields": fields})
        self.closed += 1


class _OpenRange:
    def __init__(self, number: int) -> None:
        self.number = number
        self.events = 0
        self.bytes = 0
        self._opened_at = time.monotonic()

    def limit_reached(self, limits: RangeLimits) -> str | None:
        if time.monotonic() - self._opened_at >= limits.max_seconds:
            return "max_seconds"
        if self.events >= limits.max_events:
            return "max_events"
        if self.bytes >= limits.max_bytes:
            return "max_bytes"
        return None
