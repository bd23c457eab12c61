"""Letting a pipeline begin as a new one, and removing it: its state, and the files of its journal."""

from __future__ import annotations

import sys

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.state.records import PipelineRow
from deltaforge_dagster.state.store import StateStore


def begin_anew(store: StateStore, journal: Journal, before: PipelineRow) -> PipelineRow:
    """Forget journal and positions of a pipeline, so that its next run begins by the rules of its file.

    Raises:
        NotAllowed: A run holds the lease.
    """
    after = store.reset_all(before.name)
    _sweep(journal, before.name, before.uid)
    return after


def remove(store: StateStore, journal: Journal, name: str) -> None:
    """Remove a pipeline that the store keeps, with all that is known of it and its journal.

    Raises:
        NotAllowed: A run holds the lease.
    """
    uid = store.remove_pipeline(name)
    if uid is not None:
        _sweep(journal, name, uid)
        journal.sweep_staged(name, (), older_than=-1.0)
        journal.sweep_held(name, (), epoch=sys.maxsize, older_than=-1.0)


def _sweep(journal: Journal, name: str, uid: str) -> None:
    """Remove all that is left in a journal's folder, also what killed runs left there."""
    journal.sweep(name, uid, (), epoch=sys.maxsize, older_than=-1.0)
