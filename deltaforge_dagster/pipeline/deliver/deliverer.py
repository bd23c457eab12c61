"""Delivery: one thread per sink sends the journal to it, starting at the sink's checkpoint.

Deliverers are independent: a sink that was down catches up while the others stay at the end of the journal,
and a sink that hangs slows no other. This module owns the thread, which does one of these at a time:

=====================  ==============================================================================
`connection`           open the sink; close it after a failure
`resumption`           ask a sink that keeps its own position for it whenever the sink was opened, and
                       determine where delivery resumes
`sender`               send a segment; a change that can never be delivered becomes a dead letter
`progress`             advance the checkpoint to what the sink has acknowledged
`redrive`              deliver dead letters again on request, between two segments
`retries`              record a failure and wait; then the same rows are sent again, in order
=====================  ==============================================================================
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from deltaforge_dagster.config.logs import bound, in_context
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, Retryable, StoreUnavailable
from deltaforge_dagster.pipeline.deliver.connection import SinkConnection
from deltaforge_dagster.pipeline.deliver.context import DeliveryContext
from deltaforge_dagster.pipeline.deliver.progress import SinkProgress
from deltaforge_dagster.pipeline.deliver.redrive import Redriver
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.deliver.retries import Retries
from deltaforge_dagster.pipeline.deliver.sender import SegmentSender
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow


class _Waits(Retryable):
    """A sink can continue only after more was captured."""


class Deliverer:
    """The deliverer of one sink in one run.

    Args:
        context: The sink.
        checkpoint: Where delivery continues, and when, if the sink failed before.
        build_sink: Makes the sink.
        encoder: Makes the messages of dead letters.
        encode_cache: Lends the messages of segments.
        until: Nothing after this segment is delivered.

    Attributes:
        sink_id: The sink.
        progress: What the sink has acknowledged.
        retries: Whether the sink fails, and why.
        sender: What sends segments, and counts missed deadlines.
        waiting: Whether it is idle at the end of the journal.
        redriving: Whether dead letters are, or may be, due for redelivery.
    """

    def __init__(
        self,
        context: DeliveryContext,
        checkpoint: CheckpointRow,
        *,
        build_sink: Callable[[], Sink],
        encoder: Encoder,
        encode_cache: EncodeCache,
        until: int | None = None,
    ) -> None:
        self._stop = threading.Event()
        self._news = threading.Event()
        self.sink_id = context.sink_id
        self.waiting = False
        self.redriving = True
        self.progress = SinkProgress(context, checkpoint)
        self.retries = Retries(context, checkpoint.failures)
        self._resumption = Resumption(context)
        self._connection = SinkConnection(context, build_sink, self._resumption)
        self.sender = SegmentSender(
            context, self._connection, self.progress, self._resumption, self._stop.is_set
        )
        self._redrive = Redriver(context, encoder, self._resumption)
        self._context = context
        self._encode_cache = encode_cache
        self._until = until
        self._thread = threading.Thread(
            target=in_context(self._run),
            name=f"deliver {context.run.lease.pipeline} {self.sink_id}",
            daemon=True,
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def latencies(self) -> dict[str, float]:
        """Recent delivery latencies (`meters`)."""
        return self._context.meter.latencies

    @property
    def awaits_capture(self) -> bool:
        """Whether the sink can continue only after changes that it already has were captured again."""
        return isinstance(self.retries.error, _Waits)

    def stuck(self, captured: str | None) -> bool:
        """Return whether the sink fails; if it awaits capture, only once it has searched everything up to `captured`."""
        if self.awaits_capture:
            return self._resumption.looked_up_to == captured
        return self.retries.error is not None

    def segment_added(self) -> None:
        """Wake the deliverer: the journal has a new segment."""
        self._news.set()

    def request_stop(self) -> None:
        """Ask the thread to end after the current batch."""
        self._stop.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread; close the sink if it still hangs after that time.

        The guard of the lease keeps a thread that survives this from sending anything more.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._connection.interrupt()
            self._thread.join(2)

    def _run(self) -> None:
        next_attempt_at = self.progress.checkpoint.next_attempt_at
        self._stop.wait(max(0.0, next_attempt_at - self._context.run.store.now()))
        with bound(sink_id=self.sink_id):
            self._deliver()

    def _deliver(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._deliver_until_stopped()
                except LeaseLost:
                    return
                except StoreUnavailable:  # not the sink's failure: it stays connected
                    if not self._connection.connected:
                        self._connection.close()  # opened, but not asked for its position
                    self._stop.wait(1.0)
                except DeltaforgeError as error:
                    self._failed(error)
                except Exception as error:  # noqa: BLE001 - a defect must show as this sink's failure
                    defect = DeltaforgeError(f"sink {self.sink_id}: delivery broke: {error!r}")
                    defect.__cause__ = error
                    self._context.meter.panicked()
                    self._failed(defect)
        finally:
            self._connection.close()
            with contextlib.suppress(DeltaforgeError):  # only counts are lost: the thread ends
                self._count()

    def _deliver_until_stopped(self) -> None:
        while not self._stop.is_set():
            self._news.clear()
            segment = self._next_segment()
            self.redriving = self._redrive.due(self.progress.checkpoint)
            if segment is None and not self.redriving:
                self.waiting = True
                self._news.wait(1.0)
                continue
            self.waiting = False
            if not self._connection.settled:
                self._settle()
                continue  # the checkpoint may be elsewhere now
            if self.redriving or segment is None:
                self._deliver_dead_letters()
                continue
            ordinal = self.progress.reached(segment) + 1
            with self._encode_cache.covering(self.sink_id, segment.segment, ordinal) as encoded:
                self._send_encoded(encoded, segment)

    def _next_segment(self) -> SegmentRow | None:
        number = self.progress.checkpoint.whole_segment + 1
        if self._until is not None and number > self._until:
            return None
        return self._context.segments.segment(number)

    def _settle(self) -> None:
        """Open the sink and set the checkpoint to what the sink really has, once that is in the journal."""
        checkpoint = self._connection.settle(self.progress.checkpoint)
        if checkpoint is not None:
            self.progress.resume(checkpoint)
            if self.awaits_capture:
                self.retries.error = None
        elif not self._news.wait(1.0):
            self.retries.error = _Waits(
                f"sink {self.sink_id}: waits until changes that it already has are captured again"
            )

    def _deliver_dead_letters(self) -> None:
        checkpoint = self.progress.checkpoint
        sink = self._connection.open(checkpoint)
        self.progress.redriven(*self._redrive.deliver(sink, checkpoint))
        self._count()
        self.retries.succeeded()

    def _send_encoded(self, encoded: EncodedSegments, first: SegmentRow) -> None:
        rows = self._context.segments.segments(first=first.segment, last=encoded.last_segment)
        for row in rows:
            if not self.sender.send(encoded, row):
                return
            self.retries.succeeded()

    def _count(self) -> None:
        """Write counts that belong to no checkpoint."""
        if tally := self._context.meter.drain():
            self._context.run.lease.write(lambda writer: writer.metrics.count(tally))

    def _failed(self, error: DeltaforgeError) -> None:
        self._connection.close()
        if self._stop.is_set():
            return  # closing the sink under the thread is how a hanging send is ended
        self._context.meter.did(self._connection.traffic)
        self._stop.wait(self.retries.failed(error, self.progress.checkpoint))
