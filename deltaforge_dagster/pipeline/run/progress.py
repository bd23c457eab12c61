"""Watch the progress of a run: decide when it ends by itself, and log a line every minute.

A run ends after `run.max_seconds`, or when nothing was captured and no sink made progress for
`run.idle_seconds`; a resident run (`max_seconds: 0`) for neither reason, as long as it captures. A
source that is still decoding a long transaction is not idle: the reader must
have reached the source's head. A run that only catches up ends as soon as everything that the
source had when the run began is captured and delivered. A failing sink is waited for only while its
next attempt is near (`backoff.RetryPatience`). After `run.max_seconds`, a sink that writes tables
finishes the commit that it has begun, and changes that wait for the next commit are left to the
next run; before that, such changes keep a run from being idle. If the source cannot be read, or the
journal cannot be written, for `run.idle_seconds`, capture has failed, and so has the run.

The line of each minute (`RunSummary`) says how much the run did, how fast, and how far sinks are
behind.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError, Retryable
from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.committed import sink_lag_seconds
from deltaforge_dagster.pipeline.control.journal_space import BackPressure
from deltaforge_dagster.pipeline.deliver.deliverer_set import DelivererSet
from deltaforge_dagster.pipeline.run_context import RunContext, RunOptions
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0


class RunEnd:
    """Decides when a run that starts now ends.

    Args:
        loaded: The pipeline file.
        context: Store and source.
        options: Whether the run only catches up, and what it awaits.
        goal: The head that the source had when the run began; None if the run captures nothing, or
            does not only catch up.
        deliverers: The run's deliverers.
        pressure: Whether capture is paused.
        capture: The run's capture, None if it only delivers.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        context: RunContext,
        options: RunOptions,
        goal: Position | None,
        *,
        deliverers: DelivererSet,
        pressure: BackPressure,
        capture: Capture | None,
    ) -> None:
        self._pipeline = loaded.name
        self._limits = loaded.spec.spec.engine.run
        self._store = context.store
        self._build_source = context.build_source
        self._deliverers = deliverers
        self._pressure = pressure
        self._capture = capture
        self._options = options
        self._goal = goal
        self._resident = self._limits.resident and capture is not None
        self._began = time.monotonic()
        self._quiet_head: Position | None = None
        self._quiet_since = 0.0

    def reason(self) -> str | None:
        """Return why the run should end now (see `live.RunOutcome`), None if it should continue.

        Raises:
            StoreUnavailable: The store cannot be read; call again.
        """
        now = time.monotonic()
        # Read first: anything that moves during the checks below makes their results outdated.
        moved_at = self._moved_at()
        if self._options.awaits():
            return "capture failed" if self._capture_failed() else None
        if self._is_over(now) and self._may_pause_reading() and self._deliverers.wind_up():
            return "max_seconds"
        # Checked before the sinks: these must have chunks that were merged meanwhile, but need not
        # have what was captured after the goal.
        chunks_waiting = self._chunks_waiting()
        reached = self._options.until_caught_up and (
            self._goal is None or self._reached(self._goal)
        )
        if not self._all_delivered_or_failing():
            return None
        return self._finished(moved_at, chunks_waiting=chunks_waiting, reached=reached)

    def _is_over(self, now: float) -> bool:
        """Whether the time of a run has passed that is not resident."""
        limit = self._limits.max_seconds
        return not self._limits.resident and now - self._began >= limit

    def _finished(self, moved_at: float, *, chunks_waiting: bool, reached: bool) -> str | None:
        """Return why the run may end, given that every sink has everything or is failing."""
        if self._capture_failed():
            return "capture failed"
        if chunks_waiting:
            return None
        if reached:
            return "caught up"
        if (
            self._options.until_caught_up
            and self._pressure.paused is not None
            and self._deliverers.errors
        ):
            return "journal full"
        quiet = time.monotonic() - moved_at >= self._limits.idle_seconds
        if self._resident or not quiet or not self._source_is_quiet(moved_at):
            return None
        return "idle" if self._moved_at() == moved_at else None

    def _capture_failed(self) -> bool:
        """Whether capture ended, or has failed for `run.idle_seconds`."""
        failure = None if self._capture is None else self._capture.failure
        if failure is None or failure.next_attempt_at is None:
            return failure is not None
        if self._pressure.paused is not None:
            return False
        return time.monotonic() - failure.since >= self._limits.idle_seconds

    def _chunks_waiting(self) -> bool:
        """Whether chunks of a snapshot wait to be merged."""
        capture = self._capture
        if capture is None or capture.failure is not None or self._pressure.paused is not None:
            return False
        return capture.chunks_waiting

    def _source_is_quiet(self, moved_at: float) -> bool:
        """Whether the reader has passed the head that the source had when it fell quiet.

        A database that is decoding a long transaction sends nothing for long, and is not idle.
        While capture is paused there is nothing to wait for.
        """
        if self._pressure.paused is not None:
            return True
        if self._capture is not None and self._capture.failure is not None:
            return False  # it is retried, for as long as `_capture_failed` allows
        if self._quiet_head is None or self._quiet_since != moved_at:
            self._quiet_since = moved_at
            try:
                self._quiet_head = self._head()
            except Retryable:  # the source may have changes that it cannot send now
                return False
        return self._quiet_head is None or self._reached(self._quiet_head)

    def _may_pause_reading(self) -> bool:
        """Whether the run can end without having to read a long transaction again."""
        capture = self._capture
        if capture is None or capture.failure is not None:
            return True
        return not capture.in_transaction and capture.has_read

    def _head(self) -> Position | None:
        """Return the head of the source, None if nothing is captured or the source refuses.

        Raises:
            Retryable: The source cannot be reached now.
        """
        if self._capture is None:
            return None
        source = self._build_source()
        try:
            return source.head()
        except Retryable:
            raise
        except DeltaforgeError:
            return None
        finally:
            source.close()

    def _reached(self, goal: Position) -> bool:
        if self._capture is None:
            return True
        if self._capture.failure is not None:
            return False  # it is retried, and may find more changes
        passed = self._capture.passed
        return goal <= self._capture.position or (passed is not None and goal <= passed)

    def _moved_at(self) -> float:
        captured_at = 0.0 if self._capture is None else self._capture.moved_at
        return max(self._began, captured_at, self._deliverers.moved_at)

    def _all_delivered_or_failing(self) -> bool:
        pipeline = self._store.pipelines.get(self._pipeline)
        assert pipeline is not None
        waiting = self._deliverers.behind(pipeline).keys() | self._deliverers.redriving
        return waiting <= self._deliverers.stuck(pipeline)


