"""Routes that list, create, change and delete pipelines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request

from deltaforge_dagster.api.context import ApiContext, Context
from deltaforge_dagster.api.documents import (
    DOCUMENT_BODY,
    PATCH_BODY,
    JsonObject,
    checked,
    merged,
)
from deltaforge_dagster.api.errors import (
    NameMismatch,
    PipelineBusy,
    PipelineExists,
    PipelineHasFile,
    PipelineNotFound,
)
from deltaforge_dagster.api.shapes import PipeChange, PipeDetail, PipeInfo
from deltaforge_dagster.api.views import info, ops, shown
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.desired_state import resume_pipeline
from deltaforge_dagster.pipeline.control.reset_pipeline import remove
from deltaforge_dagster.state.pipelines import StoredSpec

router = APIRouter(prefix="/pipelines", tags=["Pipelines"])

_END_SECONDS = 45.0
"""How long a deletion waits for the run to end, which takes at most 30 s."""


@router.get("")
def list_pipelines(
    context: Context,
    label: Annotated[
        list[str] | None,
        Query(description="`key:value`, `key=value` or `key`; if repeated, all must match."),
    ] = None,
) -> list[PipeInfo]:
    """Return every pipeline, or those with the given labels."""
    fitting = [one for one in context.pipelines() if _has_labels(one, label or [])]
    return [info(context.store, one) for one in fitting]


@router.get("/{name}")
def show(name: str, context: Context) -> PipeDetail:
    """Return one pipeline with its operational state."""
    pipeline = context.pipeline(name)
    about = info(context.store, pipeline)
    return PipeDetail(**about.model_dump(), ops=ops(context, name))


@router.post("", openapi_extra=DOCUMENT_BODY)
def create(document: JsonObject, request: Request, context: Context) -> PipeChange:
    """Create a pipeline, which is stored in the state store and starts at once."""
    loaded = checked(document, strict=context.settings.strict)
    request.state.tenant = loaded.spec.metadata.tenant
    if any(one.name == loaded.name for one in context.pipelines()):
        raise PipelineExists(f"pipeline {loaded.name!r} already exists")
    if not context.store.pipelines.add_document(loaded.name, orjson.dumps(document).decode()):
        raise PipelineExists(f"pipeline {loaded.name!r} already exists")
    resume_pipeline(context.store, loaded)
    return _changed(context, loaded)


@router.patch("/{name}", openapi_extra=PATCH_BODY)
def patch(name: str, changes: JsonObject, request: Request, context: Context) -> PipeChange:
    """Change a pipeline that was created through this API.

    Its run ends, and the next one continues from the checkpoints. A stopped pipeline is started. A removed sink
    loses its checkpoint.
    """
    stored = _stored(context, name)
    before = context.pipeline(name)
    if before.path is not None:
        before = context.loaded(name)  # a file has the same name; this raises if it is broken
    view = shown(before.spec) if isinstance(before, LoadedPipeline) else {}
    document = merged(orjson.loads(stored.document), changes, view)
    loaded = checked(document, strict=context.settings.strict)
    request.state.tenant = loaded.spec.metadata.tenant
    if loaded.name != name:
        raise NameMismatch(f"metadata.name is {loaded.name!r}, the pipeline is {name!r}")
    text = orjson.dumps(document).decode()
    if not context.store.pipelines.replace_document(name, stored.version, text):
        raise PipelineBusy(f"pipeline {name!r} was changed by another request; try again")
    resume_pipeline(context.store, loaded)
    return _changed(context, loaded)


@router.delete("/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete(name: str, context: Context) -> None:
    """Stop a pipeline that was created through this API, and delete it with its checkpoints and its journal.

    Its slot and publication stay in the database.
    """
    _stored(context, name)
    pipeline = context.pipeline(name)
    if pipeline.path is not None:  # a file has the same name, and keeps the state
        context.store.pipelines.remove_document(name)
    else:
        _end(context, pipeline)
        try:
            remove(context.store, context.journal, name)
        except NotAllowed as error:
            raise PipelineBusy(f"{error}; it is being stopped, try again") from error
    context.reload()


def _changed(context: ApiContext, loaded: LoadedPipeline) -> PipeChange:
    dagster = context.reload()
    about = info(context.store, loaded)
    return PipeChange(**about.model_dump(), warnings=list(loaded.warnings), dagster=dagster)


def _stored(context: ApiContext, name: str) -> StoredSpec:
    """Return the stored document of a pipeline that was created through this API."""
    stored = context.store.pipelines.document(name)
    if stored is not None:
        return stored
    if any(one.name == name for one in context.pipelines()):
        raise PipelineHasFile(f"pipeline {name!r} is defined by a file: change or remove the file")
    raise PipelineNotFound(name)


def _end(context: ApiContext, pipeline: AnyPipeline) -> None:
    """Request the end of the pipeline's run and wait for it, for at most `_END_SECONDS`."""
    store = context.store
    if store.pipelines.get(pipeline.name) is not None:
        store.pipelines.set_desired_state(pipeline.name, "stopped")
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        lease = store.leases.get(pipeline.name)
        if lease is None or not lease.held_at(store.now()):
            return
        time.sleep(0.5)


def _has_labels(pipeline: AnyPipeline, wanted: list[str]) -> bool:
    if not isinstance(pipeline, LoadedPipeline):
        return not wanted
    labels = pipeline.spec.metadata.labels
    return all(_has_label(labels, one) for one in wanted)


def _has_label(labels: Mapping[str, str], wanted: str) -> bool:
    """Return whether one label filter matches; keys may contain `:` or `=`, so every split is tried."""
    if wanted in labels:
        return True
    return any(
        labels.get(wanted[:index]) == wanted[index + 1 :]
        for index, letter in enumerate(wanted)
        if letter in ":="
    )
