"""Routes for the health of the server and of all pipelines."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from deltaforge_dagster import __version__
from deltaforge_dagster.api.context import Context
from deltaforge_dagster.api.guard import ALIVE_PATH
from deltaforge_dagster.api.shapes import (
    Healthy,
    LogLevel,
    Ready,
    Unhealthy,
    Version,
    info,
    troubles,
)
from deltaforge_dagster.config import logs
from deltaforge_dagster.pipeline.health.health import health

router = APIRouter(tags=["Health"])


@router.get(ALIVE_PATH, response_class=PlainTextResponse)
def alive() -> str:
    """Return `ok` while the process is alive; needs no token."""
    return "ok"


@router.get("/readyz")
@router.get("/ready", operation_id="ready_by_its_other_name")
def ready(context: Context) -> Ready:
    """Return every pipeline with its status; 503 if store or pipelines cannot be read."""
    return Ready(pipelines=[info(context.store, pipeline) for pipeline in context.pipelines()])


@router.get(
    "/health",
    response_model=Healthy,
    response_model_exclude_none=True,
    responses={int(HTTPStatus.SERVICE_UNAVAILABLE): {"model": Unhealthy}},
)
def healthy(context: Context) -> Healthy | JSONResponse:
    """Return whether every pipeline captures and delivers; 503 with the problems if one does not.

    Pipelines with warnings, and paused or stopped pipelines, are healthy.
    """
    pipelines = context.pipelines()
    states = {pipeline.name: health(context.store, pipeline) for pipeline in pipelines}
    problems = {name: troubles(state) for name, state in states.items() if state.problems}
    failed = [name for name, state in states.items() if not state.well]
    if failed:
        answer = Unhealthy(failed_pipelines=failed, problems=problems).model_dump()
        return JSONResponse(answer, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return Healthy(pipelines=len(pipelines), problems=problems or None)


@router.get("/log-level")
def log_level() -> LogLevel:
    """Return the filter of the server's logs."""
    return LogLevel(level=logs.level())


@router.get("/version")
def version() -> Version:
    """Return the version of this release."""
    return Version(version=__version__)
