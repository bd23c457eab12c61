"""`deltaforge run`: one live run of a pipeline in this process, without Dagster's daemon.

It executes the same job that the sensor starts, on the same instance, so that the ranges appear
in the UI like any others.
"""

from __future__ import annotations

import json
import logging

import dagster as dg

from deltaforge_dagster.assets.names import REASON_TAG, RUN_TAG, UNTIL_TAG, job_name
from deltaforge_dagster.assets.pipeline import OUTCOME_METADATA
from deltaforge_dagster.cli.instance import local_instance
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions


def execute_run(
    settings: Settings, pipeline: str, *, until_caught_up: bool
) -> tuple[bool, dict[str, object]]:
    """Run a pipeline until it is idle (or caught up); return success and how it ended.

    Raises:
        NotAllowed: There is no such pipeline.
        SpecError: Its file is broken.
    """
    settings, loaded = select_pipeline(settings, pipeline)
    definitions = build_definitions(settings, single_process=True)
    tags = {RUN_TAG: "live", REASON_TAG: "command"}
    if until_caught_up:
        tags[UNTIL_TAG] = "caught up"
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with local_instance(settings) as instance:
        result = definitions.resolve_job_def(job_name(loaded.name)).execute_in_process(
            instance=instance,
            tags=tags,
            run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}},
            raise_on_error=False,
        )
        return result.success, {"pipeline": loaded.name, **_outcome(result)}


def _outcome(result: dg.ExecuteInProcessResult) -> dict[str, object]:
    for event in result.all_events:
        if event.is_asset_observation:
            metadata = event.asset_observation_data.asset_observation.metadata
            if OUTCOME_METADATA in metadata:
                return dict(metadata[OUTCOME_METADATA].value)
        if event.is_step_failure:
            failure = event.step_failure_data.user_failure_data
            if failure is not None:
                return {"error": failure.description}
    return {"reason": "held elsewhere"}


def print_outcome(outcome: dict[str, object]) -> None:
    """Print the outcome as one line of JSON, the last one on standard output."""
    print(json.dumps(outcome))  # noqa: T201 - the command's output
