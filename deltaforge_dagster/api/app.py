"""The REST API as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI

from deltaforge_dagster import __version__
from deltaforge_dagster.api import (
    checkpoints,
    dead_letters,
    desired_state,
    health,
    metrics,
    pipelines,
    schemas,
    sensing,
    validate,
)
from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.errors import add_handlers
from deltaforge_dagster.api.guard import Guard, Limits
from deltaforge_dagster.api.metrics import RequestMetrics
from deltaforge_dagster.api.shapes import Problem

_ROUTERS = (
    health.router,
    metrics.router,
    validate.router,
    pipelines.router,
    desired_state.router,
    checkpoints.router,
    dead_letters.router,
    schemas.router,
    sensing.router,
)

# Not as a `model`: then a route that answers with text would promise text for errors, too.
_PROBLEM = {"application/json": {"schema": Problem.model_json_schema()}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be done.", "content": _PROBLEM},
    "5XX": {"description": "The installation cannot do it (now).", "content": _PROBLEM},
}


def build_app(context: ApiContext, *, token: str | None, limits: Limits) -> FastAPI:
    """Return the API of an installation.

    Args:
        context: The installation.
        token: What clients must know; None where only this machine can ask.
        limits: What a client may ask for.
    """
    app = FastAPI(
        title="deltaforge_dagster",
        version=__version__,
        description="Pipelines that carry every change of a database to sinks: made, watched and steered.",
        # The pages of these load scripts from elsewhere; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    return _equipped(app, _ROUTERS, context, token, limits)


def build_metrics_app(context: ApiContext, *, token: str | None, limits: Limits) -> FastAPI:
    """Return what answers where only metrics are to be had: `/metrics` and nothing else.

    Args:
        context: The installation.
        token: What clients must know; None where only this machine can ask.
        limits: What a client may ask for.
    """
    app = FastAPI(openapi_url=None)
    return _equipped(app, [metrics.router], context, token, limits)


def _equipped(
    app: FastAPI,
    routers: Sequence[APIRouter],
    context: ApiContext,
    token: str | None,
    limits: Limits,
) -> FastAPI:
    app.state.context = context
    add_handlers(app)
    for router in routers:
        app.include_router(router, responses=_PROBLEMS)
    app.add_middleware(Guard, token=token, limits=limits)
    app.add_middleware(RequestMetrics)
    return app
