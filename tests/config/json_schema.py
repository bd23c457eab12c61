"""A validator for the part of JSON Schema (draft 2020-12) that the pipeline schema uses; raises for other keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_TYPES: Mapping[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
_NOTES = {"$schema", "$defs", "title", "description", "default", "format", "writeOnly"}
_OF_OTHERS = {"discriminator", "properties"}
"""Keywords that are only for OpenAPI, or that are handled together with `additionalProperties`."""


def invalid(value: Any, schema: Schema) -> list[str]:
    """Return the paths in `value` that violate the schema, each with the violated keyword."""
    return list(_invalid(value, schema, schema, ""))


def _invalid(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    for word in schema.keys() - _NOTES - _OF_OTHERS:
        yield from _CHECKS[word](value, schema, root, place)
    for name, below in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            yield from _invalid(value[name], below, root, f"{place}/{name}")


def _ref(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    name = schema["$ref"].removeprefix("#/$defs/")
    return _invalid(value, root["$defs"][name], root, place)


def _type(value: Any, schema: Schema, _: Schema, place: str) -> Iterator[str]:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(_TYPES[one](value) for one in types):
        yield f"{place}: type"


def _choice(word: str) -> Callable[..., Iterator[str]]:
    def check(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
        fitting = sum(not [*_invalid(value, one, root, place)] for one in schema[word])
        if fitting == 0 or (word == "oneOf" and fitting > 1):
            yield f"{place}: {word}"

    return check


def _items(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    for index, one in enumerate(value if isinstance(value, list) else ()):
        yield from _invalid(one, schema["items"], root, f"{place}/{index}")


def _additional(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    rule = schema["additionalProperties"]
    for name in value.keys() - schema.get("properties", {}).keys():
        if rule is False:
            yield f"{place}/{name}: additionalProperties"
        elif rule is not True:
            yield from _invalid(value[name], rule, root, f"{place}/{name}")


def _simple(word: str, fits: Callable[[Any, Any], bool]) -> Callable[..., Iterator[str]]:
    def check(value: Any, schema: Schema, _: Schema, place: str) -> Iterator[str]:
        if not fits(value, schema[word]):
            yield f"{place}: {word}"

    return check


def _number(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda value, bound: not _TYPES["number"](value) or compare(value, bound)


def _not(value: Any, schema: Schema, root: Schema, place: str) -> Iterator[str]:
    if not [*_invalid(value, schema["not"], root, place)]:
        yield f"{place}: not"


_CHECKS: Mapping[str, Callable[..., Iterator[str]]] = {
    "not": _not,
    "$ref": _ref,
    "type": _type,
    "anyOf": _choice("anyOf"),
    "oneOf": _choice("oneOf"),
    "items": _items,
    "additionalProperties": _additional,
    "const": _simple("const", lambda value, only: value == only),
    "enum": _simple("enum", lambda value, allowed: value in allowed),
    "required": _simple(
        "required", lambda value, names: not isinstance(value, dict) or value.keys() >= set(names)
    ),
    "pattern": _simple(
        "pattern", lambda value, text: not isinstance(value, str) or bool(re.search(text, value))
    ),
    "minItems": _simple(
        "minItems", lambda value, least: not isinstance(value, list) or len(value) >= least
    ),
    "minLength": _simple(
        "minLength", lambda value, least: not isinstance(value, str) or len(value) >= least
    ),
    "minimum": _simple("minimum", _number(lambda value, bound: value >= bound)),
    "maximum": _simple("maximum", _number(lambda value, bound: value <= bound)),
    "exclusiveMinimum": _simple("exclusiveMinimum", _number(lambda value, bound: value > bound)),
    "exclusiveMaximum": _simple("exclusiveMaximum", _number(lambda value, bound: value < bound)),
}
