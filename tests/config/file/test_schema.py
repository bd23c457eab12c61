"""The reference and the JSON Schema of the pipeline file agree with the models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltaforge_dagster.config import settings
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.file.schema import pipeline_schema, reference
from deltaforge_dagster.config.file.validation import field_table
from deltaforge_dagster.errors import SpecError
from tests.config.conftest import GOOD, Write
from tests.config.json_schema import invalid

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text()
SCHEMA = pipeline_schema()
REMEDY = "run `make reference` and commit what it writes"


def test_the_reference_is_generated() -> None:
    """docs/reference.md is what the models generate, so it cannot be out of date."""
    assert (DOCS / "reference.md").read_text() == reference(), REMEDY


def test_the_schema_is_generated() -> None:
    """docs/pipeline.schema.json is what the models generate."""
    assert json.loads((DOCS / "pipeline.schema.json").read_text()) == SCHEMA, REMEDY


def test_every_field_is_explained() -> None:
    """Each field has a docstring in its model, and a row in the reference."""
    page = reference()
    unexplained = {
        (name, field)
        for name, block in {"": SCHEMA, **SCHEMA["$defs"]}.items()
        for field, form in block.get("properties", {}).items()
        if "description" not in form and field not in {"type", "config"}
    }

    assert unexplained == set()
    assert {path for path in field_table() if f"| `{path}` |" not in page} == set()


EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.y*ml"))
    if "dagster_project" not in path.parts  # files of Dagster and dbt
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_examples_fit_the_schema(example: Path) -> None:
    """An editor with the schema finds no errors in the recommended files."""
    assert invalid(yaml.safe_load(example.read_text()), SCHEMA) == []


def changed(place: str, value: Any) -> dict[str, Any]:
    """Return a valid document with `value` at `place`."""
    document = json.loads(json.dumps(GOOD))
    *parents, last = place.split(".")
    block: Any = document
    for part in parents:
        block = block[int(part)] if isinstance(block, list) else block.setdefault(part, {})
    block[last] = value
    return dict(document)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("apiVersion", "deltaforge/v1"),
        ("spec.sharding", {"mode": "hash"}),
        ("spec.schema_sensing", {"enabled": False}),
        ("spec.sinks.0.config.envelope", "debezium"),
        ("spec.sinks.0.config.envelope", {"type": "cloudevents", "type_prefix": "a"}),
        ("spec.sinks.0.config.encoding", "json"),
        ("spec.sinks.0.config.skipped_operations", "u,d"),
        ("spec.sinks.0.config.send_timeout_secs", 3),
        ("spec.sinks.0.config.send_timeout_secs", "${TIMEOUT:-3}"),
        ("spec.sinks.0.config.required", "${REQUIRED:-true}"),
        ("spec.sinks.0.config", {"uri": "redis://h", "stream": "no-id"}),
        ("spec.commit_policy.mode", "${MODE:-all}"),
        ("spec.source.config.start_position", {"lsn": "0/1"}),
        ("spec.engine.checkpoint", {"seed": "none"}),
    ],
)
def test_accepted_forms_fit_the_schema(write: Write, place: str, value: Any) -> None:
    """The schema accepts what loads: short forms, derived ids, values from the environment."""
    assert load_pipeline(write({place: value}))
    assert invalid(changed(place, value), SCHEMA) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec.colour", "red"),
        ("spec.sinks.0.type", "pulsar"),
        ("spec.sinks.0.config.send_timeout_secs", 0),
        ("spec.sinks.0.config.required", "maybe"),
        ("spec.sinks.0.config.envelope", {"type": "cloudevents"}),
        ("spec.sinks", []),
        ("spec.commit_policy.mode", "most"),
        ("spec.source.config.start_position", "newest"),
    ],
)
def test_mistakes_do_not_fit_the_schema(write: Write, place: str, value: Any) -> None:
    """The schema rejects what does not load, and what is ignored."""
    assert invalid(changed(place, value), SCHEMA) != []
    with pytest.raises(SpecError):
        load_pipeline(write({place: value}), strict=True)


def test_settings_are_documented() -> None:
    """The documentation has a row for every environment variable of the settings."""
    names = set(re.findall(r"DELTAFORGE_[A-Z_]+", settings.__doc__ or ""))

    assert names == set(re.findall(r"^\| `(DELTAFORGE_[A-Z_]+)`", CONFIGURATION, re.MULTILINE))
