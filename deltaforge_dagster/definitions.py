"""The Dagster definitions, composed from the pipelines in files and in the state store.

`workspace.yaml` names this module. Environment variables say where the pipeline files and the rest
of the installation are (`config.settings`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from deltaforge_dagster.assets.lake_tables import known_tables, lake_table_specs
from deltaforge_dagster.assets.maintenance import (
    build_maintenance_asset,
    build_maintenance_job,
    build_maintenance_schedule,
    maintained_sinks,
)
from deltaforge_dagster.assets.names import SharedNames
from deltaforge_dagster.assets.pipeline import (
    build_health_asset,
    build_health_check,
    build_pipeline_asset,
    build_pipeline_job,
    build_snapshot_asset,
    build_snapshot_job,
)
from deltaforge_dagster.assets.reconcile import build_reconcile_checks, build_reconcile_job
from deltaforge_dagster.assets.resync import build_resync_job
from deltaforge_dagster.assets.schemas import build_schemas_asset
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, PipelineFiles
from deltaforge_dagster.pipeline.control.specs import FormerPipeline
from deltaforge_dagster.resources.platform import (
    Platform,
    former_pipelines,
    installed_pipelines,
)
from deltaforge_dagster.sensors.every_tick import TickCache
from deltaforge_dagster.sensors.files import build_files_sensor
from deltaforge_dagster.sensors.live import (
    build_reconcile_schedule,
    build_retention,
    build_schedule,
    build_sensor,
    build_snapshot_sensor,
)
from deltaforge_dagster.sensors.watch_room import WatchRoom

if TYPE_CHECKING:
    from deltaforge_dagster.state.store import StateStore


def build_definitions(
    settings: Settings,
    pipelines: Sequence[AnyPipeline] | None = None,
    *,
    single_process: bool = False,
) -> dg.Definitions:
    """Return the definitions of an installation of its own.

    Args:
        settings: The settings of the installation.
        pipelines: The pipelines; by default all that are installed.
        single_process: Whether only this process uses the state store.
    """
    if pipelines is None:
        pipelines = installed_pipelines(settings)
    composed = compose(
        pipelines,
        Platform(settings, single_process=single_process),
        PipelineFiles(settings).installed,
        SharedNames(),
        WatchRoom(),
    )
    return dg.Definitions.merge(composed, dg.Definitions(executor=dg.in_process_executor))


def compose(
    pipelines: Sequence[AnyPipeline],
    platform: Platform,
    installed_now: Callable[[StateStore], Sequence[AnyPipeline]],
    names: SharedNames,
    room: WatchRoom,
) -> dg.Definitions:
    """Return the definitions of pipelines, which may be merged with any others.

    A pipeline whose file is invalid is shown as an asset with a failing check. If it has run
    before, it keeps its other assets and its jobs, so that starting one reports why it cannot run.

    Args:
        pipelines: The pipelines.
        platform: Opens the installation.
        installed_now: Returns which pipelines there are when it is asked.
        names: The names of what the pipelines share.
        room: What the pipelines of this code server share to watch their sources.
    """
    valid = [pipeline for pipeline in pipelines if isinstance(pipeline, LoadedPipeline)]
    former = former_pipelines(platform.settings, pipelines)
    shown: list[LoadedPipeline | FormerPipeline] = [*valid, *former]
    runnable = [*valid, *(broken.loaded for broken in former)]
    tables = known_tables(platform.settings, runnable)
    cache = TickCache(platform)
    room.admit(sum(pipeline.spec.spec.engine.dagster.schedule is None for pipeline in valid))
    jobs: list[dg.JobDefinition | UnresolvedAssetJobDefinition] = []
    sensors, schedules = [], []
    checks: list[dg.AssetsDefinition] = [
        build_health_check(pipeline, platform) for pipeline in pipelines
    ]
    for pipeline in valid:
        own = [build_pipeline_job(pipeline), build_snapshot_job(pipeline)]
        jobs += own
        cron = pipeline.spec.spec.engine.dagster.schedule
        if cron is None:
            sensors.append(build_sensor(pipeline, own, cache, room))
        else:
            sensors.append(build_snapshot_sensor(pipeline, cache))
            schedules.append(build_schedule(pipeline, cron, cache))
        for sink, options in maintained_sinks(pipeline).items():
            job = build_maintenance_job(pipeline, sink)
            jobs.append(job)
            schedules.append(build_maintenance_schedule(job, options))
        if own_tables := tables.get(pipeline.name, ()):
            job = build_reconcile_job(pipeline, own_tables)
            jobs += [job, build_resync_job(pipeline, platform)]
            checks.append(build_reconcile_checks(pipeline, own_tables, platform))
            if pipeline.spec.spec.engine.reconcile.every is not None:
                schedules.append(build_reconcile_schedule(pipeline, job, own_tables, cache))
    for broken in former:
        jobs += [build_pipeline_job(broken.loaded), build_snapshot_job(broken.loaded)]
    if alerting := [pipeline for pipeline in valid if pipeline.spec.spec.engine.alerts]:
        # Imported only for alerts, because it has an HTTP client.
        from deltaforge_dagster.sensors.alerts import build_alerts_sensor  # noqa: PLC0415

        sensors.append(build_alerts_sensor(alerting, tables, cache, names.alerts))
    sensors.append(build_files_sensor(names.files, pipelines, installed_now, tables, cache))
    retention, hourly = build_retention(valid, platform, names)
    return dg.Definitions(
        assets=[
            *(build_pipeline_asset(pipeline, platform) for pipeline in shown),
            *(build_snapshot_asset(pipeline, platform) for pipeline in shown),
            *(build_schemas_asset(pipeline, platform) for pipeline in runnable),
            *(
                spec
                for pipeline in runnable
                for spec in lake_table_specs(pipeline, tables.get(pipeline.name, ()))
            ),
            *(
                build_maintenance_asset(pipeline, sink, platform)
                for pipeline in valid
                for sink in maintained_sinks(pipeline)
            ),
            *(build_health_asset(pipeline) for pipeline in pipelines),
        ],
        asset_checks=checks,
        jobs=[*jobs, retention],
        sensors=sensors,
        schedules=[*schedules, hourly],
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Load the definitions of this installation, in a code server or a run's process."""
    definitions = build_definitions(Settings.from_env())
    # The 200,000 objects of imported modules are never garbage. A collection that visits them takes
    # a tenth of a second, during which every thread of a run stands still.
    gc.freeze()
    return definitions
