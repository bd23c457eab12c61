"""Find out whether a pipeline needs a run.

The sensor asks this, with short timeouts and without reading data. A run is started if and only if
nobody holds the lease and one of these is true:

- a range is open, because a run was killed;
- a sink is behind, is not paused, and its back-off has passed;
- dead letters must be delivered again, or no longer wait for anything;
- pending changes of a sink that writes tables are old enough to be folded;
- a table of a sink is to be loaded again, and no snapshot is unfinished;
- segments of the journal have not been sensed, and the last attempt did not fail;
- a hold was released, so that its events can be written to the journal;
- chunks of a snapshot were read and wait to be merged;
- the source needs longer than a moment to make what the pipeline starts with;
- the source has changes after the captured position, and capture is paused neither by a user nor
  because the journal is full.

After a run that captured nothing, the source is not asked for a while, which doubles up to a minute
(`next_probe`), so that an idle pipeline on a busy database costs almost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError, StartDelayed
from deltaforge_dagster.pipeline.blocked_keys import due_entries
from deltaforge_dagster.pipeline.committed import PendingSegments, segments_behind
from deltaforge_dagster.pipeline.control.first_start import first_start
from deltaforge_dagster.pipeline.control.owners import claim
from deltaforge_dagster.pipeline.control.secret_changes import note_secrets
from deltaforge_dagster.pipeline.control.specs import note_spec
from deltaforge_dagster.pipeline.control.unread_log import note_unread_changes
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sources.base import AwaitableStart, Source
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

MAX_PROBE_WAIT = 60.0
"""The longest wait, in seconds, before the source of an idle pipeline is asked again."""

_CHANGED = "the source has changes beyond the captured position"

Reason = Literal[
    "start",
    "range open",
    "sink behind",
    "dead letters",
    "pending changes",
    "resync",
    "hold released",
    "chunks read",
    "sensing",
    "changes",
]


@dataclass(frozen=True, slots=True)
class Work:
    """Why a run should start: a short reason for tags, and a sentence for users."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class NoWork:
    """Why no run is needed now.

    Attributes:
        detail: The reason, as a sentence for users.
        after: The position after which the source has nothing, if that is the only reason.
    """

    detail: str
    after: Position | None = None


def register(store: StateStore, loaded: LoadedPipeline) -> PipelineRow:
    """Make the pipeline known to the store (`note_pipeline`), and return its row.

    Also claims what the pipeline cannot share with others.

    Raises:
        SpecError: Another pipeline owns some of that.
    """
    row = note_pipeline(store, loaded)
    claim(store, loaded)
    return row


def note_pipeline(store: StateStore, loaded: LoadedPipeline) -> PipelineRow:
    """Make the pipeline, and the checkpoints of its sinks, known to the store.

    Logs where an added sink begins, and which sinks were removed.
    """
    configs = [sink.config for sink in loaded.spec.spec.sinks]
    before = store.checkpoints.read(loaded.name)
    starts = {config.id: config.start for config in configs if config.start is not None}
    row = store.pipelines.register(
        loaded.name,
        loaded.hash,
        [config.id for config in configs],
        starts,
        stored=loaded.is_stored,
    )
    note_spec(store, loaded)
    if changed := note_secrets(store, loaded):
        logger.info("%s: other secrets than before: %s", loaded.name, ", ".join(changed))
        store.pipelines.try_again(loaded.name)
        row = replace(row, probe_after=0.0)
    file = None if loaded.path is None else str(loaded.path.absolute())
    if row.file != file:
        store.pipelines.note_file(loaded.name, file)
        row = replace(row, file=file)
    after = store.checkpoints.read(loaded.name)
    for sink in after.keys() - before.keys():
        if after[sink].began is not None:
            logger.warning("%s: sink %s: %s", loaded.name, sink, after[sink].began)
    for sink in before.keys() - after.keys():
        logger.warning("%s: sink %s is gone, and its checkpoint with it", loaded.name, sink)
    return row


def ensure_start(
    store: StateStore,
    loaded: LoadedPipeline,
    pipeline: PipelineRow,
    source: Source,
    waits: Callable[[str], None] | None = None,
) -> PipelineRow:
    """Fix where the pipeline starts, once: everything committed afterwards is captured.

    The first of several callers wins; the others get its position.

    Args:
        store: The state store.
        loaded: The pipeline file.
        pipeline: The pipeline's row.
        source: Its source.
        waits: If the caller has time to wait: what is called while the source waits
            (`AwaitableStart`).

    Raises:
        StartDelayed: The source has to wait, and the caller does not.
    """
    if pipeline.start_position is not None:
        return pipeline
    first = first_start(store, loaded)
    if waits is not None and isinstance(source, AwaitableStart):
        start = source.await_start(first.at, waits=waits)
    else:
        start = source.ensure_start(first.at)
    return store.pipelines.set_start(
        pipeline.name,
        start.to_json(),
        source.definitions(start),
        has=first.has,
        source_id=loaded.spec.spec.source.config.id,
    )


