"""From a pipeline file to its source."""

from __future__ import annotations

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.postgres.source import PostgresSource


def build_source(spec: PipelineSpec) -> Source:
    """Return the source of a pipeline; connects to nothing yet.

    Raises:
        SpecError: The DSN or a table pattern is not what the source takes.
    """
    return PostgresSource(spec.spec.source.config, spec.metadata.name)
