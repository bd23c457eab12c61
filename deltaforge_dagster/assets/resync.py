"""The job that loads tables of a sink again, for who works in Dagster: `deltaforge resync`."""

from contextlib import closing

import dagster as dg
from pydantic import Field

from deltaforge_dagster.assets.names import PIPELINE_TAG, dagster_name
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.platform import Platform, build_source


class ResyncConfig(dg.Config):
    """What a run of the job does."""

    sink: str = Field(description="Id of the sink.")
    tables: list[str] = Field(
        default=[],
        description="Full names of the source's tables. Default: all that the sink has.",
    )
    dry_run: bool = Field(
        default=True,
        description="Only say which tables would be recreated, without rows, and loaded again.",
    )


def resync_job_name(pipeline: str) -> str:
    """Return the name of the job that loads tables of a pipeline's sinks again."""
    return f"{dagster_name(pipeline)}_resync"


def build_resync_job(loaded: LoadedPipeline, platform: Platform) -> dg.JobDefinition:
    """Return the job that loads tables of a pipeline's sinks again."""
    name = resync_job_name(loaded.name)

    @dg.op(name=f"{name}_tables", description="Requests that tables of a sink are loaded again.")
    def resync(context: dg.OpExecutionContext, config: ResyncConfig) -> None:
        try:
            context.log.info(_request(loaded, platform, config))
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Loads tables of {loaded.name}'s sinks again if its configuration says "
        "`dry_run: false`.",
    )
    def job() -> None:
        resync()

    return job


def _request(loaded: LoadedPipeline, platform: Platform, config: ResyncConfig) -> str:
    """Do what a run was started for; return a sentence that says what that is."""
    from deltaforge_dagster.pipeline.control.work import register  # noqa: PLC0415 - as in live.py
    from deltaforge_dagster.pipeline.tables.resync import (  # noqa: PLC0415
        check_loadable,
        request_resync,
        resynced_tables,
    )

    with platform.open() as opened, closing(build_source(loaded.spec)) as source:
        register(opened.store, loaded)
        check_loadable(loaded, source)
        if config.dry_run:
            tables = resynced_tables(opened.store, loaded, config.sink, config.tables)
            names = sorted(tables.values())
            would = "would be recreated and loaded again; nothing is done (dry_run)"
        else:
            names = list(request_resync(opened.store, loaded, config.sink, config.tables))
            would = "will be recreated by the pipeline's run, and loaded by a snapshot"
    listed = ", ".join(names) or "none"
    return f"{listed}: {pluralize(len(names), 'table')} of {config.sink} {would}"
