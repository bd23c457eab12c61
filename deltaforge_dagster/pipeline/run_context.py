"""The context of a run: what it gets from its caller, Spark sessions, and the lease that it holds.

The lease is renewed by a thread, and checked before anything is sent or written. Two checks make a
stalled holder harmless. The store refuses writes with an older epoch or an expired lease
(`StateStore.fenced`). And `guard` compares the monotonic clock of the process with a local
deadline. That deadline is computed from a time *before* the renewal was requested, so it is never
later than the store's: a process that was stopped for longer than the lease detects the loss before
it sends anything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.errors import LeaseLost, StoreUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.records import Lease, SegmentRow
from deltaforge_dagster.state.store import FencedWriter, StateStore

if TYPE_CHECKING:  # code servers load this module, but not PySpark
    from pyspark.errors import PySparkException

    from deltaforge_dagster.pipeline.spark_client import SparkSession


T = TypeVar("T")

_STORE_RETRY_SECONDS = 0.5


class SessionProvider(Protocol):
    """Provides the Spark session of a run."""

    @property
    def elsewhere(self) -> bool:
        """Whether the server is not our own, so that it may lack what the run needs."""
        ...

    def session(self) -> SparkSession:
        """Return the session, making one if there is none.

        Raises:
            SparkUnavailable: No server answers.
        """
        ...

    def lost(self, error: BaseException) -> bool:
        """Return whether `error` means that the session is gone.

        `session` then creates a new one.
        """
        ...


class RunSessions(SessionProvider, Protocol):
    """Provides the Spark session of a run, which is continued by the next run."""

    def close(self) -> None:
        """Cancel all calls to the server, also those of other threads, and refuse further ones.

        gRPC's threads do not survive the end of the interpreter, which would wait forever for a
        call that is still open then.
        """
        ...


class Observer(Protocol):
    """Receives the events of a run; called from the run's threads, must not block for long."""

    def range_opened(self, number: int) -> None:
        """Handle that a range was opened: its first segment is durable."""
        ...

    def publish(self) -> None:
        """Publish what is due (`closed_ranges.pending`), if anything is."""
        ...

    def warn(self, message: str) -> None:
        """Show users a message that is not an error of the run."""
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run works with besides its pipeline.

    Attributes:
        store: The state store.
        journal: The journal.
        sessions: Makes the Spark sessions of a run from the session id stored with the lease
            (None at first) and a function that stores a new one.
        replay_sessions: Lends a separate Spark session to a replay or a preview, and ends it.
        build_source: Makes a reader of the pipeline's source.
        build_sink: Makes the sink of the given id.
    """

    store: StateStore
    journal: Journal
    sessions: Callable[[str | None, Callable[[str], None]], RunSessions]
    replay_sessions: Callable[[], AbstractContextManager[SessionProvider]]
    build_source: Callable[[], Source]
    build_sink: Callable[[str], Sink]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What one run is asked to do.

    Attributes:
        run_id: Identifies the holder of the lease.
        observer: Receives the events of the run.
        until_caught_up: End as soon as everything that the source had when the run began is
            captured and delivered (or its sinks are failing), instead of waiting for more.
        awaits: Returns whether other work, such as reading a snapshot, will still produce changes
            for this run. Until then the run does not end by itself, unless capture fails.
        code: Which code has started the run (`PipelineRepository.code`); the run ends once other
            code ticks. None for a run of a command, which no tick has started.
    """

    run_id: str
    observer: Observer
    until_caught_up: bool = False
    awaits: Callable[[], bool] = lambda: False
    code: str | None = None


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """What the threads of a run share from the moment it holds the lease until it ends.

    Attributes:
        store: The state store.
        journal: The journal.
        lease: The lease, which names the pipeline. Every write of the run is fenced by it.
        warn: Shows people a message that is no error of the run.
    """

    store: StateStore
    journal: Journal
    lease: ActiveLease
    warn: Callable[[str], None]


class ActiveLease:
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
    ) -> ActiveLease | None:
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


def spark_condition(error: PySparkException) -> str:
    """Return a short name of an error: Spark's error condition, or the gRPC status code.

    The text of an error may quote a value of a row, so it is not used.
    """
    from deltaforge_dagster.pipeline.spark_client import (  # noqa: PLC0415 - see above
        SparkConnectGrpcException,
    )

    if condition := error.getCondition():
        return condition
    if isinstance(error, SparkConnectGrpcException):
        return str(error.getGrpcStatusCode().name)
    return type(error).__name__


def first_together(rows: Sequence[SegmentRow], most: int, max_bytes: int) -> Sequence[SegmentRow]:
    """Return the leading segments that one job covers.

    Args:
        rows: Segments in order.
        most: Maximum number of segments.
        max_bytes: Maximum bytes of their files; the first segment may exceed it.
    """
    total = 0
    for count, row in enumerate(rows[:most]):
        total += row.bytes
        if count and total > max_bytes:
            return rows[:count]
    return rows[:most]
