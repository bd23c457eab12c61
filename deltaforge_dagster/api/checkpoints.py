"""Routes about how far the sinks of a pipeline have acknowledged."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from deltaforge_dagster.api import views
from deltaforge_dagster.api.context import Context, Pipeline
from deltaforge_dagster.api.shapes import SinkCheckpoint
from deltaforge_dagster.pipeline.reset_pipeline import reset_pipeline

router = APIRouter(prefix="/pipelines/{name}", tags=["Checkpoints"])


@router.get("/checkpoints")
def checkpoints(loaded: Pipeline, context: Context) -> list[SinkCheckpoint]:
    """How far each sink has acknowledged."""
    return views.checkpoints(context.store, loaded.name)


@router.delete("/checkpoint", status_code=HTTPStatus.NO_CONTENT)
def reset(loaded: Pipeline, context: Context) -> None:
    """Forget journal and positions: the next run begins by the rules of a first run.

    The pipeline should be stopped: while a run works on it, this is refused.
    """
    before = context.store.pipeline(loaded.name)
    if before is not None:
        reset_pipeline(context.store, context.journal, before)
