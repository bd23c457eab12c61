"""The fields of the models, by their path in the file.

Suggestions for misspelt fields and the check of the reference documentation both read this table, so
they cannot differ from the models.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deltaforge_dagster.config.model import PipelineSpec


@functools.cache
def field_table() -> dict[str, FieldInfo]:
    """Return every field of a pipeline file by its path; `[]` marks list items, `spec.sinks[].config.id`.

    If a block has several forms (sinks of different types), a field is described by the first form
    that has it.
    """
    table: dict[str, FieldInfo] = {}
    for path, info in _fields(PipelineSpec, ""):
        table.setdefault(path, info)
    return table


def field_names(block: str) -> list[str]:
    """Return the names of the fields in a block; `block` is a path of `field_table`, "" the whole file."""
    prefix = f"{block}." if block else ""
    below = (path.removeprefix(prefix) for path in field_table() if path.startswith(prefix))
    return [name for name in below if "." not in name and "[" not in name]


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        path = prefix + (info.alias or name)
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
