"""The maintenance of a sink's tables as an asset, materialized on its schedule or on demand.

The result for each table is an observation of the table's own asset, with its figures before and
afterwards. It has no data version, so assets that wait for new data do not react to it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from deltaforge_dagster.assets.descriptions import maintenance_spec
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    lake_table_key,
    maintenance_job_name,
    maintenance_key,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sinks.lake.config import LakeMaintenanceConfig, LakeSinkConfig

if TYPE_CHECKING:  # code servers load this module, but not what writes tables
    from deltaforge_dagster.pipeline.lake.maintenance import MaintainedTable, TableCondition
    from deltaforge_dagster.state.table_commits import StoredWrite


def maintained_sinks(loaded: LoadedPipeline) -> Mapping[str, LakeMaintenanceConfig]:
    """Return the sinks of a pipeline whose tables are maintained, by id."""
    configs = [sink.config for sink in loaded.spec.spec.sinks]
    return {
        config.id: config.maintenance
        for config in configs
        if isinstance(config, LakeSinkConfig) and config.maintenance.enabled
    }


def build_maintenance_asset(
    loaded: LoadedPipeline, sink_id: str, platform: Platform
) -> dg.AssetsDefinition:
    """Return the asset of the maintenance of a sink's tables."""
    name = maintenance_job_name(loaded.name, sink_id)
    sink = next(block for block in loaded.spec.spec.sinks if block.config.id == sink_id)

    @dg.multi_asset(
        name=f"{name}_tables",
        specs=[maintenance_spec(loaded, sink_id)],
        pool=name,
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def maintenance(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        try:
            tables = _maintain(context, platform, loaded, sink)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        problems = [problem for table in tables for problem in table.problems]
        if problems:
            raise dg.Failure("; ".join(problems), allow_retries=False)
        return dg.MaterializeResult(
            maintenance_key(loaded.name, sink_id),
            metadata={
                "tables": len(tables),
                "compacted": sum(table.compacted for table in tables),
                "cleaned": sum(table.cleaned for table in tables),
            },
        )

    return maintenance


def build_maintenance_job(loaded: LoadedPipeline, sink_id: str) -> UnresolvedAssetJobDefinition:
    """Return the job that maintains a sink's tables."""
    return dg.define_asset_job(
        maintenance_job_name(loaded.name, sink_id),
        selection=dg.AssetSelection.assets(maintenance_key(loaded.name, sink_id)),
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Maintains the tables of sink {sink_id} of {loaded.name}.",
    )


def build_maintenance_schedule(
    job: UnresolvedAssetJobDefinition, options: LakeMaintenanceConfig
) -> dg.ScheduleDefinition:
    """Return the schedule of a job that maintains tables, which is on by default."""
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule=options.schedule,
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )


def observation(
    pipeline: str, stored: "StoredWrite", maintained: "MaintainedTable"
) -> dg.AssetObservation:
    """Return the event with the result of a table's maintenance."""
    metadata: dict[str, Any] = {
        "maintenance": maintained.done or "nothing was done",
        "table": ".".join(maintained.destination),
        **_metadata("before", maintained.before),
        **_metadata("after", maintained.after),
    }
    if remarks := [*maintained.notes, *maintained.problems]:
        metadata["remarks"] = "; ".join(remarks)
    key = lake_table_key(pipeline, stored.sink, stored.write.source)
    return dg.AssetObservation(key, metadata=metadata)


def _maintain(
    context: dg.AssetExecutionContext, platform: Platform, loaded: LoadedPipeline, sink: SinkBlock
) -> list["MaintainedTable"]:
    from deltaforge_dagster.pipeline.lake.maintenance import maintain_tables  # noqa: PLC0415
    from deltaforge_dagster.resources.run_context import build_run_context  # noqa: PLC0415

    tables = []
    with platform.open() as opened:
        sessions = build_run_context(opened, loaded).replay_sessions
        for stored, maintained in maintain_tables(opened.store, loaded.name, sink, sessions):
            if maintained.destination == stored.write.destination:  # pending changes have no asset
                context.log_event(observation(loaded.name, stored, maintained))
            tables.append(maintained)
    context.log.info("%s of sink %s maintained", pluralize(len(tables), "table"), sink.config.id)
    return tables


def _metadata(when: str, condition: "TableCondition | None") -> dict[str, int]:
    counts = {} if condition is None else condition.counts
    return {f"{name}_{when}": count for name, count in counts.items()}
