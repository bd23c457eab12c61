"""The current version of a pipeline; definitions are only as new as the loaded code location."""

from __future__ import annotations

import dagster as dg

from deltaforge_dagster.assets.checks import source_evaluation
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.catalog import reread
from deltaforge_dagster.pipeline.health.health import health, note_broken
from deltaforge_dagster.sensors.every_tick import NOT_WELL
from deltaforge_dagster.sensors.report import report_change, report_health
from deltaforge_dagster.state.store import StateStore


def current(
    instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline
) -> LoadedPipeline | dg.SkipReason:
    """Return a pipeline as its file or document is now, or why no run can be started.

    Problems of the file are reported in the check `source` of the pipeline's `changes`.
    """
    pipeline = reread(store, loaded)
    if pipeline is None:
        note_broken(store, loaded.name)
        return dg.SkipReason("the pipeline was removed; reload the code location")
    if isinstance(pipeline, BrokenPipeline):
        note_broken(store, pipeline.name)
        state = health(store, pipeline)
        report_change(instance, source_evaluation(loaded.name, state.uncaptured))
        report_health(instance, store, loaded.name, state)
        return dg.SkipReason(f"{NOT_WELL}file: {pipeline.error}")
    return pipeline


def is_outdated(settings: Settings, loaded: LoadedPipeline, current: LoadedPipeline) -> bool:
    """Return whether definitions are older than the file and only a user's request reloads them."""
    return settings.dagster_url is None and loaded.hash != current.hash
