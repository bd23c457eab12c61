"""A document against the models: what is wrong with it, in places of the file."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails

from deltaforge_dagster.config.document import DocumentPath, Problem, format_path
from deltaforge_dagster.config.fields import field_names
from deltaforge_dagster.config.processors import CUSTOM
from deltaforge_dagster.config.sentences import sentence

_Model = TypeVar("_Model", bound=pydantic.BaseModel)


def validate(
    model: type[_Model], value: dict[str, Any]
) -> tuple[_Model | None, list[Problem], list[Problem]]:
    """Return `value` as `model`, the unknown fields and the problems.

    Unknown fields leave `value`: what to make of them is the caller's choice.
    """
    unknown: list[Problem] = []
    found, errors = _try(model, value)
    strangers = [error for error in errors if error["type"] == "extra_forbidden"]
    if strangers:
        for error in strangers:
            path = _document_path(error["loc"], value)
            unknown.append(Problem(path, f"is not a known field{_guess(path)}"))
        for stranger in unknown:
            _remove(value, stranger.path)
        found, errors = _try(model, value)
    problems = [
        Problem(_document_path(error["loc"], value), sentence(error))
        for error in errors
        # Entries with problems of their own do not count as entries.
        if error["type"] != "too_short" or not _at(value, _document_path(error["loc"], value))
    ]
    return found, unknown, problems


def _try(model: type[_Model], value: dict[str, Any]) -> tuple[_Model | None, list[ErrorDetails]]:
    try:
        return model.model_validate(value), []
    except pydantic.ValidationError as error:
        return None, error.errors(include_url=False, include_input=False)


def _document_path(loc: tuple[str | int, ...], value: Any) -> DocumentPath:
    """Return a place in the file for a place in the models, which also names forms of a block."""
    path: list[str | int] = []
    for part in loc:
        form = value.get("type") if isinstance(value, dict) and part not in value else value
        if part in (form, CUSTOM):
            continue  # the form that `type` chose, or the bare word that stands for the block
        path.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(path)


def _at(value: Any, path: DocumentPath) -> Any:
    for part in path:
        value = value[part]
    return value


def _guess(path: DocumentPath) -> str:
    block = re.sub(r"\[\d+\]", "[]", format_path(path[:-1]))
    close = difflib.get_close_matches(str(path[-1]), field_names(block), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _remove(value: Any, path: DocumentPath) -> None:
    del _at(value, path[:-1])[path[-1]]
