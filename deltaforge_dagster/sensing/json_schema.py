"""Convert a learned schema to JSON Schema, draft 2020-12 or draft-07.

Both drafts have the keywords used.
"""

from __future__ import annotations

from typing import Any

from deltaforge_dagster.config.sensing import JsonSchemaFormat
from deltaforge_dagster.sensing.fields import children, name_of, optional
from deltaforge_dagster.sensing.scan import (
    ANY,
    ARRAY,
    ELEMENT,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    TYPES,
    Path,
)
from deltaforge_dagster.sensing.schema import DocumentSchema

DIALECTS: dict[JsonSchemaFormat, str] = {
    "draft-07": "http://json-schema.org/draft-07/schema#",
    "draft-2020-12": "https://json-schema.org/draft/2020-12/schema",
}
DEPTH_LIMIT = "(depth limit reached)"

_SAME_LENGTH = 10
"""How many strings of equal length are needed to report a fixed length."""


def json_schema(title: str, schema: DocumentSchema, form: JsonSchemaFormat) -> dict[str, Any]:
    """Return a JSON Schema that all documents match from which the schema was learned.

    A field is required if it was never missing and never null. A field with several types has a
    `oneOf`; if both integers and numbers were seen, `number` stands for both.
    """
    return {"$schema": DIALECTS[form], "title": title, **_node(schema, ())}


def _node(schema: DocumentSchema, path: Path) -> dict[str, Any]:
    counts = schema.fields[path].counts
    kinds = [kind for kind, count in enumerate(counts) if count]
    if counts[NUMBER]:
        kinds = [kind for kind in kinds if kind != INTEGER]
    forms = [_form(schema, path, kind) for kind in kinds]
    return forms[0] if len(forms) == 1 else {"oneOf": forms}


def _form(schema: DocumentSchema, path: Path, kind: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": TYPES[kind]}
    if kind in {OBJECT, ARRAY} and len(path) >= schema.depth:
        return form | {"description": DEPTH_LIMIT}
    if kind == OBJECT:
        return form | _object(schema, path)
    if kind == ARRAY and (*path, ELEMENT) in schema.fields:
        return form | {"items": _node(schema, (*path, ELEMENT))}
    if kind == STRING:
        return form | _string(schema, path)
    return form


def _object(schema: DocumentSchema, path: Path) -> dict[str, Any]:
    inside = [child for child in children(schema.fields, path) if child[-1] not in {ANY, ELEMENT}]
    form: dict[str, Any] = {
        "properties": {name_of(child): _node(schema, child) for child in inside},
        "required": [
            name_of(child)
            for child in inside
            if not optional(schema.fields, child) and not schema.fields[child].counts[NULL]
        ],
    }
    if path in schema.maps and (*path, ANY) in schema.fields:
        form["additionalProperties"] = _node(schema, (*path, ANY))
    return form


def _string(schema: DocumentSchema, path: Path) -> dict[str, Any]:
    field = schema.fields[path]
    values = field.values
    form: dict[str, Any] = {}
    if values.format is not None:
        form["format"] = values.format
    if values.enumeration is not None:
        form["enum"] = values.enumeration
    elif (
        values.format is None
        and values.strings >= _SAME_LENGTH
        and values.shortest == values.longest
    ):
        form["description"] = f"always {values.longest} characters"
    return form