def begin(
    store: StateStore, loaded: LoadedPipeline, build_source: Callable[[], Source]
) -> PipelineRow:
    """Register a pipeline and, if it is to capture, fix where it starts; return its row.

    Raises:
        DeltaforgeError: The source cannot be reached, or is not set up as required.
    """
    row = register(store, loaded)
    if row.start_position is not None or row.desired_state != "running":
        return row
    source = build_source()
    try:
        return ensure_start(store, loaded, row, source)
    finally:
        source.close()


def find_work(
    store: StateStore,
    loaded: LoadedPipeline,
    build_source: Callable[[], Source],
    problem: DeltaforgeError | None = None,
    *,
    changed: bool = False,
) -> Work | NoWork:
    """Return whether a run should start now; fixes the start position when it is not yet fixed.

    Args:
        store: The state store.
        loaded: The pipeline.
        build_source: Makes its source; called only if the source has to be asked.
        problem: Why the source cannot be used now, if a check has found that; raised if there is no
            other work.
        changed: The source was just seen to have changes; it is not asked again.

    Raises:
        DeltaforgeError: The source cannot be used and there is no other work, or the store is
            unavailable.
    """
    pipeline = register(store, loaded)
    now = store.now()
    lease = store.leases.get(loaded.name)
    if lease is not None and lease.run_id is not None and lease.active_at(now):
        return NoWork(f"run {lease.run_id[:8]} is working on it")
    if pipeline.desired_state == "stopped":
        return NoWork("stopped")
    work = (
        _left_open(store, loaded.name)
        or _behind(store, pipeline, now)
        or _redriven(store, pipeline, now)
        or _folded(store, loaded, now)
        or _resync(store, pipeline, now)
        or _unsensed(store, loaded)
    )
    if work is not None:
        return work
    paused = _paused(store, pipeline)
    if paused is not None:
        return NoWork(f"capture is paused{paused}")
    work = _released(store, loaded) or chunks_read(store, loaded.name)
    if work is None and problem is not None:
        raise problem
    if work is None and changed:
        return Work("changes", _CHANGED)
    return work or _probe(store, loaded, pipeline, now, build_source)


def _probe(
    store: StateStore,
    loaded: LoadedPipeline,
    pipeline: PipelineRow,
    now: float,
    build_source: Callable[[], Source],
) -> Work | NoWork:
    if pipeline.start_position is not None and now < pipeline.probe_after:
        return NoWork(f"nothing new lately, asking again in {pipeline.probe_after - now:.0f} s")
    source = build_source()
    try:
        return _query(store, loaded, pipeline, source)
    finally:
        source.close()


def _query(
    store: StateStore, loaded: LoadedPipeline, pipeline: PipelineRow, source: Source
) -> Work | NoWork:
    if pipeline.start_position is None:
        try:
            ensure_start(store, loaded, pipeline, source)
        except StartDelayed as delayed:  # a run has the time to wait
            return Work("start", str(delayed))
        return NoWork("start position fixed")
    after = parse_position(pipeline.captured_position or pipeline.start_position)
    unread = source.has_changes(after)
    note_unread_changes(store, loaded.name, unread=unread)
    if unread:
        return Work("changes", _CHANGED)
    return NoWork("no changes in the source, every sink has what was captured", after)


def next_probe(store: StateStore, pipeline: str, *, captured: bool) -> None:
    """After a run, decide when the source is asked next: at once, or later after an empty run."""
    if captured:
        store.pipelines.set_probe(pipeline, after=0.0, wait=0.0)
        return
    row = store.pipelines.get(pipeline)
    assert row is not None
    # 5 s is the default interval of ticks: a shorter wait would not delay a question.
    wait = min(max(5.0, row.probe_wait * 2), MAX_PROBE_WAIT)
    store.pipelines.set_probe(pipeline, after=store.now() + wait, wait=wait)


def _left_open(store: StateStore, pipeline: str) -> Work | None:
    for row in store.ranges.read(pipeline, state="open", limit=1):
        return Work("range open", f"range {row.range} was left open by a run that died")
    return None


def _released(store: StateStore, loaded: LoadedPipeline) -> Work | None:
    asks = loaded.spec.spec.engine.schemas.pauses
    for hold in store.holds.read(loaded.name):
        # If forms need no approval any more, a run approves what still waits.
        if hold.state == "released" or (hold.state == "held" and hold.kind == SCHEMA and not asks):
            return Work("hold released", f"what is held of {hold.kind} {hold.subject} was released")
    return None


