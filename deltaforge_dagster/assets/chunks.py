"""The work of a snapshot asset's op: reads chunks, and publishes what was read in Dagster.

Live runs that a command started import this module as well, so it imports Spark and the kernels,
which takes a second, only when there is something to read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import dagster as dg

from deltaforge_dagster.assets.names import RUN_TAG, chunk_of, chunks_name, snapshot_key
from deltaforge_dagster.assets.publish import Emit
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.pipeline.control.work import chunks_read
from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.pipeline.snapshots.request import Life, living, requested_snapshot
from deltaforge_dagster.resources.platform import Opened
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.snapshot_records import ChunkRow, SnapshotProgress
from deltaforge_dagster.state.store import StateStore

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.snapshots.read import SnapshotRun

logger = logging.getLogger(__name__)

_SNAPSHOT = "snapshot"
_READING = "reading"
_PUBLISH_SECONDS = 5.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.2


def execute(context: dg.AssetExecutionContext, loaded: LoadedPipeline, opened: Opened) -> None:
    """Read the chunks that this Dagster run was started for.

    Raises:
        DeltaforgeError: The chunks cannot be read; the message says why.
    """
    only, emit = None, context.instance.report_runless_asset_event
    if context.run.tags.get(RUN_TAG) != "snapshot" or context.run.parent_run_id is not None:
        # A backfill counts only the events of its own runs.
        only, emit = _chosen(context, loaded, opened.store), context.log_event
    shown = ChunksShown(context, opened.store, loaded.name, emit)
    arrow_without_pandas()
    run_context = build_run_context(opened, loaded)
    run = _snapshot_run(context, loaded, run_context, shown.progress, only)
    row = run.execute()
    shown.publish()
    context.log.info("snapshot %s is %s", row.snapshot, row.state_text)


def _snapshot_run(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    progress: Callable[[Mapping[str, SnapshotProgress]], None],
    only: set[tuple[str, int]] | None = None,
) -> SnapshotRun:
    """Return the run that reads a snapshot; only now are Spark and the kernels imported."""
    from deltaforge_dagster.pipeline.snapshots.read import SnapshotRun  # noqa: PLC0415 - see above

    return SnapshotRun(loaded, run_context, warn=context.log.warning, progress=progress, only=only)


def _chosen(
    context: dg.AssetExecutionContext, loaded: LoadedPipeline, store: StateStore
) -> set[tuple[str, int]]:
    """Return the chunks that were chosen in the UI, and mark them to be read again."""
    if not (context.has_partition_key or context.has_partition_key_range):
        raise NotAllowed(
            f"{loaded.name}: choose the chunks to read again; to begin a snapshot, use "
            "`deltaforge snapshot start`, or the pipeline file"
        )
    chosen = {chunk_of(key) for key in context.partition_keys}
    newest = store.snapshots.read(loaded.name, newest=1)
    if not newest:
        raise NotAllowed(f"{loaded.name}: there is no snapshot")
    store.snapshots.reopen(loaded.name, newest[0].snapshot, chosen)
    return chosen


class SnapshotBeside:
    """Reads the pipeline's requested snapshot in a thread of a live run started by a command.

    Under Dagster's daemon a sensor starts a separate run that reads the snapshot. Here a thread
    does the same, unless such a run is already reading. The live run puts the rows into the
    journal, and must not end before that (`works`).

    Args:
        context: The Dagster context of the live run.
        loaded: The pipeline.
        run_context: Store, journal, Spark sessions and source.

    Attributes:
        error: Why the snapshot could not be read, None if there was no error.
    """

    def __init__(
        self, context: dg.AssetExecutionContext, loaded: LoadedPipeline, run_context: RunContext
    ) -> None:
        self.error: DeltaforgeError | None = None
        self._context = context
        self._loaded = loaded
        self._run_context = run_context
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="snapshot", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether chunks are still being read, or wait for the live run to journal them."""
        if self._thread.is_alive():
            return True
        store, name = self._run_context.store, self._loaded.name
        row = store.pipelines.get(name)
        paused = row is None or row.capture_pause is not None or row.desired_state != "running"
        return not paused and self.error is None and chunks_read(store, name) is not None

    def end(self) -> None:
        """Stop reading further chunks."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _read(self) -> None:
        store, name = self._run_context.store, self._loaded.name
        try:
            row = self._started(store)
            if (
                row is None
                or requested_snapshot(store, self._loaded, row) is None
                or living(store, name)
            ):
                return
            report = self._context.instance.report_runless_asset_event
            shown = ChunksShown(self._context, store, name, report)
            _snapshot_run(
                self._context,
                self._loaded,
                self._run_context,
                lambda progress: self._progress(shown, progress),
            ).execute()
            shown.publish()
        except _Stopped:
            pass
        except DeltaforgeError as error:
            self.error = error
        except Exception as error:
            broke = f"{self._loaded.name}: reading a snapshot failed: {error!r}"
            self.error = DeltaforgeError(broke)
            self.error.__cause__ = error
            logger.exception("reading a snapshot failed")

    def _started(self, store: StateStore) -> PipelineRow | None:
        """Wait until the live run has fixed where the pipeline starts; return the pipeline's row.

        Returns:
            The row; None if the pipeline is not to capture.
        """
        while True:
            row = store.pipelines.get(self._loaded.name)
            if row is not None and row.desired_state != "running":
                return None
            if row is not None and row.start_position is not None:
                return row
            if self._stopped.wait(_LOOK_SECONDS):
                raise _Stopped("the run has ended")

    def _progress(self, shown: ChunksShown, progress: Mapping[str, SnapshotProgress]) -> None:
        if self._stopped.is_set():
            raise _Stopped("the run has ended")
        shown.progress(progress)


class _Stopped(DeltaforgeError):  # noqa: N818 - not an error
    """The live run has ended; another run will continue reading."""


class ChunksShown:
    """Publishes chunks in Dagster: as partitions, with a materialization of each read chunk.

    Args:
        context: The Dagster context of the run.
        store: The state store.
        pipeline: The pipeline.
        emit: Writes a materialization.
    """

    def __init__(
        self, context: dg.AssetExecutionContext, store: StateStore, pipeline: str, emit: Emit
    ) -> None:
        self._context = context
        self._emit = emit
        self._store = store
        self._pipeline = pipeline
        self._life = Life(store, pipeline, context.run.run_id)
        self._life.show()
        self._chunks = 0
        self._read = 0
        self._published_at = float("-inf")
        self._published_readings: set[str] | None = None

    def progress(self, progress: Mapping[str, SnapshotProgress]) -> None:
        """Record the progress of the snapshot, and publish it at most every few seconds."""
        self._life.show()
        chunks = sum(table.chunks for table in progress.values())
        read = sum(table.read + table.complete for table in progress.values())
        if (chunks, read) == (self._chunks, self._read):
            return
        self._chunks, self._read = chunks, read
        if time.monotonic() - self._published_at >= _PUBLISH_SECONDS:
            self.publish()
            rows = sum(table.rows for table in progress.values())
            self._context.log.info("%s of %s chunks read, %s rows", read, chunks, f"{rows:,}")

    def publish(self) -> None:
        """Write the partitions and materializations that Dagster does not have yet."""
        self._published_at = time.monotonic()
        (snapshot,) = self._store.snapshots.read(self._pipeline, newest=1)
        chunks = self._store.snapshots.chunks(self._pipeline, snapshot.snapshot)
        if self._published_readings is None:
            self._published_readings = self._published(snapshot.snapshot)
            names = [chunk.partition for chunk in chunks]
            self._context.instance.add_dynamic_partitions(chunks_name(self._pipeline), names)
        for chunk in chunks:
            reading = _reading(chunk)
            if chunk.read_at is not None and reading not in self._published_readings:
                self._emit(self._materialization(chunk))
                self._published_readings.add(reading)

    def _published(self, snapshot: int) -> set[str]:
        """Return the reads of a snapshot's chunks (`_reading`) that are materialized in Dagster."""
        readings: set[str] = set()
        cursor = None
        while True:
            page = self._context.instance.fetch_materializations(
                snapshot_key(self._pipeline), limit=1000, cursor=cursor
            )
            for record in page.records:
                event = record.asset_materialization
                metadata = {} if event is None else event.metadata
                # Events that users reported manually lack this metadata.
                if _SNAPSHOT in metadata and metadata[_SNAPSHOT].value == snapshot:
                    readings.add(str(metadata[_READING].value))
            if not page.has_more or not readings:
                return readings
            cursor = page.cursor

    def _materialization(self, chunk: ChunkRow) -> dg.AssetMaterialization:
        return dg.AssetMaterialization(
            snapshot_key(self._pipeline),
            partition=chunk.partition,
            description=(
                f"{pluralize(chunk.rows or 0, 'row')} of {chunk.table_name}, "
                f"by snapshot {chunk.snapshot}"
            ),
            metadata={
                "table": chunk.table_name,
                "rows": chunk.rows or 0,
                "bytes": chunk.bytes or 0,
                "seconds": round(chunk.seconds or 0.0, 3),
                "rows_per_second": round((chunk.rows or 0) / max(chunk.seconds or 0.0, 0.001)),
                "position": chunk.position or "",
                "chunks_read": self._read,
                "chunks": self._chunks,
                _SNAPSHOT: chunk.snapshot,
                _READING: _reading(chunk),  # only for this class, so it comes last
            },
        )


def _reading(chunk: ChunkRow) -> str:
    """Return a string that identifies one read of a chunk."""
    return f"{chunk.partition}@{chunk.read_at}"
