"""Delivery: one thread per sink sends the journal to it, starting at the sink's checkpoint.

Deliverers are independent: a sink that was down catches up while the others stay at the end of the journal,
and a sink that hangs slows no other. A failure is recorded with the time of the next attempt, so that the
wait survives the run; then the same rows are sent again, in order. A sink that keeps its own position is
asked for it each time it is opened, and delivery may have to resume there (`resume`). A change that can never
be delivered is set aside as a dead letter (`dead_letters`), and is delivered again between two segments on
request (`redrive`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from deltaforge_dagster.config.engine.engine import DeliverLimits
from deltaforge_dagster.config.logs import bound, in_context
from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    LeaseLost,
    Retryable,
    StoreUnavailable,
    Undeliverable,
)
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.deliver.batches import BatchSettings, cut
from deltaforge_dagster.pipeline.deliver.dead_letters import DeadLetterWriter, QueueFull
from deltaforge_dagster.pipeline.deliver.deadline import Deadline
from deltaforge_dagster.pipeline.deliver.redrive import Redriver
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.meters import SinkMeter
from deltaforge_dagster.pipeline.pending_segments import PendingSegments
from deltaforge_dagster.sinks.base import Sink, SinkBatch, traffic_of
from deltaforge_dagster.state.checkpoints import NOTHING
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 1.0
"""Minimum seconds between two checkpoints within a large segment."""


class _Waits(Retryable):
    """A sink cannot continue before more was captured."""


class Deliverer:
    """The deliverer of one sink in one run.

    Attributes:
        sink_id: The sink.
        checkpoint: What the sink has acknowledged, as last written to the store.
        error: Why the last attempt failed, None after a success.
        waiting: Whether it is idle at the end of the journal.
        redriving: Whether dead letters are, or may be, due for redelivery.
        moved_at: Monotonic time of the last acknowledgement.
        rows: Messages sent by this run.
        deadline: The time limit of a batch, and how often the sink exceeded it.
    """

    def __init__(
        self,
        *,
        sink_id: str,
        build_sink: Callable[[], Sink],
        store: StateStore,
        pipeline: str,
        journal: PendingSegments,
        lease: HeldLease,
        encode_cache: EncodeCache,
        resumption: Resumption,
        dead_letters: DeadLetterWriter,
        redrive: Redriver,
        batch_settings: BatchSettings,
        deadline: Deadline,
        meter: SinkMeter,
        checkpoint: CheckpointRow,
        limits: DeliverLimits,
        until: int | None = None,
    ) -> None:
        self.sink_id = sink_id
        self.checkpoint = checkpoint
        self.error: DeltaforgeError | None = None
        self.waiting = False
        self.redriving = True
        self.moved_at = time.monotonic()
        self.rows = 0
        self._build_sink = build_sink
        self._store = store
        self._pipeline = pipeline
        self._journal = journal
        self._lease = lease
        self._encode_cache = encode_cache
        self._resumption = resumption
        self._dead_letters = dead_letters
        self._redrive = redrive
        self._batch_settings = batch_settings
        self.deadline = deadline
        self._meter = meter
        self._limits = limits
        self._until = until
        self._sink: Sink | None = None
        self._connected = False
        self._settled = False
        self._failures = checkpoint.failures
        self._sent: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(
            target=in_context(self._run), name=f"deliver {pipeline} {sink_id}", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def latencies(self) -> dict[str, float]:
        """Recent delivery latencies (`meters`)."""
        return self._meter.latencies

    @property
    def awaits_capture(self) -> bool:
        """Whether the sink can continue only after changes that it already has were captured again."""
        return isinstance(self.error, _Waits)

    def stuck(self, captured: str | None) -> bool:
        """Whether it fails; if it awaits capture, only once it has checked everything that was captured."""
        if self.awaits_capture:
            return self._resumption.looked_up_to == captured
        return self.error is not None

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
            sink = self._sink
            if sink is not None:
                sink.close()
            self._thread.join(2)

    def _run(self) -> None:
        backoff = Backoff(
            self._limits.backoff_initial_seconds,
            self._limits.backoff_max_seconds,
            self.checkpoint.failures,
        )
        self._stop.wait(max(0.0, self.checkpoint.next_attempt_at - self._store.now()))
        with bound(sink_id=self.sink_id):
            self._deliver(backoff)

    def _deliver(self, backoff: Backoff) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._deliver_until_stopped(backoff)
                except LeaseLost:
                    return
                except StoreUnavailable:  # not the sink's failure: it stays connected
                    if not self._connected:
                        self._close_sink()  # opened, but not asked what it holds
                    self._stop.wait(1.0)
                except DeltaforgeError as error:
                    self._failed(error, backoff)
                except Exception as error:  # noqa: BLE001 - a defect must show as this sink's failure
                    defect = DeltaforgeError(f"sink {self.sink_id}: delivery broke: {error!r}")
                    defect.__cause__ = error
                    self._meter.panicked()
                    self._failed(defect, backoff)
        finally:
            self._close_sink()
            with contextlib.suppress(DeltaforgeError):  # whatever it is, nothing more is sent
                self._count()

    def _deliver_until_stopped(self, backoff: Backoff) -> None:
        while not self._stop.is_set():
            self._news.clear()
            segment = self._next_segment()
            self.redriving = self._redrive.due(self.checkpoint)
            if segment is None and not self.redriving:
                self.waiting = True
                self._news.wait(1.0)
                continue
            self.waiting = False
            if not self._settled:
                self._settle()
                continue  # the checkpoint may be elsewhere now
            if self.redriving or segment is None:
                self._deliver_dead_letters(backoff)
                continue
            ordinal = self.checkpoint.ordinal + 1 if self._inside(segment) else 0
            with self._encode_cache.covering(self.sink_id, segment.segment, ordinal) as encoded:
                self._send_encoded(encoded, segment, backoff)

    def _next_segment(self) -> SegmentRow | None:
        number = self.checkpoint.whole_segment + 1
        if self._until is not None and number > self._until:
            return None
        return self._journal.segment(number)

    def _settle(self) -> None:
        """Open the sink and resume after what it really has, once that was captured."""
        sink = self._open_sink()
        checkpoint = self._resumption.settle(sink, self.checkpoint)
        if checkpoint is not None:
            self.checkpoint = checkpoint
            self._sent = None
            self._settled = True
            if self.awaits_capture:
                self.error = None
        elif not self._news.wait(1.0):
            self.error = _Waits(
                f"sink {self.sink_id}: waits until what it has already is captured again"
            )

    def _deliver_dead_letters(self, backoff: Backoff) -> None:
        self.checkpoint, messages = self._redrive.deliver(self._open_sink(), self.checkpoint)
        self._sent = None
        self.rows += messages
        self._meter.redriven(messages)
        self._count()
        self.moved_at = time.monotonic()
        backoff.reset()
        self.error = None

    def _send_encoded(self, encoded: EncodedSegments, first: SegmentRow, backoff: Backoff) -> None:
        rows = self._journal.segments(first=first.segment, last=encoded.last_segment)
        for row in rows:
            if not self._send_segment(encoded, row):
                return
            backoff.reset()
            self.error = None
            self._failures = 0

    def _send_segment(self, encoded: EncodedSegments, row: SegmentRow) -> bool:
        """Send the rest of a segment, or of its encoded part; return False if asked to stop."""
        if not row.rows:  # processors left nothing of it
            self._advance(row, -1, complete=True)
            return True
        last = encoded.last_ordinal(row.segment)
        reached = self.checkpoint.ordinal if self._inside(row) else -1
        while reached < last:
            try:
                if not self._send_after(reached, encoded, row):
                    return False
                reached = last
            except (Undeliverable, QueueFull) as error:
                self._put_aside(row, error)
                reached = error.ordinal
            self._advance(row, reached, complete=reached == row.rows - 1)
        return True

    def _put_aside(self, row: SegmentRow, error: Undeliverable | QueueFull) -> None:
        """Set a change aside as a dead letter, so that the sink continues after it; everything before it was sent."""
        try:
            self._dead_letters.refuse(row, error)
        except (Undeliverable, QueueFull):
            if error.ordinal - 1 > (self.checkpoint.ordinal if self._inside(row) else -1):
                self._advance(row, error.ordinal - 1, complete=False)
            raise
        except StoreUnavailable:
            self._meter.not_put_aside()
            raise

    def _send_after(self, ordinal: int, encoded: EncodedSegments, row: SegmentRow) -> bool:
        """Send the encoded rows of a segment after an ordinal; return False if asked to stop.

        Raises:
            Undeliverable: A message can never be delivered; everything before it was.
            QueueFull: A change has to wait for room; everything before it was delivered.
        """
        sink = self._open_sink()
        self._dead_letters.poll(self.checkpoint)
        origin = self._resumption.origin(row, self.checkpoint) if sink.exactly_once else None
        written_at = time.monotonic()
        since = 0
        batches = encoded.batches(
            self.sink_id, row.segment, ordinal, set_aside=self._dead_letters.enabled
        )
        passing = self._dead_letters.passing(row, batches)
        limits = self._batch_settings.limits(commits=sink.commits)
        if limits is not None:
            passing = cut(passing, limits, lambda: self._batch_settings.transaction_ends(row))
        for messages in passing:
            if self._stop.is_set():
                if since:
                    self._advance(row, ordinal, complete=False)
                return False
            batch = replace(messages, origin=origin)
            self._lease.guard()
            self._meter.sends()
            try:
                with self.deadline.over(sink):
                    ordinal = sink.send(batch, self._lease.guard)
            except Undeliverable as error:
                self._note_sent(batch, error.ordinal)
                raise
            self._note_sent(batch, ordinal + 1)
            failpoint("sink-sent")
            since += batch.messages.num_rows
            self.rows += batch.messages.num_rows
            self.moved_at = time.monotonic()
            if self._batch_settings.due(since) or self.moved_at - written_at > CHECKPOINT_SECONDS:
                self._advance(row, ordinal, complete=False)
                written_at, since = self.moved_at, 0
        return True

    def _note_sent(self, batch: SinkBatch, stop: int) -> None:
        """Count what has arrived: a batch up to an ordinal, which the sink's own position names."""
        ordinals = batch.messages.column("ordinal").to_numpy()
        count = int(ordinals.searchsorted(stop))
        self._meter.sent(batch.messages.slice(0, count))
        if count:
            self._sent = batch.segment, int(ordinals[count - 1])

    def _inside(self, row: SegmentRow) -> bool:
        """Whether the sink has the first part of this segment, but not all of it."""
        return self.checkpoint.segment == row.segment

    def _advance(self, row: SegmentRow, ordinal: int, *, complete: bool) -> None:
        assert self._sink is not None
        exactly_once = self._sink.exactly_once
        position = row.end_position if complete else None
        sent = (self._sent or self.checkpoint.sent) if exactly_once else None
        self._meter.did(traffic_of(self._sink))
        tally = self._meter.acknowledged(row, complete=complete)
        began, failures = time.monotonic(), 0

        def failed() -> None:
            nonlocal failures
            failures += 1

        self._lease.write(
            lambda writer: writer.checkpoints.advance(
                self.sink_id,
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
            lineage=self.checkpoint.lineage if exactly_once else None,
            overrules=not exactly_once or sent == NOTHING,
            sent_segment=None if sent is None else sent[0],
            sent_ordinal=None if sent is None else sent[1],
        )
        failpoint("checkpoint-written")

    def _open_sink(self) -> Sink:
        # One object for the whole run: a sink may remember its last connection, to end it.
        if self._sink is None:
            self._sink = self._build_sink()
        if not self._connected:
            self._lease.guard()  # whoever opens may end the sender that was there before
            self._sink.open()
            self._meter.opened()
            self._resumption.begin(self._sink, self.checkpoint)
            self._connected = True
        return self._sink

    def _count(self) -> None:
        """Write counts that belong to no checkpoint."""
        if tally := self._meter.drain():
            self._lease.write(lambda writer: writer.metrics.count(tally))

    def _close_sink(self) -> None:
        self._connected = self._settled = False
        if self._sink is not None:
            self._sink.close()

    def _failed(self, error: DeltaforgeError, backoff: Backoff) -> None:
        self._close_sink()
        if self._stop.is_set():
            return  # closing the sink under the thread is how a hanging send is ended
        if isinstance(error, JournalDamaged):
            error = JournalDamaged(
                f"{error}; bring the file back, or have the changes captured again: deltaforge "
                f"journal rebuild {self._pipeline}"
            )
        self.error = error
        if self._sink is not None:
            self._meter.did(traffic_of(self._sink))
        self._meter.failed(error)
        delay = backoff.next_delay()
        if not isinstance(error, Retryable):
            delay = self._limits.backoff_max_seconds  # nothing changes until a person acts
        self._failures += 1
        stands = self.checkpoint
        logger.warning(
            "the sink failed",
            exc_info=error.__cause__ if type(error) is DeltaforgeError else None,
            extra={
                "fields": {
                    "reason": str(error),
                    "kind": error.kind,
                    "attempt": self._failures,
                    "sleep_seconds": round(delay, 1),
                    "batch_id": stands.whole_segment + 1,
                }
            },
        )
        with contextlib.suppress(LeaseLost, StoreUnavailable):  # the loop meets it again
            next_attempt_at = self._store.now() + delay
            tally = self._meter.drain()
            self._lease.write(
                lambda writer: writer.checkpoints.failed(
                    self.sink_id, str(error), next_attempt_at, tally
                )
            )
        self._stop.wait(delay)
