"""The work of a live run while it holds the lease.

It is separate from the run (`live`), because what it imports (Arrow, Spark and the kernels) takes
longer to load than the lease takes to acquire.

Before a source is read, it checks that the journal belongs to this state store. A store that was
deleted, or replaced by another one, is empty: the pipeline would start from scratch, and changes in
the journal that sinks do not have yet would be skipped silently. The journal reveals this: it has
segments of the pipeline with another uid, and the store has never had any segment.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Literal

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, NotAllowed, StoreUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.capture.backlog import Backlog
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureOptions
from deltaforge_dagster.pipeline.capture.committer import Ranges
from deltaforge_dagster.pipeline.control.journal_space import BackPressure
from deltaforge_dagster.pipeline.control.work import ensure_start, next_probe
from deltaforge_dagster.pipeline.deliver.deliverer_set import DelivererSet
from deltaforge_dagster.pipeline.failover import Failover
from deltaforge_dagster.pipeline.health.health import health
from deltaforge_dagster.pipeline.health.recorded import (
    capture_failed,
    capture_works,
    failure_of,
    note_findings,
    source_answers,
    with_remedy,
)
from deltaforge_dagster.pipeline.health.source_watch import SourceWatch
from deltaforge_dagster.pipeline.health.undelivered import DeadLetterWatch
from deltaforge_dagster.pipeline.interrupts import uninterrupted
from deltaforge_dagster.pipeline.run.confirmer import Confirmer
from deltaforge_dagster.pipeline.run.kernels import prepare
from deltaforge_dagster.pipeline.run.live import RunOutcome
from deltaforge_dagster.pipeline.run.progress import RunEnd, RunSummary
from deltaforge_dagster.pipeline.run_context import LeasedRun, RunContext, RunOptions
from deltaforge_dagster.pipeline.schemas.live import WarmStart
from deltaforge_dagster.pipeline.schemas.views import approve_everything
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore

_BRIEF_SECONDS = 2.0
"""A connection that is restored within this time is not recorded as a failure."""


logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_PUBLISH_SECONDS = 1.0


class _AskedToEndError(Exception):
    """The run was asked to end before it had a start position."""


class LeasedWork:
    """Captures and delivers until the run ends.

    Attributes:
        interrupted: The result so far if Ctrl-C or SIGTERM ended the work; None otherwise.

    Args:
        loaded: The pipeline file.
        context: Store, journal, Spark sessions, source and sinks.
        options: What the run is asked to do.
        run: The lease, and what the threads of the run share.
        asked_to_end: Returns why the run was asked to end, None if it was not.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        context: RunContext,
        options: RunOptions,
        run: LeasedRun,
        asked_to_end: Callable[[], str | None],
    ) -> None:
        self._loaded = loaded
        self._engine = loaded.spec.spec.engine
        self._context = context
        self._store = context.store
        self._options = options
        self._observer = options.observer
        self._run = run
        self._asked_to_end = asked_to_end
        self.interrupted: RunOutcome | None = None
        self._deliverers: DelivererSet
        self._pressure: BackPressure
        self._capture: Capture | None = None
        self._warm_start: WarmStart | None = None
        self._source_watch: SourceWatch | None = None
        self._waited_for: str | None = None

    @property
    def reading(self) -> bool:
        """Whether the source's log is being read."""
        return self._capture is not None and self._capture.reading

    def execute(self, pipeline: PipelineRow) -> RunOutcome:
        """Capture and deliver until the run ends.

        Raises:
            DeltaforgeError: The work could not start because of the source, the store or the
                journal.
        """
        ranges = Ranges(
            self._store,
            self._run.lease,
            spec_hash=self._loaded.hash,
            limits=self._engine.range,
            opened=self._observer.range_opened,
        )
        ranges.close_left_open()
        self._observer.publish()
        try:
            prepare(self._loaded.spec, self._waits)
            pipeline, goal = self._start_position(pipeline)
        except _AskedToEndError as asked:
            return RunOutcome(str(asked))
        if self._waited_for is not None:
            note_findings(self._store, self._loaded.name, [])
        self._deliverers = DelivererSet(
            self._loaded.spec, self._context, self._run, at_once=self._options.until_caught_up
        )
        self._pressure = BackPressure(
            self._loaded.spec,
            self._run,
            close_range=ranges.close,
            publish=self._observer.publish,
            detach=self._detach,
            awaits_capture=lambda: self._deliverers.awaits_capture,
        )
        ended = "lease lost"
        try:
            self._deliverers.poll()
            if pipeline.desired_state == "running":
                self._pressure.check(0)
                self._capture = self._start_capture(pipeline, ranges)
                self._warm_start = WarmStart(
                    self._store, self._loaded.name, self._context.build_source, self._observer.warn
                )
                capture = self._capture
                self._source_watch = SourceWatch(
                    self._store,
                    self._loaded,
                    self._context.build_source,
                    self._observer.warn,
                    lambda: capture.received,
                )
            ended = self._supervise(ranges, goal)
        except LeaseLost:
            ended = "lease lost"
        except BaseException as error:
            if not isinstance(error, Exception):
                logger.info("asked to end: closes its range first")
                ended = "interrupted"
            raise
        finally:
            with uninterrupted():
                self._end(ranges, ended)
                if ended == "interrupted":
                    self.interrupted = self._outcome(ended, ranges)
        return self._outcome(ended, ranges)

    def _detach(self, sink_id: str, why: str) -> None:
        self._deliverers.detach(sink_id, why)
        self._observer.warn(f"sink {sink_id} is {why}")

    def _start_position(self, pipeline: PipelineRow) -> tuple[PipelineRow, Position | None]:
        """Set the start position if there is none.

        The source is asked for its head only if that is the goal.

        Raises:
            DeltaforgeError: The source cannot be used; this is recorded as if a tick had found it.
        """
        if pipeline.desired_state != "running":
            return pipeline, None
        if pipeline.start_position is not None and not self._options.until_caught_up:
            return pipeline, None
        source = self._context.build_source()
        try:
            pipeline = ensure_start(self._store, self._loaded, pipeline, source, self._waits)
            head = source.head() if self._options.until_caught_up else None
        except DeltaforgeError as error:
            now = self._store.now()
            capture_failed(self._store, self._loaded.name, "tick", error, now)
            raise
        finally:
            source.close()
        source_answers(self._store, self._loaded.name)
        return pipeline, head

    def _waits(self, what: str) -> None:
        """Tell users what the start waits for, when that changes.

        Raises:
            LeaseLost: The lease is gone.
            _AskedToEndError: The run was asked to end.
        """
        self._run.lease.guard()
        if asked := self._asked_to_end():
            raise _AskedToEndError(asked)
        if what != self._waited_for:
            self._waited_for = what
            logger.warning("the start waits: %s", what)
            self._observer.warn(what)
            note_findings(self._store, self._loaded.name, [Finding("start", "warning", what)])

    def _start_capture(self, pipeline: PipelineRow, ranges: Ranges) -> Capture:
        spec = self._loaded.spec
        pauses = self._engine.schemas.pauses
        if not pauses:
            approve_everything(self._store, self._loaded.name)
        return Capture(
            self._run,
            CaptureOptions(
                row=pipeline,
                limits=spec.spec.segment_limits,
                source_id=spec.spec.source.config.id,
                tenant=spec.metadata.tenant,
                pauses_tables=pauses,
                paused=self._pressure.paused is not None,
            ),
            build_source=self._context.build_source,
            ranges=ranges,
            backlog=Backlog(
                self._run, self._deliverers.sessions, uid=pipeline.uid, limits=self._engine.segment
            ),
            someone_waits=lambda: self._deliverers.someone_waits,
            segment_wanted=lambda: self._deliverers.segment_wanted,
            captured=lambda _segment: self._deliverers.segment_added(),
            find_start=self._find_start,
        )

    def _find_start(self, source: Source, start: Position) -> Position:
        refuse_lost_store(self._store, self._context.journal, self._loaded.name)
        config = self._loaded.spec.spec.source.config
        failover = Failover(self._store, self._run.lease, config.id, config.on_schema_drift)
        return failover.start(source, start)

    def _supervise(self, ranges: Ranges, goal: Position | None) -> str:
        """Do the work of the main thread until the run ends; return the reason."""
        end = RunEnd(
            self._loaded,
            self._context,
            self._options,
            goal,
            deliverers=self._deliverers,
            pressure=self._pressure,
            capture=self._capture,
        )
        confirmer = Confirmer(self._loaded, self._run)
        letters = DeadLetterWatch(
            self._loaded.spec, self._store, self._run.lease, self._observer.warn
        )
        failures = CaptureWatch(self._store, self._loaded.name)
        published_at = 0.0
        summary = RunSummary(self._store, self._loaded.name, self._deliverers)
        while True:
            self._run.lease.guard()
            with contextlib.suppress(StoreUnavailable):  # retried until the lease is lost
                ended = self._asked_to_end() or end.reason()
                ranges.close_if_due()
                confirmer.confirm(self._capture, last=ended is not None)
                if self._capture is not None:
                    self._pressure.check(self._capture.segments)
                    self._capture.pause(self._pressure.paused is not None)
                failures.poll(self._capture, over=ended == "capture failed")
                if ended is not None:
                    summary.report(self._capture)
                    return ended
                if time.monotonic() - published_at >= _PUBLISH_SECONDS:
                    self._observer.publish()
                    self._deliverers.poll()
                    letters.poll()
                    summary.poll(self._capture)
                    published_at = time.monotonic()
            time.sleep(_LOOK_SECONDS)

    def _end(self, ranges: Ranges, reason: str) -> None:
        """Stop capture, then let the sinks finish their current batches."""
        try:
            for helper in (self._warm_start, self._source_watch):
                if helper is not None:
                    helper.end()
            if self._capture is not None:
                self._capture.stop()
            if not self._run.lease.lost.is_set():
                ranges.close("run ended" if reason != "idle" else "idle")
        except LeaseLost:
            pass
        finally:
            self._deliverers.end()
        if self._run.lease.lost.is_set():
            return
        self._observer.publish()
        captured = self._capture is not None and self._capture.rows > 0
        next_probe(self._store, self._loaded.name, captured=captured)

    def _outcome(self, reason: str, ranges: Ranges) -> RunOutcome:
        capture = self._capture
        error = None if capture is None else capture.error
        row = self._store.pipelines.get(self._loaded.name)
        assert row is not None
        checkpoints = self._store.checkpoints.read(self._loaded.name).values()
        status = health(self._store, self._loaded)
        return RunOutcome(
            reason=reason,
            captured=ranges.rows,
            segments=0 if capture is None else capture.segments,
            ranges=ranges.closed,
            delivered=self._deliverers.sent,
            capture_error=None if error is None else with_remedy(self._loaded.name, error),
            sink_errors=self._deliverers.errors,
            behind=self._deliverers.behind(row),
            sink_timeouts=self._deliverers.timeouts,
            pauses=self._pressure.pauses,
            paused=self._pressure.paused,
            detached=tuple(
                checkpoint.sink for checkpoint in checkpoints if not checkpoint.attached
            ),
            paused_sinks=tuple(checkpoint.sink for checkpoint in checkpoints if checkpoint.paused),
            problems=status.problems,
        )


