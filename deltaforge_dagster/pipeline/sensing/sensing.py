"""The sensing thread of a run: learns from segments what tables and documents look like.

It takes segments in the journal's order once they are ready for sinks, has one Spark task examine
them, and stores the findings together with the segment's number, in one fenced transaction. So a
segment counts once, however often runs are killed. A few rows are examined in the run itself, like
encoding (`encode.encoder`), so that a short run needs no Spark. Only the end of a run waits for
sensing, for up to `END_SECONDS`. Retention does not: a segment that was deleted before it was
examined is counted as skipped.

Errors are stored for the check `sensing`, and retried with back-off.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa
from pyspark.errors import PySparkException

from deltaforge_dagster.config.logs import in_context
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.errors import (
    DeltaforgeError,
    LeaseLost,
    SparkUnavailable,
    StoreUnavailable,
)
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.committed import PendingSegments
from deltaforge_dagster.pipeline.encode.encoder import are_few
from deltaforge_dagster.pipeline.process.chain_jobs import spark_schema
from deltaforge_dagster.pipeline.run_context import (
    ActiveLease,
    SessionProvider,
    first_together,
    spark_condition,
)
from deltaforge_dagster.pipeline.sensing.job import REPORT, SensingJob, learned_by
from deltaforge_dagster.sensing.drift import declared
from deltaforge_dagster.sensing.learning import Learned
from deltaforge_dagster.sensing.table import Versions
from deltaforge_dagster.state.metric_families import (
    DRIFT_DETECTED,
    PIPELINE_EVOLUTIONS,
    SCHEMA_CACHE_HITS,
    SCHEMA_CACHE_MISSES,
    SCHEMA_EVENTS,
    SCHEMA_EVOLUTIONS,
    SENSING_SECONDS,
)
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.sensing import Findings
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import fingerprints

_JOB_SEGMENTS = 64
_JOB_BYTES = 16 << 20
"""Bytes of segment files in one job: some 300,000 changes, which take one task well below a second.

