"""Sends the encoded messages of a segment to the sink in delivery batches.

The connection to the sink is opened when something is to be sent, and closed after each failure. A
timer closes a sink that exceeds the time limit of a delivery batch, which ends the send. The
checkpoint follows what the sink has acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from deltaforge_dagster.errors import (
    DeltaforgeError,
    LeaseLost,
    SinkOverdue,
    StoreUnavailable,
    Undeliverable,
)
from deltaforge_dagster.pipeline.deliver.batches import BatchSettings, cut
from deltaforge_dagster.pipeline.deliver.dead_letters import DeadLetterWriter, QueueFull
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.sinks.base import Sink, SinkBatch, Traffic, traffic_of
from deltaforge_dagster.state.checkpoints import NOTHING
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow

CHECKPOINT_SECONDS = 1.0
"""Minimum seconds between two checkpoints within a large segment."""


class SegmentSender:
    """Sends segments to one sink.

    Args:
        context: The sink.
        connection: Its connection.
        progress: Its checkpoint.
        resumption: Knows the origin of the messages, for a sink that keeps its own position.
        stopped: Whether the deliverer was asked to stop.

    Attributes:
        deadline: The time limit of a batch, and how often the sink exceeded it.
    """

    def __init__(
        self,
        context: DeliveryContext,
        connection: SinkConnection,
        progress: SinkProgress,
        resumption: Resumption,
        stopped: Callable[[], bool],
    ) -> None:
        spec = context.spec.spec
        self.deadline = Deadline(context.sink_id, spec.sink_batch_deadline_secs)
        self._sink_id = context.sink_id
        self._lease = context.run.lease
        self._meter = context.meter
        self._connection = connection
        self._progress = progress
        self._resumption = resumption
        self._stopped = stopped
        self._dead_letters = DeadLetterWriter(context)
        self._batch_settings = BatchSettings(spec, context.run.journal)

    def send(self, encoded: EncodedSegments, row: SegmentRow) -> bool:
        """Send the rest of a segment, or of its encoded part; return False if asked to stop."""
        sink = self._connection.open(self._progress.checkpoint)
        if not row.rows:  # processors removed all of its rows
            self._progress.advance(row, -1, sink, complete=True)
            return True
        last = encoded.last_ordinal(row.segment)
        reached = self._progress.reached(row)
        while reached < last:
            try:
                if not self._send_after(reached, encoded, row, sink):
                    return False
                reached = last
            except (Undeliverable, QueueFull) as error:
                self._put_aside(row, error, sink)
                reached = error.ordinal
            self._progress.advance(row, reached, sink, complete=reached == row.rows - 1)
        return True

    def _put_aside(self, row: SegmentRow, error: Undeliverable | QueueFull, sink: Sink) -> None:
        """Set a change aside as a dead letter, so that the sink can continue.

        Everything before it was sent.
        """
        try:
            self._dead_letters.refuse(row, error)
        except (Undeliverable, QueueFull):
            if error.ordinal - 1 > self._progress.reached(row):
                self._progress.advance(row, error.ordinal - 1, sink, complete=False)
            raise
        except StoreUnavailable:
            self._meter.not_put_aside()
            raise

    def _send_after(
        self, ordinal: int, encoded: EncodedSegments, row: SegmentRow, sink: Sink
    ) -> bool:
        """Send the encoded rows of a segment after an ordinal; return False if asked to stop.

        Raises:
            Undeliverable: A message can never be delivered; everything before it was.
            QueueFull: A change has to wait for room; everything before it was delivered.
        """
        checkpoint = self._progress.checkpoint
        self._dead_letters.poll(checkpoint)
        origin = self._resumption.origin(row, checkpoint) if sink.exactly_once else None
        written_at = time.monotonic()
        since = 0
        batches = encoded.batches(
            self._sink_id, row.segment, ordinal, set_aside=self._dead_letters.enabled
        )
        passing = self._dead_letters.passing(row, batches)
        limits = self._batch_settings.limits(parts=sink.takes_parts)
        if limits is not None:
            passing = cut(passing, limits, lambda: self._batch_settings.transaction_ends(row))
        for messages in passing:
            if self._stopped():
                if since:
                    self._progress.advance(row, ordinal, sink, complete=False)
                return False
            batch = replace(messages, origin=origin)
            self._lease.guard()
            self._meter.sends()
            try:
                with self.deadline.over(sink):
                    ordinal = sink.send(batch, self._lease.guard)
            except Undeliverable as error:
                self._progress.arrived(batch, error.ordinal)
                raise
            except DeltaforgeError as error:
                self._keep_acknowledged(row, batch, error, sink)
                raise
            encoded.sent(self._sink_id)
            self._progress.arrived(batch, ordinal + 1)
            failpoint("sink-sent")
            since += batch.num_rows
            now = time.monotonic()
            if self._batch_settings.due(since) or now - written_at > CHECKPOINT_SECONDS:
                self._progress.advance(row, ordinal, sink, complete=False)
                written_at, since = now, 0
        return True

    def _keep_acknowledged(
        self, row: SegmentRow, batch: SinkBatch, error: DeltaforgeError, sink: Sink
    ) -> None:
        """Write a checkpoint after the part of a batch that was acknowledged before a failure.

        Without it, an endpoint that accepts fewer messages than a batch has would get the same ones
        again and again.
        """
        reached = error.acknowledged
        if reached is None or isinstance(error, LeaseLost):
            return
        self._progress.arrived(batch, reached + 1)
        if reached > self._progress.reached(row):
            self._progress.advance(row, reached, sink, complete=False)


class SinkConnection:
    """Opens and closes the sink of a deliverer.

    Args:
        context: The sink.
        build_sink: Makes the sink.
        resumption: Determines where the sink resumes after it was opened.

    Attributes:
        connected: Whether the sink is open and its own position was read.
        settled: Whether the checkpoint was compared with what the sink holds since it was opened.
    """

    def __init__(
        self, context: DeliveryContext, build_sink: Callable[[], Sink], resumption: Resumption
    ) -> None:
        self.connected = False
        self.settled = False
        self._lease = context.run.lease
        self._meter = context.meter
        self._build_sink = build_sink
        self._resumption = resumption
        self._sink: Sink | None = None

    @property
    def traffic(self) -> Traffic | None:
        """What the sink's client library has done, if it counts that."""
        return None if self._sink is None else traffic_of(self._sink)

    def open(self, checkpoint: CheckpointRow) -> Sink:
        """Return the open sink; if it was closed, open it and read the position that it keeps."""
        # One object for the whole run: a sink may remember its last connection, to end it.
        if self._sink is None:
            self._sink = self._build_sink()
        if not self.connected:
            # Opening may cut off another sender, which must not be the run that succeeds this one.
            self._lease.guard()
            self._sink.open()
            self._meter.opened()
            self._resumption.begin(self._sink, checkpoint)
            self.connected = True
        return self._sink

    def settle(self, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Open the sink; return the checkpoint to resume after.

        Return None while more must be captured first.
        """
        resumed = self._resumption.settle(self.open(checkpoint), checkpoint)
        self.settled = resumed is not None
        return resumed

    def close(self) -> None:
        """Close the sink; the next `open` connects again."""
        self.connected = self.settled = False
        self.interrupt()

    def interrupt(self) -> None:
        """Close the sink while another thread may be using it, which ends a send that hangs."""
        if self._sink is not None:
            self._sink.close()


class SinkProgress:
    """Counts acknowledged messages, and advances the checkpoint accordingly.

    Args:
        context: The sink.
        checkpoint: Its checkpoint when the deliverer begins.

    Attributes:
        checkpoint: What the sink has acknowledged, as last written to the store.
        moved_at: Monotonic time of the last acknowledgement.
        rows: Messages sent by this run.
    """

    def __init__(self, context: DeliveryContext, checkpoint: CheckpointRow) -> None:
        self.checkpoint = checkpoint
        self.moved_at = time.monotonic()
        self.rows = 0
        self._sink_id = context.sink_id
        self._lease = context.run.lease
        self._meter = context.meter
        self._sent: tuple[int, int] | None = None

    def reached(self, row: SegmentRow) -> int:
        """Return the last ordinal of a segment that the sink has; -1 if it has none of it."""
        return self.checkpoint.ordinal if self.checkpoint.segment == row.segment else -1

    def resume(self, checkpoint: CheckpointRow) -> None:
        """Continue after a checkpoint that was set when the sink was opened."""
        self.checkpoint = checkpoint
        self._sent = None

    def redriven(self, checkpoint: CheckpointRow, messages: int) -> None:
        """Count redelivered dead letters; continue after the checkpoint of that redelivery."""
        self.resume(checkpoint)
        self._meter.redriven(messages)
        self.rows += messages
        self.moved_at = time.monotonic()

    def arrived(self, batch: SinkBatch, stop: int) -> None:
        """Count the messages of a batch that have arrived: those before the ordinal `stop`."""
        cut = [
            part.slice(0, int(part.column("ordinal").to_numpy().searchsorted(stop)))
            for part in batch.parts
        ]
        arrived = [part for part in cut if part.num_rows]
        self._meter.sent(arrived)
        if arrived:
            # The sink's own position names the last message that has arrived.
            self._sent = batch.segment, cast("int", arrived[-1].column("ordinal")[-1].as_py())
            self.rows += sum(part.num_rows for part in arrived)
            self.moved_at = time.monotonic()

    def advance(self, row: SegmentRow, ordinal: int, sink: Sink, *, complete: bool) -> None:
        """Record that the sink is done with everything up to a row of a segment.

        Every change up to it was acknowledged, or has become a dead letter.
        """
        exactly_once = sink.exactly_once
        position = row.end_position if complete else None
        sent = (self._sent or self.checkpoint.sent) if exactly_once else None
        self._meter.did(traffic_of(sink))
        tally = self._meter.acknowledged(row, complete=complete)
        began, failures = time.monotonic(), 0

        def failed() -> None:
            nonlocal failures
            failures += 1

        self._lease.write(
            lambda writer: writer.checkpoints.advance(
                self._sink_id,
                row.segment,
                ordinal,
                complete=complete,
                source_position=position,
                exactly_once=exactly_once,
                sent=sent,
                tally=tally,
            ),
            failed=failed,
        )
        self._meter.committed(row, time.monotonic() - began, failures)
        self.checkpoint = replace(
            self.checkpoint,
            segment=row.segment,
            ordinal=ordinal,
            complete=complete,
            source_position=position or self.checkpoint.source_position,
            incarnation=self.checkpoint.incarnation if exactly_once else None,
            overrules=not exactly_once or sent == NOTHING,
            sent_segment=None if sent is None else sent[0],
            sent_ordinal=None if sent is None else sent[1],
        )
        failpoint("checkpoint-written")


class Deadline:
    """Limits how long one sink may take for a delivery batch; used by one thread.

    Args:
        sink_id: The sink.
        seconds: The limit (`sink_batch_deadline_secs`); None for none.

    Attributes:
        missed: How often the limit was exceeded.
    """

    def __init__(self, sink_id: str, seconds: float | None) -> None:
        self.missed = 0
        self._sink_id = sink_id
        self._seconds = seconds
        self._lock = threading.Lock()
        self._sending: object | None = None
        self._overdue = False

    @contextmanager
    def over(self, sink: Sink) -> Iterator[None]:
        """Close `sink` if the block takes too long.

        An error that the block then raises becomes `SinkOverdue`. If the block succeeds although
        the limit was exceeded, its result counts.

        Raises:
            SinkOverdue: The block failed, because it took too long.
        """
        if self._seconds is None:
            yield
            return
        token = object()
        self._sending, self._overdue = token, False
        timer = threading.Timer(self._seconds, self._close, (sink, token))
        timer.daemon = True
        timer.start()
        try:
            yield
        except LeaseLost:
            raise
        except DeltaforgeError as error:
            if not self._end(timer):
                raise
            self.missed += 1
            overdue = SinkOverdue(
                f"sink {self._sink_id}: took longer than {self._seconds:g} s for a batch "
                "(sink_batch_deadline_secs); it was closed, and gets the batch again"
            )
            overdue.acknowledged = error.acknowledged
            raise overdue from error
        finally:
            self._end(timer)

    def _end(self, timer: threading.Timer) -> bool:
        """Cancel the timer; return whether it has already closed the sink."""
        timer.cancel()
        with self._lock:
            self._sending = None
            return self._overdue

    def _close(self, sink: Sink, token: object) -> None:
        with self._lock:
            # The timer of an earlier batch must not close the sink during a later one.
            if self._sending is token:
                self._overdue = True
                sink.close()
