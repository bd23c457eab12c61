"""Cut the batches of one stream into segments, between transactions.

A segment ends only where the source says that every transaction is whole. Changes of a
transaction that is still open wait in memory until its commit arrives, so that the whole
transactions before it can be cut and delivered meanwhile; once they outgrow `SPILL_BYTES` they
begin a segment of their own, written row group by row group, and memory stays bounded.

Parked events (`sources.base.ParkedEvent`) are written to files of their own, which end together
with the segment, at the same position. If only parked events arrive, these files end without a
segment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.journal.writer import SegmentWriter
from deltaforge_dagster.pipeline.capture.holds import kind_of
from deltaforge_dagster.pipeline.control.unread_log import ReadAhead
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent
from deltaforge_dagster.state.records import HoldPart, Trigger

SPILL_BYTES = 16 << 20
"""Changes of an open transaction kept in memory before they are written out."""


class SegmentCutter:
    """Writes change batches into segments, and ends each segment where and when it is due.

    Args:
        limits: `engine.segment` of the pipeline file.
        open_writer: Makes the writer of the next segment.
        seal: Makes a segment (None if there were only parked events) and the files of parked events
            durable; all of them end at the given position.
        open_hold: Opens a file for parked events of one table, all of which come after the given
            position.
        start: Where the stream begins.
        segment_wanted: Whether the segment would be delivered or encoded as soon as it is captured,
            which lets it end `min_ms` after the last one: a change that comes alone need not wait
            for others.

    Attributes:
        passed: A position that the log has passed without a change for this pipeline since the last
            one that was written, or None.
        trigger: Why the last segment ended.
        age: Seconds from the first change of that segment until it was cut.
    """

    def __init__(
        self,
        limits: SegmentLimits,
        open_writer: Callable[[], SegmentWriter],
        seal: Callable[[SegmentWriter | None, Sequence[Hold], Position], None],
        segment_wanted: Callable[[], bool],
        *,
        open_hold: Callable[[ParkedEvent, Position], Hold],
        start: Position,
    ) -> None:
        self.passed: Position | None = None
        self.trigger: Trigger = "timer"
        self.age = 0.0
        self._limits = limits
        self._open_writer = open_writer
        self._seal = seal
        self._segment_wanted = segment_wanted
        self._open_hold = open_hold
        self._reached = start
        self._holds: dict[tuple[str, str], Hold] = {}
        self._waiting_parked: list[ParkedEvent] = []
        self._writer: SegmentWriter | None = None
        self._began = 0.0
        self._last_end = -math.inf
        self._end: Position | None = None  # None also while a spilled transaction is open
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._open_rows = 0
        self._open_since: float | None = None

    def accept(self, batch: ChangeBatch) -> None:
        """Add a batch, and end the segment if it is due.

        With an empty batch, this only checks whether the segment is due.
        """
        if batch.rows is not None:
            self.passed = None
            self._waiting.append(batch.rows)
            self._waiting_bytes += batch.rows.nbytes
            if batch.end is None:
                self._open_rows += batch.rows.num_rows
                self._open_since = self._open_since or time.time()
        if batch.parked:
            self.passed = None
            self._waiting_parked += batch.parked
            self._waiting_bytes += sum(len(event.data) for event in batch.parked)
        if batch.end is not None:
            self._write_waiting()
            self._open_rows, self._open_since = 0, None
            self._reached = batch.end
            if self._writer is None and not self._holds:
                self.passed = batch.end
            else:
                self._end = batch.end
        elif self._waiting_bytes > SPILL_BYTES:
            # First end the segment of complete transactions; the open one begins its own.
            self.cut("limits")
            self._write_waiting()
        due = self._due()
        if due is not None:
            self.cut(due)

    @property
    def reached(self) -> Position:
        """Position up to which the log was read, between two transactions."""
        return self._reached

    @property
    def received(self) -> ReadAhead:
        """What was accepted, and is not captured yet."""
        return ReadAhead(self.passed, self._open_rows, self._open_since)

    @property
    def in_transaction(self) -> bool:
        """Whether changes were accepted whose commit has not been read."""
        open_ones = self._writer is not None or bool(self._holds)
        return bool(self._waiting or self._waiting_parked) or (open_ones and self._end is None)

    def cut(self, trigger: Trigger = "shutdown") -> None:
        """End the segment after the complete transactions written so far, if there are any."""
        if self._end is None:
            return
        self._last_end = time.monotonic()
        self.trigger, self.age = trigger, self._last_end - self._began
        writer, holds, end = self._writer, list(self._holds.values()), self._end
        self._writer = self._end = None
        self._holds.clear()
        self._seal(writer, holds, end)

    def abandon(self) -> None:
        """Drop changes of incomplete transactions; they will be read again."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        for hold in self._holds.values():
            hold.abort()
        self._holds.clear()

    def _write_waiting(self) -> None:
        if not self._waiting and not self._waiting_parked:
            return
        if self._writer is None and not self._holds:
            self._began = time.monotonic()
        if self._waiting and self._writer is None:
            self._writer = self._open_writer()
        for rows in self._waiting:
            assert self._writer is not None
            self._writer.write(rows)
        for event in self._waiting_parked:
            hold = kind_of(event), event.table
            if hold not in self._holds:
                self._holds[hold] = self._open_hold(event, self._reached)
            self._holds[hold].write(event)
        self._waiting.clear()
        self._waiting_parked.clear()
        self._waiting_bytes = 0
        self._end = None

    def _due(self) -> Trigger | None:
        if self._end is None:
            return None
        limits, writer = self._limits, self._writer
        if writer is not None and writer.rows >= limits.max_events:
            return "limits"
        written = 0 if writer is None else writer.bytes
        if written + sum(hold.size for hold in self._holds.values()) >= limits.max_bytes:
            return "limits"
        now = time.monotonic()
        if (now - self._began) * 1000 >= limits.max_ms:
            return "timer"
        rested = (now - self._last_end) * 1000 >= limits.min_ms
        return "timer" if writer is not None and rested and self._segment_wanted() else None


class Hold(Protocol):
    """A file of parked events being written."""

    @property
    def size(self) -> int:
        """Bytes of the events so far."""
        ...

    def write(self, event: ParkedEvent) -> None:
        """Append an event."""
        ...

    def close(self) -> HoldPart:
        """Make the file durable, and return its row."""
        ...

    def abort(self) -> None:
        """Remove what was written."""
        ...