def chunks_read(store: StateStore, pipeline: str) -> Work | None:
    """Return work if chunks of a snapshot wait to be merged.

    Chunks of tables with a hold do not count.
    """
    snapshot = store.snapshots.unfinished(pipeline)
    if snapshot is None:
        return None
    # Chunks of a table with a hold wait until the hold is journaled.
    on_hold = {hold.subject for hold in store.holds.read(pipeline) if hold.state != "journaled"}
    read = store.snapshots.chunks(pipeline, snapshot.snapshot, state="read")
    if all(chunk.table_name in on_hold for chunk in read):
        return None
    return Work("chunks read", f"chunks of snapshot {snapshot.snapshot} are to be taken over")


def _behind(store: StateStore, pipeline: PipelineRow, now: float) -> Work | None:
    for checkpoint, behind in _lacking(store, pipeline):
        if checkpoint.next_attempt_at <= now and not checkpoint.paused:
            lacks = f"sink {checkpoint.sink} lacks {behind} of the journal's segments"
            return Work("sink behind", lacks)
    return None


def _redriven(store: StateStore, pipeline: PipelineRow, now: float) -> Work | None:
    for checkpoint in store.checkpoints.read(pipeline.name).values():
        entries, dead, _ = store.dead_letters.state(pipeline.name, checkpoint.sink)
        if entries == dead or checkpoint.state != "attached" or checkpoint.next_attempt_at > now:
            continue
        letters = store.dead_letters.places(pipeline.name, checkpoint.sink)
        if due := len(due_entries(letters, (checkpoint.segment, checkpoint.ordinal))):
            detail = f"{due} dead letters of sink {checkpoint.sink} are to be delivered again"
            return Work("dead letters", detail)
    return None


def _folded(store: StateStore, loaded: LoadedPipeline, now: float) -> Work | None:
    sinks = {
        sink.config.id: sink.config.pending_changes
        for sink in loaded.spec.spec.sinks
        if isinstance(sink.config, TableSinkConfig)
    }
    tables = store.table_commits.pending(loaded.name) if sinks else []
    checkpoints = store.checkpoints.read(loaded.name) if tables else {}
    for table in tables:
        pending, checkpoint = sinks.get(table.sink), checkpoints.get(table.sink)
        if checkpoint is None or checkpoint.state != "attached" or checkpoint.paused:
            continue
        due = pending is None or pending.due(table.changes, now - table.since)
        if due and table.changes and checkpoint.next_attempt_at <= now:
            name = ".".join(table.destination)
            detail = f"pending changes of table {name} of sink {table.sink} are to be folded"
            return Work("pending changes", detail)
    return None


def _resync(store: StateStore, pipeline: PipelineRow, now: float) -> Work | None:
    for resync in store.table_commits.resyncs(pipeline.name):
        sink = store.checkpoints.read(pipeline.name).get(resync.sink)
        if sink is None or sink.state != "attached" or sink.next_attempt_at > now:
            continue
        if resync.begun or store.snapshots.unfinished(pipeline.name) is None:
            return Work(
                "resync", f"{resync.table_name} is to be loaded again into sink {resync.sink}"
            )
    return None


def _unsensed(store: StateStore, loaded: LoadedPipeline) -> Work | None:
    progress = store.sensing.progress(loaded.name)
    if progress is not None and progress.problem is not None:
        return None  # what fails is tried again by the next run that has other work
    behind = sensing_behind(store, loaded)
    if behind == 0:
        return None
    return Work("sensing", f"sensing lacks {behind} of the journal's segments")


def sensing_behind(store: StateStore, loaded: LoadedPipeline) -> int:
    """Return how many segments of the journal are ready to be sensed and are not.

    Returns 0 without sensing.
    """
    options = loaded.spec.spec.schema_sensing
    progress = store.sensing.progress(loaded.name) if options and options.enabled else None
    if progress is None:
        return 0
    chained = bool(loaded.spec.spec.processors)
    segments = PendingSegments(store, loaded.name, chained=chained)
    return len(segments.segments(first=progress.segment + 1))


def _paused(store: StateStore, pipeline: PipelineRow) -> str | None:
    """Return why nothing is captured now, None when it is."""
    if pipeline.desired_state == "paused":
        return ", every sink has what was captured"
    if pipeline.capture_pause is not None and _lacking(store, pipeline):
        return f": {pipeline.capture_pause}"
    return None


def _lacking(store: StateStore, pipeline: PipelineRow) -> list[tuple[CheckpointRow, int]]:
    """Return the checkpoints of sinks that are behind, and by how many segments."""
    rows = store.checkpoints.read(pipeline.name).values()
    return [
        (checkpoint, behind)
        for checkpoint in rows
        if (behind := segments_behind(pipeline, checkpoint))
    ]
