"""Sends the encoded messages of a segment to the sink in delivery batches.

The checkpoint follows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from deltaforge_dagster.errors import (
    DeltaforgeError,
    LeaseLost,
    StoreUnavailable,
    Undeliverable,
)
from deltaforge_dagster.pipeline.deliver.batches import BatchSettings, cut
from deltaforge_dagster.pipeline.deliver.dead_letters import DeadLetterWriter, QueueFull
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.deliver.sender import Deadline, SinkConnection, SinkProgress
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.sinks.base import Sink, SinkBatch
from deltaforge_dagster.state.records import SegmentRow

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
