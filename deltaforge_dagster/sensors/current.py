"""A pipeline as it is now: definitions are as old as the code location."""

from __future__ import annotations

from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.pipeline.catalog import reread
from deltaforge_dagster.state.store import StateStore

REMOVED = "the pipeline was removed; reload the code location"
"""Why a sensor does nothing for a pipeline that is gone."""


def current(store: StateStore, loaded: LoadedPipeline) -> LoadedPipeline | None:
    """Return a pipeline as its file or document is now; None when that is gone.

    A broken one shows by its own failing check, and is taken as it was.
    """
    found = reread(store, loaded)
    return found if found is None or isinstance(found, LoadedPipeline) else loaded
