"""The multi-asset of a pipeline: `changes` and one asset per sink, partitioned by ranges.

The op behind them does one of two things. With the tag `deltaforge/run: live` it is the pipeline's
run, which captures, delivers and publishes ranges as it goes. Any other run is a Materialize of
ranges chosen in the UI: `changes` is verified; a sink gets the ranges that it has again, as a
replay, and catches up in order with those that it does not have yet.

The op yields no results for its assets, because in a backfill a yielded result would overwrite the
metadata of every partition. It writes the events of assets (`publish`) and of checks itself.
Outputs of checks are not optional in Dagster, unlike those of assets: for each one that is not
yielded, Dagster would log a message and create an empty output. So the op yields these empty
outputs, which do not affect the checks.
"""

from collections.abc import Iterator

import dagster as dg

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.descriptions import asset_specs
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    asset_key,
    dagster_name,
    job_name,
    op_name,
    range_partitions,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.control.specs import FormerPipeline, code_parts
from deltaforge_dagster.resources.platform import Platform


def build_pipeline_asset(pipeline: LoadedPipeline | FormerPipeline) -> dg.AssetsDefinition:
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
        specs=[spec.replace_attributes(key=plain[spec.key]) for spec in specs],
        check_specs=[
            spec.replace_key(dg.AssetCheckKey(plain[spec.asset_key], spec.name))
            for spec in check_specs(loaded)
        ],
        partitions_def=range_partitions(loaded.name),
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def ranges(
        context: dg.AssetExecutionContext, platform: dg.ResourceParam[Platform]
    ) -> Iterator[dg.Output[None]]:
        try:
            if problem is not None:
                raise problem
            with platform.open() as opened:
                from deltaforge_dagster.assets import execution  # noqa: PLC0415 - takes seconds

                execution.execute(context, loaded, opened)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield from (dg.Output(None, name) for name in context.assets_def.check_specs_by_output_name)

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
        ),
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Captures and delivers changes of pipeline {loaded.name} until it is idle.",
    )
