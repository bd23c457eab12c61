"""The thread of one sink: runs the delivery while something is due, and retries it after failures.

Deliverers are independent: a sink that was down catches up while the others stay at the end of the
journal, and a sink that hangs slows no other. What is delivered, messages (`messages`) or tables
(`tables.delivery`), is a `delivery.Delivery`.

`Retries` records the failures of a sink, and says how long to wait before the next attempt. The
time of that attempt is in the store, so that the wait survives the run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from deltaforge_dagster.config.logs import bound, in_context
from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    LeaseLost,
    Retryable,
    StoreUnavailable,
)
from deltaforge_dagster.pipeline.backoff import Backoff, RetryPatience
from deltaforge_dagster.pipeline.control.secret_changes import with_restart_hint
from deltaforge_dagster.pipeline.delivery import (
    AwaitsCapture,
    Delivery,
    DeliveryContext,
    DeliveryThread,
)
from deltaforge_dagster.state.records import CheckpointRow

logger = logging.getLogger(__name__)


class Deliverer:
    """The deliverer of one sink in one run.

    Args:
        context: The sink.
        checkpoint: Where delivery continues, and when, if the sink failed before.
        build: Makes the delivery that the thread runs.

    Attributes:
        sink_id: The sink.
        delivery: What it delivers.
        retries: Whether the sink fails, and why.
        waiting: Whether it has nothing to do.
    """

    def __init__(
        self,
        context: DeliveryContext,
        checkpoint: CheckpointRow,
        build: Callable[[DeliveryThread], Delivery],
    ) -> None:
        self.sink_id = context.sink_id
        self.waiting = False
        self._prepared = False
        self.retries = Retries(context, checkpoint.failures)
        self._shared = DeliveryThread(self.retries)
        self._stop, self._news = self._shared.stop, self._shared.news
        self.delivery = build(self._shared)
        self._context = context
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
        """Whether changes that the sink has must be captured again before it can continue."""
        return isinstance(self.retries.error, AwaitsCapture)

    def stuck(self, captured: str | None) -> bool:
        """Return whether the sink has failed and a run need not wait for it.

        The main thread calls this. See `Delivery.stuck`. A run waits for an attempt that is made
        soon.
        """
        error, moved_at = self.retries.error, self.delivery.progress.moved_at
        soon = not self.awaits_capture and self.retries.patience.lasts(moved_at)
        stuck = not soon and self.delivery.stuck(captured)
        return stuck and self.retries.error is error  # otherwise the thread has gone on meanwhile

    def segment_added(self) -> None:
        """Wake the deliverer: the journal has a new segment."""
        self._news.set()

    def request_stop(self) -> None:
        """Ask the thread to end after its current piece of work."""
        self._stop.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread; interrupt the delivery if it still hangs after that time.

        The guard of the lease keeps a thread that survives this from sending anything more.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.delivery.interrupt()
            self._thread.join(2)

    def _run(self) -> None:
        self._stop.wait(max(0.0, self.delivery.begins_at - self._context.run.store.now()))
        with bound(sink_id=self.sink_id):
            self._deliver()

    def _deliver(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._deliver_until_stopped()
                except LeaseLost:
                    return
                except StoreUnavailable as error:  # not the sink's failure
                    self.delivery.failed(error)
                    self._stop.wait(1.0)
                except DeltaforgeError as error:
                    self._failed(error)
                except Exception as error:  # noqa: BLE001 - a defect shows as this sink's failure
                    defect = DeltaforgeError(f"sink {self.sink_id}: delivery broke: {error!r}")
                    defect.__cause__ = error
                    self._context.meter.panicked()
                    self._failed(defect)
        finally:
            self.delivery.close()
            with contextlib.suppress(DeltaforgeError):  # only counts are lost: the thread ends
                if tally := self._context.meter.drain():
                    self._context.run.lease.write(lambda writer: writer.metrics.count(tally))

    def _deliver_until_stopped(self) -> None:
        while not self._stop.is_set():
            self._news.clear()
            if not self.delivery.due():
                self.waiting = True
                self._prepare()
                # What is due also depends on the time and on users' requests, which send no news.
                self._news.wait(1.0)
                continue
            self.waiting = False
            self.delivery.deliver()

    def _prepare(self) -> None:
        if not self._prepared:
            self._prepared = True
            self.delivery.prepare()

    def _failed(self, error: DeltaforgeError) -> None:
        if self._stop.is_set():
            return  # no failure of the sink: `join` interrupts a delivery that hangs
        self.delivery.failed(error)
        self._stop.wait(self.retries.failed(error, self.delivery.progress.checkpoint))


class Retries:
    """Determines when a failing sink is tried again.

    Args:
        context: The sink.
        failures: How often it has failed in a row before this run.

    Attributes:
        error: Why the last attempt failed, None after a success.
        patience: Whether a run waits for the next attempt.
    """

    def __init__(self, context: DeliveryContext, failures: int) -> None:
        self.error: DeltaforgeError | None = None
        limits = context.spec.spec.engine.deliver
        self._context = context
        self._longest = limits.backoff_max_seconds
        self._backoff = Backoff(limits.backoff_initial_seconds, self._longest, failures)
        self._failures = failures
        self.patience = RetryPatience(context.spec.spec.engine.run.idle_seconds)

    def succeeded(self) -> None:
        """Forget all earlier failures."""
        self._backoff.reset()
        self._failures = 0
        self.error = None
        self.patience.succeeded()

    def failed(self, error: DeltaforgeError, checkpoint: CheckpointRow) -> float:
        """Record a failure after a checkpoint; return the seconds to wait before trying again."""
        run, meter, sink_id = self._context.run, self._context.meter, self._context.sink_id
        if isinstance(error, JournalDamaged):
            error = self._with_way_out(error)
        meter.failed(error)
        delay = self._backoff.next_delay()
        if not isinstance(error, Retryable):
            delay = self._longest  # nothing changes until somebody fixes the cause
        elif error.retry_after is not None:
            delay = error.retry_after
        self.patience.failed(error, delay)
        self._failures += 1
        logger.warning(
            "the sink failed",
            exc_info=error.__cause__ if type(error) is DeltaforgeError else None,
            extra={
                "fields": {
                    "reason": str(error),
                    "kind": error.kind,
                    "attempt": self._failures,
                    "sleep_seconds": round(delay, 1),
                    "batch_id": checkpoint.whole_segment + 1,
                }
            },
        )
        with contextlib.suppress(LeaseLost, StoreUnavailable):  # the deliverer meets the same error
            next_attempt_at = run.store.now() + delay
            tally = meter.drain()
            text = with_restart_hint(run.store, run.lease.pipeline, error, sink_id)
            run.lease.write(
                lambda writer: writer.checkpoints.failed(
                    sink_id, text, next_attempt_at, tally, remedy=error.remedy
                )
            )
        # After it is recorded: a run ends, and releases its lease, when all that lag have failed.
        self.error = error
        return delay

    def _with_way_out(self, error: JournalDamaged) -> JournalDamaged:
        """Return the error with a remedy: rebuild the journal, or recover from existing rows."""
        run, pipeline = self._context.run, self._context.run.lease.pipeline
        try:
            lost = self._context.sink_id in run.store.journals.not_recapturable(pipeline)
        except StoreUnavailable:
            return error  # the next failure adds the remedy
        if lost:
            return JournalDamaged(
                f"{error}; the source was told that it may forget what this sink lacks, so only "
                "the journal had it: bring the file back, or let the sink have the rows that exist "
                "now",
                remedy=f"deltaforge recover {pipeline}",
            )
        return JournalDamaged(
            f"{error}; bring the file back, or have the changes captured again",
            remedy=f"deltaforge journal rebuild {pipeline}",
        )
