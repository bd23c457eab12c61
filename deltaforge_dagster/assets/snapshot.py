"""The asset of a pipeline's snapshots: one partition is one chunk of a table.

With the tag `deltaforge/run: snapshot` its op reads the missing chunks of the unfinished snapshot.
Any other run is a Materialize of chunks chosen in the UI, which are read again as part of the
newest snapshot. In both cases the op writes a materialization for each chunk that was read; the
pipeline's run puts the rows into the journal.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from deltaforge_dagster.assets.descriptions import snapshot_spec
from deltaforge_dagster.assets.names import (
    PIPELINE_TAG,
    chunks_name,
    dagster_name,
    snapshot_job_name,
    snapshot_key,
)
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.specs import FormerPipeline
from deltaforge_dagster.resources.platform import Platform


def build_snapshot_asset(pipeline: LoadedPipeline | FormerPipeline) -> dg.AssetsDefinition:
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
    def snapshot(
        context: dg.AssetExecutionContext, platform: dg.ResourceParam[Platform]
    ) -> Iterator[dg.MaterializeResult[Any]]:
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
