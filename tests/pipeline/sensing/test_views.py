"""The shapes in which the API and commands show what sensing knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed, SensingDisabled
from deltaforge_dagster.pipeline.control.closed_ranges import pending
from deltaforge_dagster.pipeline.sensing import views
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.sensed import documents, pipeline, sense
from tests.processors.rows import dumps, row
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
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", doc["fingerprint"])
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


def test_a_table_without_a_column(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Its columns that hold documents are the fields of one object, by the bare name as well."""
    found = views.schema(sqlite_store, loaded, "orders")
    assert (found["table"], found["sequence"], found["sampled_count"]) == ("public.orders", 1, 31)
    assert found["fingerprint"] != views.schema(sqlite_store, loaded, DOC)["fingerprint"]
    assert found["fields"] == [
        {"name": "doc", "types": ["object"], "nullable": False, "optional": False,
         "nested_field_count": 5, "null_rate": 0.0},
    ]  # fmt: skip
    of_column = views.json_schema(sqlite_store, loaded, DOC)
    assert views.json_schema(sqlite_store, loaded, "public.orders") == {
        "$schema": of_column.pop("$schema"),
        "title": "public.orders",
        "type": "object",
        "properties": {"doc": {key: one for key, one in of_column.items() if key != "title"}},
        "required": ["doc"],
    }
    classified = views.classifications(sqlite_store, loaded, "orders")
    assert list(classified["paths"]) == ["", "doc", "doc.items[]"]
    assert classified["paths"][""] == {
        "stable_fields": ["doc"], "has_dynamic_fields": False, "unique_keys": 1,
    }  # fmt: skip


def test_a_column_that_is_not_always_a_document(sqlite_store: StateStore, tmp_path: Path) -> None:
    """It is optional in its table; how far documents are looked into does not change with it."""
    loaded = pipeline(tmp_path, "enabled: true, deep_inspect: {max_depth: 1}")
    sense(sqlite_store, loaded, [*documents(31), row(after='{"id":31,"doc":null}')])
    (field,) = views.schema(sqlite_store, loaded, "orders")["fields"]
    assert field["optional"] is True
    schema = views.json_schema(sqlite_store, loaded, "orders")
    assert schema["required"] == []
    of_column = views.json_schema(sqlite_store, loaded, DOC)
    assert schema["properties"]["doc"]["properties"] == of_column["properties"]
    assert of_column["properties"]["items"] == {
        "type": "array", "description": "(depth limit reached)",
    }  # fmt: skip


def test_evolutions_of_a_table(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Those of each column, in order, with old and new fingerprint."""
    loaded = pipeline(tmp_path)
    rows = [row(after=dumps({"id": n, "doc": {f"a{n}": 1}})) for n in range(3)]
    sense(sqlite_store, loaded, rows)
    found = views.evolutions(sqlite_store, loaded, "orders")
    assert found == views.evolutions(sqlite_store, loaded, DOC)
    assert [(one["table"], one["sequence"], one["added"]) for one in found] == [
        (DOC, 2, ["a1: integer"]), (DOC, 3, ["a2: integer"]),
    ]  # fmt: skip
    assert found[0]["new"] == found[1]["old"]
    assert found[1]["new"] == views.schema(sqlite_store, loaded, DOC)["fingerprint"]


def test_paths_of_evolutions_are_those_of_classifications(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """Inside objects and arrays, of fields whose names begin with `$`, and of the document itself."""
    loaded = pipeline(tmp_path)
    shapes: tuple[Any, ...] = ({}, {"$": {"$.a": 1}, "items": [{"tag": {"n": 1}}]}, [])
    sense(
        sqlite_store,
        loaded,
        [row(after=dumps({"id": n, "doc": one})) for n, one in enumerate(shapes)],
    )
    within, whole = (one["added"] for one in views.evolutions(sqlite_store, loaded, DOC))
    paths = set(views.classifications(sqlite_store, loaded, DOC)["paths"])
    assert {text.removesuffix(": object") for text in within if ": object" in text} == paths - {""}
    assert "$.$.a: integer" in within
    assert whole == [": array"]


def test_the_draft_of_json_schema(sqlite_store: StateStore, tmp_path: Path) -> None:
    """The one that the file names; everything else is the same in both."""
    newer = pipeline(tmp_path)
    sense(sqlite_store, newer, documents(31))
    older = pipeline(tmp_path, "enabled: true, output: {json_schema_format: draft-07}")
    of_newer = views.json_schema(sqlite_store, newer, DOC)
    of_older = views.json_schema(sqlite_store, older, DOC)
    assert of_newer.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert of_older.pop("$schema") == "http://json-schema.org/draft-07/schema#"
    assert of_older == of_newer


def test_classifications_and_stats(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Objects by their paths, and how often a known structure was met."""
    assert views.classifications(sqlite_store, loaded, DOC) == {
        "table": DOC,
        "paths": {
            "": {"stable_fields": ["at", "items", "state"], "has_dynamic_fields": False,
                  "unique_keys": 3},
            "items[]": {"stable_fields": ["n"], "has_dynamic_fields": False, "unique_keys": 1},
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
