"""Alerts about failing checks and runs: one sensor for all pipelines that configure hooks."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.catalog import reread
from deltaforge_dagster.sensors.alerts import AlertProblem, notify
from deltaforge_dagster.sensors.every_tick import TickCache
from deltaforge_dagster.sensors.report import newest_evaluation

SENSOR = "deltaforge_alerts"

_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


def build_alerts_sensor(
    pipelines: Sequence[LoadedPipeline], cache: TickCache
) -> dg.SensorDefinition:
    """Return the sensor, which is on by default."""

    @dg.sensor(
        name=SENSOR,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Notifies the hooks of engine.alerts when checks and runs fail and when they "
        "recover.",
    )
    def alerts(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        unreached = []
        with cache.lend(context) as (instance, opened):
            for pipeline in pipelines:
                try:
                    current = reread(opened.store, pipeline)
                    if isinstance(current, LoadedPipeline):
                        failing = problems(instance, current)
                        unreached += [
                            f"{pipeline.name}: {hook}"
                            for hook in notify(opened.store, current, failing)
                        ]
                except DeltaforgeError as error:  # go on with the other pipelines
                    unreached.append(f"{pipeline.name}: {error}")
        return dg.SkipReason(
            "could not notify " + "; ".join(unreached) if unreached else "every hook is up to date"
        )

    return alerts


def problems(instance: dg.DagsterInstance, loaded: LoadedPipeline) -> list[AlertProblem]:
    """Return the checks of a pipeline that fail now, and its newest live run if that failed."""
    failing = []
    for spec in check_specs(loaded):
        shown = newest_evaluation(instance, spec.key)
        if shown is not None and not shown.passed:
            path = spec.asset_key.to_user_string()
            failing.append(AlertProblem(path, spec.name, shown.severity.value))
    live = dg.RunsFilter(tags={PIPELINE_TAG: loaded.name, RUN_TAG: "live"}, statuses=_ENDED)
    newest = instance.get_runs(live, limit=1)
    if newest and newest[0].status == dg.DagsterRunStatus.FAILURE:
        failing.append(AlertProblem(loaded.name, "run", "ERROR"))
    return failing
