"""Routes about the server itself and about all pipelines together."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from deltaforge_dagster import __version__
from deltaforge_dagster.api.context import Context
from deltaforge_dagster.api.guard import ALIVE_PATH
from deltaforge_dagster.api.shapes import Healthy, LogLevel, Ready, Unhealthy, Version
from deltaforge_dagster.api.views import info, troubles
from deltaforge_dagster.config import logs
from deltaforge_dagster.pipeline.health import health

router = APIRouter(tags=["Health"])


@router.get(ALIVE_PATH, response_class=PlainTextResponse)
def alive() -> str:
    """The process is alive; asked without a token."""
    return "ok"


@router.get("/readyz")
@router.get("/ready", operation_id="ready_by_its_other_name")
def ready(context: Context) -> Ready:
    """State store and pipelines can be read, and how each pipeline is; 503 when they cannot."""
    return Ready(pipelines=[info(context.store, one) for one in context.pipelines()])


@router.get(
    "/health",
    response_model=Healthy,
    response_model_exclude_none=True,
    responses={int(HTTPStatus.SERVICE_UNAVAILABLE): {"model": Unhealthy}},
)
def healthy(context: Context) -> Healthy | JSONResponse:
    """Whether every pipeline captures and delivers; 503, with what is wrong, where one does not.

    Warnings, and what people paused or stopped, are healthy.
    """
    pipelines = context.pipelines()
    found = {one.name: health(context.store, one) for one in pipelines}
    problems = {name: troubles(one) for name, one in found.items() if one.problems}
    failed = [name for name, one in found.items() if not one.well]
    if failed:
        answer = Unhealthy(failed_pipelines=failed, problems=problems).model_dump()
        return JSONResponse(answer, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return Healthy(pipelines=len(pipelines), problems=problems or None)


@router.get("/log-level")
def log_level() -> LogLevel:
    """The filter of the server's logs."""
    return LogLevel(level=logs.level())


@router.get("/version")
def version() -> Version:
    """Which release this is."""
    return Version(version=__version__)
