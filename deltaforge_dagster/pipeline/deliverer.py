"""Delivery: one thread per sink carries the journal to it, from that sink's checkpoint.

Deliverers know nothing of each other: a sink that was down catches up while its siblings stay at
the tail, and one that hangs slows nobody. A failure is recorded with the time of the next
attempt, so that the wait survives the run; then the same rows are sent again, in order. A sink
that keeps its own position is asked for it whenever it was opened, and may have to go on elsewhere
(`resume`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from deltaforge_dagster.config.model import DeliverLimits
from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    LeaseLost,
    Retryable,
    StoreUnavailable,
)
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.preparations import Preparations
from deltaforge_dagster.pipeline.prepare import Prepared
from deltaforge_dagster.pipeline.resumption import Resumption
from deltaforge_dagster.sinks.base import Sink, SinkBatch
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import StateStore

CHECKPOINT_SECONDS = 1.0
"""Within a large segment the checkpoint is written at most this often."""

JOINED_ROWS = 50_000
JOINED_BYTES = 32 << 20
"""Up to both, batches are joined for a sink that stores its position with each of them: a commit of
Kafka takes two round trips, 9 ms, in which nothing is sent."""


class _Waits(Retryable):
    """A sink cannot go on before capture has got further."""


class Deliverer:
    """The deliverer of one sink in one run.

    Attributes:
        sink_id: The sink.
        checkpoint: How far the sink has acknowledged; its place is as last written to the store.
        error: Why the last attempt failed, None once one succeeded.
        waiting: Idle at the journal's end.
        moved_at: Monotonic time of the last acknowledgement.
        rows: Messages sent by this run.
    """

    def __init__(
        self,
        *,
        sink_id: str,
        build_sink: Callable[[], Sink],
        store: StateStore,
        pipeline: str,
        lease: HeldLease,
        preparations: Preparations,
        resumption: Resumption,
        checkpoint: CheckpointRow,
        limits: DeliverLimits,
        until: int | None = None,
    ) -> None:
        self.sink_id = sink_id
        self.checkpoint = checkpoint
        self.error: DeltaforgeError | None = None
        self.waiting = False
        self.moved_at = time.monotonic()
        self.rows = 0
        self._build_sink = build_sink
        self._store = store
        self._pipeline = pipeline
        self._lease = lease
        self._preparations = preparations
        self._resumption = resumption
        self._limits = limits
        self._until = until
        self._sink: Sink | None = None
        self._connected = False
        self._settled = False
        self._stop = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"deliver {pipeline} {sink_id}", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def awaits_capture(self) -> bool:
        """Whether the sink can only go on once what it has already is captured again."""
        return isinstance(self.error, _Waits)

    def segment_added(self) -> None:
        """Wake the deliverer: the journal has grown."""
        self._news.set()

    def request_stop(self) -> None:
        """Ask the thread to end after the messages it is sending."""
        self._stop.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread; a sink that still hangs then is closed under it.

        The lease's guard keeps a thread that outlives this from sending anything more.
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
                    self._failed(defect, backoff)
        finally:
            self._close_sink()

    def _deliver_until_stopped(self, backoff: Backoff) -> None:
        while not self._stop.is_set():
            self._news.clear()
            segment = self._next_segment()
            if segment is None:
                self.waiting = True
                self._news.wait(1.0)
                continue
            self.waiting = False
            if not self._settled:
                self._settle()
                continue  # the checkpoint may be elsewhere now
            ordinal = self.checkpoint.ordinal + 1 if self._inside(segment) else 0
            with self._preparations.covering(self.sink_id, segment.segment, ordinal) as prepared:
                self._send_prepared(prepared, segment, backoff)

    def _next_segment(self) -> SegmentRow | None:
        number = self.checkpoint.whole_segment + 1
        if self._until is not None and number > self._until:
            return None
        return self._store.segment(self._pipeline, number)

    def _settle(self) -> None:
        """Open the sink and go on after what it really holds, once that is captured."""
        sink = self._open_sink()
        checkpoint = self._resumption.settle(sink, self.checkpoint)
        if checkpoint is not None:
            self.checkpoint = checkpoint
            self._settled = True
            if self.awaits_capture:
                self.error = None
        elif not self._news.wait(1.0):
            self.error = _Waits(
                f"sink {self.sink_id}: waits until what it has already is captured again"
            )

    def _send_prepared(self, prepared: Prepared, first: SegmentRow, backoff: Backoff) -> None:
        rows = self._store.segments(self._pipeline, first=first.segment, last=prepared.last_segment)
        for row in rows:
            if not self._send_segment(prepared, row):
                return
            backoff.reset()
            self.error = None

    def _send_segment(self, prepared: Prepared, row: SegmentRow) -> bool:
        """Send what is left of a segment, or of its prepared part; False when asked to stop."""
        first = ordinal = self.checkpoint.ordinal if self._inside(row) else -1
        sink = self._open_sink()
        origin = self._resumption.origin(row, self.checkpoint) if sink.exactly_once else None
        written_at = time.monotonic()
        batches = prepared.batches(self.sink_id, row.segment, ordinal)
        for messages in _joined(batches) if sink.exactly_once else batches:
            if self._stop.is_set():
                if ordinal != first:
                    self._advance(row, ordinal, complete=False)
                return False
            batch = replace(messages, origin=origin)
            self._lease.guard()
            ordinal = sink.send(batch, self._lease.guard)
            failpoint("sink-sent")
            self.rows += batch.messages.num_rows
            self.moved_at = time.monotonic()
            if self.moved_at - written_at > CHECKPOINT_SECONDS:
                self._advance(row, ordinal, complete=False)
                written_at = self.moved_at
        ordinal = prepared.last_ordinal(row.segment)
        self._advance(row, ordinal, complete=ordinal == row.rows - 1)
        return True

    def _inside(self, row: SegmentRow) -> bool:
        """Whether the sink has the beginning of this segment, which is not complete."""
        return self.checkpoint.segment == row.segment

    def _advance(self, row: SegmentRow, ordinal: int, *, complete: bool) -> None:
        assert self._sink is not None
        exactly_once = self._sink.exactly_once
        position = row.end_position if complete else None
        self._lease.write(
            lambda writer: writer.advance(
                self.sink_id,
                row.segment,
                ordinal,
                complete=complete,
                source_position=position,
                exactly_once=exactly_once,
            )
        )
        self.checkpoint = replace(
            self.checkpoint,
            segment=row.segment,
            ordinal=ordinal,
            complete=complete,
            lineage=self.checkpoint.lineage if exactly_once else None,
            overrules=not exactly_once,
        )
        failpoint("checkpoint-written")

    def _open_sink(self) -> Sink:
        # One object for the whole run: a sink may remember its last connection, to end it.
        if self._sink is None:
            self._sink = self._build_sink()
        if not self._connected:
            self._lease.guard()  # whoever opens may end the sender that was there before
            self._sink.open()
            self._resumption.begin(self._sink, self.checkpoint)
            self._connected = True
        return self._sink

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
        delay = backoff.next_delay()
        if not isinstance(error, Retryable):
            delay = self._limits.backoff_max_seconds  # nothing changes until a person acts
        with contextlib.suppress(LeaseLost, StoreUnavailable):  # the loop meets it again
            next_attempt_at = self._store.now() + delay
            self._lease.write(
                lambda writer: writer.sink_failed(self.sink_id, str(error), next_attempt_at)
            )
        self._stop.wait(delay)


def _joined(batches: Iterable[SinkBatch]) -> Iterator[SinkBatch]:
    """Yield batches of one segment in fewer, larger ones; an error comes after all before it."""
    waiting: list[SinkBatch] = []
    rows = size = 0
    try:
        for batch in batches:
            rows += batch.messages.num_rows
            size += batch.messages.nbytes
            if waiting and (rows > JOINED_ROWS or size > JOINED_BYTES):
                yield _one(waiting)
                waiting.clear()
                rows, size = batch.messages.num_rows, batch.messages.nbytes
            waiting.append(batch)
    except DeltaforgeError:
        if waiting:
            yield _one(waiting)
        raise
    if waiting:
        yield _one(waiting)


def _one(batches: Sequence[SinkBatch]) -> SinkBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches([one.messages for one in batches])
    (joined,) = table.combine_chunks().to_batches()
    return replace(batches[0], messages=joined)
