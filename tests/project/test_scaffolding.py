"""Tests of what `dg scaffold defs` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deltaforge_dagster.config.file.load import LoadedPipeline, load_inline
from deltaforge_dagster.project.scaffolding import PipelineParams, pipeline_attributes
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types
from tests.project.conftest import QUIET, Project, keys

pytestmark = QUIET

VARIABLES = {
    "CLICKHOUSE_URL": "http://localhost:8123",
    "COPY_DSN": "postgres://u@localhost/copy",
    "KAFKA_BROKERS": "localhost:9092",
    "LAKE": "/lake",
    "LAKE_BUCKET": "lake",
    "MYSQL_DSN": "mysql://u@localhost/shop",
    "NATS_URL": "nats://localhost",
    "POSTGRES_DSN": "postgres://u@localhost/shop",
    "REDIS_URI": "redis://localhost",
    "TURSO_URL": "/shop.db",
    "WEBHOOK_URL": "https://localhost/hooks",
}


@pytest.mark.parametrize("source", sorted(source_types()))
@pytest.mark.parametrize("sink", sorted(sink_types()))
def test_every_kind_loads(
    source: str, sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its variables set, each combination is a valid pipeline."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    params = PipelineParams.model_validate({"source": source, "sink": sink})

    pipeline = load_inline("x", pipeline_attributes("orders", params), tmp_path)

    assert isinstance(pipeline, LoadedPipeline), pipeline.error


def test_what_is_written_loads(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file names the variables that it needs; a second component can be appended to it."""
    from deltaforge_dagster import PipelineComponent  # noqa: PLC0415 - as in a project

    monkeypatch.setenv("POSTGRES_DSN", VARIABLES["POSTGRES_DSN"])
    monkeypatch.setenv("LAKE", "/lake")
    folder = project.sandbox.scaffold_component(
        component_cls=PipelineComponent,
        defs_path="new-orders",
        scaffold_params={"source": "postgres", "sink": "delta"},
    )

    text = (folder / "defs.yaml").read_text()
    assert yaml.safe_load(text)["requirements"] == {"env": ["LAKE", "POSTGRES_DSN"]}
    assert "new_orders/changes" in keys(project.load())
