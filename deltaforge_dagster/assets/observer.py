"""Publishes the events of a live run in Dagster while it works."""

import dagster as dg

from deltaforge_dagster.assets.lake_tables import publish_writes
from deltaforge_dagster.assets.publish import add_partition, publish
from deltaforge_dagster.assets.schemas import publish_versions
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.run_context import RunContext


class RunObserver:
    """Publishes a live run in Dagster: partitions when ranges open, events when they are due."""

    def __init__(
        self, context: dg.AssetExecutionContext, run_context: RunContext, loaded: LoadedPipeline
    ) -> None:
        self._context = context
        self._run_context = run_context
        self._loaded = loaded

    def range_opened(self, number: int) -> None:
        """Add the range as a partition."""
        add_partition(self._context.instance, self._loaded.name, number)
        self._context.log.info("range %s opened", number)

    def publish(self) -> None:
        """Publish the ranges, table versions and commits to tables that are due."""
        instance, run_context = self._context.instance, self._run_context
        name = self._loaded.name
        publish(instance, run_context.store, name, self._emit, run_context.journal)
        publish_versions(instance, run_context.store, name, self._context.log_event)
        publish_writes(instance, run_context.store, self._loaded, self._context.log_event)

    def warn(self, message: str) -> None:
        """Log a warning."""
        self._context.log.warning(message)

    def _emit(self, event: dg.AssetMaterialization) -> None:
        self._context.log_event(event)
        failpoint("range-published")
