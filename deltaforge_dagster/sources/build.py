"""From a pipeline file to its source."""

from __future__ import annotations

from deltaforge_dagster.config.model import MysqlSource, PipelineSpec, PostgresSource
from deltaforge_dagster.sources.base import Source


def build_source(spec: PipelineSpec) -> Source:
    """Return the source of a pipeline; connects to nothing yet.

    Raises:
        SpecError: The DSN or a table pattern is not what the source takes.
    """
    # Only when it is used: kernels and drivers take a second to import.
    match spec.spec.source:
        case MysqlSource(config=mysql):
            from deltaforge_dagster.sources.mysql import source as mysql_source  # noqa: PLC0415

            return mysql_source.MysqlSource(mysql, spec.metadata.name, spec.spec.engine.values)
        case PostgresSource(config=postgres):
            from deltaforge_dagster.sources.postgres import source as postgres_source  # noqa: PLC0415

            return postgres_source.PostgresSource(
                postgres, spec.metadata.name, spec.spec.engine.values, spec.spec.engine.postgres
            )
