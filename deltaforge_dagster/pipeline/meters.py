"""What a run counts: tallies of captured and processed segments, and of messages sent to a sink.

Each tally is written in the transaction that records what it counts (`state.metrics`).
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa

from deltaforge_dagster.errors import DeltaforgeError, SinkOverdue, Undeliverable
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.sinks.base import Traffic
from deltaforge_dagster.state import metric_families as families
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.records import SegmentRow

_PROCESSOR = re.compile(r"processor ([^\s:]+):")
_LATENCIES = 1000
_OUTBOX_DROPPED = "outbox_dropped:"


Versions: TypeAlias = "set[tuple[str, str]]"
"""Pairs of a table and a version of it that a run has captured."""


def captured(source: str, segment: WrittenSegment, now: float, seen: Versions) -> Tally:
    """Return the tally of a segment captured at `now`, seconds since 1970.

    Adds the segment's table versions to `seen`.
    """
    tally = Tally()
    versions = {
        (table, version)
        for table, contained in segment.schema_versions.items()
        for version in ([contained] if isinstance(contained, str) else contained)
    }
    tally.add(families.SOURCE_SCHEMA_HITS, len(versions & seen), source=source)
    tally.add(families.SOURCE_SCHEMA_MISSES, len(versions - seen), source=source)
    seen |= versions
    for table, ops in segment.counts.items():
        for op, count in ops.items():
            tally.add(families.SOURCE_EVENTS, count, source=source, table=table, op=op)
        tally.add(families.SNAPSHOT_ROWS, ops.get("r", 0), table=table)
    for table, newest in segment.newest.items():
        tally.set(families.SOURCE_TABLE_LAG, _age(newest, now), table=table)
    tally.set(families.SOURCE_LAG, _age(segment.last_ts_us, now), source=source)
    tally.set(families.SOURCE_RECEIVED, now, source=source)
    tally.add(families.SOURCE_BYTES, segment.memory, source=source)
    tally.add(families.BYTES_TOTAL, segment.bytes)
    tally.observe(families.BATCH_EVENTS, segment.rows)
    tally.observe(families.BATCH_BYTES, segment.memory)
    return tally


def read_failed(source: str, error: DeltaforgeError) -> Tally:
    """Return the tally of an error that ended the reading of a source."""
    tally = Tally()
    tally.add(families.SOURCE_ERRORS, source=source, kind=error.kind)
    return tally


def read_again(source: str) -> Tally:
    """Return the tally of a source that is read again after an error."""
    tally = Tally()
    tally.add(families.SOURCE_RECONNECTS, source=source)
    return tally


def processed(
    segment: SegmentRow, counts: Mapping[str, Mapping[str, int]], seconds: float
) -> Tally:
    """Return the tally of a segment that went through the chain in `seconds`.

    Args:
        segment: The segment as captured.
        counts: The counts of each processor (`processors.chain`).
        seconds: Duration of the Spark job that processed it, perhaps with others.
    """
    tally = Tally()
    tally.observe(families.STAGE_LATENCY, seconds, stage="process", trigger=_trigger(segment))
    for processor, counted in counts.items():
        tally.observe(
            families.PROCESSOR_LATENCY, counted.get("busy_us", 0) / 1e6, processor=processor
        )
        for family, name in (
            (families.PROCESSOR_IN, "events_in"),
            (families.PROCESSOR_OUT, "events_out"),
            (families.OUTBOX_TRANSFORMED, "outbox_transformed"),
            (families.FILTER_DROPPED, "filter_dropped"),
        ):
            tally.add(family, counted.get(name, 0), processor=processor)
        for name, count in counted.items():
            if name.startswith(_OUTBOX_DROPPED):
                reason = name.removeprefix(_OUTBOX_DROPPED)
                tally.add(families.OUTBOX_DROPPED, count, processor=processor, reason=reason)
    return tally


def processing_failed(error: DeltaforgeError, processors: Iterable[str]) -> Tally:
    """Return the tally of an error of the chain.

    It counts one error of the processor that the message names, if it names one.
    """
    tally = Tally()
    named = _PROCESSOR.search(str(error))
    if named is not None and named[1] in processors:
        tally.add(families.PROCESSOR_ERRORS, processor=named[1])
    return tally


class SinkMeter:
    """Counts what one deliverer does until the next write to the store; used by its thread alone.

    Args:
        sink: The sink's id.
    """

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._tally = Tally()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._opened = False
        self._began = 0.0
        self._spent = 0.0

    def opened(self) -> None:
        """Count that the sink was opened; the first time is no reconnect."""
        if self._opened:
            self._tally.add(families.SINK_RECONNECTS, sink=self._sink)
        self._opened = True

    def sends(self) -> None:
        """Remember that a batch is being delivered."""
        self._began = time.monotonic()

    def sent(self, parts: Sequence[pa.RecordBatch]) -> None:
        """Count a batch (`SinkBatch.parts`), or the part of it that has arrived."""
        seconds = time.monotonic() - self._began
        self._spent += seconds
        messages = sum(part.num_rows for part in parts)
        if not messages:
            return
        sink, tally = self._sink, self._tally
        tally.add(families.SINK_EVENTS, messages, sink=sink)
        tally.add(families.SINK_BATCHES, sink=sink)
        tally.add(
            families.SINK_BYTES, sum(part.column("value").nbytes for part in parts), sink=sink
        )
        tally.observe(families.SINK_LATENCY, seconds, sink=sink)
        self._latencies.append(seconds)

    def wrote(self, changes: int) -> None:
        """Count what was added to a table."""
        seconds = time.monotonic() - self._began
        self._spent += seconds
        sink, tally = self._sink, self._tally
        tally.add(families.SINK_EVENTS, changes, sink=sink)
        tally.add(families.SINK_BATCHES, sink=sink)
        tally.observe(families.SINK_LATENCY, seconds, sink=sink)
        self._latencies.append(seconds)

    @property
    def latencies(self) -> dict[str, float]:
        """Median and 95th percentile of recent delivery times, in milliseconds.

        Empty before the first delivery.
        """
        newest = sorted(self._latencies.copy())
        if not newest:
            return {}
        return {
            f"latency_ms_p{part}": round(newest[len(newest) * part // 100] * 1000, 1)
            for part in (50, 95)
        }

    def redriven(self, messages: int) -> None:
        """Count dead letters that have arrived."""
        self._tally.add(families.SINK_EVENTS, messages, sink=self._sink)

    def failed(self, error: DeltaforgeError) -> None:
        """Count a failure of the sink."""
        sink, tally = self._sink, self._tally
        tally.add(families.SINK_ERRORS, sink=sink)
        tally.add(families.SINK_FAILURES, sink=sink, kind=error.kind)
        if isinstance(error, SinkOverdue):
            tally.add(families.SINK_TIMEOUTS, sink=sink)
        if isinstance(error, Undeliverable):
            tally.add(families.SINK_ROUTING_ERRORS, sink=sink, kind=error.cause)

    def did(self, traffic: Traffic | None) -> None:
        """Count what the sink's client library has done since the last time."""
        if traffic is None:
            return
        sink, tally, done = self._sink, self._tally, traffic.take()
        tally.add(families.SINK_COMMITS, done.commits, sink=sink)
        tally.add(families.SINK_ABORTS, done.aborts, sink=sink)
        tally.add(families.KAFKA_RETRIES, done.retries, sink=sink)
        if done.waiting is not None and done.waiting_bytes is not None:
            tally.set(families.KAFKA_QUEUE, done.waiting, sink=sink)
            tally.set(families.KAFKA_QUEUE_BYTES, done.waiting_bytes, sink=sink)

    def not_put_aside(self) -> None:
        """Count that a change could not be set aside as a dead letter."""
        self._tally.add(families.DLQ_WRITE_FAILURES)

    def panicked(self) -> None:
        """Count a defect of the program."""
        self._tally.add(families.PANICS)

    def acknowledged(self, segment: SegmentRow, *, complete: bool) -> Tally:
        """Return the tally to write with a checkpoint inside a segment.

        With `complete`, the checkpoint is at the end of the segment.
        """
        now = time.time()
        tally = self.drain()
        tally.add(families.CHECKPOINTS)
        tally.add(families.CHECKPOINT_SUCCESS)
        tally.set(families.SINK_CHECKPOINT_TS, now, sink=self._sink)
        if complete:
            trigger = _trigger(segment)
            tally.observe(families.STAGE_LATENCY, self._spent, stage="sink", trigger=trigger)
            self._spent = 0.0
            if segment.received_at is not None:
                tally.observe(families.E2E_LATENCY, max(0.0, now - segment.received_at))
        return tally

    def passed(self, segments: Sequence[SegmentRow]) -> Tally:
        """Return the tally to write with a checkpoint after zero or more whole segments."""
        if not segments:
            return self.drain()
        now = time.time()
        for segment in segments[:-1]:
            if segment.received_at is not None:
                self._tally.observe(families.E2E_LATENCY, max(0.0, now - segment.received_at))
        return self.acknowledged(segments[-1], complete=True)

    def committed(self, segment: SegmentRow, seconds: float, failures: int) -> None:
        """Count how long the checkpoint's write took, and how often it failed before."""
        trigger = _trigger(segment)
        self._tally.observe(families.STAGE_LATENCY, seconds, stage="commit", trigger=trigger)
        self._tally.add(families.CHECKPOINT_FAILURE, failures)

    def drain(self) -> Tally:
        """Return what was counted since the last time."""
        tally, self._tally = self._tally, Tally()
        return tally


def _age(ts_us: int, now: float) -> float:
    return max(0.0, now - ts_us / 1e6)


def _trigger(segment: SegmentRow) -> str:
    return segment.trigger or "timer"
