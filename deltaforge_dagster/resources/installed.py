"""The pipelines of this installation, even while its state store cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from deltaforge_dagster.config.file.load import BrokenPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, SpecError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, installed, united
from deltaforge_dagster.pipeline.control.specs import FormerPipeline, former_pipeline
from deltaforge_dagster.resources.platform import existing_store
from deltaforge_dagster.state.lake_commits import StoredWrite

UNREADABLE = "pipelines-of-the-state-store"
"""Name of the placeholder for the pipelines in the state store while it cannot be read."""


def installed_pipelines(settings: Settings) -> list[AnyPipeline]:
    """Return every pipeline: those of the files, then those stored in the state store.

    Raises:
        SpecError: The path `settings.pipelines` does not exist; an empty directory is allowed.
    """
    try:
        with existing_store(settings) as store:
            return installed(settings, store)
    except SpecError:
        raise
    except DeltaforgeError as error:
        files = load_pipelines(settings.pipelines, strict=settings.strict)
        return united(files, [BrokenPipeline(None, UNREADABLE, SpecError(str(error)))])


def former_pipelines(settings: Settings, pipelines: Iterable[AnyPipeline]) -> list[FormerPipeline]:
    """Return the broken pipelines as they were when last in use.

    While the state store cannot be read, there are none.
    """
    broken = [pipeline for pipeline in pipelines if isinstance(pipeline, BrokenPipeline)]
    if not broken:
        return []
    try:
        with existing_store(settings) as store:
            former = (
                [] if store is None else [former_pipeline(store, pipeline) for pipeline in broken]
            )
    except DeltaforgeError:
        return []
    return [pipeline for pipeline in former if pipeline is not None]


def lake_tables(
    settings: Settings, pipelines: Sequence[str]
) -> Mapping[str, Sequence[StoredWrite]]:
    """Return, by pipeline, the last write to each lake table.

    While the state store cannot be read, there are none.
    """
    tables: dict[str, Sequence[StoredWrite]] = dict.fromkeys(pipelines, ())
    if tables:
        with suppress(DeltaforgeError), existing_store(settings) as store:
            if store is not None:
                tables |= {name: store.lake_commits.tables(name) for name in pipelines}
    return tables
