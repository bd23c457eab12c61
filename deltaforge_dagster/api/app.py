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
    documentation,
    health,
    metrics,
    pipelines,
    schemas,
    sensing,
)
from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.errors import add_handlers
from deltaforge_dagster.api.guard import Guard, RequestLimits
from deltaforge_dagster.api.metrics import RequestMetrics
from deltaforge_dagster.api.shapes import Problem

_ROUTERS = (
    documentation.router,
    health.router,
    metrics.router,
    pipelines.router,
    desired_state.router,
    checkpoints.router,
    dead_letters.router,
    schemas.router,
    sensing.router,
)

# Not as a `model`: FastAPI would then document errors of a text route as text.
_PROBLEM = {"application/json": {"schema": Problem.model_json_schema()}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request was refused.", "content": _PROBLEM},
    "5XX": {"description": "The server failed to handle the request.", "content": _PROBLEM},
}


def build_app(context: ApiContext, *, token: str | None, limits: RequestLimits) -> FastAPI:
    """Return the API of an installation.

    Args:
        context: The installation.
        token: The token that requests must carry; None if the server only listens on loopback
            addresses.
        limits: Limits for clients' requests.
    """
    app = FastAPI(
        title="deltaforge_dagster",
        version=__version__,
        description="Create, monitor and control pipelines that deliver every change of a database "
        "to sinks.",
        # Their pages load scripts from other servers; ours (`documentation`) loads nothing.
        docs_url=None,
        redoc_url=None,
    )
    return _equipped(app, _ROUTERS, context, token, limits)


def build_metrics_app(context: ApiContext, *, token: str | None, limits: RequestLimits) -> FastAPI:
    """Return an application that serves only `/metrics`.

    Args:
        context: The installation.
        token: The token that requests must carry; None if the server only listens on loopback
            addresses.
        limits: Limits for clients' requests.
    """
    app = FastAPI(openapi_url=None)
    return _equipped(app, [metrics.router], context, token, limits)


def _equipped(
    app: FastAPI,
    routers: Sequence[APIRouter],
    context: ApiContext,
    token: str | None,
    limits: RequestLimits,
) -> FastAPI:
    app.state.context = context
    add_handlers(app)
    for router in routers:
        app.include_router(router, responses=_PROBLEMS)
    app.add_middleware(Guard, token=token, limits=limits)
    app.add_middleware(RequestMetrics)
    return app
