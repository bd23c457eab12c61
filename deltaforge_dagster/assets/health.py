"""The asset that stands for a whole pipeline: one line of the Catalog, red while something is wrong.

Of an asset with partitions the Catalog's list shows how many of these are materialized, and not whether a
check fails. So each pipeline also has an asset without partitions, whose one check fails with
everything that `deltaforge status` calls a problem. A pipeline whose file cannot be loaded has only this one: it
never stops the others.
"""

from collections.abc import Iterator

import dagster as dg

from deltaforge_dagster.assets.descriptions import health_spec
from deltaforge_dagster.assets.names import dagster_name, health_key
from deltaforge_dagster.pipeline.catalog import AnyPipeline
from deltaforge_dagster.pipeline.health import Health, Problem, health
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.sources.findings import and_run

WELL_CHECK = "well"

_COUNTED = {"holds", "dead letters"}
"""Subjects whose text counts events: an evaluation is written once per change of its text."""


def build_health_asset(pipeline: AnyPipeline) -> dg.AssetSpec:
    """Return the asset that stands for a pipeline."""
    return health_spec(pipeline)


def build_health_check(pipeline: AnyPipeline) -> dg.AssetChecksDefinition:
    """Return its check, which ticks report; *Execute* in the UI evaluates it at once."""
    spec = dg.AssetCheckSpec(
        WELL_CHECK,
        asset=health_key(pipeline.name),
        description="Nothing is wrong with the pipeline: what `deltaforge status` says.",
    )

    @dg.multi_asset_check(name=f"{dagster_name(pipeline.name)}_health", specs=[spec])
    def well(platform: dg.ResourceParam[Platform]) -> Iterator[dg.AssetCheckResult]:
        with platform.open() as opened:
            found = health_evaluation(pipeline.name, health(opened.store, pipeline))
        yield dg.AssetCheckResult(
            passed=found.passed, severity=found.severity, description=found.description
        )

    return well


def health_evaluation(name: str, found: Health) -> dg.AssetCheckEvaluation:
    """Return the check's outcome: every problem in a line; a warning where none is an error."""
    return dg.AssetCheckEvaluation(
        asset_key=health_key(name),
        check_name=WELL_CHECK,
        passed=not found.problems,
        severity=dg.AssetCheckSeverity.WARN if found.well else dg.AssetCheckSeverity.ERROR,
        description="\n".join(_line(one) for one in found.problems) or None,
    )


def _line(problem: Problem) -> str:
    text = "not empty" if problem.subject in _COUNTED else problem.text
    return f"{problem.severity}: {problem.subject}: {and_run(text, problem.remedy)}"
