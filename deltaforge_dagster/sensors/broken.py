"""The sensor that shows broken pipeline files as failing checks."""

from collections.abc import Sequence

import dagster as dg

from deltaforge_dagster.assets.broken import broken_evaluation
from deltaforge_dagster.config.load import BrokenPipeline
from deltaforge_dagster.sensors.report import report_change


def build_broken_files_sensor(broken: Sequence[BrokenPipeline]) -> dg.SensorDefinition:
    """Return a sensor that reports each broken file's failing check, once."""

    @dg.sensor(
        name="broken_pipeline_files",
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Shows what is wrong with pipeline files that cannot be loaded.",
    )
    def report(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        for one in broken:
            report_change(context.instance, broken_evaluation(one))
        return dg.SkipReason("; ".join(str(one.error) for one in broken))

    return report
