"""Retention, which a scheduled job calls: deletes old data of journal, state store and Dagster."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg

from deltaforge_dagster.assets.maintenance import maintained_sinks
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    SharedNames,
    asset_key,
    chunks_name,
    dagster_name,
    health_key,
    lake_table_key,
    maintenance_job_name,
    partition_key,
    partitions_name,
    snapshot_key,
)
from deltaforge_dagster.assets.reconcile import reconcile_job_name
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.control.journal_space import expire
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.platform import Opened, Platform
from deltaforge_dagster.sensors.history import (
    delete_runs,
    forget_assets,
    forget_events,
    forget_partitions,
    forget_ticks,
)
from deltaforge_dagster.state.since import RETENTION
from deltaforge_dagster.state.store import StateStore

RUNS_PER_TURN = 500
"""How many old runs of a pipeline one execution deletes at most, so that the job stays short."""


def forget_old(
    context: dg.OpExecutionContext,
    platform: Platform,
    pipelines: Sequence[LoadedPipeline],
    names: SharedNames,
) -> None:
    """Delete what is old of each pipeline, and of what they share.

    Raises:
        dg.Failure: It could not be done for some pipelines; it was for the others.
    """
    problems = []
    with platform.open() as opened:
        for loaded in pipelines:
            try:
                context.log.info(_forget(context.instance, opened, loaded))
                opened.store.pipelines.note_since(loaded.name, RETENTION)
            except DeltaforgeError as error:  # go on with the other pipelines
                problems.append(f"{loaded.name}: {error}")
        forget_assets(context.instance, opened.store.pipelines.removed())
    forget_ticks(context.instance, _instigators(pipelines, names))
    week_ago = datetime.now(UTC) - timedelta(days=7)
    delete_runs(context.instance, week_ago, RUNS_PER_TURN, job=names.retention)
    if problems:
        raise dg.Failure("; ".join(problems), allow_retries=False)


def _forget(instance: dg.DagsterInstance, opened: Opened, loaded: LoadedPipeline) -> str:
    """Delete old data of one pipeline; return a sentence that says what was removed."""
    done = expire(opened.store, opened.journal, loaded)
    partitions = _delete_old_partitions(instance, opened.store, loaded.name)
    runs, events = _delete_history(instance, opened.store, loaded)
    return (
        f"{loaded.name}: removed {pluralize(done.segments, 'segment')}, "
        f"{pluralize(len(done.ranges), 'range')}, {pluralize(done.orphans, 'orphaned file')}, "
        f"{pluralize(partitions, 'partition')}, {pluralize(runs, 'run')}, "
        f"{pluralize(events, 'event')} without a run"
    )


def _delete_old_partitions(instance: dg.DagsterInstance, store: StateStore, pipeline: str) -> int:
    """Delete the partitions without a range, including those that an earlier execution left.

    The partitions must be read before the ranges, because a range gets its row before its
    partition.
    """
    name = partitions_name(pipeline)
    partitions = instance.get_dynamic_partitions(name)
    kept = {partition_key(row.range) for row in store.ranges.read(pipeline)}
    old = [partition for partition in partitions if partition not in kept]
    for partition in old:
        instance.delete_dynamic_partition(name, partition)
    return len(old) + _delete_old_chunks(instance, store, pipeline)


def _kept_chunks(store: StateStore, pipeline: str) -> set[str]:
    """Return the partitions of the chunks of the newest snapshot."""
    newest = store.snapshots.read(pipeline, newest=1)
    return {
        chunk.partition
        for row in newest
        for chunk in store.snapshots.chunks(pipeline, row.snapshot)
    }


def _delete_old_chunks(instance: dg.DagsterInstance, store: StateStore, pipeline: str) -> int:
    """Delete the partitions of chunks that are not in the newest snapshot."""
    name = chunks_name(pipeline)
    partitions = instance.get_dynamic_partitions(name)
    kept = _kept_chunks(store, pipeline)
    old = [partition for partition in partitions if partition not in kept]
    for partition in old:
        instance.delete_dynamic_partition(name, partition)
    return len(old)


def _delete_history(
    instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline
) -> tuple[int, int]:
    """Delete runs, and events without a run, that are older than every range that is still kept."""
    oldest = store.now() - loaded.spec.spec.engine.journal.retention_hours * 3600
    kept = store.ranges.read(loaded.name, limit=1)
    if kept:
        oldest = min(oldest, kept[0].opened_at)
    runs = delete_runs(
        instance,
        datetime.fromtimestamp(oldest, UTC),
        RUNS_PER_TURN,
        tags={PIPELINE_TAG: loaded.name},
    )
    row = store.pipelines.get(loaded.name)
    if row is None:
        return runs, 0
    first = kept[0].range if kept else row.next_range
    keys = [
        asset_key(loaded.name, asset) for asset in (CHANGES, *store.checkpoints.read(loaded.name))
    ]
    keys.append(health_key(loaded.name))
    keys += [
        lake_table_key(loaded.name, stored.sink, stored.write.source)
        for stored in store.table_commits.tables(loaded.name)
    ]
    events = forget_events(instance, keys, partition_key(first), oldest)
    chunks = _kept_chunks(store, loaded.name)
    return runs, events + forget_partitions(instance, snapshot_key(loaded.name), chunks)


def _instigators(pipelines: Sequence[LoadedPipeline], names: SharedNames) -> set[str]:
    """Return the names of all sensors and schedules of these pipelines."""
    instigators = {names.alerts, names.files, f"{names.retention}_hourly"}
    for loaded in pipelines:
        name = dagster_name(loaded.name)
        instigators |= {f"{name}_work", f"{name}_snapshots", f"{name}_schedule"}
        jobs = (maintenance_job_name(loaded.name, sink) for sink in maintained_sinks(loaded))
        instigators |= {f"{job}_schedule" for job in jobs}
        instigators.add(f"{reconcile_job_name(loaded.name)}_schedule")
    return instigators
