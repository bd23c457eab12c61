"""Processing, between capture and delivery of a pipeline with processors.

Each segment goes through the chain. One thread takes segments in the journal's order, has Spark's
tasks run the chain over as many at once as `deliver.max_bytes` allows, and records the output in
one fenced transaction. Only then do sinks see the segments (`PendingSegments`). So the recorded
output of a segment never changes, whatever happens to sinks and runs; a run that dies before the
transaction leaves orphaned files, and the next run processes the segment again.

A failing processor stops the pipeline's deliveries at that segment, but not capture; it is retried
with back-off, and every sink that has reached that segment shows the error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, Retryable, StoreUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.backoff import Backoff, RetryPatience
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.meters import processed, processing_failed
from deltaforge_dagster.pipeline.process.chain_jobs import check_expressions, run_job
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.pipeline.process.stages import ProcessingJob, processed_by
from deltaforge_dagster.pipeline.run_context import ActiveLease, SessionProvider, first_together
from deltaforge_dagster.state.records import CheckpointRow, Processed, SegmentRow
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

_SEGMENTS_PER_JOB = 16


class Processing:
    """The processing thread of one run.

    Args:
        spec: The pipeline; it has processors.
        store: Lists the segments.
        journal: Holds the segments and the output.
        sessions: Provides the Spark session.
        lease: The run's lease; fences what is written.
        processed: Called when further segments are ready for sinks.

    Attributes:
        error: Why the last attempt failed, None after a success.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        store: StateStore,
        journal: Journal,
        sessions: SessionProvider,
        lease: ActiveLease,
        *,
        processed: Callable[[], None],
    ) -> None:
        self.error: DeltaforgeError | None = None
        self._pipeline = spec.metadata.name
        self._spec = spec
        self._limits = spec.spec.engine.deliver
        self._patience = RetryPatience(spec.spec.engine.run.idle_seconds)
        self._store = store
        self._journal = journal
        self._sessions = sessions
        self._lease = lease
        self._processed = processed
        self._done = 0
        self._stop = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(
            target=in_context(self._run), name=f"process {self._pipeline}", daemon=True
        )
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether processing fails and the run need not wait for it; read by the main thread."""
        error = self.error
        stuck = error is not None and not self._patience.lasts()
        return stuck and self.error is error  # otherwise the thread has gone on meanwhile

    def segment_added(self) -> None:
        """Wake the thread: the journal has a new segment."""
        self._news.set()

    def end(self) -> None:
        """Ask the thread to end; does not wait for it, nor for a job that is running."""
        self._stop.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread to end."""
        self._thread.join(seconds)

    def _run(self) -> None:
        backoff = Backoff(self._limits.backoff_initial_seconds, self._limits.backoff_max_seconds)
        settled = False
        while not self._stop.is_set():
            self._news.clear()
            try:
                if not settled:
                    check_expressions(self._sessions, chain_of(self._spec))
                    self._leave_what_sinks_have()
                    settled = True
                if not self._process_next():
                    self._news.wait(1.0)
                self.error = None
                backoff.reset()
                self._patience.succeeded()
            except LeaseLost:
                return
            except StoreUnavailable:
                self._stop.wait(1.0)
            except DeltaforgeError as error:
                self._failed(error, backoff)
            except Exception as error:  # noqa: BLE001 - a defect must show as the sinks' failure
                defect = DeltaforgeError(f"{self._pipeline}: processing broke: {error!r}")
                defect.__cause__ = error
                self._failed(defect, backoff)

    def _leave_what_sinks_have(self) -> None:
        """Exempt from processing the segments that sinks have received already.

        Some sink began to receive them before the file had processors.
        """
        begun = max(
            map(_last_begun, self._store.checkpoints.read(self._pipeline).values()), default=0
        )
        self._lease.write(lambda writer: writer.segments.leave_as_captured(begun))

    def _process_next(self) -> bool:
        """Process the next segments; return whether there were any."""
        waiting = self._waiting()
        if not waiting:
            return False
        began = time.monotonic()
        outputs = self._run_chain(waiting)
        failpoint("processed-file-written")
        seconds = time.monotonic() - began
        tallies = {
            output.segment: processed(row, output.counts, seconds)
            for row, output in zip(waiting, outputs, strict=True)
        }
        self._lease.write(lambda writer: writer.segments.add_processed(outputs, tallies))
        failpoint("processed-noted")
        self._done = waiting[-1].segment
        self._processed()
        return True

    def _waiting(self) -> Sequence[SegmentRow]:
        rows = self._store.segments.read(self._pipeline, first=self._done + 1, limit=1000)
        undecided = [row for row in rows if row.chain_hash is None]
        if rows and not undecided:
            self._done = rows[-1].segment
        return first_together(undecided, _SEGMENTS_PER_JOB, self._limits.max_bytes)

    def _run_chain(self, rows: Sequence[SegmentRow]) -> list[Processed]:
        pipeline = self._store.pipelines.get(self._pipeline)
        assert pipeline is not None
        job = ProcessingJob(
            chain_of(self._spec),  # built each time: a Python function's source may have changed
            self._lease.run_id,
            self._journal.url,
            self._pipeline,
            pipeline.uid,
            self._lease.epoch,
            [(row.segment, row.path) for row in rows],
        )
        subject = f"segments {rows[0].segment} to {rows[-1].segment}"
        return processed_by(run_job(self._sessions, job, len(rows), len(rows), subject))

    def _failed(self, error: DeltaforgeError, backoff: Backoff) -> None:
        if self._stop.is_set():
            return
        delay = backoff.next_delay()
        if not isinstance(error, Retryable):
            delay = self._limits.backoff_max_seconds  # until somebody fixes the cause
        self._patience.failed(error, delay)
        self.error = error
        fields = {"reason": str(error), "kind": error.kind, "sleep_seconds": round(delay, 1)}
        logger.warning("processing failed", extra={"fields": fields})
        with contextlib.suppress(LeaseLost, StoreUnavailable):  # the loop will meet the same error
            tally = processing_failed(
                error, {processor.id for processor in self._spec.spec.processors}
            )
            self._lease.write(lambda writer: writer.metrics.count(tally))
            waiting = self._waiting()
            first = waiting[0].segment if waiting else 0
            at = self._store.now() + delay
            for name, checkpoint in self._store.checkpoints.read(self._pipeline).items():
                if checkpoint.state == "attached" and checkpoint.whole_segment + 1 >= first:
                    self._lease.write(
                        lambda writer, sink=name: writer.checkpoints.failed(  # type: ignore[misc]
                            sink, error.text, at, remedy=error.remedy
                        )
                    )
        self._stop.wait(delay)


def _last_begun(checkpoint: CheckpointRow) -> int:
    """Return the last segment that a sink has at least a part of."""
    has_some = checkpoint.complete or checkpoint.ordinal >= 0
    return checkpoint.segment if has_some else checkpoint.segment - 1
