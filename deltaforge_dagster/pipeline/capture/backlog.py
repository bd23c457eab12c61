"""Read a backlog in parallel: several Spark tasks each decode a section of the log.

One thread decodes a log as fast as one core can. While sinks wait for it and much of the log lies
ahead, the run plans log sections, each as large as a segment (`sources.base.SectionedSource`),
gives each one its segment number, and has Spark's tasks read, decode and journal them, as many at a
time as Spark has cores. The segments are added in the log's order, each as soon as those before it
are.

If a task cannot read its section (a table that changes, a server that is gone, a lost Spark
session), that is no error here: neither its section nor any later one is added, their files are
removed, and the run's own reader continues from there and reports what is wrong, if anything is. So
whether Spark can reach the source affects only speed.

`Backlog.due` decides when: tasks take cores that encoding needs, so none are started while the
pipeline waits for sinks or for encoding.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pyspark.errors import PySparkException

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline.capture.backlog_job import (
    SectionJob,
    WarmJob,
    WrittenSection,
    written_by,
)
from deltaforge_dagster.pipeline.run_context import LeasedRun, SessionProvider, spark_condition
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import LogSection, SectionedSource, SourceNotes

logger = logging.getLogger(__name__)

WORTH_BYTES = 128 << 20
"""Least unread log, in bytes, that is worth reading in parallel.

Less is read before tasks have started.
"""

LOOK_BYTES = 64 << 20
"""Bytes of log that the run's own reader reads between two checks.

