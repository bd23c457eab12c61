"""The asset of a pipeline: `changes` and one asset per sink, on the pipeline's ranges.

The op behind them does one of two things. With the tag `deltaforge/run: live` it is the
pipeline's run, which captures and delivers and publishes ranges as it goes. Every other run is a
Materialize of the chosen ranges from the UI: `changes` is verified; a sink gets what it has once
more, as a replay, and catches up in order with what it does not have yet.
The op yields nothing, since in a backfill a yielded result would overwrite the true metadata of
every partition; it writes events itself (`publish`).
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    asset_key,
    dagster_name,
    job_name,
    range_partitions,
)
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.publication import CHANGES
from deltaforge_dagster.resources.platform import Platform


def build_pipeline_asset(loaded: LoadedPipeline) -> dg.AssetsDefinition:
    """Return the multi-asset of a pipeline."""

    @dg.multi_asset(
        name=dagster_name(loaded.name),
        specs=_asset_specs(loaded),
        check_specs=check_specs(loaded),
        partitions_def=range_partitions(loaded.name),
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def pipeline(
        context: dg.AssetExecutionContext, platform: dg.ResourceParam[Platform]
    ) -> Iterator[dg.MaterializeResult[Any]]:
        try:
            with platform.open() as opened:
                from deltaforge_dagster.assets import execution  # noqa: PLC0415 - takes seconds

                execution.execute(context, loaded, opened)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        yield from ()

    return pipeline


def build_pipeline_job(loaded: LoadedPipeline) -> UnresolvedAssetJobDefinition:
    """Return the job of a pipeline's live runs."""
    return dg.define_asset_job(
        job_name(loaded.name),
        selection=dg.AssetSelection.assets(*(spec.key for spec in _asset_specs(loaded))),
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Captures and delivers pipeline {loaded.name}, until it has been idle.",
    )


def _asset_specs(loaded: LoadedPipeline) -> list[dg.AssetSpec]:
    group = loaded.spec.spec.engine.dagster.group or dagster_name(loaded.name)
    changes = asset_key(loaded.name, CHANGES)
    source = loaded.spec.spec.source
    return [
        dg.AssetSpec(
            changes,
            group_name=group,
            kinds={source.type},
            description=(
                f"Changes captured from {', '.join(source.config.tables)}; one partition is one "
                "range of the log, kept in the journal."
            ),
        ),
        *(
            dg.AssetSpec(
                asset_key(loaded.name, sink.config.id),
                deps=[changes],
                group_name=group,
                kinds={sink.type},
                description=(
                    f"Ranges that sink {sink.config.id} has acknowledged. Materialize a "
                    "partition to deliver it again, marked as a replay, or to let the sink catch "
                    "up to it."
                ),
            )
            for sink in loaded.spec.spec.sinks
        ),
    ]
