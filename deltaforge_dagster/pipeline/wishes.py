"""What people ask of a pipeline: to go on, to capture nothing more, or to do nothing at all.

A live run looks at the wish whenever it renews its lease, some seconds at most, and the sensor
before it starts another.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.pipeline.work import register
from deltaforge_dagster.state.records import Want
from deltaforge_dagster.state.store import StateStore


@dataclass(frozen=True, slots=True)
class GoneOn:
    """What `go_on` found and did.

    Attributes:
        before: What the pipeline was to do until then.
        snapshot: It begins with a snapshot.
    """

    before: Want
    snapshot: bool


def go_on(store: StateStore, loaded: LoadedPipeline) -> GoneOn:
    """Let a paused or stopped pipeline go on after what was captured and delivered.

    With `snapshot.mode: always` in its file it begins with a snapshot.
    """
    name = loaded.name
    before = register(store, loaded).want
    block = loaded.spec.spec.source.config.snapshot
    begins = before != "running" and block is not None and block.mode == "always"
    if begins and store.unfinished_snapshot(name) is None:
        store.want_snapshot(name, cause="always")
    store.set_want(name, "running")
    return GoneOn(before, begins)


def end(store: StateStore, loaded: LoadedPipeline, want: Want) -> None:
    """Pause or stop a pipeline, also one that has never run."""
    register(store, loaded)
    store.set_want(loaded.name, want)