A check decides whether to read the rest in parallel.
"""

_MAX_SECTION_BYTES = 256 << 20  # bytes of log in one section
_MAX_TASKS = 64  # tasks at a time
_MAX_FAILURES = 3  # in a row, after which the run's own reader alone continues
_WAIT_SECONDS = 0.05  # for the oldest section; then the lease is checked again
_GRACE_SECONDS = 10.0
"""Seconds that running tasks get to finish when the run ends."""

_REPORT = "written string, problem string"


@dataclass(slots=True)
class _Pace:
    """How much log was read most recently, and what it became.

    Attributes:
        log_bytes: Bytes of log.
        rows: Changes.
        bytes: Bytes of Arrow memory.
    """

    log_bytes: int = 0
    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Reading:
    section: LogSection
    reader: int
    written: Future[WrittenSection]


class Backlog:
    """Has Spark read the backlogs of one run in parallel, when that is faster.

    Args:
        run: The run.
        sessions: Where the Spark session comes from.
        uid: Uid of the pipeline.
        limits: `engine.segment` of the pipeline file.

    Attributes:
        segments: Segments that tasks have written.
    """

    def __init__(
        self, run: LeasedRun, sessions: SessionProvider, *, uid: str, limits: SegmentLimits
    ) -> None:
        self.segments = 0
        self._journal = run.journal
        self._lease = run.lease
        self._pipeline = run.lease.pipeline
        self._sessions = sessions
        self._uid = uid
        self._limits = limits
        self._failures = 0
        self._read = _Pace()
        self._pace = _Pace()
        self._sealed = self._awaited = 0
        self._warming: Future[int] | None = None
        self._pool = ThreadPoolExecutor(
            _MAX_TASKS + 1, thread_name_prefix=f"backlog {self._pipeline}"
        )

    def passed(self, log_bytes: int) -> None:
        """Count bytes of log that the run's own reader has read."""
        self._read.log_bytes += log_bytes

    def sealed(self, rows: int, size: int, *, awaited: bool) -> None:
        """Count a segment that the run's own reader has written.

        `awaited` says whether a sink waited for it.
        """
        self._read.rows += rows
        self._read.bytes += size
        self._sealed += 1
        self._awaited += awaited

    def due(self, source: SectionedSource, position: Position) -> bool:
        """Return whether the log after `position` should be read in parallel; most calls are cheap.

        It should if capture is the bottleneck (most of the last segments found a sink idle at the
        journal's end) and at least `WORTH_BYTES` of log are unread. Before the first time, Spark's
        workers load code and kernels, while the run's own reader continues.
        """
        if self._failures >= _MAX_FAILURES or self._journal.url.startswith("memory:"):
            return False
        if self._warming is not None and not self._warming.done():
            return False
        if self._read.log_bytes < LOOK_BYTES:
            return False
        useful = self._awaited * 2 > self._sealed and source.behind(position) >= WORTH_BYTES
        if useful and self._warming is None:
            self.warm_up(source)  # the counts are kept, and decide again once the workers are ready
            return False
        self._pace, self._read = self._read, _Pace()
        self._sealed = self._awaited = 0
        return useful

    def warm_up(self, source: SectionedSource) -> Future[int]:
        """Start loading code and kernels in Spark's workers.

        The future's result is how many tasks run at a time.
        """
        self._warming = self._pool.submit(self._warm, source)
        return self._warming

    def read(
        self,
        source: SectionedSource,
        registry: SourceNotes,
        start: Position,
        number: int,
        *,
        add: Callable[[WrittenSegment, Position], bool],
        going_on: Callable[[], bool],
    ) -> Position:
        """Capture the log after `start` in parallel, as far as sections can be planned.

        It stops earlier if no sink has waited for a while: then delivery is the bottleneck.

        Args:
            source: The source whose log is read.
            registry: Where table versions are registered.
            start: The end of the journal, or a later position before which the log has no captured
                change.
            number: Number of the next segment.
            add: Adds a segment that ends at the given position, and returns whether a sink waited
                for it; called in the log's order.
            going_on: Checked regularly; once it returns False, no section is started any more, and
                those that tasks are reading are added if they finish within seconds.

        Returns:
            The end of the last section that was added; `start` if there was none.

        Raises:
            LeaseLost: The lease is gone.
        """
        width = self._width()
        readings: deque[_Reading] = deque()
        sections = source.plan_sections(start, registry, self._size)
        more, patience, unawaited = width > 0, float("inf"), 0
        try:
            while more or readings:
                if more and not going_on():
                    more, patience = False, time.monotonic() + _GRACE_SECONDS
                room = more and len(readings) < width
                if room:
                    section, more = self._next(sections)
                    if section is not None:
                        reader = min(set(range(width)) - {reading.reader for reading in readings})
                        job = self._job(source, section, number + len(readings), reader)
                        readings.append(_Reading(section, reader, self._submit(job)))
                if not readings or not _ended_within(readings[0], 0 if room else _WAIT_SECONDS):
                    self._lease.guard()
                    if time.monotonic() > patience:
                        break
                    continue
                written = self._written(readings[0])
                if written is None:
                    break
                done = readings.popleft()
                unawaited = 0 if add(written.segment, done.section.end) else unawaited + 1
                more = more and unawaited < 2 * width
                start, number = done.section.end, number + 1
            return start
        finally:
            sections.close()
            for reading in readings:
                reading.written.add_done_callback(self._discard)

    def close(self) -> None:
        """Start no further tasks; running ones are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _size(self) -> int:
        """Return how many bytes of log make one segment, judging by the log that was read last."""
        pace, limits = self._pace, self._limits
        if not pace.rows:
            return _MAX_SECTION_BYTES
        by_rows = limits.max_events * pace.log_bytes // pace.rows
        by_bytes = limits.max_bytes * pace.log_bytes // max(pace.bytes, 1)
        return max(1, min(by_rows, by_bytes, _MAX_SECTION_BYTES))

    def _warm(self, source: SectionedSource) -> int:
        """Have all Spark workers load code and kernels; return how many tasks run at a time."""
        session = self._sessions.session()
        # Without a number of partitions, Spark starts one task per core.
        tasks = session.range(_MAX_TASKS).mapInArrow(WarmJob(source).run, "task int").toArrow()
        return min(tasks.num_rows, _MAX_TASKS)

    def _width(self) -> int:
        """Return how many log sections are submitted at a time.

        It is one more than the cores, so that none is idle; 0 if the workers could not load.
        """
        assert self._warming is not None
        try:
            return self._warming.result() + 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the run's own reader continues
            self._fail(error)
            self._warming = None  # the next check tries again
            return 0

    def _next(self, sections: Generator[LogSection | None]) -> tuple[LogSection | None, bool]:
        """Return the next log section if there is one by now, and whether there may be more."""
        try:
            return next(sections), True
        except StopIteration:
            pass
        except LeaseLost:
            raise
        except DeltaforgeError as error:
            self._fail(error)
        return None, False

    def _job(
        self, source: SectionedSource, section: LogSection, number: int, reader: int
    ) -> SectionJob:
        return SectionJob(
            source=source,
            section=section,
            reader=reader,
            max_events=self._limits.max_events,
            journal_url=self._journal.url,
            pipeline=self._pipeline,
            uid=self._uid,
            segment=number,
            epoch=self._lease.epoch,
        )

    def _submit(self, job: SectionJob) -> Future[WrittenSection]:
        return self._pool.submit(self._execute, job)

    def _execute(self, job: SectionJob) -> WrittenSection:
        frame = self._sessions.session().range(0, 1, 1, 1)
        return written_by(frame.mapInArrow(job.run, _REPORT).toArrow())

    def _written(self, reading: _Reading) -> WrittenSection | None:
        """Return what a task has written, None if it failed."""
        try:
            written = reading.written.result()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run's own reader continues
            self._fail(error)
            return None
        self._failures = 0
        self.segments += 1
        rows = written.segment.rows
        self._pace = _Pace(reading.section.log_bytes, rows, written.bytes)
        return written

    def _fail(self, error: Exception) -> None:
        """Count and log a failure, after which the run's own reader continues."""
        self._failures += 1
        # Only our own error texts are known to contain no secrets and no row values.
        reason = str(error) if isinstance(error, DeltaforgeError) else type(error).__name__
        if isinstance(error, PySparkException):
            self._sessions.lost(error)
            reason = f"Spark: {spark_condition(error)}"
        logger.info("%s: a backlog is read by one reader: %s", self._pipeline, reason)

    def _discard(self, written: Future[WrittenSection]) -> None:
        """Remove a segment that was not added."""
        with contextlib.suppress(Exception):  # no file was written, or the orphan sweep removes it
            self._journal.delete(written.result().segment.path)


def _ended_within(reading: _Reading, seconds: float) -> bool:
    """Wait for a task; return whether it has ended."""
    return bool(wait([reading.written], seconds).done)
