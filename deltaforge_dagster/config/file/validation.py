"""Validate a document against the models, and report problems by their path in the file."""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deltaforge_dagster.config.blocks import sentence
from deltaforge_dagster.config.file.document import DocumentPath, DocumentProblem
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.processors import CUSTOM

_Model = TypeVar("_Model", bound=pydantic.BaseModel)


def validate(
    model: type[_Model], value: dict[str, Any]
) -> tuple[_Model | None, list[DocumentProblem], list[DocumentProblem]]:
    """Return `value` as `model` (None if it is invalid), the unknown fields, and the problems.

    Unknown fields are removed from `value`; the caller decides whether they are problems.
    """
    unknown: list[DocumentProblem] = []
    validated, errors = _validate(model, value)
    extras = [error for error in errors if error["type"] == "extra_forbidden"]
    if extras:
        for error in extras:
            path = _document_path(error["loc"], value)
            guess = _guess(str(path[-1]), block_fields(model, error["loc"]))
            unknown.append(DocumentProblem(path, f"is not a known field{guess}"))
        for problem in unknown:
            _remove(value, problem.path)
        validated, errors = _validate(model, value)
    problems = [
        DocumentProblem(_document_path(error["loc"], value), sentence(error))
        for error in errors
        # pydantic does not count invalid entries: a list of them is not too short.
        if error["type"] != "too_short" or not _value_at(value, _document_path(error["loc"], value))
    ]
    return validated, unknown, problems


def _validate(
    model: type[_Model], value: dict[str, Any]
) -> tuple[_Model | None, list[ErrorDetails]]:
    try:
        return model.model_validate(value), []
    except pydantic.ValidationError as error:
        return None, error.errors(include_url=False, include_input=False)


def _document_path(loc: tuple[str | int, ...], value: Any) -> DocumentPath:
    """Convert the location of a pydantic error to a path in the file.

    Such a location also names the form of a block.
    """
    path: list[str | int] = []
    for part in loc:
        form = value.get("type") if isinstance(value, dict) and part not in value else value
        if part in (form, CUSTOM):
            continue  # the form selected by `type`, or the bare word that is short for the block
        path.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(path)


def _value_at(value: Any, path: DocumentPath) -> Any:
    for part in path:
        value = value[part]
    return value


def _guess(name: str, names: list[str]) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    close = (
        difflib.get_close_matches(name, names, n=1)
        or difflib.get_close_matches(words, names, n=1)
        or [word for word in words.split("_") if word in names]  # checkpointAfter: after
    )
    return f" (did you mean {close[0]}?)" if close else ""


def _remove(value: Any, path: DocumentPath) -> None:
    del _value_at(value, path[:-1])[path[-1]]


@functools.cache
def field_table() -> dict[str, FieldInfo]:
    """Return every field of a pipeline file by its path, such as `spec.sinks[].config.id`.

    `[]` marks list items. The check of the reference documentation reads this table, so it cannot
    differ from the models.

    If a block has several forms (sinks of different types), a field is described by the first form
    that has it.
    """
    table: dict[str, FieldInfo] = {}
    for path, info in _fields(PipelineSpec, ""):
        table.setdefault(path, info)
    return table


def block_fields(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """Return the names of the fields of one block.

    Args:
        model: The model of the whole file.
        loc: The location of a field of the block, as pydantic's errors give it: it names the form
            of each block that has several.
    """
    blocks: list[type[BaseModel]] = [model]
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        fields = [info for block in blocks for name, info in _own_fields(block) if name == part]
        if fields:
            blocks = [block for info in fields for block, _ in _models(info.annotation)]
        else:
            blocks = [block for block in blocks if _has_form(block, part)] or blocks
    return [name for block in blocks for name, _ in _own_fields(block)]


def _has_form(block: type[BaseModel], form: str) -> bool:
    info = block.model_fields.get("type")
    return info is not None and form in typing.get_args(info.annotation)


def _own_fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield info.alias or name, info


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in _own_fields(model):
        path = prefix + name
        yield path, info
        for below, mark in _models(info.annotation):
            yield from _fields(below, f"{path}{mark}.")


def _models(annotation: object) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    mark = "[]" if typing.get_origin(annotation) is tuple else ""
    for argument in typing.get_args(annotation):
        for model, below in _models(argument):
            yield model, mark + below
