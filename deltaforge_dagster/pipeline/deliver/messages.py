"""The delivery of messages to one sink: decides which of its parts acts next.

=====================  ===========================================================================
`SinkConnection`       open the sink; close it after a failure
`Resumption`           ask a sink that keeps its own position for it whenever the sink was opened,
                       and determine where delivery resumes
`SegmentSender`        send a segment; a change that can never be delivered becomes a dead letter
`SinkProgress`         advance the checkpoint to what the sink has acknowledged
`Redriver`             deliver dead letters again on request, between two segments
=====================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Callable

from deltaforge_dagster.errors import DeltaforgeError, StoreUnavailable
from deltaforge_dagster.pipeline.deliver.redrive import Redriver
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.deliver.sender import SegmentSender, SinkConnection, SinkProgress
from deltaforge_dagster.pipeline.delivery import AwaitsCapture, DeliveryContext, DeliveryThread
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow


class MessageDelivery:
    """Sends the messages of the journal to one sink; implements `delivery.Delivery`.

    Args:
        context: The sink.
        checkpoint: Where delivery continues.
        thread: The thread that runs it.
        build_sink: Makes the sink.
        encoder: Makes the messages of dead letters.
        encode_cache: Lends the messages of segments.
        until: Nothing after this segment is delivered.
    """

    prompt = True

    def __init__(
        self,
        context: DeliveryContext,
        checkpoint: CheckpointRow,
        thread: DeliveryThread,
        *,
        build_sink: Callable[[], Sink],
        encoder: Encoder,
        encode_cache: EncodeCache,
        until: int | None = None,
    ) -> None:
        self.redriving = True
        self.progress = SinkProgress(context, checkpoint)
        self.begins_at = checkpoint.next_attempt_at
        self._resumption = Resumption(context)
        self._connection = SinkConnection(context, build_sink, self._resumption)
        self._sender = SegmentSender(
            context, self._connection, self.progress, self._resumption, thread.stop.is_set
        )
        self._redrive = Redriver(context, encoder, self._resumption)
        self._context = context
        self._thread = thread
        self._encode_cache = encode_cache
        self._until = until
        self._segment: SegmentRow | None = None

    @property
    def timeouts(self) -> int:
        """How often the sink missed its deadline."""
        return self._sender.deadline.missed

    def prepare(self) -> None:
        """Open the sink while the source is being read; if that fails, close it again."""
        try:
            self._connection.open(self.progress.checkpoint)
        except DeltaforgeError:
            self._connection.close()

    def due(self) -> bool:
        """Return whether there is a segment, or a dead letter to deliver again."""
        self._segment = self._next_segment()
        self.redriving = self._redrive.due(self.progress.checkpoint)
        return self._segment is not None or self.redriving

    def deliver(self) -> None:
        """Determine where the sink resumes, or deliver dead letters or segments.

        The segments are those that are encoded together.
        """
        segment = self._segment
        if not self._connection.settled:
            self._settle()
            return  # settling may have moved the checkpoint
        if self.redriving or segment is None:
            self._deliver_dead_letters()
            return
        ordinal = self.progress.reached(segment) + 1
        sink_id = self._context.sink_id
        with self._encode_cache.covering(sink_id, segment.segment, ordinal) as encoded:
            self._send_encoded(encoded, segment)

    def failed(self, error: DeltaforgeError) -> None:
        """Close the sink; if only the store failed, it stays connected."""
        if isinstance(error, StoreUnavailable):
            if not self._connection.connected:
                self._connection.close()  # it may be open already, but its position was not read
            return
        self._connection.close()
        self._context.meter.did(self._connection.traffic)

    def stuck(self, captured: str | None) -> bool:
        """Return whether the sink fails.

        If it awaits capture, this is so only once everything up to `captured` was searched.
        """
        error = self._thread.attempts.error
        if isinstance(error, AwaitsCapture):
            return self._resumption.looked_up_to == captured
        return error is not None

    def wind_up(self) -> bool:
        """Return True: no delivery batch takes long."""
        return True

    def interrupt(self) -> None:
        """Close the sink, which ends a send that hangs."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the sink."""
        self._connection.close()

    def _next_segment(self) -> SegmentRow | None:
        number = self.progress.checkpoint.whole_segment + 1
        if self._until is not None and number > self._until:
            return None
        return self._context.segments.segment(number)

    def _settle(self) -> None:
        """Open the sink and set the checkpoint to what the sink really has.

        The checkpoint is set once that is in the journal.
        """
        attempts = self._thread.attempts
        checkpoint = self._connection.settle(self.progress.checkpoint)
        if checkpoint is not None:
            self.progress.resume(checkpoint)
            if isinstance(attempts.error, AwaitsCapture):
                attempts.error = None
        elif not self._thread.news.wait(1.0):
            attempts.error = AwaitsCapture(self._context.sink_id)

    def _deliver_dead_letters(self) -> None:
        checkpoint = self.progress.checkpoint
        sink = self._connection.open(checkpoint)
        self.progress.redriven(*self._redrive.deliver(sink, checkpoint))
        if tally := self._context.meter.drain():  # counts that belong to no checkpoint
            self._context.run.lease.write(lambda writer: writer.metrics.count(tally))
        self._thread.attempts.succeeded()

    def _send_encoded(self, encoded: EncodedSegments, first: SegmentRow) -> None:
        rows = self._context.segments.segments(first=first.segment, last=encoded.last_segment)
        for row in rows:
            if not self._sender.send(encoded, row):
                return
            self._thread.attempts.succeeded()
