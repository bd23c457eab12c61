"""Writes new components, with the fields that a kind of source and sink needs.

Values that differ by place, and secrets, are environment variables, which the file lists under
`requirements`, so that `dg list envs` shows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import dagster as dg
import yaml
from pydantic import BaseModel, ConfigDict

_SOURCES: Mapping[str, Mapping[str, Any]] = {
    "postgres": {
        "dsn": "{{ env.POSTGRES_DSN }}",
        "slot": "NAME",
        "publication": "NAME",
        "tables": ["public.*"],
    },
    "mysql": {"dsn": "{{ env.MYSQL_DSN }}", "tables": ["shop.*"]},
    "turso": {"url": "{{ env.TURSO_URL }}", "tables": ["*"]},
}
_SINKS: Mapping[str, Mapping[str, Any]] = {
    "file": {"path": "/tmp/NAME.jsonl"},  # noqa: S108 - an example that works at once
    "redis": {"uri": "{{ env.REDIS_URI }}", "stream": "NAME.${source.table}"},
    "kafka": {"brokers": "{{ env.KAFKA_BROKERS }}", "topic": "NAME.${source.table}"},
    "nats": {"url": "{{ env.NATS_URL }}", "subject": "NAME.${source.table}"},
    "http": {"url": "{{ env.WEBHOOK_URL }}"},
    "delta": {"path": "{{ env.LAKE }}/NAME"},
    "iceberg": {
        "catalog": "lake",
        "catalog_properties": {"type": "hadoop", "warehouse": "{{ env.LAKE }}"},
    },
    "postgres": {"dsn": "{{ env.COPY_DSN }}", "table": "NAME.${source.table}"},
    "clickhouse": {
        "url": "{{ env.CLICKHOUSE_URL }}",
        "database": "NAME",
        "table": "${source.table}",
    },
    "s3": {"bucket": "{{ env.LAKE_BUCKET }}", "prefix": "NAME"},
}
_VARIABLE = re.compile(r"\{\{ env\.(\w+) \}\}")


class PipelineParams(BaseModel):
    """What `dg scaffold defs deltaforge_dagster.PipelineComponent` may be told."""

    model_config = ConfigDict(extra="forbid")

    source: Literal["postgres", "mysql", "turso"] = "postgres"
    sink: Literal[
        "file",
        "redis",
        "kafka",
        "nats",
        "http",
        "delta",
        "iceberg",
        "postgres",
        "clickhouse",
        "s3",
    ] = "file"


class PipelineScaffolder(dg.Scaffolder[PipelineParams]):
    """Writes the `defs.yaml` of a pipeline."""

    @classmethod
    def get_scaffold_params(cls) -> type[PipelineParams]:
        """Return the model of the options."""
        return PipelineParams

    def scaffold(self, request: dg.ScaffoldRequest[PipelineParams]) -> None:
        """Write the component, named after its folder."""
        name = re.sub(r"[^a-z0-9_]", "_", request.target_path.name.lower())
        attributes = pipeline_attributes(name, request.params)
        if request.scaffold_format != "yaml":
            dg.scaffold_component(request, attributes)
            return
        ours = request.type_name.startswith("deltaforge_dagster.")  # perhaps the module's name
        kind = "deltaforge_dagster.PipelineComponent" if ours else request.type_name
        document: dict[str, Any] = {"type": kind, "attributes": attributes}
        text = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
        if variables := sorted(set(_VARIABLE.findall(text))):
            text += yaml.safe_dump({"requirements": {"env": variables}}, default_flow_style=False)
        if request.append:
            with request.target_path.open("a") as file:
                file.write(f"---\n{text}")
        else:
            (request.target_path / "defs.yaml").write_text(text)


def pipeline_attributes(name: str, params: PipelineParams) -> dict[str, Any]:
    """Return the attributes of a pipeline with this name, from one kind to another."""
    source = {"id": f"{name}_source", **_named(_SOURCES[params.source], name)}
    sink = {"id": params.sink, **_named(_SINKS[params.sink], name)}
    return {
        "metadata": {"name": name, "tenant": "default"},
        "spec": {
            "source": {"type": params.source, "config": source},
            "sinks": [{"type": params.sink, "config": sink}],
        },
    }


def _named(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return fields in which NAME is replaced."""

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("NAME", name)
        return _named(value, name) if isinstance(value, dict) else value

    return {field: replaced(value) for field, value in fields.items()}
