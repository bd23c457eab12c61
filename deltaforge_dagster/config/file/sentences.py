"""Messages for the models' validation errors, in the terms of the file instead of Python's."""

from __future__ import annotations

from pydantic_core import ErrorDetails

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
