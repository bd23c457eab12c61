"""The schedule on which the tables of a sink are maintained."""

import dagster as dg

from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.sinks.lake.config import LakeMaintenanceConfig


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
