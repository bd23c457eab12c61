"""Everything Dagster loads: composed from the pipeline files, nothing else.

`workspace.yaml` names this module. The pipeline files and the rest of the installation come from
environment variables (`config.settings`).
"""

from __future__ import annotations

import dagster as dg

from deltaforge_dagster.assets.broken import build_broken_asset, build_broken_check
from deltaforge_dagster.assets.pipeline import build_pipeline_asset, build_pipeline_job
from deltaforge_dagster.config.load import BrokenPipeline, LoadedPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sensors.broken import build_broken_files_sensor
from deltaforge_dagster.sensors.live import build_schedule, build_sensor
from deltaforge_dagster.sensors.retention import build_retention


def build_definitions(settings: Settings, *, single_process: bool = False) -> dg.Definitions:
    """Return the definitions of all pipelines that `settings.pipelines` holds.

    A file that cannot be loaded becomes an asset with a failing check, beside the others.
    `single_process` says that nothing but this process will use the state.
    """
    files = load_pipelines(settings.pipelines)
    good = [one for one in files if isinstance(one, LoadedPipeline)]
    bad = [one for one in files if isinstance(one, BrokenPipeline)]
    sensors, schedules = [], []
    for one in good:
        cron = one.spec.spec.engine.dagster.schedule
        if cron is None:
            sensors.append(build_sensor(one))
        else:
            schedules.append(build_schedule(one, cron))
    if bad:
        sensors.append(build_broken_files_sensor(bad))
    retention, hourly = build_retention(good)
    return dg.Definitions(
        assets=[
            *(build_pipeline_asset(one) for one in good),
            *(build_broken_asset(one) for one in bad),
        ],
        asset_checks=[build_broken_check(one) for one in bad],
        jobs=[*(build_pipeline_job(one) for one in good), retention],
        sensors=sensors,
        schedules=[*schedules, hourly],
        resources={"platform": Platform(settings, single_process=single_process)},
        executor=dg.in_process_executor,
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Load the definitions of this installation."""
    return build_definitions(Settings.from_env())
