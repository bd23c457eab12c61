"""What users request of a pipeline: to run, pause or stop, to be reset, to be removed.

The desired state is running, paused (capture nothing more) or stopped. A live run checks it each
time it renews its lease, every few seconds, and the sensor checks it before it starts a run. A
reset deletes the pipeline's state and the files of its journal.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.work import note_pipeline, register
from deltaforge_dagster.state.records import DesiredState, PipelineRow
from deltaforge_dagster.state.store import StateStore

_END_SECONDS = 45.0  # more than the 30 s within which a run ends


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `resume_pipeline` did.

    Attributes:
        before: The desired state until then.
        snapshot: Whether a snapshot was requested.
    """

    before: DesiredState
    snapshot: bool


def resume_pipeline(store: StateStore, loaded: LoadedPipeline) -> Resumed:
    """Resume a paused or stopped pipeline where it left off.

    With `snapshot.mode: always` in its file, a snapshot is requested first.
    """
    name = loaded.name
    before = register(store, loaded).desired_state
    block = loaded.spec.spec.source.config.snapshot
    begins = before != "running" and block is not None and block.mode == "always"
    if begins and store.snapshots.unfinished(name) is None:
        store.snapshots.request(name, cause="always")
    store.pipelines.set_desired_state(name, "running")
    return Resumed(before, begins)


def request_end(store: StateStore, loaded: LoadedPipeline, state: DesiredState) -> None:
    """Pause or stop a pipeline, even one that has never run."""
    note_pipeline(store, loaded)
    store.pipelines.set_desired_state(loaded.name, state)


def reset_pipeline(store: StateStore, journal: Journal, before: PipelineRow) -> PipelineRow:
    """Delete the journal and all positions of a pipeline: its next run starts as its first one did.

    Raises:
        NotAllowed: A run holds the lease.
    """
    after = store.journals.reset(before.name)
    sweep(journal, before.name, before.uid)
    return after


def end_run(store: StateStore, name: str, seconds: float = _END_SECONDS) -> None:
    """Stop a pipeline, and wait until no run holds it; a run ends within 30 s.

    Raises:
        NotAllowed: A run has not ended after `seconds`. The pipeline stays stopped.
    """
    if store.pipelines.get(name) is not None:
        store.pipelines.set_desired_state(name, "stopped")
    deadline = time.monotonic() + seconds
    while (lease := store.leases.get(name)) is not None and lease.active_at(store.now()):
        if time.monotonic() >= deadline:
            raise NotAllowed(
                f"pipeline {name!r} is held by run {lease.run_id}, which does not end;"
                " it is asked to stop, so end it or try again later"
            )
        time.sleep(0.5)


def remove(store: StateStore, journal: Journal, name: str) -> None:
    """Remove a pipeline from the state store, with everything known about it, and its journal.

    Raises:
        NotAllowed: A run holds the lease.
    """
    uid = store.pipelines.remove(name)
    if uid is not None:
        sweep(journal, name, uid)
        journal.sweep_staged(name, (), older_than=-1.0)
        journal.sweep_parked(name, (), epoch=sys.maxsize, older_than=-1.0)


def sweep(journal: Journal, name: str, uid: str) -> None:
    """Delete every file of a journal, including those that killed runs left behind."""
    journal.sweep(name, uid, (), epoch=sys.maxsize, older_than=-1.0)