class CaptureWatch:
    """Keeps a pipeline's failure in the store up to date with a run's capture.

    Args:
        store: Where the failure is recorded.
        name: The pipeline.
    """

    def __init__(self, store: StateStore, name: str) -> None:
        self._store = store
        self._name = name
        self._recorded: Literal["nothing", "well", "trouble", "failed"] = "nothing"
        self._troubled_since: float | None = None
        self._attempt: float | None = None

    def poll(self, capture: Capture | None, *, over: bool = False) -> None:
        """Record what has changed since the last call.

        With `over`, the run ends, so brief errors are recorded, too.
        """
        if capture is None or self._recorded == "failed":
            return
        failure = capture.failure
        if failure is None:
            self._troubled_since = None
            if self._recorded == "trouble" or (
                self._recorded == "nothing" and self._works(capture)
            ):
                capture_works(self._store, self._name, "run")
                self._recorded = "well"
        elif failure.next_attempt_at is None:
            capture_failed(self._store, self._name, "run", failure.error, None)
            self._recorded = "failed"
        else:
            self._trouble(failure.error, failure.next_attempt_at, over=over)

    def _works(self, capture: Capture) -> bool:
        """Return whether an earlier failure is over; for one of the journal, only after a write."""
        if not capture.has_read or capture.has_written:
            return capture.has_read
        row = self._store.pipelines.get(self._name)
        failure = None if row is None else failure_of(row)
        return failure is None or failure.subject == "source" or failure.next_attempt_at is None

    def _trouble(self, error: DeltaforgeError, attempt: float, *, over: bool) -> None:
        """Record a retryable error once it lasts `_BRIEF_SECONDS`, and at each further attempt.

        `attempt` is the monotonic time of the next one.
        """
        now = time.monotonic()
        if self._troubled_since is None:
            self._troubled_since = now
        if now - self._troubled_since < _BRIEF_SECONDS and not over:
            return
        if self._recorded == "trouble" and attempt == self._attempt:
            return
        left = max(0.0, attempt - now)
        at = self._store.now() + left
        capture_failed(self._store, self._name, "run", error, at)
        self._recorded, self._attempt = "trouble", attempt


def refuse_lost_store(store: StateStore, journal: Journal, pipeline: str) -> None:
    """Refuse to start a pipeline that is new to the store but has segments in the journal.

    A store in memory is always new, and is not checked.

    Raises:
        NotAllowed: The journal has segments of the pipeline that were recorded in another state
            store.
        StoreUnavailable: The journal cannot be listed.
    """
    row = store.pipelines.get(pipeline)
    if row is None or row.next_segment > 1 or store.database.where == "memory":
        return
    others = journal.written_by_others(pipeline, row.uid)
    if others:
        folders = ", ".join(mask(f"{journal.url}/{folder}") for folder in others)
        raise NotAllowed(
            f"{pipeline}: the journal has segments that this state store knows nothing of "
            f"({folders}): the store was lost, or is another one. Bring it back: "
            "deltaforge state restore FILE --force. Without a copy, what sinks had not got by then "
            "is lost to them: take that folder away, and the pipeline begins as a new one"
        )
