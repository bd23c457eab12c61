"""Reset or remove a pipeline: its state, and the files of its journal."""

from __future__ import annotations

import sys
import time

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore

_END_SECONDS = 45.0


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
    while (lease := store.leases.get(name)) is not None and lease.held_at(store.now()):
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
        journal.sweep_held(name, (), epoch=sys.maxsize, older_than=-1.0)


def sweep(journal: Journal, name: str, uid: str) -> None:
    """Delete every file of a journal, including those that killed runs left behind."""
    journal.sweep(name, uid, (), epoch=sys.maxsize, older_than=-1.0)
