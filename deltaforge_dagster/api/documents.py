"""Pipelines as JSON documents: read from a request, checked, changed by a patch.

A document is a pipeline file as JSON. Environment variables in it are not expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request

from deltaforge_dagster.api.errors import BadRequest, BuildFailed
from deltaforge_dagster.config.load import BrokenPipeline, LoadedPipeline, load_document
from deltaforge_dagster.pipeline.build_check import build_problems

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["metadata", "spec"],
    "properties": {
        "metadata": {
            "type": "object",
            "required": ["name", "tenant"],
            "properties": {"name": {"type": "string"}, "tenant": {"type": "string"}},
        },
        "spec": {
            "type": "object",
            "required": ["source", "sinks"],
            "properties": {
                "source": {"type": "object"},
                "processors": {"type": "array"},
                "sinks": {"type": "array", "minItems": 1},
            },
        },
    },
}


def _request_body(schema: dict[str, Any], description: str) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


DOCUMENT_BODY = _request_body(_SCHEMA, "A pipeline file as JSON.")
"""What the OpenAPI document says of a body that is a document."""

PATCH_BODY = _request_body({"type": "object"}, "The parts of a pipeline file that change, as JSON.")
"""What the OpenAPI document says of a body that is a patch."""


async def _object(request: Request) -> dict[str, Any]:
    try:
        value = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not JSON: line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


JsonObject = Annotated[dict[str, Any], Depends(_object)]
"""The type of a route's parameter that is to be the request's body, any JSON object."""


def checked(value: Mapping[str, Any], *, strict: bool) -> LoadedPipeline:
    """Return the pipeline of a document.

    Raises:
        SpecError: With every problem of the document.
        BuildFailed: It is well formed, and its sinks or processors cannot be built.
    """
    found = load_document("the document", value, strict=strict)
    if isinstance(found, BrokenPipeline):
        raise found.error
    problems = build_problems(found.spec)
    if problems:
        raise BuildFailed("\n".join(problems))
    return found


def merged(value: Any, patch: Any, shown: Any) -> Any:
    """Return a document's part with a patch laid over it.

    Objects are merged deeply, and arrays by index, a longer patch appends. Null takes a field back to its
    default, and an entry out of an array. What is patched as it is shown stays as it is: answers hide
    secrets, and an answer that is sent back must not put `***` in their place.

    Args:
        value: The part as it is; None when it is not there.
        patch: What changes.
        shown: The part as answers show it.
    """
    if isinstance(patch, dict):
        before = value if isinstance(value, dict) else {}
        views = shown if isinstance(shown, dict) else {}
        changed = {key: merged(before.get(key), one, views.get(key)) for key, one in patch.items()}
        return before | changed
    if isinstance(patch, list):
        items = value if isinstance(value, list) else []
        views_of = shown if isinstance(shown, list) else []
        laid = [
            merged(_at(items, index), one, _at(views_of, index)) for index, one in enumerate(patch)
        ]
        return [one for one in laid if one is not None] + items[len(laid) :]
    return value if patch is not None and value is not None and patch == shown else patch


def _at(items: list[Any], index: int) -> Any:
    return items[index] if index < len(items) else None
