"""When the tables of sinks are compared, as `engine.reconcile` of the file says."""

from collections.abc import Sequence

import dagster as dg

from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import REASON_TAG
from deltaforge_dagster.assets.reconcile import (
    reconcile_job_name,
    reconcile_op_name,
    reconciled_key,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.sensors.tick import UNFINISHED
from deltaforge_dagster.state.store import StateStore


def due_comparison(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    tables: Sequence[KnownTable],
) -> dg.RunRequest | dg.SkipReason:
    """Return the run that compares the tables that are due, or why none is started now.

    Args:
        instance: The Dagster instance.
        store: The state store.
        loaded: The pipeline.
        tables: The tables that have a check.
    """
    options, now = loaded.spec.spec.engine.reconcile, store.now()
    every, left = options.every_seconds, options.seconds_left(now % 86_400)
    if every is None:
        return dg.SkipReason("the file asks for no comparisons (engine.reconcile.every)")
    if left == 0:
        return dg.SkipReason(f"tables are compared in the window {options.window} (UTC)")
    due = [
        table
        for table in tables
        if now - store.reconciliations.last(loaded.name, table.sink, table.name).ended >= every
    ]
    if not due:
        return dg.SkipReason(f"every table was compared within {options.every}")
    job = reconcile_job_name(loaded.name)
    running = instance.get_runs(dg.RunsFilter(job_name=job, statuses=UNFINISHED), limit=1)
    if running:
        return dg.SkipReason(f"run {running[0].run_id[:8]} is comparing")
    limits = {"max_seconds": left, "rate": options.rate}
    config = {name: value for name, value in limits.items() if value is not None}
    return dg.RunRequest(
        run_config={"ops": {reconcile_op_name(loaded.name): {"config": config}}},
        tags={REASON_TAG: f"tables not compared for {options.every}"},
        asset_check_keys=[reconciled_key(loaded.name, table) for table in due],
    )
