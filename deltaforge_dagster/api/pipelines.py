"""Routes that validate, list, create, change, delete, pause, stop, resume and reset pipelines.

Requests contain pipelines as *documents*: a pipeline file as JSON, in which environment variables
are not expanded. A patch is merged into the document that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from deltaforge_dagster.api.context import ApiContext, Context, Pipeline
from deltaforge_dagster.api.errors import (
    BadRequest,
    BuildFailed,
    NameMismatch,
    PipelineBusy,
    PipelineExists,
    PipelineHasFile,
)
from deltaforge_dagster.api.shapes import (
    Invalid,
    PipeChange,
    PipeDetail,
    PipeInfo,
    SinkCheckpoint,
    Valid,
    info,
    ops,
    shown,
    sink_checkpoints,
)
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline, load_document
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import NotAllowed, SpecError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline, is_gone
from deltaforge_dagster.pipeline.control.user_requests import (
    end_run,
    remove,
    request_end,
    reset_pipeline,
    resume_pipeline,
)
from deltaforge_dagster.pipeline.process.chains import build_problems
from deltaforge_dagster.state.pipelines import StoredSpec

router = APIRouter(tags=["Pipelines"])
desired_state_router = APIRouter(prefix="/pipelines/{name}", tags=["Pipelines"])
checkpoints_router = APIRouter(prefix="/pipelines/{name}", tags=["Checkpoints"])

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


_DOCUMENT_BODY = _request_body(_SCHEMA, "A pipeline file as JSON.")
"""The description of a document as request body in the OpenAPI document."""

_PATCH_BODY = _request_body(
    {"type": "object"}, "The parts of a pipeline file that change, as JSON."
)
"""The description of a patch as request body in the OpenAPI document."""


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        value = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not JSON: line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


_JsonObject = Annotated[dict[str, Any], Depends(_json_object)]
"""The type of a route parameter that receives the request body, which may be any JSON object."""


@router.post(
    "/validate",
    response_model=Valid,
    responses={int(HTTPStatus.BAD_REQUEST): {"model": Invalid}},
    openapi_extra=_DOCUMENT_BODY,
)
def validate(document: _JsonObject, context: Context) -> Valid | JSONResponse:
    """Validate a pipeline without connecting to anything; return all problems at once."""
    try:
        loaded = _checked(document, strict=context.settings.strict)
    except (SpecError, BuildFailed) as error:
        answer = Invalid(error=mask(str(error))).model_dump()
        return JSONResponse(answer, status_code=HTTPStatus.BAD_REQUEST)
    spec = loaded.spec.spec
    return Valid(
        pipeline=loaded.name,
        source_type=spec.source.type,
        sink_count=len(spec.sinks),
        warnings=list(loaded.warnings),
    )


@router.get("/pipelines")
def list_pipelines(
    context: Context,
    label: Annotated[
        list[str] | None,
        Query(description="`key:value`, `key=value` or `key`; if repeated, all must match."),
    ] = None,
) -> list[PipeInfo]:
    """Return every pipeline, or those with the given labels."""
    fitting = [pipeline for pipeline in context.pipelines() if _has_labels(pipeline, label or [])]
    return [info(context.store, pipeline) for pipeline in fitting]


@router.get("/pipelines/{name}")
def show(name: str, context: Context) -> PipeDetail:
    """Return one pipeline with its operational state."""
    pipeline = context.pipeline(name)
    about = info(context.store, pipeline)
    return PipeDetail(**about.model_dump(), ops=ops(context, name))


@router.post("/pipelines", openapi_extra=_DOCUMENT_BODY)
def create(document: _JsonObject, request: Request, context: Context) -> PipeChange:
    """Create a pipeline, which is stored in the state store and starts at once."""
    loaded = _checked(document, strict=context.settings.strict)
    request.state.tenant = loaded.spec.metadata.tenant
    if any(
        pipeline.name == loaded.name and not is_gone(pipeline) for pipeline in context.pipelines()
    ):
        raise PipelineExists(f"pipeline {loaded.name!r} already exists")
    if not context.store.pipelines.add_document(loaded.name, orjson.dumps(document).decode()):
        raise PipelineExists(f"pipeline {loaded.name!r} already exists")
    resume_pipeline(context.store, loaded)
    return _changed(context, loaded)


@router.patch("/pipelines/{name}", openapi_extra=_PATCH_BODY)
def patch(name: str, changes: _JsonObject, request: Request, context: Context) -> PipeChange:
    """Change a pipeline that was created through this API.

    Its run ends, and the next one continues from the checkpoints. A stopped pipeline is started. A
    removed sink loses its checkpoint.
    """
    stored = _stored(context, name)
    before = context.pipeline(name)
    if before.path is not None:
        before = context.loaded(name)  # a file has the same name; this raises if it is broken
    view = shown(before.spec) if isinstance(before, LoadedPipeline) else {}
    document = _merged(orjson.loads(stored.document), changes, view)
    loaded = _checked(document, strict=context.settings.strict)
    request.state.tenant = loaded.spec.metadata.tenant
    if loaded.name != name:
        raise NameMismatch(f"metadata.name is {loaded.name!r}, the pipeline is {name!r}")
    text = orjson.dumps(document).decode()
    if not context.store.pipelines.replace_document(name, stored.version, text):
        raise PipelineBusy(f"pipeline {name!r} was changed by another request; try again")
    resume_pipeline(context.store, loaded)
    return _changed(context, loaded)


@router.delete("/pipelines/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete(name: str, context: Context) -> None:
    """Stop a pipeline that this API created, and delete it with its checkpoints and journal.

    Its slot and publication stay in the database.
    """
    _stored(context, name)
    pipeline = context.pipeline(name)
    if pipeline.path is not None:  # a file has the same name, and keeps the state
        context.store.pipelines.remove_document(name)
    else:
        try:
            end_run(context.store, name)
            remove(context.store, context.journal, name)
        except NotAllowed as error:
            raise PipelineBusy(str(error)) from error
    context.reload()


@desired_state_router.post("/pause")
def pause(loaded: Pipeline, context: Context) -> PipeInfo:
    """Stop capturing changes; those already in the journal are still delivered."""
    request_end(context.store, loaded, "paused")
    return info(context.store, loaded)


@desired_state_router.post("/stop")
def stop(loaded: Pipeline, context: Context) -> PipeInfo:
    """Stop capturing and delivering: the run closes its range and ends within seconds."""
    request_end(context.store, loaded, "stopped")
    return info(context.store, loaded)


@desired_state_router.post("/resume")
def resume(loaded: Pipeline, context: Context) -> PipeInfo:
    """Resume a paused or stopped pipeline from its checkpoints."""
    resume_pipeline(context.store, loaded)
    return info(context.store, loaded)


@checkpoints_router.get("/checkpoints")
def checkpoints(loaded: Pipeline, context: Context) -> list[SinkCheckpoint]:
    """Return the checkpoint of each sink."""
    return sink_checkpoints(context.store, loaded.name)


@checkpoints_router.delete("/checkpoint", status_code=HTTPStatus.NO_CONTENT)
def reset(loaded: Pipeline, context: Context) -> None:
    """Delete the journal and all positions; the next run starts as a first run does.

    Stop the pipeline first: the request is refused while a run works on it.
    """
    before = context.store.pipelines.get(loaded.name)
    if before is not None:
        reset_pipeline(context.store, context.journal, before)


def _changed(context: ApiContext, loaded: LoadedPipeline) -> PipeChange:
    dagster = context.reload()
    about = info(context.store, loaded)
    return PipeChange(**about.model_dump(), warnings=list(loaded.warnings), dagster=dagster)


def _stored(context: ApiContext, name: str) -> StoredSpec:
    """Return the stored document of a pipeline that was created through this API."""
    stored = context.store.pipelines.document(name)
    if stored is not None:
        return stored
    if is_gone(context.pipeline(name)):
        raise PipelineHasFile(
            f"the file of pipeline {name!r} is gone: restore it, or run: deltaforge remove {name}"
        )
    raise PipelineHasFile(f"pipeline {name!r} is defined by a file: change or remove the file")


def _has_labels(pipeline: AnyPipeline, wanted: list[str]) -> bool:
    if not isinstance(pipeline, LoadedPipeline):
        return not wanted
    labels = pipeline.spec.metadata.labels
    return all(_has_label(labels, label) for label in wanted)


def _has_label(labels: Mapping[str, str], wanted: str) -> bool:
    """Return whether a label filter matches; keys may have `:` or `=`, so every split is tried."""
    if wanted in labels:
        return True
    return any(
        labels.get(wanted[:index]) == wanted[index + 1 :]
        for index, letter in enumerate(wanted)
        if letter in ":="
    )


def _checked(value: Mapping[str, Any], *, strict: bool) -> LoadedPipeline:
    """Return the pipeline of a document.

    Raises:
        SpecError: The document is invalid; the error lists every problem.
        BuildFailed: The document is well formed, but its sinks or processors cannot be built.
    """
    pipeline = load_document("the document", value, strict=strict)
    if isinstance(pipeline, BrokenPipeline):
        raise pipeline.error
    problems = build_problems(pipeline.spec)
    if problems:
        raise BuildFailed("\n".join(problems))
    return pipeline


def _merged(value: Any, patch: Any, shown: Any) -> Any:
    """Return a part of a document with a patch applied.

    Objects are merged recursively, arrays by index; a longer array in the patch appends entries.
    Null resets a field to its default and removes an entry from an array. A value that is patched
    with its form in responses stays unchanged: responses mask secrets, and sending a response back
    must not replace them with `***`.

    Args:
        value: The part as it is; None if it does not exist.
        patch: The changes.
        shown: The part as responses show it.
    """
    if isinstance(patch, dict):
        before = value if isinstance(value, dict) else {}
        views = shown if isinstance(shown, dict) else {}
        changed = {
            key: _merged(before.get(key), part, views.get(key)) for key, part in patch.items()
        }
        return before | changed
    if isinstance(patch, list):
        items = value if isinstance(value, list) else []
        views_of = shown if isinstance(shown, list) else []
        merged = [
            _merged(_at(items, index), part, _at(views_of, index))
            for index, part in enumerate(patch)
        ]
        return [part for part in merged if part is not None] + items[len(merged) :]
    return value if patch is not None and value is not None and patch == shown else patch


def _at(items: list[Any], index: int) -> Any:
    return items[index] if index < len(items) else None
