"""The asset of a pipeline: `changes` and one asset per sink, on the pipeline's ranges.

The op behind them does one of two things. With the tag `deltaforge/run: live` it is the
pipeline's run, which captures and delivers and publishes ranges as it goes. Every other run is a
Materialize of the chosen ranges from the UI: `changes` is verified; a sink gets what it has once
more, as a replay, and catches up in order with what it does not have yet.
The op yields nothing for its assets, since in a backfill a yielded result would overwrite the true metadata of
every partition; it writes events itself (`publish`), and those of checks, too. Outputs of checks are not
optional for Dagster, as those of assets are: of each it would write into the run's log that it was not yielded, and
then make an empty one. So the op yields these empty outputs; they say nothing about the check.
"""

from collections.abc import Iterator

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.descriptions import asset_specs
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    dagster_name,
    job_name,
    op_name,
    range_partitions,
)
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.resources.platform import Platform


def build_pipeline_asset(loaded: LoadedPipeline) -> dg.AssetsDefinition:
    """Return the multi-asset of a pipeline.

    Dagster makes Python names of asset keys, in which `a-b` and `a_b` are one. So the asset is made with
    keys whose names stay different, and gets its own afterwards.
    """
    specs = asset_specs(loaded)
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
    def pipeline(
        context: dg.AssetExecutionContext, platform: dg.ResourceParam[Platform]
    ) -> Iterator[dg.Output[None]]:
        try:
            with platform.open() as opened:
                from deltaforge_dagster.assets import execution  # noqa: PLC0415 - takes seconds

                execution.execute(context, loaded, opened)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield from (dg.Output(None, name) for name in context.assets_def.check_specs_by_output_name)

    return pipeline.with_attributes(
        asset_key_replacements={of_names: key for key, of_names in plain.items()}
    )


def _plain(key: dg.AssetKey) -> dg.AssetKey:
    """Return a key whose last part, which tells a pipeline's assets apart, Dagster need not change."""
    return dg.AssetKey([*key.path[:-1], dagster_name(key.path[-1])])


def build_pipeline_job(loaded: LoadedPipeline) -> UnresolvedAssetJobDefinition:
    """Return the job of a pipeline's live runs."""
    return dg.define_asset_job(
        job_name(loaded.name),
        selection=dg.AssetSelection.assets(*(spec.key for spec in asset_specs(loaded))),
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Captures and delivers pipeline {loaded.name}, until it has been idle.",
    )
