"""The pipelines of this installation, also while its state store cannot be read."""

from __future__ import annotations

from deltaforge_dagster.config.load import BrokenPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, SpecError
from deltaforge_dagster.pipeline.catalog import AnyPipeline, installed, united
from deltaforge_dagster.resources.platform import existing_store

UNREADABLE = "pipelines-of-the-state-store"
"""Name of what stands for the pipelines that the store keeps, while it cannot be read."""


def installed_pipelines(settings: Settings) -> list[AnyPipeline]:
    """Return every pipeline: of the files, then those that the state store keeps.

    Raises:
        SpecError: There is nothing at `settings.pipelines`; an empty directory is enough.
    """
    try:
        with existing_store(settings) as store:
            return installed(settings, store)
    except SpecError:
        raise
    except DeltaforgeError as error:
        files = load_pipelines(settings.pipelines, strict=settings.strict)
        return united(files, [BrokenPipeline(None, UNREADABLE, SpecError(str(error)))])
