"""From a pipeline file to its source."""

from __future__ import annotations

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sources.sources import MysqlSource, PostgresSource
from deltaforge_dagster.config.sources.turso import TursoSource
from deltaforge_dagster.sources.base import Source


def build_source(spec: PipelineSpec) -> Source:
    """Return the source of a pipeline; connects to nothing yet.

    Raises:
        SpecError: The DSN or a table pattern is not what the source takes.
    """
    engine = spec.spec.engine
    # Only when it is used: kernels and drivers take a second to import.
    match spec.spec.source:
        case MysqlSource(config=mysql):
            from deltaforge_dagster.sources.mysql import source as mysql_source  # noqa: PLC0415

            return mysql_source.MysqlSource(
                mysql, spec.metadata.name, engine.values, engine.columns
            )
        case PostgresSource(config=postgres):
            from deltaforge_dagster.sources.postgres import source as postgres_source  # noqa: PLC0415

            return postgres_source.PostgresSource(
                postgres, spec.metadata.name, engine.values, engine.postgres, engine.columns
            )
        case TursoSource(config=turso):
            from deltaforge_dagster.sources.turso import source as turso_source  # noqa: PLC0415

            return turso_source.TursoSource(turso, engine.columns)
