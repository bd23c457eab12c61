"""Retention as a scheduled job: journal, store, Dagster's partitions and old runs."""

from collections.abc import Sequence
from datetime import UTC, datetime

import dagster as dg

from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    RUN_TAG,
    partition_key,
    partitions_name,
)
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.retention import expire
from deltaforge_dagster.resources.platform import Opened, Platform
from deltaforge_dagster.state.store import StateStore

RUNS_PER_TURN = 500
"""Old runs deleted at most in one turn, so that the job stays short."""


def build_retention(
    pipelines: Sequence[LoadedPipeline],
) -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    """Return the job that forgets what is old and delivered, and its hourly schedule."""

    @dg.op(name="forget", description="Removes old, delivered segments, ranges and runs.")
    def forget(context: dg.OpExecutionContext, platform: dg.ResourceParam[Platform]) -> None:
        problems = []
        with platform.open() as opened:
            for loaded in pipelines:
                try:
                    context.log.info(_forget(context.instance, opened, loaded))
                except DeltaforgeError as error:  # the others' turn comes nevertheless
                    problems.append(f"{loaded.name}: {error}")
        if problems:
            raise dg.Failure("; ".join(problems), allow_retries=False)

    @dg.job(
        name="deltaforge_retention",
        executor_def=dg.in_process_executor,
        description="Forgets what every sink has and the pipeline file no longer asks to keep.",
    )
    def retention() -> None:
        forget()

    schedule = dg.ScheduleDefinition(
        name="deltaforge_retention_hourly",
        job=retention,
        cron_schedule="7 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    return retention, schedule


def _forget(instance: dg.DagsterInstance, opened: Opened, loaded: LoadedPipeline) -> str:
    """Do one pipeline's part; return what was removed."""
    done = expire(opened.store, opened.journal, loaded)
    partitions = _delete_old_partitions(instance, opened.store, loaded.name)
    runs = _delete_old_runs(instance, opened.store, loaded)
    return (
        f"{loaded.name}: removed {done.segments} segments, {len(done.ranges)} ranges, "
        f"{done.orphans} orphaned files, {partitions} partitions, {runs} runs"
    )


def _delete_old_partitions(instance: dg.DagsterInstance, store: StateStore, pipeline: str) -> int:
    """Delete the partitions without a range, also those that an earlier turn left behind.

    Partitions are read first: a range has its row before it gets its partition.
    """
    name = partitions_name(pipeline)
    partitions = instance.get_dynamic_partitions(name)
    kept = {partition_key(row.range) for row in store.ranges(pipeline)}
    old = [partition for partition in partitions if partition not in kept]
    for partition in old:
        instance.delete_dynamic_partition(name, partition)
    return len(old)


def _delete_old_runs(
    instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline
) -> int:
    """Delete finished live runs older than every range that is still kept."""
    hours = loaded.spec.spec.engine.journal.retention_hours
    oldest = store.now() - hours * 3600
    kept = store.ranges(loaded.name, limit=1)
    if kept:
        oldest = min(oldest, kept[0].opened_at)
    records = instance.get_run_records(
        dg.RunsFilter(
            tags={PIPELINE_TAG: loaded.name, RUN_TAG: "live"},
            statuses=[
                dg.DagsterRunStatus.SUCCESS,
                dg.DagsterRunStatus.FAILURE,
                dg.DagsterRunStatus.CANCELED,
            ],
            updated_before=datetime.fromtimestamp(oldest, UTC),
        ),
        limit=RUNS_PER_TURN,
        ascending=True,
    )
    for record in records:
        instance.delete_run(record.dagster_run.run_id)
    return len(records)
