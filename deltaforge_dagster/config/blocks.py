"""The base class and the validated field types that all models of a pipeline file share.

The models are frozen values that mirror the file; each checks what its own block can check. The
message of a validator's error names the problem and what to write instead; `load` adds the place in
the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, SecretStr
from pydantic_core import CoreSchema, ErrorDetails

from deltaforge_dagster.config.env import unresolved
from deltaforge_dagster.config.templates import compile_template, unknown_variable
from deltaforge_dagster.errors import SpecError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Matches names of pipelines and sinks, which become asset keys, file names and keys in sinks."""


def resolved(text: str) -> str:
    """Check that text is not empty and has no unexpanded environment variable; return it."""
    if not text.strip():
        raise ValueError("is empty")
    return environment_filled(text)


def environment_filled(text: str) -> str:
    """Check that text, which may be empty, has no unexpanded environment variable; return it."""
    name = unresolved(text)
    if name is None:
        return text
    if "." in name:
        raise ValueError(f"holds ${{{name}}}, but this field is not a template (write it out)")
    raise ValueError(
        f"needs the environment variable {name}, which is not set (set it for every process that "
        "loads this file)"
    )


def setting_text(value: object) -> object:
    """Accept numbers and flags in place of the text that another program's settings have."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return environment_filled(value) if isinstance(value, str) else value


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError(
            "must be 1 to 100 letters, digits, `-`, `_` or `.`, and start with a letter or digit "
            "(it becomes part of asset keys and file names)"
        )
    return text


def template(text: str) -> str:
    """Check that text is a template whose variables are fields of events; return it."""
    if not text:
        raise ValueError("is empty")
    try:
        unknown = unknown_variable(compile_template(text))
    except SpecError as error:
        raise ValueError(str(error)) from error
    if unknown is not None:
        raise ValueError(
            f"names ${{{unknown}}}, which is neither a field of events nor an environment variable "
            "that is set"
        )
    return text


Text = Annotated[str, AfterValidator(resolved)]


Name = Annotated[str, AfterValidator(resolved), AfterValidator(_name)]


TEMPLATE = Field(json_schema_extra={"format": "template"})
"""Marks a field as a template in the JSON Schema."""

TemplateText = Annotated[str, AfterValidator(template), TEMPLATE]


def _filled(secret: SecretStr) -> SecretStr:
    resolved(secret.get_secret_value())
    return secret


FilledSecret = Annotated[SecretStr, AfterValidator(_filled)]
"""A secret that is not empty, and names no environment variable that is not set."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


Count = Annotated[int, Field(gt=0)]


def bare_type(value: object) -> object:
    """Accept `envelope: native` for `envelope: {type: native}`."""
    return {"type": value} if isinstance(value, str) else value


@dataclass(frozen=True)
class AlsoAccepts:
    """Adds to a field's JSON Schema an alternative form that its validator also accepts."""

    form: Mapping[str, Any]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return a schema that accepts the usual form and the alternative one."""
        return {"anyOf": [handler(schema), dict(self.form)]}


class Block(BaseModel):
    """One block of the file. Unknown fields are errors here; `load` turns them into warnings.

    The docstring below a field is its description for users, in Markdown: the JSON Schema
    and the reference of all fields (`file.schema`) are generated from it.

    Pydantic builds a model's validator when it is first needed (`defer_build`), because most models
    are only validated as parts of other models.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        validate_default=False,
        defer_build=True,
    )


_KINDS = {
    "string_type": "must be text (put it in quotes if it looks like a number)",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a block of fields",
    "model_attributes_type": "must be a block of fields",
    "missing": "is required",
    "union_tag_not_found": "needs a `type`",
    "too_short": "must have at least one entry",
}


_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def sentence(error: ErrorDetails) -> str:
    """Return the message of an error, without the value, which may be a secret."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "union_tag_invalid":
        return f"has an unknown type; it must be {context['expected_tags'].replace(', ', ' or ')}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}"
    return _KINDS.get(kind, error["msg"])
