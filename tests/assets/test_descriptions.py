"""Tests of the owners and tags of assets."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.descriptions import asset_specs, health_spec, owners, tags
from deltaforge_dagster.assets.pipeline import build_health_check
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.model import Metadata
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.specs import code_parts
from deltaforge_dagster.resources.platform import Platform
from tests.config.conftest import Write, write

__all__ = ["write"]


def metadata(
    labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None
) -> Metadata:
    """Return the metadata of a file."""
    return Metadata(
        name="orders", tenant="acme", labels=labels or {}, annotations=annotations or {}
    )


@pytest.mark.parametrize(
    ("labels", "annotations", "found"),
    [
        ({}, {}, []),
        ({"team": "data"}, {}, ["team:data"]),
        ({"owner": "team:data"}, {}, ["team:data"]),
        ({}, {"owner": "ada@example.com"}, ["ada@example.com"]),
        ({}, {"owners": "ada@example.com, data ,"}, ["ada@example.com", "team:data"]),
        ({"team": "data"}, {"owner": "data, ops"}, ["team:data", "team:ops"]),
        ({"team": "team:"}, {"owner": " "}, []),
    ],
)
def test_owners(labels: dict[str, str], annotations: dict[str, str], found: list[str]) -> None:
    """Owners are email addresses and teams, from annotations first, without duplicates."""
    assert owners(metadata(labels, annotations)) == found


def test_tags() -> None:
    """Tags are the tenant and the labels that Dagster accepts."""
    labels = {"env": "prod", "note": "not a tag, this", "dagster/priority": "1", "a b": "c"}

    assert tags(metadata(labels)) == {"env": "prod", "tenant": "acme"}


_TEXTS = st.dictionaries(
    st.sampled_from(["owner", "team", "env", "a/b", "dagster/x"]) | st.text(), st.text()
)


@given(labels=_TEXTS, annotations=_TEXTS)
def test_dagster_takes_whatever_comes_of_it(
    labels: dict[str, str], annotations: dict[str, str]
) -> None:
    """No text in a pipeline file makes an asset that Dagster refuses."""
    given_ = metadata(labels, annotations)

    spec = dg.AssetSpec("a", owners=owners(given_), tags=tags(given_))

    dg.Definitions.validate_loadable(dg.Definitions(assets=[spec]))


def test_tables_of_a_lake(write: Write) -> None:
    """A lake's asset says what its tables have and where they are, and offers no replay."""
    config = {"id": "lake", "path": "/lake", "mode": "history"}
    loaded = load_pipeline(write({"spec.sinks.1": {"type": "delta", "config": config}}))

    _, cache, lake = asset_specs(loaded, code_parts(loaded.spec))

    assert lake.kinds == {"delta"}
    assert lake.metadata == {
        "destination": "${source.schema}.${source.table}",
        "delivery": "exactly once",
        "required": True,
        "mode": "history",
        "path": "/lake",
    }
    assert "to deliver them again" in (cache.description or "")
    assert "to deliver them again" not in (lake.description or "")
    assert cache.metadata["envelope"] == "native"


def test_destinations_are_readable(write: Write) -> None:
    """A template's variables are names in the text, not what looks like an environment variable that is not set."""
    config = {"id": "lake", "path": "/lake", "table": "copy.${source.schema}_${source.table}"}
    loaded = load_pipeline(write({"spec.sinks.1": {"type": "delta", "config": config}}))

    _, _, lake = asset_specs(loaded, code_parts(loaded.spec))

    assert "has arrived at `copy.<source.schema>_<source.table>`." in (lake.description or "")


def test_descriptions_of_checks_say_nothing_of_their_result(write: Write) -> None:
    """Dagster shows the description above a failure, which it must not contradict."""
    sensing = {"spec.schema_sensing": {"enabled": True}}
    loaded = load_pipeline(write(sensing))
    (well,) = build_health_check(loaded, Platform(Settings.from_env({}))).check_specs

    specs = [*check_specs(loaded), well]

    assert {spec.name for spec in specs} >= {"holds", "delivered", "sensing", "well"}
    assert [
        spec.name for spec in specs if not (spec.description or "").startswith("Whether ")
    ] == []


def test_health_hangs_on_the_pipelines_graph(write: Write) -> None:
    """Its node is behind all others of the pipeline, whose health it is, so that none hangs alone."""
    loaded = load_pipeline(write())

    health = health_spec(loaded)

    assert [dep.asset_key.path for dep in health.deps] == [
        [loaded.name, "changes"],
        *([loaded.name, "sinks", sink.config.id] for sink in loaded.spec.spec.sinks),
        [loaded.name, "schemas"],
        [loaded.name, "snapshot"],
    ]
    dg.Definitions.validate_loadable(
        dg.Definitions(assets=[*asset_specs(loaded, code_parts(loaded.spec)), health])
    )
