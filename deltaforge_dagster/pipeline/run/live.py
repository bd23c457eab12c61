"""A live run: one process that holds a pipeline's lease, and threads that capture and deliver.

::

    lease thread     renews the lease; checks the desired state and the pipeline file
    capture thread   log -> segments -> ranges
    deliverers       journal -> encoded messages -> sink, one thread per sink
    main thread      closes ranges that are due, confirms positions to the source, limits the size
                     of the journal, has closed ranges published, and decides when the run ends

The run does not depend on Dagster: it reports to an `Observer`, and returns a `RunOutcome`. It ends
when there is nothing more to do (`progress`), and within seconds on request, when the pipeline's
desired state, its file or the code that starts its runs changes, or when the lease is lost. It then
closes the open range, so that the next run starts a new one. Its end is shielded from further
signals, and its imports from any signal.

What the run does while it holds the lease is in `leased_work`, which is imported then.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.logs import bound
from deltaforge_dagster.errors import LeaseLost, StoreLost, StoreUnavailable
from deltaforge_dagster.pipeline.control.catalog import reread
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.interrupts import interrupted_afterwards, uninterrupted
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun, RunContext, RunOptions
from deltaforge_dagster.state.records import DesiredState, HoldRow

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.run.leased_work import LeasedWork
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltaforge_dagster.pipeline.health.health import HealthProblem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run.

    Attributes:
        reason: Why the run ended: `idle`, `caught up`, `max_seconds`, `asked`, `paused`, `stopped`,
            `pipeline file changed`, `pipeline file removed`, `code changed`, `hold released`,
            `journal full`, `lease lost`, `capture failed`, `interrupted`, or `held elsewhere`.
        captured: Number of changes that the run has put into the journal, rows of snapshots
            included.
        delivered: Number of messages sent, by sink.
        capture_error: Why capture failed or is failing, None if it works.
        sink_errors: The last error of each failing sink.
        behind: The number of missing segments of each sink that is behind.
        sink_timeouts: How often each sink exceeded its deadline for a batch; without the sinks that
            never did.
        pauses: How often capture was paused because the journal was full.
        paused: Why capture was paused at the end, None if it was not.
        detached: Sinks that get nothing until they are attached again.
        paused_sinks: Sinks that get nothing until they are resumed; the journal keeps everything
            for them.
        problems: What `deltaforge status` shows at the end of the run.
    """

    reason: str
    captured: int = 0
    segments: int = 0
    ranges: int = 0
    delivered: Mapping[str, int] = field(default_factory=dict)
    capture_error: str | None = None
    sink_errors: Mapping[str, str] = field(default_factory=dict)
    behind: Mapping[str, int] = field(default_factory=dict)
    sink_timeouts: Mapping[str, int] = field(default_factory=dict)
    pauses: int = 0
    paused: str | None = None
    detached: tuple[str, ...] = ()
    paused_sinks: tuple[str, ...] = ()
    problems: tuple[HealthProblem, ...] = ()

    @property
    def had_lease(self) -> bool:
        """Whether this run ever held the lease."""
        return self.reason != "held elsewhere"


class LiveRun:
    """One live run of a pipeline.

    Args:
        loaded: The pipeline file.
        context: Store, journal, Spark sessions, source and sinks.
        options: What the run is asked to do.
    """

    def __init__(self, loaded: LoadedPipeline, context: RunContext, options: RunOptions) -> None:
        self._loaded = loaded
        self._context = context
        self._store = context.store
        self._options = options
        self._observer = options.observer
        self._asked_to_end: str | None = None
        self._desired_state: DesiredState = "running"
        self._missing = False
        self._work: LeasedWork | None = None

    @property
    def interrupted(self) -> RunOutcome | None:
        """The result so far if Ctrl-C or SIGTERM ended the run; None otherwise."""
        return None if self._work is None else self._work.interrupted

    def request_end(self, reason: str = "asked") -> None:
        """Ask the run to close its range and end.

        Any thread or signal handler may call this.
        """
        self._asked_to_end = self._asked_to_end or reason

    def execute(self) -> RunOutcome:
        """Take the lease, then capture and deliver until the run ends.

        Raises:
            DeltaforgeError: The run could not start because of the source, the store or the
                journal.
        """
        tenant = self._loaded.spec.metadata.tenant
        with bound(pipeline=self._loaded.name, tenant=tenant, run=self._options.run_id):
            return self._execute()

    def _execute(self) -> RunOutcome:
        pipeline = register(self._store, self._loaded)
        self._desired_state = pipeline.desired_state
        run = self._loaded.spec.spec.engine.run
        lease = ActiveLease.acquire(
            self._store,
            self._loaded.name,
            self._options.run_id,
            seconds=run.lease_seconds,
            renew_seconds=run.renew_seconds,
            on_renewal=self._check_desired_state,
        )
        if lease is None:
            return RunOutcome("held elsewhere")
        logger.info("run begins", extra={"fields": {"epoch": lease.epoch}})
        try:
            outcome = self._begin_work(lease).execute(pipeline)
        except StoreLost:
            raise
        except LeaseLost:  # while the work began; afterwards, the outcome says more
            outcome = RunOutcome("lease lost")
        finally:
            with uninterrupted():
                lease.release()
        fields = {"reason": outcome.reason, "events": outcome.captured, "sent": outcome.delivered}
        logger.info("run ended", extra={"fields": fields})
        return outcome

    def _begin_work(self, lease: ActiveLease) -> LeasedWork:
        with interrupted_afterwards():
            # Takes seconds, so not before the lease.
            from deltaforge_dagster.pipeline.run import leased_work  # noqa: PLC0415 - slow

        run = LeasedRun(self._store, self._context.journal, lease, self._observer.warn)
        self._work = leased_work.LeasedWork(
            self._loaded, self._context, self._options, run, lambda: self._asked_to_end
        )
        return self._work

    def _check_desired_state(self) -> None:
        """After each renewal, request the end if the desired state, file or code has changed.

        The end is requested, too, if the pipeline file is gone.
        """
        with contextlib.suppress(StoreUnavailable):
            row = self._store.pipelines.get(self._loaded.name)
            if row is not None and row.desired_state != self._desired_state:
                self.request_end(row.desired_state)
            # Holds that were released before this run began to read are in the journal, or held
            # again.
            reading = self._work is not None and self._work.reading
            if reading and any(hold.state == "released" for hold in self._holds()):
                self.request_end("hold released")
            if self._options.code is not None and self._other_code_ticks():
                self.request_end("code changed")
            # A half-written or broken file is reported by its own failing check; this run
            # continues.
            current = reread(self._store, self._loaded)
            if isinstance(current, LoadedPipeline) and self._differs(current):
                self.request_end("pipeline file changed")
            # Some editors delete a file before they write it again.
            if current is None and self._missing:
                self.request_end("pipeline file removed")
            self._missing = current is None

    def _differs(self, current: LoadedPipeline) -> bool:
        """Return whether the file differs from that of this run, even if only in a secret."""
        before = self._loaded
        return current.hash != before.hash or current.spec.secrets() != before.spec.secrets()

    def _other_code_ticks(self) -> bool:
        return self._store.pipelines.code(self._loaded.name) not in (None, self._options.code)

    def _holds(self) -> list[HoldRow]:
        return self._store.holds.read(self._loaded.name)
