"""Spark for assets of users' own code: a session that can read the lake tables of a pipeline.

    import dagster as dg
    from deltaforge_dagster.resources.lake_spark import LakeSparkResource

    @dg.asset(deps=[dg.AssetKey(["shop", "lake", "public", "orders"])])
    def revenue(spark: LakeSparkResource) -> None:
        orders = spark.table("lake", "public.orders")
        ...

    defs = dg.Definitions([revenue], resources={"spark": LakeSparkResource(pipeline="shop")})

The server is that of the installation, as runs use it. The process that executes the asset needs
the same environment as DeltaForge: its variables, and those that the pipeline file names.
DeltaForge's own definitions do not load this module, which imports PySpark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dagster import InitResourceContext
from dagster_pyspark import PySparkResource
from pydantic import Field, PrivateAttr
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.pipeline.run_context import spark_condition
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_dagster.resources.platform import existing_store, installed_pipelines
from deltaforge_dagster.resources.spark import SparkSessions
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.dialect import LakeDialect, session_settings
from deltaforge_dagster.sinks.registry import LakeSinkType, sink_types
from deltaforge_dagster.sources.findings import listed

_MODE = "SPARK_CONNECT_MODE_ENABLED"
"""Makes the functions of `pyspark.sql.functions` those of Spark Connect.

PySpark's own session builder sets it as well.
"""


class LakeSparkResource(PySparkResource):
    """A session on this installation's Spark server that can read the lake tables of a pipeline.

    The server is started if needed.

    The session begins when it is first asked for, and ends with the step. Nobody else has it, so
    temporary views and settings do not disturb the pipeline. It is one of Spark Connect, which has
    no `spark_context`.

    In the session, catalogs of Iceberg sinks have their names, as in `lake.public.orders`. `table`
    finds the tables of every sink.
    """

    pipeline: str = Field(description="Name of the pipeline.")
    sinks: list[str] | None = Field(
        default=None,
        description="Ids of the sinks whose tables are read. By default all sinks of Delta and "
        "Iceberg tables.",
    )
    spark_config: dict[str, Any] = Field(
        default={},
        description="Further settings of the session, which override those of the sinks.",
    )
    _sessions: SparkSessions | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Do nothing: the session begins when it is first asked for."""

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002
        """End the session."""
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.stop()

    @property
    def spark_session(self) -> SparkSession:
        """The session.

        Raises:
            NotAllowed: There is no such pipeline or sink, or sinks have settings that exclude one
                another.
            SpecError: The pipeline's file cannot be loaded.
            SettingsError: The server does not allow a setting, or cannot be started.
            SparkUnavailable: The server cannot be reached.
        """
        if self._sessions is None:
            self._sessions = self._begin()
        return self._sessions.session()

    def table(self, sink: str, table: str) -> DataFrame:
        """Return the table in which a sink keeps a table of the source.

        Args:
            sink: Id of the sink.
            table: Name of the source's table, `schema.table`; in sources without schemas
                `database.table`.

        Raises:
            NotAllowed: The resource has no such sink, or the sink has not written such a table yet.
        """
        sinks = self._lake_sinks()
        if sink not in sinks:
            raise NotAllowed(
                f"pipeline {self.pipeline}: {sink!r} is none of {listed(list(sinks))}, whose "
                "tables this resource reads"
            )
        with existing_store(Settings.from_env()) as store:
            written = [] if store is None else store.table_commits.tables(self.pipeline)
        for stored in written:
            if stored.sink == sink and ".".join(stored.write.source) == table:
                return self.spark_session.table(sinks[sink].dialect.table(stored.write.destination))
        raise NotAllowed(
            f"pipeline {self.pipeline}: sink {sink} has not written a table of {table} yet"
        )

    def _begin(self) -> SparkSessions:
        settings = {**self._settings_of_sinks(), **dict(_flat(self.spark_config))}
        sessions = SparkSessions(Settings.from_env(), None, lambda _session_id: None)
        try:
            session = sessions.session()
            for name, value in settings.items():
                _set(session, name, value)
        except BaseException:
            sessions.stop()
            raise
        os.environ[_MODE] = "1"
        return sessions

    def _settings_of_sinks(self) -> Mapping[str, str]:
        """Return the settings with which all sinks of the resource read their tables."""
        settings: dict[str, str] = {}
        whose: dict[str, str] = {}
        for sink, lake_sink in self._lake_sinks().items():
            for name, value in session_settings(lake_sink.dialect, lake_sink.config).items():
                if settings.setdefault(name, value) != value:
                    raise NotAllowed(
                        f"pipeline {self.pipeline}: sinks {whose[name]} and {sink} set {name} to "
                        "different values, so one session cannot read the tables of both; name one "
                        "of them under `sinks`"
                    )
                whose.setdefault(name, sink)
        return settings

    def _lake_sinks(self) -> Mapping[str, _LakeSink]:
        """Return the sinks of the resource, by id."""
        kinds = sink_types()
        lake_sinks = {
            block.config.id: _LakeSink(block.config, kind.dialect(block.config))
            for block in self._loaded().spec.spec.sinks
            if isinstance(kind := kinds[block.type], LakeSinkType)
            and isinstance(block.config, LakeSinkConfig)
        }
        chosen = list(lake_sinks) if self.sinks is None else self.sinks
        for sink in chosen:
            if sink not in lake_sinks:
                raise NotAllowed(f"pipeline {self.pipeline}: {sink!r} is no sink of lake tables")
        return {sink: lake_sinks[sink] for sink in chosen}

    def _loaded(self) -> LoadedPipeline:
        for pipeline in installed_pipelines(Settings.from_env()):
            if pipeline.name == self.pipeline:
                if isinstance(pipeline, BrokenPipeline):
                    raise pipeline.error
                return pipeline
        raise NotAllowed(
            f"pipeline {self.pipeline!r} is unknown; DELTAFORGE_PIPELINES names the files"
        )


@dataclass(frozen=True, slots=True)
class _LakeSink:
    """A sink of lake tables."""

    config: LakeSinkConfig
    dialect: LakeDialect


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings, which may be nested as in every `PySparkResource`, by their whole names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _set(session: SparkSession, name: str, value: str | bool | int) -> None:
    try:
        session.conf.set(name, value)
    except PySparkException as error:
        raise SettingsError(
            f"the Spark server does not take the setting {name} ({spark_condition(error)})"
        ) from None
