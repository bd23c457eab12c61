"""What starts the live runs of a pipeline: its sensor, or the schedule that takes its place."""

import dagster as dg

from deltaforge_dagster.assets.names import dagster_name, job_name
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sensors.current import REMOVED, current
from deltaforge_dagster.sensors.tick import tick


def build_sensor(loaded: LoadedPipeline) -> dg.SensorDefinition:
    """Return the sensor of a pipeline; it runs unless someone turns it off."""

    @dg.sensor(
        name=f"{dagster_name(loaded.name)}_work",
        job_name=job_name(loaded.name),
        minimum_interval_seconds=int(loaded.spec.spec.engine.dagster.sensor_interval_seconds),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Starts a run of {loaded.name} when there is something to do.",
    )
    def work(
        context: dg.SensorEvaluationContext, platform: dg.ResourceParam[Platform]
    ) -> dg.RunRequest | dg.SkipReason:
        return _look(context.instance, platform, loaded)

    return work


def build_schedule(loaded: LoadedPipeline, cron: str) -> dg.ScheduleDefinition:
    """Return the schedule of a pipeline: looks for work when it is due, instead of a sensor."""

    @dg.schedule(
        name=f"{dagster_name(loaded.name)}_schedule",
        job_name=job_name(loaded.name),
        cron_schedule=cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Starts a run of {loaded.name} on time, when there is something to do.",
    )
    def due(
        context: dg.ScheduleEvaluationContext, platform: dg.ResourceParam[Platform]
    ) -> dg.RunRequest | dg.SkipReason:
        return _look(context.instance, platform, loaded)

    return due


def _look(
    instance: dg.DagsterInstance, platform: Platform, loaded: LoadedPipeline
) -> dg.RunRequest | dg.SkipReason:
    with platform.open() as opened:
        now = current(opened.store, loaded)
        if now is None:
            return dg.SkipReason(REMOVED)
        return tick(instance, opened.store, now, opened.source_builder(now), opened.journal)
