"""Writes new components, with the fields that a kind of source and sink needs.

Values that differ by place, and secrets, are environment variables, which the file lists under
`requirements`, so that `dg list envs` shows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import dagster as dg
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_VARIABLE = re.compile(r"\{\{ env\.(\w+) \}\}")


def _source(kind: str) -> str:
    """Return the type of a source, if there is such a type."""
    # Not for all projects in whose environment this package is installed: they import this module.
    from deltaforge_dagster.sources.registry import source_types  # noqa: PLC0415 - see above

    return _one_of(kind, source_types())


def _sink(kind: str) -> str:
    """Return the type of a sink, if there is such a type."""
    from deltaforge_dagster.sinks.registry import sink_types  # noqa: PLC0415 - see above

    return _one_of(kind, sink_types())


def _one_of(kind: str, kinds: Iterable[str]) -> str:
    if kind not in kinds:
        raise ValueError(f"must be one of {', '.join(sorted(kinds))}")
    return kind


class PipelineParams(BaseModel):
    """What `dg scaffold defs deltaforge_dagster.PipelineComponent` may be told."""

    model_config = ConfigDict(extra="forbid")

    source: Annotated[str, AfterValidator(_source), Field(description="type of its source")]
    sink: Annotated[str, AfterValidator(_sink), Field(description="type of its sink")]


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
    from deltaforge_dagster.sinks.registry import sink_types  # noqa: PLC0415 - see above
    from deltaforge_dagster.sources.registry import source_types  # noqa: PLC0415 - see above

    source = {"id": f"{name}_source", **_named(source_types()[params.source].sample, name)}
    sink = {"id": params.sink, **_named(sink_types()[params.sink].sample, name)}
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
