"""Routes that set the desired state of a pipeline: pause, stop and resume."""

from __future__ import annotations

from fastapi import APIRouter

from deltaforge_dagster.api.context import Context, Pipeline
from deltaforge_dagster.api.shapes import PipeInfo
from deltaforge_dagster.api.views import info
from deltaforge_dagster.pipeline.control.user_requests import request_end, resume_pipeline

router = APIRouter(prefix="/pipelines/{name}", tags=["Pipelines"])


@router.post("/pause")
def pause(loaded: Pipeline, context: Context) -> PipeInfo:
    """Stop capturing changes; those already in the journal are still delivered."""
    request_end(context.store, loaded, "paused")
    return info(context.store, loaded)


@router.post("/stop")
def stop(loaded: Pipeline, context: Context) -> PipeInfo:
    """Stop capturing and delivering: the run closes its range and ends within seconds."""
    request_end(context.store, loaded, "stopped")
    return info(context.store, loaded)


@router.post("/resume")
def resume(loaded: Pipeline, context: Context) -> PipeInfo:
    """Resume a paused or stopped pipeline from its checkpoints."""
    resume_pipeline(context.store, loaded)
    return info(context.store, loaded)
