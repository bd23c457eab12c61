"""What Dagster loads to start a pipeline's runs and to delete old data: sensors and schedules.

A pipeline has a sensor, or a schedule and a separate sensor for snapshots. What they do is imported
with their first tick, because every load of a code location pays for what definitions import, and
once the installation is open, which says what is not installed.
"""

from collections.abc import Sequence

import dagster as dg

from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import SharedNames, dagster_name, job_name, snapshot_job_name
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sensors.every_tick import (
    NOT_WELL,
    TickCache,
    interval_seconds,
    is_outdated,
    red,
)
from deltaforge_dagster.sensors.watch_room import ROUND_SECONDS, WatchRoom


def build_sensor(
    loaded: LoadedPipeline,
    jobs: Sequence[UnresolvedAssetJobDefinition],
    cache: TickCache,
    room: WatchRoom,
) -> dg.SensorDefinition:
    """Return the sensor of a pipeline, which is on by default.

    It starts both live runs and snapshot runs: a tick itself costs Dagster's daemon more than the
    work in it, so one sensor is cheaper than two.

    Args:
        loaded: The pipeline.
        jobs: The job of its live runs, and the job that reads its snapshots.
        cache: The resources that ticks share.
        room: Limits how many ticks watch their sources. Ticks of a pipeline whose interval is
            longer than a round of the daemon do not watch: its file asks for fewer looks at the
            source.
    """
    interval = loaded.spec.spec.engine.dagster.sensor_interval_seconds
    own_room = room if interval <= ROUND_SECONDS else None

    @dg.sensor(
        name=f"{dagster_name(loaded.name)}_work",
        jobs=jobs,
        minimum_interval_seconds=interval_seconds(loaded),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Starts runs of {loaded.name} when there is work.",
    )
    def work(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        answers: list[dg.RunRequest | dg.SkipReason | None]
        try:
            with cache.lend(context) as (instance, opened):
                from deltaforge_dagster.sensors.snapshot import due_snapshot_run  # noqa: PLC0415
                from deltaforge_dagster.sensors.tick import current, tick  # noqa: PLC0415

                origin = context.code_location_origin
                location = None if origin is None else origin.location_name
                pipeline = current(instance, opened.store, loaded, location)
                if isinstance(pipeline, dg.SkipReason):
                    answers = [pipeline]
                else:
                    source = opened.source_builder(pipeline)
                    outdated = is_outdated(opened.settings, loaded, pipeline)
                    answers = [
                        tick(
                            instance,
                            opened.store,
                            pipeline,
                            source,
                            opened.journal,
                            outdated=outdated,
                            room=own_room,
                        ),
                        due_snapshot_run(instance, opened.store, pipeline),
                    ]
        except DeltaforgeError as error:
            answers = [dg.SkipReason(f"{NOT_WELL}{error}")]
        asked = [answer for answer in answers if isinstance(answer, dg.RunRequest)]
        skipped = [
            str(answer.skip_message) for answer in answers if isinstance(answer, dg.SkipReason)
        ]
        return asked or red(dg.SkipReason("; ".join(skipped)))

    return work


def build_schedule(loaded: LoadedPipeline, cron: str, cache: TickCache) -> dg.ScheduleDefinition:
    """Return the schedule of a pipeline, which checks for work when due, in place of a sensor."""

    @dg.schedule(
        name=f"{dagster_name(loaded.name)}_schedule",
        job_name=job_name(loaded.name),
        cron_schedule=cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Starts a run of {loaded.name} on schedule, if there is work.",
    )
    def due(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        answer: dg.RunRequest | dg.SkipReason
        try:
            with cache.lend(context) as (instance, opened):
                from deltaforge_dagster.sensors.tick import current, tick  # noqa: PLC0415

                pipeline = current(instance, opened.store, loaded)
                if isinstance(pipeline, dg.SkipReason):
                    answer = pipeline
                else:
                    source = opened.source_builder(pipeline)
                    outdated = is_outdated(opened.settings, loaded, pipeline)
                    answer = tick(
                        instance, opened.store, pipeline, source, opened.journal, outdated=outdated
                    )
        except DeltaforgeError as error:
            answer = dg.SkipReason(f"{NOT_WELL}{error}")
        return answer if isinstance(answer, dg.RunRequest) else red(answer)

    return due


def build_snapshot_sensor(loaded: LoadedPipeline, cache: TickCache) -> dg.SensorDefinition:
    """Return the sensor for the snapshots of a pipeline that has a schedule."""

    @dg.sensor(
        name=f"{dagster_name(loaded.name)}_snapshots",
        job_name=snapshot_job_name(loaded.name),
        minimum_interval_seconds=interval_seconds(loaded),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Starts a run that reads a snapshot of {loaded.name} when one is requested.",
    )
    def snapshots(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        try:
            with cache.lend(context) as (instance, opened):
                from deltaforge_dagster.sensors.snapshot import due_snapshot_run  # noqa: PLC0415
                from deltaforge_dagster.sensors.tick import current  # noqa: PLC0415

                pipeline = current(instance, opened.store, loaded)
                if isinstance(pipeline, dg.SkipReason):
                    return pipeline
                answer = due_snapshot_run(instance, opened.store, pipeline)
                return answer or dg.SkipReason("no snapshot is requested")
        except DeltaforgeError as error:
            return dg.SkipReason(str(error))

    return snapshots


def build_reconcile_schedule(
    loaded: LoadedPipeline,
    job: UnresolvedAssetJobDefinition,
    tables: Sequence[KnownTable],
    cache: TickCache,
) -> dg.ScheduleDefinition:
    """Return the schedule that compares the tables of a pipeline's sinks when they are due."""

    @dg.schedule(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule=loaded.spec.spec.engine.reconcile.cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Compares tables of {loaded.name}'s sinks when they are due.",
    )
    def due(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        answer: dg.RunRequest | dg.SkipReason
        try:
            with cache.lend(context) as (instance, opened):
                from deltaforge_dagster.sensors.reconcile import due_comparison  # noqa: PLC0415

                answer = due_comparison(instance, opened.store, loaded, tables)
        except DeltaforgeError as error:
            answer = dg.SkipReason(f"{NOT_WELL}{error}")
        return answer if isinstance(answer, dg.RunRequest) else red(answer)

    return due


def build_retention(
    pipelines: Sequence[LoadedPipeline], platform: Platform, names: SharedNames
) -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    """Return the job that deletes old, delivered data, and its hourly schedule."""

    @dg.op(
        name=f"{names.retention}_forget",  # Dagster refuses two ops of one name
        description="Removes old, delivered segments, ranges and runs.",
    )
    def forget(context: dg.OpExecutionContext) -> None:
        from deltaforge_dagster.sensors.retention import forget_old  # noqa: PLC0415

        forget_old(context, platform, pipelines, names)

    @dg.job(
        name=names.retention,
        executor_def=dg.in_process_executor,
        description="Deletes data that every sink has and that is older than the pipeline's "
        "retention.",
    )
    def retention() -> None:
        forget()

    schedule = dg.ScheduleDefinition(
        name=f"{names.retention}_hourly",
        job=retention,
        cron_schedule="7 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    return retention, schedule
