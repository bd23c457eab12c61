"""The asset that represents a whole pipeline: one line of the Catalog, red if there is a problem.

For an asset with partitions, the Catalog's list shows how many of them are materialized, but not
whether a check fails. So each pipeline also has an asset without partitions, whose only check fails
with every problem that `deltaforge status` shows. A pipeline whose file cannot be loaded always has
this asset, and never affects the others.
"""

from collections.abc import Iterator

import dagster as dg

from deltaforge_dagster.assets.descriptions import health_spec
from deltaforge_dagster.assets.names import dagster_name, health_key
from deltaforge_dagster.errors import and_run
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.health.health import Health, HealthProblem, health
from deltaforge_dagster.resources.platform import Platform

WELL_CHECK = "well"

_COUNTED = {
    "holds": "not empty",
    "dead letters": "not empty",
    "source log": "the server may soon remove what is needed; deltaforge status says when",
    "journal room": "more than half of it is taken by what sinks lack",
}
"""Subjects whose text has figures, with the text that replaces it.

A new evaluation is written whenever the text changes, and figures change all the time.
"""


def build_health_asset(pipeline: AnyPipeline) -> dg.AssetSpec:
    """Return the asset that represents a pipeline."""
    return health_spec(pipeline)


def build_health_check(pipeline: AnyPipeline) -> dg.AssetChecksDefinition:
    """Return the asset's check, which ticks report; *Execute* in the UI evaluates it at once."""
    spec = dg.AssetCheckSpec(
        WELL_CHECK,
        asset=health_key(pipeline.name),
        description="Whether the pipeline has no problems, as `deltaforge status` shows them.",
    )

    @dg.multi_asset_check(name=f"{dagster_name(pipeline.name)}_health", specs=[spec])
    def well(platform: dg.ResourceParam[Platform]) -> Iterator[dg.AssetCheckResult]:
        with platform.open() as opened:
            evaluation = health_evaluation(pipeline.name, health(opened.store, pipeline))
        yield dg.AssetCheckResult(
            passed=evaluation.passed,
            severity=evaluation.severity,
            description=evaluation.description,
        )

    return well


def health_evaluation(name: str, state: Health) -> dg.AssetCheckEvaluation:
    """Return the result of the check, with one line per problem.

    It is a warning if no problem is an error.
    """
    return dg.AssetCheckEvaluation(
        asset_key=health_key(name),
        check_name=WELL_CHECK,
        passed=not state.problems,
        severity=dg.AssetCheckSeverity.WARN if state.well else dg.AssetCheckSeverity.ERROR,
        description="\n".join(_line(problem) for problem in state.problems) or None,
    )


def _line(problem: HealthProblem) -> str:
    text = _COUNTED.get(problem.subject, problem.text)
    return f"{problem.severity}: {problem.subject}: {and_run(text, problem.remedy)}"
