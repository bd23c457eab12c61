"""The assets of a pipeline: changes and sinks by ranges, snapshots by chunks, and its health.

`changes` and one asset per sink are one multi-asset, partitioned by ranges. The op behind them does
one of two things. With the tag `deltaforge/run: live` it is the pipeline's run, which captures,
delivers and publishes ranges as it goes. Any other run is a Materialize of ranges chosen in the UI:
`changes` is verified; a sink gets the ranges that it has again, as a replay, and catches up in
order with those that it does not have yet.

The op yields no results for its assets, because in a backfill a yielded result would overwrite the
metadata of every partition. It writes the events of assets (`publish`) and of checks itself.
Outputs of checks are not optional in Dagster, unlike those of assets: for each one that is not
yielded, Dagster would log a message and create an empty output. So a Materialize yields these
empty outputs, which do not affect the checks. A live run is started without the checks, and reports
them without a run when it ends.

A partition of the asset of snapshots is one chunk of a table. With the tag
`deltaforge/run: snapshot` its op reads the missing chunks of the unfinished snapshot. Any other run
is a Materialize of chunks chosen in the UI, which are read again as part of the newest snapshot. In
both cases the op writes a materialization for each chunk that was read; the pipeline's run puts the
rows into the journal.

The asset `health` represents the whole pipeline: one line of the Catalog, red if there is a
problem. For an asset with partitions, the Catalog's list shows how many of them are materialized,
but not whether a check fails. So `health` has no partitions, and its only check fails with every
problem that `deltaforge status` shows. A pipeline whose file cannot be loaded always has this
asset, and never affects the others.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.descriptions import asset_specs, health_spec, snapshot_spec
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    asset_key,
    chunks_name,
    dagster_name,
    health_key,
    job_name,
    op_name,
    range_partitions,
    snapshot_job_name,
    snapshot_key,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.errors import DeltaforgeError, and_run
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.control.specs import FormerPipeline, code_parts
from deltaforge_dagster.resources.platform import Platform

if TYPE_CHECKING:
    from deltaforge_dagster.pipeline.health.health import Health, HealthProblem

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


def build_pipeline_asset(
    pipeline: LoadedPipeline | FormerPipeline, platform: Platform
) -> dg.AssetsDefinition:
    """Return the multi-asset of a pipeline.

    If the pipeline's file cannot be loaded, every run of the asset fails at once, and says why.

    Dagster derives Python names from asset keys, in which `a-b` and `a_b` would collide. So the
    asset is built with keys whose names stay different, and gets its real keys afterwards.
    """
    if isinstance(pipeline, FormerPipeline):
        loaded, parts, problem = pipeline.loaded, pipeline.parts, pipeline.problem
    else:
        loaded, parts, problem = pipeline, code_parts(pipeline.spec), None
    specs = asset_specs(loaded, parts)
    plain = {spec.key: _plain(spec.key) for spec in specs}

    @dg.multi_asset(
        name=op_name(loaded.name),
        specs=[
            spec.replace_attributes(
                key=plain[spec.key],
                deps=[plain.get(dep.asset_key, dep) for dep in spec.deps],
            )
            for spec in specs
        ],
        check_specs=[
            spec.replace_key(dg.AssetCheckKey(plain[spec.asset_key], spec.name))
            for spec in check_specs(loaded)
        ],
        partitions_def=range_partitions(loaded.name),
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def ranges(context: dg.AssetExecutionContext) -> Iterator[dg.Output[None]]:
        try:
            if problem is not None:
                raise problem
            with platform.open() as opened:
                from deltaforge_dagster.assets import execution  # noqa: PLC0415 - takes seconds

                execution.execute(context, loaded, opened)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield from (
            dg.Output(None, name)
            for name, spec in context.assets_def.check_specs_by_output_name.items()
            if spec.key in context.selected_asset_check_keys
        )

    return ranges.with_attributes(
        asset_key_replacements={of_names: key for key, of_names in plain.items()}
    )


def _plain(key: dg.AssetKey) -> dg.AssetKey:
    """Return a key whose last part is a valid Python name.

    The last part distinguishes the assets of a pipeline.
    """
    return dg.AssetKey([*key.path[:-1], dagster_name(key.path[-1])])


def build_pipeline_job(loaded: LoadedPipeline) -> UnresolvedAssetJobDefinition:
    """Return the job of a pipeline's live runs."""
    return dg.define_asset_job(
        job_name(loaded.name),
        selection=dg.AssetSelection.assets(
            asset_key(loaded.name, CHANGES),
            *(asset_key(loaded.name, sink.config.id) for sink in loaded.spec.spec.sinks),
        ).without_checks(),  # otherwise the UI shows them as in progress for the whole run
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Captures and delivers changes of pipeline {loaded.name} until it is idle.",
    )


def build_snapshot_asset(
    pipeline: LoadedPipeline | FormerPipeline, platform: Platform
) -> dg.AssetsDefinition:
    """Return the asset of a pipeline's snapshots.

    Its runs fail at once if the file cannot be loaded.
    """
    problem = pipeline.problem if isinstance(pipeline, FormerPipeline) else None
    loaded = pipeline.loaded if isinstance(pipeline, FormerPipeline) else pipeline
    name = dagster_name(loaded.name)

    @dg.multi_asset(
        name=f"{name}_chunks",
        specs=[snapshot_spec(loaded)],
        partitions_def=dg.DynamicPartitionsDefinition(name=chunks_name(loaded.name)),
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,  # else Dagster would write its own materialization at the end
        pool=f"{name}_snapshot",
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def snapshot(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        try:
            if problem is not None:
                raise problem
            with platform.open() as opened:
                from deltaforge_dagster.assets import chunks  # noqa: PLC0415 - takes seconds

                chunks.execute(context, loaded, opened)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield from ()

    return snapshot


def build_snapshot_job(loaded: LoadedPipeline) -> UnresolvedAssetJobDefinition:
    """Return the job that reads a pipeline's snapshots."""
    return dg.define_asset_job(
        snapshot_job_name(loaded.name),
        selection=dg.AssetSelection.assets(snapshot_key(loaded.name)),
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Reads the missing chunks of a snapshot of {loaded.name}.",
    )


def build_health_asset(pipeline: AnyPipeline) -> dg.AssetSpec:
    """Return the asset that represents a pipeline."""
    return health_spec(pipeline)


def build_health_check(pipeline: AnyPipeline, platform: Platform) -> dg.AssetChecksDefinition:
    """Return the asset's check, which ticks report; *Execute* in the UI evaluates it at once."""
    spec = dg.AssetCheckSpec(
        WELL_CHECK,
        asset=health_key(pipeline.name),
        description="Whether the pipeline has no problems, as `deltaforge status` shows them.",
    )

    @dg.multi_asset_check(name=f"{dagster_name(pipeline.name)}_health", specs=[spec])
    def well() -> Iterator[dg.AssetCheckResult]:
        from deltaforge_dagster.pipeline.health.health import health  # noqa: PLC0415 - as above

        with platform.open() as opened:
            evaluation = health_evaluation(pipeline.name, health(opened.store, pipeline))
        yield dg.AssetCheckResult(
            passed=evaluation.passed,
            severity=evaluation.severity,
            description=evaluation.description,
        )

    return well


def health_evaluation(name: str, state: "Health") -> dg.AssetCheckEvaluation:
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


def _line(problem: "HealthProblem") -> str:
    text = _COUNTED.get(problem.subject, problem.text)
    return f"{problem.severity}: {problem.subject}: {and_run(text, problem.remedy)}"
