"""Pipelines as JSON documents: read from a request, validated, and changed by a patch.

A document is a pipeline file as JSON. Environment variables in it are not expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request

from deltaforge_dagster.api.errors import BadRequest, BuildFailed
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline, load_document
from deltaforge_dagster.pipeline.process.chains import build_problems

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
"""The description of a document as request body in the OpenAPI document."""

PATCH_BODY = _request_body({"type": "object"}, "The parts of a pipeline file that change, as JSON.")
"""The description of a patch as request body in the OpenAPI document."""


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
"""The type of a route parameter that receives the request body, which may be any JSON object."""


def checked(value: Mapping[str, Any], *, strict: bool) -> LoadedPipeline:
    """Return the pipeline of a document.

    Raises:
        SpecError: The document is invalid; the error lists every problem.
        BuildFailed: The document is well formed, but its sinks or processors cannot be built.
    """
    found = load_document("the document", value, strict=strict)
    if isinstance(found, BrokenPipeline):
        raise found.error
    problems = build_problems(found.spec)
    if problems:
        raise BuildFailed("\n".join(problems))
    return found


def merged(value: Any, patch: Any, shown: Any) -> Any:
    """Return a part of a document with a patch applied.

    Objects are merged recursively, arrays by index; a longer array in the patch appends entries. Null resets a
    field to its default and removes an entry from an array. A value that is patched with its form in responses
    stays unchanged: responses mask secrets, and sending a response back must not replace them with `***`.

    Args:
        value: The part as it is; None if it does not exist.
        patch: The changes.
        shown: The part as responses show it.
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
