"""The JSON Schema (draft 2020-12) of the pipeline file, and its reference as Markdown.

Editors and programs use the schema. It is generated from the models and accepts what `load`
accepts, except that unknown fields are errors, so that editors mark them. What only the models can
check, such as a DSN or a rule between two fields, is not part of it.

The reference has every field with type, default and meaning. It is generated from the schema, so it
cannot differ from the models.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from deltaforge_dagster.config.model import PipelineSpec

VARIABLE: JsonSchemaValue = {"type": "string", "pattern": r"^\$"}
"""A value given by an environment variable: numbers, flags and choices accept it, too."""

_DERIVED = "id"
"""The field that `load` fills in if the file omits it."""


class _Generator(GenerateJsonSchema):
    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Describe each field by the docstring below it.

        Pydantic can do that (`use_attribute_docstrings`), but does it when a class is made: it
        would read the source of all models in every process that loads a pipeline.
        """
        json_schema = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        for name, text in _docstrings(model):
            alias = model.model_fields[name].alias or name
            json_schema["properties"][alias].setdefault("description", text)
        return json_schema

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return _or_variable(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return _or_variable(super().float_schema(schema))

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        return _or_variable(super().bool_schema(schema))

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        json_schema = super().literal_schema(schema)
        return json_schema if "const" in json_schema else _or_variable(json_schema)

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Omit the default of a block: its fields have their own defaults."""
        if isinstance(schema.get("default"), BaseModel):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Omit titles, which would only repeat the names of fields."""
        return False


def _or_variable(schema: JsonSchemaValue) -> JsonSchemaValue:
    return {"anyOf": [schema, VARIABLE]}


def _docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the model's fields that have a docstring, and it, most derived class first."""
    for base in model.__mro__:
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        with suppress(OSError):  # models that are created at run time have no source
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            statements = body.body if isinstance(body, ast.ClassDef) else []
            for field, below in pairwise(statements):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ) if name in model.model_fields:
                        yield name, inspect.cleandoc(text)


def pipeline_schema() -> dict[str, Any]:
    """Return the JSON Schema of a pipeline file."""
    schema = PipelineSpec.model_json_schema(schema_generator=_Generator)
    for block in schema["$defs"].values():
        if _DERIVED in block.get("required", ()):
            block["required"].remove(_DERIVED)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "DeltaForge pipeline",
    }


_Schema = Mapping[str, Any]

_DIVIDED = frozenset({"", "spec", "spec.engine"})
"""Blocks whose inner blocks get their own sections; those of all others are rows of one table."""

_INTRODUCTION = """\
# Every field of the pipeline file

Generated from the models by `make reference`; [configuration.md](configuration.md) explains \
the rules behind it. `[]` in a path
is an entry of a list. Fields that end in `_seconds` or `_secs` are in seconds, `_ms` in \
milliseconds, `_bytes` in bytes. A
*template* is text with variables ([templates](configuration.md#templates)); a *secret* is \
never shown. A *derived* id is
generated, with a warning, if the file has none.
"""

_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "map",
}


def reference() -> str:
    """Return the whole page."""
    schema = pipeline_schema()
    sections = _Reference(schema["$defs"]).sections("", schema)
    return "\n".join([_INTRODUCTION, *sections])


class _Reference:
    def __init__(self, definitions: Mapping[str, _Schema]) -> None:
        self._definitions = definitions

    def sections(self, path: str, block: _Schema) -> Iterator[str]:
        """Yield the section of a block, and those of its inner blocks."""
        if path:
            form = block["properties"].get("type", {}).get("const")
            yield f"## {path}" + (f", type {form}" if form else "") + "\n"
            yield " ".join(block.get("description", "").split()) + "\n"
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        yield from self._rows(path, block)
        yield ""
        if path in _DIVIDED:
            for name, field in block["properties"].items():
                for form in self._forms(field):
                    yield from self.sections(_below(path, name, field), form)

    def _rows(self, path: str, block: _Schema, note: str = "") -> Iterator[str]:
        required = block.get("required", ())
        for name, field in block["properties"].items():
            field_path = f"{path}.{name}" if path else name
            forms = self._forms(field)
            # In the schema, a field has no description if it equals the description of its block.
            text = field.get("description", forms[0].get("description", "") if forms else "")
            meaning = " ".join(text.split())
            default = "required" if name in required else _default(name, field)
            if forms:
                default = default if name in required else "none" if _optional(field) else ""
            cells = (f"`{field_path}`", _kind(field), default, note + meaning)
            yield f"| {' | '.join(cells)} |".replace("  ", " ")
            if path not in _DIVIDED:
                yield from self._rows_of_forms(_below(path, name, field), forms)

    def _rows_of_forms(self, path: str, forms: Sequence[_Schema]) -> Iterator[str]:
        """Yield the rows of a block, which may have several forms, chosen by `type`."""
        if len(forms) < 2:
            for form in forms:
                yield from self._rows(path, form)
            return
        types = _words([f"`{form['properties']['type']['const']}`" for form in forms])
        yield f"| `{path}.type` | {types} | required | |"
        for form in forms:
            kind = form["properties"]["type"]["const"]
            fields = {name: field for name, field in form["properties"].items() if name != "type"}
            yield from self._rows(path, {**form, "properties": fields}, f"`{kind}`: ")

    def _forms(self, field: _Schema) -> list[_Schema]:
        """Return the schemas of the blocks that a field, or an entry of its list, can be."""
        if "$ref" in field:
            return [self._definitions[field["$ref"].rpartition("/")[2]]]
        alternatives = [*field.get("anyOf", ()), *field.get("oneOf", ())]
        if "items" in field:
            alternatives.append(field["items"])
        return [form for alternative in alternatives for form in self._forms(alternative)]


def _kind(field: _Schema) -> str:
    """Return the type of a field in words."""
    choices = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if choices:
        shown = [
            choice for choice in choices if choice != VARIABLE and choice.get("type") != "null"
        ]
        return " or ".join(dict.fromkeys(_kind(choice) for choice in shown))
    match field:
        case {"$ref": _}:
            kind = "block"
        case {"const": only}:
            kind = f"`{only}`"
        case {"enum": words}:
            kind = _words([f"`{word}`" for word in words])
        case {"type": "array", "items": items}:
            kind = f"list of {_kind(items)}"
        case {"type": "string", "format": "password"}:
            kind = "secret"
        case {"type": "string", "format": kind}:
            pass
        case _:
            kind = _WORDS.get(str(field.get("type")), "any value")
    return str(kind)


def _below(path: str, name: str, field: _Schema) -> str:
    """Return the path of a field's content, with `[]` for a list."""
    field_path = f"{path}.{name}" if path else name
    return field_path + ("[]" if field.get("type") == "array" else "")


def _optional(field: _Schema) -> bool:
    return any(choice.get("type") == "null" for choice in field.get("anyOf", ()))


def _default(name: str, field: _Schema) -> str:
    if "default" not in field:
        return "derived" if name == "id" else ""
    match field["default"]:
        case None:
            return "none"
        case bool(flag):
            return f"`{str(flag).lower()}`"
        case float(number) if number.is_integer():
            return f"`{int(number)}`"
        case other:
            return f"`{other}`"


def _words(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
