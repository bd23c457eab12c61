"""The thread of one sink: runs the delivery while something is due, and retries it after failures.

Deliverers are independent: a sink that was down catches up while the others stay at the end of the
journal, and a sink that hangs slows no other. What is delivered, messages (`messages`) or tables
(`lake.delivery`), is a `delivery.Delivery`; `retries` records failures and says how long to wait
after one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from deltaforge_dagster.config.logs import bound, in_context
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, StoreUnavailable
from deltaforge_dagster.pipeline.deliver.deliverer import Retries
from deltaforge_dagster.pipeline.delivery import (
    AwaitsCapture,
    Delivery,
    DeliveryContext,
    DeliveryThread,
)
from deltaforge_dagster.state.records import CheckpointRow


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
