"""What starts the runs that read snapshots.

This is the pipeline's sensor, or a separate sensor if the pipeline has a schedule.

A run starts when a user or the pipeline file has requested a snapshot, or when chunks of a snapshot
are missing: their run died, what it had read could not be used, or rows were relocated
(`relocated_rows`). Only one run reads at a time. After a failed run there is a pause, which is
longer after several failures.
"""

import time
from itertools import takewhile

import dagster as dg

from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    REASON_TAG,
    RUN_TAG,
    snapshot_job_name,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.snapshots.request import is_alive, living, requested_snapshot
from deltaforge_dagster.sensors.tick import UNFINISHED
from deltaforge_dagster.state.store import StateStore

PAUSES_SECONDS = (5.0, 20.0, 60.0)
"""How long no run is started after one failed run, after two in a row, and after three or more."""

BEGIN_SECONDS = 180.0
"""How long a run may take until it shows its first sign of life."""


def due_snapshot_run(
    instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline
) -> dg.RunRequest | dg.SkipReason | None:
    """Return the run to start, or why none is started now; None if there is nothing to read."""
    pipeline = register(store, loaded)
    snapshot = (
        requested_snapshot(store, loaded, pipeline) if pipeline.desired_state == "running" else None
    )
    if snapshot is None:
        return None
    number = snapshot.snapshot
    planned = (
        snapshot.state == "wanted"
        or store.snapshots.chunks(loaded.name, number, state="planned", limit=1)
        or store.relocated_rows.ready_tables(loaded.name, number)
    )
    if not planned:
        return dg.SkipReason(f"snapshot {number} is read; the pipeline's run takes it over")
    hindrance = _hindrance(instance, store, loaded.name)
    if hindrance is not None:
        return dg.SkipReason(hindrance)
    return dg.RunRequest(
        job_name=snapshot_job_name(loaded.name),
        tags={RUN_TAG: "snapshot", REASON_TAG: f"snapshot {number}"},
    )


def _hindrance(instance: dg.DagsterInstance, store: StateStore, pipeline: str) -> str | None:
    """Return which run is already reading or has just failed; None if there is none."""
    records = instance.get_run_records(
        dg.RunsFilter(tags={PIPELINE_TAG: pipeline, RUN_TAG: "snapshot"}),
        limit=len(PAUSES_SECONDS),
    )
    chosen = _reading_what_was_chosen(instance, store, pipeline)
    if chosen is not None:
        return f"run {chosen.run_id[:8]} is reading"
    if not records:
        return None
    newest, run = records[0], records[0].dagster_run
    if run.status in UNFINISHED:
        begun = newest.start_time
        silent = begun is not None and time.time() - begun > BEGIN_SECONDS
        if not silent or is_alive(store, pipeline, run.run_id):
            return f"run {run.run_id[:8]} is reading"
        instance.report_run_failed(run, "the run's process is gone: it shows no sign of life")
        return None
    failed = list(takewhile(lambda record: record.dagster_run.is_failure, records))
    if failed:
        left = PAUSES_SECONDS[len(failed) - 1] - (time.time() - (newest.end_time or 0.0))
        if left > 0:
            return f"run {run.run_id[:8]} failed; the next one begins in {left:.0f} s"
    return None


def _reading_what_was_chosen(
    instance: dg.DagsterInstance, store: StateStore, pipeline: str
) -> dg.DagsterRun | None:
    """Return a reading run that was started in the UI, None if there is none.

    Runs that a sensor started are left out: they have a tag.
    """
    for run_id in living(store, pipeline):
        run = instance.get_run_by_id(run_id)
        if run is not None and run.tags.get(RUN_TAG) != "snapshot" and run.status in UNFINISHED:
            return run
    return None
