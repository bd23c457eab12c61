"""The sensor that evaluates conditions; the one that Dagster adds by itself is off at first."""

import dagster as dg

automation = dg.AutomationConditionSensorDefinition(
    "automation",
    target=dg.AssetSelection.groups("reports"),
    default_status=dg.DefaultSensorStatus.RUNNING,
    minimum_interval_seconds=5,
)
