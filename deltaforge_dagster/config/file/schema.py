"""The JSON Schema (draft 2020-12) of the pipeline file, generated from the models.

Editors and programs use it. The schema accepts what `load` accepts, except that unknown fields are
errors, so that editors mark them. What only the models can check, such as a DSN or a rule between
two fields, is not part of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
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
