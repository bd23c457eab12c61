"""Change the desired state of a pipeline: running, paused (capture nothing more) or stopped.

A live run checks the desired state each time it renews its lease, every few seconds, and the sensor
checks it before it starts a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.control.work import note_pipeline, register
from deltaforge_dagster.state.records import DesiredState
from deltaforge_dagster.state.store import StateStore


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
    before = register(store, loaded).want
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
