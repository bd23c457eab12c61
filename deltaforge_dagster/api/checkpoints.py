"""Routes for the checkpoints of a pipeline's sinks."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from deltaforge_dagster.api import views
from deltaforge_dagster.api.context import Context, Pipeline
from deltaforge_dagster.api.shapes import SinkCheckpoint
from deltaforge_dagster.pipeline.control.user_requests import reset_pipeline

router = APIRouter(prefix="/pipelines/{name}", tags=["Checkpoints"])


@router.get("/checkpoints")
def checkpoints(loaded: Pipeline, context: Context) -> list[SinkCheckpoint]:
    """Return the checkpoint of each sink."""
    return views.checkpoints(context.store, loaded.name)


@router.delete("/checkpoint", status_code=HTTPStatus.NO_CONTENT)
def reset(loaded: Pipeline, context: Context) -> None:
    """Delete the journal and all positions; the next run starts as a first run does.

    Stop the pipeline first: the request is refused while a run works on it.
    """
    before = context.store.pipelines.get(loaded.name)
    if before is not None:
        reset_pipeline(context.store, context.journal, before)