The other cores of the Spark server remain for encoding.
"""

_PAUSE_SECONDS = 2.0
"""Pause after a job that took all segments, so that small segments are collected."""

END_SECONDS = 15.0
"""Seconds in which captured segments are still examined when the run ends."""


class Sensing:
    """The sensing thread of one run.

    Args:
        spec: The pipeline, which has `schema_sensing` enabled.
        store: Where findings are stored.
        journal: Holds the segments.
        sessions: Provides the Spark session.
        lease: The run's lease; fences what is written.
        segments: The segments that are ready for sinks.
        warn: Called once for each new error.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        store: StateStore,
        journal: Journal,
        sessions: SessionProvider,
        lease: ActiveLease,
        *,
        segments: PendingSegments,
        warn: Callable[[str], None],
    ) -> None:
        self._pipeline = spec.metadata.name
        self._options = spec.spec.schema_sensing or SchemaSensing()
        self._store = store
        self._journal = journal
        self._sessions = sessions
        self._lease = lease
        self._segments = segments
        self._warn = warn
        self._warned: str | None = None
        self._versions: dict[str, Versions] = {}
        self._ends_at: float | None = None
        self._ending = threading.Event()
        self._news = threading.Event()
        self._states: dict[str, bytes] = {}
        row = store.pipelines.get(self._pipeline)
        assert row is not None
        # Replaced by the recorded progress, if there is any.
        self._last_examined = row.next_segment - 1
        self._thread = threading.Thread(
            target=in_context(self._run), name=f"sense {self._pipeline}", daemon=True
        )
        self._thread.start()

    def segment_added(self) -> None:
        """Wake the thread: a further segment is ready."""
        self._news.set()

    def end(self) -> None:
        """Ask the thread to end when all segments are examined, or after `END_SECONDS`."""
        self._ends_at = time.monotonic() + END_SECONDS
        self._ending.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread to end."""
        self._thread.join(seconds)

    def _run(self) -> None:
        backoff = Backoff(1.0, 60.0)
        begun = False
        while not self._over:
            ending = self._ending.is_set()  # read before the last examination
            self._news.clear()
            try:
                if not begun:
                    self._begin()
                    begun = True
                if self._inspect_segments():
                    continue
                backoff.reset()
                if ending:
                    return
                self._ending.wait(_PAUSE_SECONDS)
                self._news.wait(_PAUSE_SECONDS)
            except LeaseLost:
                return
            except StoreUnavailable:
                self._ending.wait(1.0)
            except DeltaforgeError as error:
                self._ending.wait(self._failed(error, backoff))
            except Exception as error:  # noqa: BLE001 - a defect of sensing stops nothing else
                defect = DeltaforgeError(f"sensing broke: {type(error).__name__}")
                defect.__cause__ = error
                self._ending.wait(self._failed(defect, backoff))
            if ending:
                return

    @property
    def _over(self) -> bool:
        """Whether the time to examine segments after the run's end has passed."""
        return self._ends_at is not None and time.monotonic() >= self._ends_at

    def _begin(self) -> None:
        """Load the findings and the progress; the first time, start with what this run captures."""
        progress = self._store.sensing.progress(self._pipeline)
        if progress is None:
            self._lease.write(lambda writer: writer.sensing.note(Findings(self._last_examined)))
        else:
            self._last_examined = progress.segment
        self._states = self._store.sensing.tables(self._pipeline)

    def _inspect_segments(self) -> bool:
        """Examine the next segments; return whether to continue without a pause."""
        rows = self._segments.segments(first=self._last_examined + 1, limit=_JOB_SEGMENTS + 1)
        if not rows:
            return False
        taken = first_together(rows, _JOB_SEGMENTS, _JOB_BYTES)
        began = time.monotonic()
        skipped = taken[0].segment - self._last_examined - 1
        learned = self._learn(taken)
        seconds = time.monotonic() - began
        last = taken[-1].segment
        findings = Findings(
            segment=last,
            skipped=skipped,
            tables={sensed.table: sensed.state for sensed in learned},
            facts={sensed.table: sensed.facts for sensed in learned},
            evolutions=[evolution for sensed in learned for evolution in sensed.evolutions],
            tally=_tally(learned, seconds),
        )
        self._lease.write(lambda writer: writer.sensing.note(findings))
        self._last_examined = last
        self._states |= findings.tables
        self._warned = None
        return len(taken) < len(rows) or self._ending.is_set()

    def _learn(self, rows: Sequence[SegmentRow]) -> list[Learned]:
        paths = [row.path for row in rows if row.rows]
        if not paths:
            return []
        named = {table for row in rows for table in row.counts}
        versions = self._versions_of(
            named,
            {
                fingerprint
                for row in rows
                for versions in row.schema_versions.values()
                for fingerprint in fingerprints(versions)
            },
        )
        job = SensingJob(
            options=self._options,
            journal_url=self._journal.url,
            paths=paths,
            versions=versions,
            # Tables that processors have renamed have no registered versions, and are always
            # included.
            states={
                name: state
                for name, state in self._states.items()
                if name in named or name not in self._versions
            },
        )
        return learned_by(job.report() if are_few(rows) else self._by_spark(job, rows))

    def _by_spark(self, job: SensingJob, rows: Sequence[SegmentRow]) -> pa.Table:
        """Return the report of one Spark task."""
        subject = f"segments {rows[0].segment} to {rows[-1].segment}"
        try:
            return (
                self._sessions.session()
                .range(0, 1, 1, 1)
                .mapInArrow(job.run, spark_schema(REPORT))
                .toArrow()
            )
        except PySparkException as error:
            self._sessions.lost(error)
            # Not chained: Spark's text of a failed task may quote a value of a row.
            raise SparkUnavailable(
                f"{subject}: the Spark job of sensing failed ({spark_condition(error)}); see the "
                "server's log"
            ) from None

    def _versions_of(
        self, tables: Collection[str], fingerprints: Collection[str]
    ) -> dict[str, Versions]:
        """Return the registered versions of some tables; reload if a fingerprint is unknown."""
        registered = {
            fingerprint for versions in self._versions.values() for fingerprint in versions
        }
        if not registered.issuperset(fingerprints):
            self._versions = {
                history.name: {
                    version.stamp.fingerprint: tuple(
                        declared(column.name, column.data_type, nullable=column.nullable)
                        for column in version.table.columns
                    )
                    for version in history.versions
                }
                for history in self._store.schemas.histories(self._pipeline)
            }
        return {name: self._versions[name] for name in tables if name in self._versions}

    def _failed(self, error: DeltaforgeError, backoff: Backoff) -> float:
        """Store an error, and return the seconds to wait before the next attempt."""
        if self._over:
            return 0.0  # the run has cancelled the job
        problem = str(error)
        if problem != self._warned:
            self._warn(f"sensing: {problem}")
            self._warned = problem
        with contextlib.suppress(LeaseLost, StoreUnavailable):  # the loop will meet the same error
            self._lease.write(lambda writer: writer.sensing.fail(problem))
        return backoff.next_delay()


def _tally(learned: list[Learned], seconds: float) -> Tally:
    tally = Tally()
    for sensed in learned:
        labels = {"table": sensed.table}
        tally.add(SCHEMA_EVENTS, sensed.counts["sampled"], **labels)
        tally.add(SCHEMA_EVOLUTIONS, len(sensed.evolutions), **labels)
        tally.add(SCHEMA_CACHE_HITS, sensed.counts["hits"], **labels)
        tally.add(SCHEMA_CACHE_MISSES, sensed.counts["misses"], **labels)
        tally.observe(SENSING_SECONDS, seconds / len(learned), **labels)
        tally.add(PIPELINE_EVOLUTIONS, len(sensed.evolutions))
        tally.add(DRIFT_DETECTED, sensed.counts["drifted"])
    return tally
