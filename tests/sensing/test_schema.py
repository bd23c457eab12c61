"""Schemas of documents, compared with a plain Python reference that reads one document at a time."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import jsonschema_rs
import numpy as np
import orjson
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.sensing.json_schema import DIALECTS, json_schema
from deltaforge_dagster.sensing.scan import TYPES
from deltaforge_dagster.sensing.schema import DocumentSchema
from deltaforge_dagster.sensing.values import ENUM_REPEATS
from tests.chance import examples
from tests.sensing.reference import Reference

names = st.sampled_from(["id", "kind", "ä", 'q"', "", "[]", "<*>", *(f"u{n}" for n in range(12))])
texts = st.sampled_from(["new", "paid", "", "2026-11-22", "a@b.org", 'es"c\\aped', "näme"])
leaves = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
documents = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=8,
)
maps = st.dictionaries(
    st.sampled_from([f"u{n}" for n in range(40)]), st.fixed_dictionaries({"n": leaves}), max_size=4
)
shaped = st.fixed_dictionaries({"id": st.integers(), "m": maps}, optional={"note": texts})
streams = st.lists(shaped | documents, min_size=1, max_size=60) | st.lists(
    shaped, min_size=20, max_size=60
)


def options_with(**blocks: Any) -> SchemaSensing:
    """Return options with which a small stream of documents triggers every rule."""
    return SchemaSensing.model_validate({"enabled": True, **blocks})


all_options = st.builds(
    options_with,
    deep_inspect=st.fixed_dictionaries(
        {"max_depth": st.sampled_from([1, 3, 10]), "max_sample_size": st.sampled_from([0, 15, 40])}
    ),
    sampling=st.fixed_dictionaries(
        {"structure_cache": st.booleans(), "structure_cache_size": st.sampled_from([0, 2, 100])}
    ),
    high_cardinality=st.fixed_dictionaries(
        {
            "enabled": st.booleans(),
            "min_events": st.sampled_from([3, 10]),
            "min_dynamic_fields": st.sampled_from([0, 2, 5]),
            "stable_threshold": st.sampled_from([0.3, 0.5, 1.0]),
            "confidence_threshold": st.sampled_from([0.0, 0.6, 0.9]),
            "reevaluate_interval": st.sampled_from([0, 7]),
        }
    ),
)


def learned(schema: DocumentSchema) -> dict[tuple[tuple[str, ...], str], int]:
    """Return how often each path had each type."""
    return {
        (path, TYPES[kind]): count
        for path, field in schema.fields.items()
        for kind, count in enumerate(field.counts)
        if count
    }


def observed(
    options: SchemaSensing, written: list[str], cuts: list[int]
) -> tuple[DocumentSchema, list[bool]]:
    """Return what is learned when documents arrive in parts, between which the state is stored."""
    schema = DocumentSchema(options)
    strange: list[bool] = []
    bounds = sorted({0, len(written), *(cut % len(written) for cut in cuts)})
    for start, stop in pairwise(bounds):
        schema = DocumentSchema.restored(options, orjson.loads(orjson.dumps(schema.state())))
        part = pa.array(written[start:stop], pa.string())
        strange += schema.observe(part, np.arange(start, stop)).tolist()
    return schema, strange


@settings(max_examples=examples(80))
@given(
    streams, all_options, st.lists(st.integers(0, 1000), max_size=4), st.booleans(), st.booleans()
)
def test_equals_the_reference(
    stream: list[Any], options: SchemaSensing, cuts: list[int], ascii_only: bool, spaced: bool
) -> None:
    """Fields, types, counts, maps, evolutions, cache and flags are the same however the stream is divided."""
    separators = (", ", ": ") if spaced else (",", ":")
    written = [json.dumps(one, ensure_ascii=ascii_only, separators=separators) for one in stream]
    reference = Reference(options)
    expected = [reference.observe(one) for one in written]

    schema, strange = observed(options, written, cuts)

    assert learned(schema) == dict(reference.counts())
    assert {path: names.stable for path, names in schema.maps.items()} == reference.maps
    assert strange == expected
    assert (schema.sequence, schema.stabilized) == (reference.sequence, reference.stabilized)
    assert (schema.hits, schema.misses) == (reference.hits, reference.misses)
    assert schema.fingerprint == reference.fingerprint
    assert (schema.first_us, schema.last_us) == (0, len(written) - 1)


@settings(max_examples=examples(30))
@given(streams, st.sampled_from([0, 15]), st.integers(1, 59))
def test_values_equal_the_reference(stream: list[Any], most: int, cut: int) -> None:
    """Enumerations, lengths and counts are those of all strings that were learned from."""
    options = options_with(
        deep_inspect={"max_sample_size": most},
        high_cardinality={"min_events": 10, "min_dynamic_fields": 2},
        tracking={"enum_max_cardinality": 3, "field_statistics": True},
    )
    written = [json.dumps(one) for one in stream]
    reference = Reference(options)
    for one in written:
        reference.observe(one)

    schema, _ = observed(options, written, [cut])

    strings = reference.strings()
    for path, field in schema.fields.items():
        found = strings.get(path, Counter())
        assert field.values.strings == sum(found.values())
        few = 0 < len(found) <= 3 and sum(found.values()) >= ENUM_REPEATS * len(found)
        assert field.values.enumeration == (sorted(found) if few else None)
        if found:
            assert field.values.shortest == min(map(len, found))
            assert field.values.longest == max(map(len, found))


@settings(max_examples=examples(40))
@given(streams)
def test_documents_fit_their_json_schema(stream: list[Any]) -> None:
    """All documents match the JSON Schema, in each draft, that was learned from them."""
    options = options_with(high_cardinality={"min_events": 10, "min_dynamic_fields": 2})

    schema, _ = observed(options, [json.dumps(one) for one in stream], [])

    for draft in DIALECTS:
        exported = json_schema("stream", schema, draft)
        jsonschema_rs.meta.validate(exported)
        for one in stream:
            jsonschema_rs.validate(exported, one)


def test_names_that_are_values() -> None:
    """After enough documents an object keyed by ids is a map with one field, and later ids change nothing."""
    options = SchemaSensing(enabled=True)
    written = [
        json.dumps({"id": n, "sizes": {"unit": "cm", **{f"k{n}-{m}": m for m in range(3)}}})
        for n in range(2_000)
    ]

    schema, strange = observed(options, written, [500])

    assert [path for path, _ in learned(schema)] == [
        (), (".id",), (".sizes",), (".sizes", ".unit"), (".sizes", "<*>")
    ]  # fmt: skip
    (names,) = schema.maps.values()
    assert names.stable == {"unit"}
    assert abs(names.unique - 6_000) < 300
    assert len(names.frequent) == 50
    assert not any(strange)
    assert (
        schema.sequence == 101
    )  # each of the first 100 had new names; afterwards they were one field
    assert schema.hits == 1_900 - 1
    assert json_schema("t", schema, "draft-2020-12")["properties"]["sizes"] == {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["cm"]}},
        "required": ["unit"],
        "additionalProperties": {"type": "integer"},
    }


def test_a_stable_schema_is_compared_with() -> None:
    """After `max_sample_size` documents another structure is not learned, but reported."""
    options = options_with(deep_inspect={"max_sample_size": 2})
    written = ['{"a":1}', '{"a":2}', '{"a":3}', '{"a":"x"}', '{"a":4,"b":5}', "{}"]

    schema, strange = observed(options, written, [1])

    assert strange == [False, False, False, True, True, False]
    assert schema.stabilized
    assert (schema.sequence, [*schema.fields]) == (1, [(), (".a",)])


def test_depth_is_limited() -> None:
    """Values below the maximum depth are not inspected, and the JSON Schema tells that."""
    options = options_with(deep_inspect={"max_depth": 2})

    schema, _ = observed(options, ['{"a":{"b":{"c":1}}}'], [])

    inner = json_schema("t", schema, "draft-2020-12")["properties"]["a"]["properties"]["b"]
    assert inner == {"type": "object", "description": "(depth limit reached)"}
