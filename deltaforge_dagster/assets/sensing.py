"""The checks of sensing: that it makes progress, and that rows match their tables. Both only warn."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg

from deltaforge_dagster.assets.names import asset_key
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.sensing import is_off
from deltaforge_dagster.pipeline.control.publication import CHANGES
from deltaforge_dagster.state.store import StateStore

DAY = 86_400
"""Drift that was last seen longer ago than this many seconds no longer counts."""

_SHOWN = 20


def sensing_specs(loaded: LoadedPipeline) -> list[dg.AssetCheckSpec]:
    """Return the checks of sensing, none if it is not enabled."""
    if is_off(loaded.spec.spec.schema_sensing):
        return []
    changes = asset_key(loaded.name, CHANGES)
    return [
        dg.AssetCheckSpec(
            "sensing", asset=changes, description="Sensing processes the captured changes."
        ),
        dg.AssetCheckSpec(
            "drift", asset=changes, description="Rows match the declarations of their tables."
        ),
    ]


def sensing_checks(store: StateStore, loaded: LoadedPipeline) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the current results of the checks of sensing."""
    if is_off(loaded.spec.spec.schema_sensing):
        return
    yield _sensing(store, loaded)
    yield _drift(store, loaded)


def _sensing(store: StateStore, loaded: LoadedPipeline) -> dg.AssetCheckEvaluation:
    progress, row = store.sensing.progress(loaded.name), store.pipelines.get(loaded.name)
    reached = 0 if progress is None else progress.segment
    captured = 0 if row is None else row.next_segment - 1
    problem = None if progress is None else progress.problem
    metadata = {
        "segments_behind": max(0, captured - reached),
        "segments_skipped": 0 if progress is None else progress.skipped,
    }
    return _warning(loaded, "sensing", problem, metadata)


def _drift(store: StateStore, loaded: LoadedPipeline) -> dg.AssetCheckEvaluation:
    from deltaforge_dagster.pipeline.sensing.views import recent_drift  # noqa: PLC0415 - takes seconds

    found = recent_drift(store, loaded, store.now() - DAY)
    lines = [f"{column}: {', '.join(kinds)}" for column, kinds in found.items()]
    if len(lines) > _SHOWN:
        more = len(lines) - _SHOWN
        lines = [*lines[:_SHOWN], f"and {more} more; deltaforge sensing drift {loaded.name}"]
    return _warning(loaded, "drift", "\n".join(lines) or None, {"columns": len(found)})


def _warning(
    loaded: LoadedPipeline, name: str, problem: str | None, metadata: dict[str, int]
) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=asset_key(loaded.name, CHANGES),
        check_name=name,
        passed=problem is None,
        severity=dg.AssetCheckSeverity.WARN,
        description=problem,
        metadata=metadata,
    )
