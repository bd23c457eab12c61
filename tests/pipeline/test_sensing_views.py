"""The shapes in which the API and commands show what sensing knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed, SensingDisabled
from deltaforge_dagster.pipeline import sensing_views as views
from deltaforge_dagster.pipeline.publication import pending
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.sensed import documents, pipeline, sense
from tests.processors.rows import row
from tests.state.make import NAME, capture

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
DOC = "public.orders:doc"


@pytest.fixture
def loaded(sqlite_store: StateStore, tmp_path: Path) -> LoadedPipeline:
    """A pipeline of which forty rows were looked at, and one message of its own."""
    loaded = pipeline(tmp_path)
    rows = [*documents(31), row(table="message", schema_version=None, after='{"any":1.5}')]
    sense(sqlite_store, loaded, rows)
    return loaded


def test_schemas(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Every schema by its name: fingerprint, number, how many documents, since when."""
    message, doc = views.schemas(sqlite_store, loaded)
    assert (message["table"], doc["table"]) == ("public.message", DOC)
    assert doc.keys() == {
        "table", "fingerprint", "sequence", "event_count", "sampled_count", "stabilized",
        "first_seen", "last_seen",
    }  # fmt: skip
    assert (doc["sequence"], doc["event_count"], doc["sampled_count"]) == (1, 31, 31)
    assert doc["stabilized"] is False
    assert re.fullmatch(r"[0-9a-f]{16}", doc["fingerprint"])
    assert MOMENT.fullmatch(doc["first_seen"])


def test_fields(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """The outermost fields with types, whether they are always there, and what is in them."""
    found = views.schema(sqlite_store, loaded, DOC)
    assert found["fields"] == [
        {"name": "state", "types": ["string"], "nullable": False, "optional": True,
         "null_rate": 0.0, "enum": ["new", "paid"]},
        {"name": "items", "types": ["array"], "nullable": False, "optional": False,
         "array_element_types": ["object"], "null_rate": 0.0},
        {"name": "at", "types": ["null"], "nullable": True, "optional": True, "null_rate": 1.0},
    ]  # fmt: skip
    assert views.schema(sqlite_store, loaded, "message")["table"] == "public.message"
    with pytest.raises(
        NotAllowed, match=r"nothing is known of 'items' \(there is: public.message, "
    ):
        views.schema(sqlite_store, loaded, "items")


def test_json_schema(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """What is never missing and never null is required."""
    assert views.json_schema(sqlite_store, loaded, "orders:doc") == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": DOC,
        "type": "object",
        "properties": {
            "state": {"type": "string", "enum": ["new", "paid"]},
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": ["n"],
                },
            },
            "at": {"type": "null"},
        },
        "required": ["items"],
    }


def test_classifications_and_stats(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Objects by their paths, and how often a known structure was met."""
    assert views.classifications(sqlite_store, loaded, DOC) == {
        "table": DOC,
        "paths": {
            "$": {"stable_fields": ["at", "items", "state"], "has_dynamic_fields": False,
                  "unique_keys": 3},
            "$.items[]": {"stable_fields": ["n"], "has_dynamic_fields": False, "unique_keys": 1},
        },
    }  # fmt: skip
    assert views.stats(sqlite_store, loaded) == {
        "tables": [
            {"table": name, "cached_structures": count, "max_cache_size": 100,
             "cache_hits": hits, "cache_misses": count}
            for name, count, hits in (("public.message", 1, 0), (DOC, 2, 29))
        ],
        "total_cache_hits": 29,
        "total_cache_misses": 3,
        "hit_rate": 0.9062,
    }  # fmt: skip
    assert views.evolutions(sqlite_store, loaded, DOC) == []


def test_drift(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """By column: what was declared, what was seen; a column that no row has is missing."""
    (found,) = views.drifts(sqlite_store, loaded)
    assert found == views.drift(sqlite_store, loaded, "orders")
    assert (found["table"], found["has_drift"]) == ("public.orders", True)
    assert (found["events_analyzed"], found["events_with_drift"]) == (31, 1)
    null, missing = found["columns"]
    assert MOMENT.fullmatch(null.pop("last_seen")["unexpected_null"])
    assert null == {
        "column": "id", "expected_type": "integer", "observed_types": ["null"],
        "mismatch_count": 1, "examples": [], "problems": {"unexpected_null": 1},
    }  # fmt: skip
    assert (missing["column"], missing["problems"]) == ("gone", {"missing_column": 31})
    with pytest.raises(NotAllowed, match="nothing is known of 'message'"):
        views.drift(sqlite_store, loaded, "message")


def test_what_is_switched_off(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Without sensing, or what would show it, there is one clear error."""
    with pytest.raises(SensingDisabled, match="schema sensing is not enabled"):
        views.schemas(sqlite_store, pipeline(tmp_path, "enabled: false"))
    hidden = pipeline(
        tmp_path, "enabled: true, output: {expose_api: false, export_json_schema: false}"
    )
    with pytest.raises(SensingDisabled, match="expose_api is false"):
        views.check_exposed(hidden)
    with pytest.raises(SensingDisabled, match="export_json_schema is false"):
        views.json_schema(sqlite_store, hidden, DOC)
    views.check_exposed(pipeline(tmp_path))


def test_ranges_carry_it(sqlite_store: StateStore, tmp_path: Path) -> None:
    """What is known when a range is published is metadata of `changes`, not of sinks."""
    lease = sense(sqlite_store, pipeline(tmp_path), documents(31))
    capture(sqlite_store, lease, 1)

    (changes,) = [one for one in pending(sqlite_store, NAME) if one.asset == "changes"]

    assert changes.metadata["drift/public.orders"] == 1
    assert str(changes.metadata[f"sensing/{DOC}"]).startswith("1 ")
