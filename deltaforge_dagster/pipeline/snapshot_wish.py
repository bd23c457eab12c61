"""Whether the pipeline file asks for a snapshot now: `snapshot.mode` of its source.

`initial` asks once, when the pipeline has begun, unless it began where DeltaForge or another reader stood:
then whoever read before has brought what was there. `always` asks once for every version of the file.
A new run of the pipeline asks for nothing. What was cancelled is not asked for again.

A sink that was added with `start: snapshot` asks for one of its own, unless one for all sinks was
wanted since.
"""

from __future__ import annotations

from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.pipeline.first_start import first_start
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.snapshot_records import SnapshotRow
from deltaforge_dagster.state.store import StateStore


def wish(store: StateStore, loaded: LoadedPipeline, pipeline: PipelineRow) -> SnapshotRow | None:
    """Return the snapshot that is not finished, wanting one if the file asks for it.

    Args:
        store: Where snapshots are.
        loaded: The pipeline file.
        pipeline: The pipeline, registered with that file.
    """
    newest = store.snapshots(loaded.name)
    if newest and newest[0].state in ("wanted", "reading"):
        return newest[0]
    if pipeline.start_position is None:
        return None
    block = loaded.spec.spec.source.config.snapshot
    if block is not None and _asks(store, loaded, newest):
        return store.want_snapshot(loaded.name, cause=block.mode)
    sinks = _sinks_that_ask(store, loaded)
    return store.want_snapshot(loaded.name, cause="sink", sinks=sinks) if sinks else None


def is_to_come(store: StateStore | None, loaded: LoadedPipeline) -> bool:
    """Say whether a snapshot is unfinished, or will be asked for; wants none.

    Args:
        store: Where snapshots are; None when nothing has run yet.
        loaded: The pipeline file.
    """
    made = [] if store is None else store.snapshots(loaded.name)
    if made and made[0].state in ("wanted", "reading"):
        return True
    return _asks(store, loaded, made) or (
        store is not None and bool(_sinks_that_ask(store, loaded))
    )


def _sinks_that_ask(store: StateStore, loaded: LoadedPipeline) -> list[str]:
    """Return the sinks that are to begin with a snapshot, and have none so far."""
    known = store.checkpoints(loaded.name)
    asking = [one.config.id for one in loaded.spec.spec.sinks if one.config.start == "snapshot"]
    return [one for one in asking if one in known and known[one].snapshot_due]


def _asks(store: StateStore | None, loaded: LoadedPipeline, made: list[SnapshotRow]) -> bool:
    block = loaded.spec.spec.source.config.snapshot
    if block is None or block.mode == "never":
        return False
    by_file = [one for one in made if one.cause in ("initial", "always")]
    if block.mode == "initial":
        return not by_file and first_start(store, loaded).at is None
    return all(one.spec_hash != loaded.hash for one in by_file)
