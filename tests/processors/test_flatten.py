"""Nested objects become columns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.processors import FlattenProcessor
from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.flatten import Flatten
from tests.processors.rows import batch, images, row


def flat(image: str, **options: Any) -> str:
    """Return the flattened form of an image."""
    config = FlattenProcessor(type="flatten", **options)
    made = Flatten(config).process(batch([row(before=image, after=image)]))
    before, after = (made.column(one)[0].as_py() for one in ("before", "after"))
    assert before == after
    return str(after)


@pytest.mark.parametrize(
    ("image", "options", "expected"),
    [
        ('{"a":{"b":1,"c":{"d":1.10}}}', {}, '{"a__b":1,"a__c__d":1.10}'),
        ('{"a":{"b":1}}', {"separator": "."}, '{"a.b":1}'),
        ('{"a":{"b":{"c":{"d":1}}}}', {"max_depth": 2}, '{"a__b__c":{"d":1}}'),
        ('{"a":{"b":1}}', {"max_depth": 0}, '{"a":{"b":1}}'),
        ('{"a":{},"b":{"c":{}}}', {}, '{"a":{},"b__c":{}}'),
        ('{"a":{},"b":{"c":{}}}', {"empty_object": "drop"}, "{}"),
        ('{"a":{},"b":{"c":{}}}', {"empty_object": "null"}, '{"a":null,"b__c":null}'),
        ('{"a":[1,{"b":2}]}', {}, '{"a":[1,{"b":2}]}'),
        ('{"a":[1,{"b":2}]}', {"lists": "index"}, '{"a__0":1,"a__1__b":2}'),
        ('{"a":[[1],[]]}', {"lists": "index"}, '{"a__0__0":1,"a__1":[]}'),
        ('{"a":[[1]]}', {"lists": "index", "max_depth": 0}, '{"a__0__0":1}'),
        ('{"a":[]}', {"empty_list": "drop"}, "{}"),
        ('{"a":[]}', {"empty_list": "null"}, '{"a":null}'),
        ('{"a":{"b":1},"a__b":2}', {}, '{"a__b":2}'),
        ('{"a":{"b":1},"a__b":2}', {"on_collision": "first"}, '{"a__b":1}'),
        ('{"a":{"_base64":"AA=="},"b":{"_unchanged":true}}', {}, None),
        ('{"a":"{[","b":1.0}', {}, None),
    ],
)
def test_rules(image: str, options: dict[str, Any], expected: str | None) -> None:
    """Every option has its effect; None stands for an image that stays unchanged."""
    assert flat(image, **options) == (expected or image)


def test_a_collision_can_be_an_error() -> None:
    """`on_collision: error` stops the batch with the column's name."""
    with pytest.raises(ProcessorFailed, match="flatten: key collision on 'a__b'"):
        flat('{"a":{"b":1},"a__b":2}', on_collision="error")


def test_images_that_are_missing_stay_so() -> None:
    """A delete has no `after`, an insert no `before`."""
    rows = batch([row(after=None, before=None), row(after='{"a":{"b":1}}', before=None)])

    made = Flatten(FlattenProcessor(type="flatten")).process(rows)

    assert made.column("after").to_pylist() == [None, '{"a__b":1}']
    assert made.column("before").to_pylist() == [None, None]


def reference(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten with the default options, in the simplest way."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for name, one in value.items():
        found |= reference(one, f"{path}__{name}" if path else name)
    return found


@given(images, st.booleans())
def test_agrees_with_the_reference(image: dict[str, Any], twice: bool) -> None:
    """Any image is flattened like the reference, and flattening a flat image changes nothing."""
    nested = {"outer": image, "list": [image]}
    text = json.dumps(nested, separators=(",", ":"), ensure_ascii=False)
    made = flat(text)
    if twice:
        assert flat(made) == made

    expected: dict[str, Any] = {}
    for name, one in nested.items():
        expected |= reference(one, name)
    assert json.loads(made) == expected
