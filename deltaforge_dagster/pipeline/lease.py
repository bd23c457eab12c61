"""The lease of a run: renewed by a thread, and checked before anything is sent or written.

Two checks make a stalled holder harmless. The store refuses writes with an older epoch or an
expired lease (`StateStore.fenced`). And `guard` compares the monotonic clock of the process with a
local deadline. That deadline is computed from a time *before* the renewal was requested, so it is
never later than the store's: a process that was stopped for longer than the lease detects the loss
before it sends anything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.errors import LeaseLost, StoreUnavailable
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import FencedWriter, StateStore

T = TypeVar("T")

_STORE_RETRY_SECONDS = 0.5


class HeldLease:
    """The lease of one pipeline while a run holds it.

    `lost` is set once the lease is gone; every later `guard` and `write` raises `LeaseLost`.
    """

    def __init__(
        self,
        store: StateStore,
        lease: Lease,
        taken_at: float,
        *,
        seconds: float,
        renew_seconds: float,
        on_renewal: Callable[[], None],
    ) -> None:
        self.epoch = lease.epoch
        self.run_id = lease.run_id
        self.lost = threading.Event()
        self._store = store
        self._lease = lease
        self._seconds = seconds
        self._renew_seconds = renew_seconds
        self._on_renewal = on_renewal
        self._deadline = taken_at + seconds
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=in_context(self._renew_until_released),
            name=f"lease {lease.pipeline}",
            daemon=True,
        )
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        store: StateStore,
        pipeline: str,
        run_id: str,
        *,
        seconds: float,
        renew_seconds: float,
        on_renewal: Callable[[], None],
    ) -> HeldLease | None:
        """Take the lease of `pipeline`, or return None while another run holds it.

        `on_renewal` is called from the renewing thread after each renewal.
        """
        taken_at = time.monotonic()
        lease = store.leases.acquire(pipeline, run_id, seconds)
        if lease is None:
            return None
        return cls(
            store,
            lease,
            taken_at,
            seconds=seconds,
            renew_seconds=renew_seconds,
            on_renewal=on_renewal,
        )

    @property
    def pipeline(self) -> str:
        """Name of the pipeline."""
        return self._lease.pipeline

    def guard(self) -> None:
        """Raise `LeaseLost` unless this run certainly holds the lease now."""
        if self.lost.is_set() or time.monotonic() >= self._deadline:
            self.lost.set()
            raise LeaseLost(
                f"{self._lease.pipeline}: the lease of epoch {self.epoch} is gone; "
                "this run stops, the next one goes on"
            )

    def write(
        self, block: Callable[[FencedWriter], T], *, failed: Callable[[], None] = lambda: None
    ) -> T:
        """Run `block` in one fenced transaction and return its result.

        While the store cannot be reached, the block is run again, in a new transaction, until the
        lease's deadline, so that a short outage of the store does not cost a segment or checkpoint.
        `failed` is called after each attempt that failed.

        Raises:
            LeaseLost: The lease is gone; nothing was written.
        """
        while True:
            self.guard()
            try:
                with self._store.fenced(self._lease) as writer:
                    return block(writer)
            except StoreUnavailable:
                failed()
                time.sleep(_STORE_RETRY_SECONDS)
            except LeaseLost:
                self.lost.set()
                raise

    def release(self) -> None:
        """Stop renewing and release the lease, so that the next run need not wait."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(LeaseLost):
            self.write(lambda writer: writer.lease.release())

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._renew_seconds):
            asked_at = time.monotonic()
            try:
                self.write(lambda writer: writer.lease.renew(self._seconds))
                self._deadline = asked_at + self._seconds
                self._on_renewal()
            except LeaseLost:
                return
