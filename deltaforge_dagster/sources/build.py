"""From a pipeline file to its source."""

from __future__ import annotations

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.sources.base import Source


def build_source(spec: PipelineSpec) -> Source:
    """Return the source of a pipeline; connects to nothing yet.

    Raises:
        SpecError: The DSN or a table pattern is not what the source takes.
    """
    # Only when it is used: kernels and drivers take a second to import.
    from deltaforge_dagster.sources.postgres.source import PostgresSource  # noqa: PLC0415

    return PostgresSource(spec.spec.source.config, spec.metadata.name)
