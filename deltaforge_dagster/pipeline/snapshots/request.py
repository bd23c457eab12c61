"""Which snapshot to request for a pipeline, and which runs that read one are alive.

The pipeline file asks for a snapshot with `snapshot.mode` of its source. `initial` requests one
snapshot once the pipeline has a start position, unless it took over from DeltaForge or another
reader, which has already delivered the existing rows. `always` requests one for each version of the
file. Neither requests a cancelled snapshot again.

A sink that is added with `start: snapshot` gets a snapshot of its own, unless one for all sinks was
requested in the meantime.

Runs that read a snapshot have heartbeats: they hold no lease that would expire when they die.
"""

from __future__ import annotations

import time

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.control.first_start import first_start
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.snapshot_records import RECOVERY, SnapshotRow
from deltaforge_dagster.state.store import StateStore

_NAMESPACE = "snapshot-runs"
_EVERY_SECONDS = 20.0
_LIFE_SECONDS = 120.0  # a minute between two calls of `show`, and as much for a busy store


def requested_snapshot(
    store: StateStore, loaded: LoadedPipeline, pipeline: PipelineRow
) -> SnapshotRow | None:
    """Return the unfinished snapshot; request one first if the file asks for it.

    Args:
        store: Where snapshots are.
        loaded: The pipeline file.
        pipeline: The pipeline, registered with that file.
    """
    newest = store.snapshots.read(loaded.name)
    if newest and newest[0].state in ("wanted", "reading"):
        return newest[0]
    if pipeline.start_position is None:
        return None
    block = loaded.spec.spec.source.config.snapshot
    if block is not None and _source_asks(store, loaded, newest):
        return store.snapshots.request(loaded.name, cause=block.mode)
    sinks = _sinks_that_ask(store, loaded)
    return store.snapshots.request(loaded.name, cause="sink", sinks=sinks) if sinks else None


def is_snapshot_expected(store: StateStore | None, loaded: LoadedPipeline) -> bool:
    """Return whether a snapshot is unfinished or will be requested; requests none itself.

    Args:
        store: Where snapshots are; None when nothing has run yet.
        loaded: The pipeline file.
    """
    snapshots = [] if store is None else store.snapshots.read(loaded.name)
    if snapshots and snapshots[0].state in ("wanted", "reading"):
        return True
    return _source_asks(store, loaded, snapshots) or (
        store is not None and bool(_sinks_that_ask(store, loaded))
    )


class Life:
    """Writes the heartbeat of a run, at most every 20 seconds.

    Args:
        store: Where the heartbeat is written; it expires there after two minutes.
        pipeline: Name of the pipeline.
        run_id: Id of the run.
    """

    def __init__(self, store: StateStore, pipeline: str, run_id: str) -> None:
        self._kv = Kv(store.database, _NAMESPACE)
        self._key = f"{pipeline}/{run_id}"
        self._shown_at = float("-inf")

    def show(self) -> None:
        """Write the heartbeat if it is due; call this at least every minute."""
        if time.monotonic() - self._shown_at >= _EVERY_SECONDS:
            self._kv.put(self._key, b"", ttl=_LIFE_SECONDS)
            self._shown_at = time.monotonic()


def living(store: StateStore, pipeline: str) -> list[str]:
    """Return the ids of the runs whose heartbeat has not expired."""
    shown = Kv(store.database, _NAMESPACE).items(f"{pipeline}/")
    return [key.removeprefix(f"{pipeline}/") for key in shown]


def is_alive(store: StateStore, pipeline: str, run_id: str) -> bool:
    """Return whether a run's heartbeat has not expired."""
    return Kv(store.database, _NAMESPACE).get(f"{pipeline}/{run_id}") is not None


def _sinks_that_ask(store: StateStore, loaded: LoadedPipeline) -> list[str]:
    """Return the sinks that start with a snapshot and have none yet."""
    checkpoints = store.checkpoints.read(loaded.name)
    asking = [
        block.config.id for block in loaded.spec.spec.sinks if block.config.start == "snapshot"
    ]
    return [sink for sink in asking if sink in checkpoints and checkpoints[sink].snapshot_due]


def _source_asks(
    store: StateStore | None, loaded: LoadedPipeline, snapshots: list[SnapshotRow]
) -> bool:
    block = loaded.spec.spec.source.config.snapshot
    if block is None or block.mode == "never":
        return False
    by_file = [
        snapshot for snapshot in snapshots if snapshot.cause in ("initial", "always", RECOVERY)
    ]
    if block.mode == "initial":
        return not by_file and first_start(store, loaded).at is None
    return all(snapshot.spec_hash != loaded.hash for snapshot in by_file)
