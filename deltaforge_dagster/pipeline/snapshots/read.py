"""Reading a snapshot: a run plans its chunks, and Spark's tasks read them into staging files.

Such a run needs no lease, and several may work at the same time: the first result for a chunk
counts (`state.snapshot_records`). A run that died leaves only orphaned files, and the next one
continues with exactly the missing chunks. The pipeline's live run merges the chunks
(`chunk_deduplicator`); when the staging files that wait for it reach
`engine.snapshot.max_staged_bytes`, reading pauses.

Tasks read a few chunks of one table each, one after another. As many tables and chunks of a table
are read at a time as the pipeline file says.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass

from pyspark.errors import PySparkException
from pyspark.sql.types import StringType, StructField, StructType

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.sources import Snapshot
from deltaforge_dagster.errors import (
    NotAllowed,
    Retryable,
    SourceMisconfigured,
    SparkUnavailable,
)
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.control.work import ensure_start, register
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.run_context import RunContext, SessionProvider, spark_condition
from deltaforge_dagster.pipeline.snapshots.chunk_rows import plan_relocated_rows
from deltaforge_dagster.pipeline.snapshots.read_job import (
    REPORT,
    StageJob,
    WrittenChunk,
    written_by,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position, parse_read_view
from deltaforge_dagster.sources.snapshot import SnapshotSource
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.snapshot_records import (
    ChunkRow,
    PlannedChunk,
    SnapshotProgress,
    SnapshotRow,
    StagedChunk,
)
from deltaforge_dagster.state.store import StateStore

GUARD_SECONDS = 30.0
"""Seconds between two checks whether the source still retains what the snapshot needs."""

CHUNKS_PER_TASK = 16
_MOST_TASKS = 32
_PAGE = 200
_LOOK_SECONDS = 0.5
_TASKS_SECONDS = 5.0
"""Seconds between two searches for chunks to read, while tasks read others."""
_FAILURES = 5
_REPORT = StructType([StructField(name, StringType()) for name in REPORT.names])


@dataclass(frozen=True, slots=True)
class _Task:
    table: str
    chunks: list[ChunkRow]


class SnapshotRun:
    """One run over the chunks of a pipeline's unfinished snapshot.

    Args:
        loaded: The pipeline file.
        context: Store, journal, Spark sessions and source.
        warn: Shows people a warning.
        progress: Called regularly with the progress of each table.
        only: The chunks to read, as table and number; None for all that are missing.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        context: RunContext,
        *,
        warn: Callable[[str], None],
        progress: Callable[[dict[str, SnapshotProgress]], None],
        only: Collection[tuple[str, int]] | None = None,
    ) -> None:
        self._name = loaded.name
        self._loaded = loaded
        self._options = loaded.spec.spec.source.config.snapshot or Snapshot(mode="never")
        self._room = loaded.spec.spec.engine.snapshot.max_staged_bytes
        self._context = context
        self._store = context.store
        self._warn = warn
        self._progress = progress
        self._only = only
        self._watermarks: list[str] = []
        self._backoff = Backoff()
        self._failures = 0
        self._guarded_at = 0.0
        self._source: SnapshotSource

    def execute(self) -> SnapshotRow:
        """Read the missing chunks; return the snapshot's row afterwards.

        Raises:
            NotAllowed: There is no unfinished snapshot, or this kind of source has no snapshots.
            DeltaforgeError: A chunk cannot be read; chunks that were read count, and another run
                can continue.
        """
        source = self._context.build_source()
        if not isinstance(source, SnapshotSource):
            raise NotAllowed(f"pipeline {self._name!r}: its source knows no snapshots")
        self._source = source
        try:
            snapshot = self._planned_snapshot()
            self._watermarks = [source.snapshots().watermark()]
            with self._context.replay_sessions() as sessions:
                self._read(snapshot, sessions)
        finally:
            source.close()
        return self._store.snapshots.read(self._name, newest=1)[0]

    def _planned_snapshot(self) -> SnapshotRow:
        """Return the unfinished snapshot, with its chunks planned and the stream's start fixed."""
        pipeline = register(self._store, self._loaded)
        ensure_start(self._store, self._loaded, pipeline, self._source)
        snapshot = self._store.snapshots.unfinished(self._name)
        if snapshot is None:
            raise NotAllowed(
                f"pipeline {self._name!r}: there is no unfinished snapshot "
                "(deltaforge snapshot start)"
            )
        if snapshot.state == "wanted":
            self._plan(snapshot)
        return snapshot

    def _plan(self, snapshot: SnapshotRow) -> None:
        snapshots = self._source.snapshots()
        tables = list(snapshot.tables) or None
        for finding in snapshots.preflight(tables, self._max_tasks):
            if finding.level == "error":
                raise SourceMisconfigured(f"pipeline {self._name!r}: {finding.text}")
            if finding.level == "warning":
                self._warn(finding.text)
        chunks = snapshots.plan(tables, self._options.chunk_size, snapshot.condition)
        planned = (PlannedChunk(chunk.table, chunk.number, chunk.to_json()) for chunk in chunks)
        self._store.snapshots.plan(self._name, snapshot.snapshot, list(planned))

    @property
    def _per_table(self) -> int:
        return self._options.max_parallel_chunks if self._options.intra_table_parallel else 1

    @property
    def _max_tasks(self) -> int:
        """How many tasks may run at a time."""
        return min(self._options.max_parallel_tables * self._per_table, _MOST_TASKS)

    def _read(self, snapshot: SnapshotRow, sessions: SessionProvider) -> None:
        running: dict[Future[list[tuple[int, WrittenChunk]]], _Task] = {}
        looked_at = float("-inf")
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(self._max_tasks, "snapshot"))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            while self._is_unfinished(snapshot):
                progress = self._store.snapshots.progress(self._name, snapshot.snapshot)
                self._progress(progress)
                staged = sum(table.staged_bytes for table in progress.values())
                if staged < self._room and time.monotonic() - looked_at >= _TASKS_SECONDS:
                    looked_at = time.monotonic()
                    for task in self._next_tasks(snapshot, list(running.values())):
                        running[pool.submit(self._stage, sessions, snapshot, task)] = task
                if not running:
                    if not any(True for _ in self._missing(snapshot)):
                        return
                    time.sleep(_LOOK_SECONDS)  # until the live run has merged staged chunks
                    continue
                done, _ = wait(running, _LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    self._handle_end(future, running.pop(future))
                    looked_at = float("-inf")

    def _is_unfinished(self, snapshot: SnapshotRow) -> bool:
        """Return whether the snapshot is still unfinished; check its source every `GUARD_SECONDS`.

        Raises:
            SourceMisconfigured: The source no longer retains what the snapshot needs, which is
                cancelled.
        """
        if time.monotonic() - self._guarded_at >= GUARD_SECONDS:
            self._guarded_at = time.monotonic()
            self._guard(snapshot)
            with contextlib.suppress(Retryable):
                self._watermarks[1:] = [self._source.snapshots().watermark()]
        unfinished = self._store.snapshots.unfinished(self._name)
        return unfinished is not None and unfinished.snapshot == snapshot.snapshot

    def _guard(self, snapshot: SnapshotRow) -> None:
        row = self._store.pipelines.get(self._name)
        assert row is not None
        for finding in self._source.snapshots().guard(_captured(row)):
            if finding.level == "error":
                self._store.snapshots.cancel(self._name, snapshot.snapshot, finding.text)
                raise SourceMisconfigured(
                    f"pipeline {self._name!r}: snapshot {snapshot.snapshot} is cancelled: "
                    f"{finding.text}"
                )

    def _missing(self, snapshot: SnapshotRow) -> Iterator[ChunkRow]:
        """Yield the chunks that are to be read, by table and number."""
        if self._only is None:
            plan_relocated_rows(self._store, self._name, snapshot)
        for chunk in self._store.snapshots.chunks(self._name, snapshot.snapshot, state="planned"):
            if self._only is None or (chunk.table_name, chunk.number) in self._only:
                yield chunk

    def _next_tasks(self, snapshot: SnapshotRow, running: list[_Task]) -> list[_Task]:
        """Return the tasks to start in addition to the running ones."""
        if len(running) >= self._max_tasks:
            return []
        taken = {(chunk.table_name, chunk.number) for task in running for chunk in task.chunks}
        tables: dict[str, deque[ChunkRow]] = {}
        for chunk in self._missing(snapshot):
            if (chunk.table_name, chunk.number) not in taken:
                tables.setdefault(chunk.table_name, deque()).append(chunk)
        tasks: list[_Task] = []
        for table, chunks in tables.items():
            free = self._per_table - sum(task.table == table for task in running)
            size = min(CHUNKS_PER_TASK, -(-len(chunks) // self._per_table))
            read_now = {task.table for task in [*running, *tasks]}
            if table not in read_now and len(read_now) >= self._options.max_parallel_tables:
                continue
            for _ in range(min(free, self._max_tasks - len(running) - len(tasks))):
                if chunks:
                    part = [chunks.popleft() for _ in range(min(size, len(chunks)))]
                    tasks.append(_Task(table, part))
        return tasks

    def _stage(
        self, sessions: SessionProvider, snapshot: SnapshotRow, task: _Task
    ) -> list[tuple[int, WrittenChunk]]:
        """Have a Spark task read chunks, up to the first that cannot be read, and record them.

        Raises:
            DeltaforgeError: A chunk could not be read; the chunks before it are recorded.
        """
        before = self._store.pipelines.get(self._name)
        assert before is not None
        job = StageJob(
            self._source,
            self._watermarks[-1],
            self._context.journal.url,
            self._name,
            snapshot.snapshot,
            [PlannedChunk(chunk.table_name, chunk.number, chunk.plan) for chunk in task.chunks],
        )
        try:
            frame = sessions.session().range(0, 1, 1, 1)
            report = frame.mapInArrow(job.run, _REPORT).toArrow()
        except PySparkException as error:
            sessions.lost(error)
            raise SparkUnavailable(
                f"snapshot {snapshot.snapshot}: the Spark job that reads {task.table} failed "
                f"({spark_condition(error)}); see the server's log"
            ) from None  # the text of Spark's error may quote values of rows
        written, problem = written_by(report)
        for number, written_chunk in written:
            self._note(snapshot, task.chunks[number], written_chunk, before)
        if problem is not None:
            raise problem
        return written

    def _note(
        self, snapshot: SnapshotRow, chunk: ChunkRow, written: WrittenChunk, before: PipelineRow
    ) -> None:
        first = first_not_visible(self._store, before, written.read_view)
        noted = (
            first is not None
            # Sinks may start with that segment: they lack earlier changes that the read missed.
            and first >= snapshot.since_segment
            and self._store.snapshots.stage(
                self._name,
                snapshot.snapshot,
                chunk,
                StagedChunk(**asdict(written), first_segment=first),
            )
        )
        failpoint("chunk-noted")
        # Another task was first, or the read missed too much: no row names the file.
        if not noted and written.path is not None:
            self._context.journal.delete(written.path)

    def _handle_end(self, future: Future[list[tuple[int, WrittenChunk]]], task: _Task) -> None:
        """Handle the end of a task; a retryable error is raised only after several in a row."""
        try:
            future.result()
        except Retryable as error:
            self._failures += 1
            if self._failures > _FAILURES:
                raise
            # With an older watermark, the read need not wait for a transaction that a newer one
            # includes.
            self._watermarks[1:] = []
            self._warn(f"{task.table}: {error}; it is read again")
            time.sleep(self._backoff.next_delay())
        else:
            self._failures = 0
            self._backoff.reset()


def first_not_visible(store: StateStore, before: PipelineRow, read_view: str) -> int | None:
    """Return the number of the first segment that may have a change that a read could not see.

    Args:
        store: Lists the segments.
        before: The pipeline's row, read before the read began.
        read_view: What the read could see.

    Returns:
        The number; None if the journal no longer reaches back that far, so that the chunk must be
        read again.
    """
    seen = parse_read_view(read_view)
    if seen.covers(_captured(before)):
        return before.next_segment
    last = before.next_segment - 1
    first = before.next_segment
    while rows := store.segments.read(before.name, first=last - _PAGE + 1, last=last):
        for row in reversed(rows):
            end: Position = parse_position(row.end_position)
            if seen.covers(end):
                return row.segment + 1
            first, start = row.segment, row.start_position
        last = first - 1
    if first < before.next_segment:
        begin: Position = parse_position(start)
        return first if seen.covers(begin) else None
    return None


def _captured(pipeline: PipelineRow) -> Position:
    """Return the captured position of a pipeline, or its start position if nothing was captured."""
    position = pipeline.captured_position or pipeline.start_position
    assert position is not None
    return parse_position(position)
