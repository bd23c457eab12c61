"""Ranges: opened with their first segment and closed once, at their limits.

The capture thread adds segments, and the main thread of the run closes a range that is due while
nothing arrives. Both hold one lock, so that no segment is added to a range that is being closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from deltaforge_dagster.config.engine import RangeLimits
from deltaforge_dagster.journal.hashing import range_hash
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.records import HeldPart, HoldRow, NewSegment, Trigger
from deltaforge_dagster.state.snapshot_records import ChunkRow
from deltaforge_dagster.state.store import FencedWriter, StateStore

logger = logging.getLogger(__name__)


class Ranges:
    """The open range of one run, and the segments that enter it.

    Args:
        store: Where ranges and segments are recorded.
        lease: The run's lease; it names the pipeline, and every write is fenced by it.
        spec_hash: Hash of the pipeline file that this run works with.
        limits: `engine.range` of the pipeline file.
        opened: Called with the number of a range right after its first segment is durable.
    """

    def __init__(
        self,
        store: StateStore,
        lease: HeldLease,
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

    def close_left_open(self) -> None:
        """Close ranges that a killed run left open; their segments are durable and complete."""
        with self._lock:
            for row in self._store.ranges.read(self._pipeline, state="open"):
                self._close_row(row.range, "recovered")

    def add(
        self,
        number: int,
        segment: WrittenSegment,
        start: Position,
        end: Position,
        *,
        held: Sequence[HeldPart] = (),
        released: HoldRow | None = None,
        chunks: Sequence[tuple[ChunkRow, int]] = (),
        received_at: float | None = None,
        trigger: Trigger | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Record a segment whose file is durable, and set the captured position to `end`.

        Both happen in one fenced transaction.

        Args:
            number: Number of the segment.
            segment: The file and its summary.
            start: The captured position before.
            end: The captured position after.
            held: Files with held events from before `end`.
            released: The hold whose events the segment contains.
            chunks: The snapshot chunks that the segment contains, each with the number of its rows.
            received_at: When the first change arrived, seconds since 1970.
            trigger: Why the segment ended.
            tally: Metrics to count in the same transaction.
        """
        row = NewSegment(
            segment=number,
            segment_id=segment.segment_id,
            path=segment.path,
            checksum=segment.checksum,
            content_hash=segment.content_hash,
            rows=segment.rows,
            bytes=segment.bytes,
            start_position=start.to_json(),
            end_position=end.to_json(),
            counts=segment.counts,
            schema_versions=segment.schema_versions,
            first_ts_us=segment.first_ts_us,
            last_ts_us=segment.last_ts_us,
            received_at=received_at,
            trigger=trigger,
        )
        with self._lock:
            is_new = self._open is None
            entered = self._lease.write(
                lambda writer: self._enter(writer, row, held, released, chunks, tally=tally)
            )
            failpoint("segment-row-written")
            if self._open is None:
                self._open = _OpenRange(entered)
            self._open.events += row.rows
            self._open.bytes += row.bytes
            fields = {"range": entered, "batch_id": number, "events": row.rows, "bytes": row.bytes}
            logger.debug("captured a segment", extra={"fields": fields})
            if is_new:
                self._opened(entered)
        self.close_if_due()

    def close_if_due(self) -> None:
        """Close the open range when it has reached one of its limits."""
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
        self,
        writer: FencedWriter,
        row: NewSegment,
        held: Sequence[HeldPart],
        released: HoldRow | None,
        chunks: Sequence[tuple[ChunkRow, int]],
        *,
        tally: Tally | None,
    ) -> int:
        """Add a segment to the open range, opening one if need be; return the range's number."""
        if self._open is None:
            number = writer.ranges.open(row.start_position, self._spec_hash, row.segment)
        else:
            number = self._open.number
        writer.segments.add(row, number, held=held, released=released, tally=tally)
        for chunk, rows in chunks:
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
