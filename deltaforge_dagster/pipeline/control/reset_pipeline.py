"""Reset or remove a pipeline: its state, and the files of its journal."""

from __future__ import annotations

import sys

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore


def reset_pipeline(store: StateStore, journal: Journal, before: PipelineRow) -> PipelineRow:
    """Delete the journal and all positions of a pipeline: its next run starts as its first one did.

    Raises:
        NotAllowed: A run holds the lease.
    """
    after = store.journals.reset(before.name)
    sweep(journal, before.name, before.uid)
    return after


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