class RunSummary:
    """Logs what happened since the last line, if anything did.

    Args:
        store: The state store.
        pipeline: Name of the pipeline.
        deliverers: The run's deliverers.
        seconds: Seconds between two lines.
    """

    def __init__(
        self,
        store: StateStore,
        pipeline: str,
        deliverers: DelivererSet,
        *,
        seconds: float = EVERY_SECONDS,
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._deliverers = deliverers
        self._seconds = seconds
        self._reported_at = time.monotonic()
        self._reported = _RunCounts(0, 0, {})

    def poll(self, capture: Capture | None) -> None:
        """Write the line if it is due."""
        if time.monotonic() - self._reported_at >= self._seconds:
            self.report(capture)

    def report(self, capture: Capture | None) -> None:
        """Write the line now, unless nothing has happened."""
        now = time.monotonic()
        seconds, self._reported_at = max(now - self._reported_at, 0.001), now
        before = self._reported
        rows, segments = (0, 0) if capture is None else (capture.rows, capture.segments)
        self._reported = counts = _RunCounts(rows, segments, self._deliverers.sent)
        events, batches = counts.rows - before.rows, counts.segments - before.segments
        sent = {sink: count - before.sent.get(sink, 0) for sink, count in counts.sent.items()}
        lag = self._lag()
        if not (events or any(sent.values()) or any(lag.values())):
            return
        latencies = self._deliverers.latencies
        sinks = {
            sink: {
                "events": count,
                "events_per_second": round(count / seconds, 1),
                "lag_seconds": round(lag.get(sink, 0.0), 1),
                **latencies.get(sink, {}),
            }
            for sink, count in sorted(sent.items())
        }
        logger.info(
            "captured %s changes in %s segments (%.0f/s)",
            events,
            batches,
            events / seconds,
            extra={
                "fields": {
                    "events": events,
                    "batches": batches,
                    "average_batch": round(events / batches, 1) if batches else 0,
                    "events_per_second": round(events / seconds, 1),
                    "sinks": sinks,
                }
            },
        )

    def _lag(self) -> dict[str, float]:
        row = self._store.pipelines.get(self._pipeline)
        if row is None:
            return {}
        now = self._store.now()
        return {
            sink: sink_lag_seconds(self._store, row, checkpoint, now)
            for sink, checkpoint in self._store.checkpoints.read(self._pipeline).items()
        }


@dataclass(frozen=True, slots=True)
class _RunCounts:
    rows: int
    segments: int
    sent: dict[str, int]
