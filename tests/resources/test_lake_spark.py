"""A session for other people's assets: on the installation's server, with the tables that a pipeline's sinks write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster_pyspark import PySparkResource
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed, SettingsError, SpecError
from deltaforge_dagster.resources.lake_spark import LakeSparkResource
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.fix_spark import SparkAddress
from tests.state.make import NAME, held, position

Install = Callable[..., Settings]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let the environment name an installation whose pipeline has sinks of one kind, with further options by id."""
    mode = "SPARK_CONNECT_MODE_ENABLED"
    monkeypatch.setenv(mode, "")  # so that the end of the test undoes what the resource sets
    monkeypatch.delenv(mode)

    def installed(kind: str = "iceberg", **sinks: dict[str, Any]) -> Settings:
        source = {"id": "pg", "dsn": "postgres://u@localhost/app", "slot": "s", "publication": "p"}
        document = {
            "metadata": {"name": NAME, "tenant": "acme"},
            "spec": {
                "source": {"type": "postgres", "config": source | {"tables": ["public.*"]}},
                "sinks": [
                    {"type": "file", "config": {"id": "lines", "path": "lines.jsonl"}},
                    *(
                        {
                            "type": kind,
                            "config": {"id": name, **place(kind, str(tmp_path / name)), **more},
                        }
                        for name, more in sinks.items()
                    ),
                ],
            },
        }
        path = tmp_path / "orders.yaml"
        path.write_text(yaml.safe_dump(document))
        monkeypatch.setenv("DELTAFORGE_PIPELINES", str(path))
        monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
        return Settings.from_env()

    return installed


def place(kind: str, folder: str) -> dict[str, Any]:
    """Return the options of a sink that say that its tables are in a folder."""
    if kind == "delta":
        return {"path": folder}
    return {"catalog_properties": {"type": "hadoop", "warehouse": folder}}


def wrote(settings: Settings, sink: str, *destination: str) -> None:
    """Record that a sink has written a table of `public.orders`."""
    write = TableWrite(("public", "orders"), destination, (), 1, position(1), 0.0)
    with contextlib.closing(StateStore.open(settings.state_url)) as store:
        lease = held(store, sink)
        with store.fenced(lease) as writer:
            writer.table_commits.restart(sink, 0)
            writer.table_commits.advance(sink, 1, (), [write])


@pytest.mark.spark
@pytest.mark.parametrize(
    "kind", ["iceberg", pytest.param("delta", marks=pytest.mark.soak("formats"))]
)
def test_an_asset_reads_a_table(
    install: Install,
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """By names of sink and source, and in SQL; the session has PySpark's functions and pandas, and ends with the step."""
    settings = install(kind, lake={"spark": {"spark.sql.shuffle.partitions": 3}})
    spark_server.use(tmp_path / "home", monkeypatch)
    wrote(settings, "lake", "raw", "orders")
    sessions: list[Any] = []

    @dg.asset
    def report(spark: LakeSparkResource) -> dict[str, Any]:
        session = spark.spark_session
        sessions.append(session)
        assert spark.spark_session is session
        name = "lake.raw.orders" if kind == "iceberg" else f"delta.`{tmp_path}/lake/raw/orders`"
        if kind == "iceberg":
            session.sql("CREATE NAMESPACE lake.raw")
        session.sql(f"CREATE TABLE {name} USING {kind} AS SELECT id FROM range(7)")
        orders = spark.table("lake", "public.orders")
        large: Any = orders.where(sf.col("id") > 4).toPandas()
        with pytest.raises(NotAllowed, match=r"sink lake has not written a table of public\.o yet"):
            spark.table("lake", "public.o")
        with pytest.raises(NotAllowed, match="'lines' is none of lake"):
            spark.table("lines", "public.orders")
        return {
            "all": orders.count(),
            "large": large["id"].tolist(),
            "partitions": session.conf.get("spark.sql.shuffle.partitions"),
            "zone": session.conf.get("spark.sql.session.timeZone"),
            "mine": session.conf.get("spark.sql.files.maxRecordsPerFile"),
        }

    resource = LakeSparkResource(
        pipeline=NAME, spark_config={"spark": {"sql": {"files": {"maxRecordsPerFile": 9}}}}
    )
    result = dg.materialize([report], resources={"spark": resource})

    assert isinstance(resource, PySparkResource)
    assert result.output_for_node("report") == {
        "all": 7, "large": [5, 6], "partitions": "3", "zone": "UTC", "mine": "9",
    }  # fmt: skip
    with pytest.raises(PySparkException):
        sessions[0].range(1).collect()

    static = LakeSparkResource(pipeline=NAME, spark_config={"spark.sql.extensions": "x"})
    with pytest.raises(SettingsError, match=r"does not take the setting spark\.sql\.extensions"):
        _ = static.spark_session


def test_sinks_that_exclude_one_another(install: Install) -> None:
    """Two catalogs of one name cannot be in one session; the error names no value."""
    install(here={}, there={})

    with pytest.raises(NotAllowed, match="sinks here and there set") as caught:
        _ = LakeSparkResource(pipeline=NAME).spark_session

    assert "spark.sql.catalog.lake.warehouse" in str(caught.value)
    assert "/there" not in str(caught.value)


def test_what_there_is_not(install: Install, tmp_path: Path) -> None:
    """A sink without tables, an unknown pipeline and a broken file are named; no server is started for that."""
    install(lake={})

    with pytest.raises(NotAllowed, match="'lines' is no sink of lake tables"):
        _ = LakeSparkResource(pipeline=NAME, sinks=["lines"]).spark_session
    with pytest.raises(NotAllowed, match="pipeline 'other' is unknown"):
        _ = LakeSparkResource(pipeline="other").spark_session
    with pytest.raises(
        NotAllowed, match=r"sink lake has not written a table of public\.orders yet"
    ):
        LakeSparkResource(pipeline=NAME).table("lake", "public.orders")
    install(lake={"mode": "none"})
    with pytest.raises(SpecError, match="mode"):
        _ = LakeSparkResource(pipeline=NAME).spark_session
    assert not (tmp_path / "home").exists()
