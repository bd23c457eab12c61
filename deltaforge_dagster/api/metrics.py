"""`/metrics` for Prometheus, in its text format or as OpenMetrics, and metrics of requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import orjson
from fastapi import APIRouter, Request, Response
from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaforge_dagster.api.context import Context
from deltaforge_dagster.api.metrics import collect
from deltaforge_dagster.state.metric_families import API_ACTIONS, API_REQUESTS, API_SECONDS
from deltaforge_dagster.state.metrics import Stored, Tally

router = APIRouter(tags=["Observability"])

_ACTIONS = {
    ("POST", "/pipelines"): "create",
    ("PATCH", "/pipelines/{name}"): "patch",
    ("DELETE", "/pipelines/{name}"): "delete",
    ("POST", "/pipelines/{name}/pause"): "pause",
    ("POST", "/pipelines/{name}/resume"): "resume",
    ("POST", "/pipelines/{name}/stop"): "stop",
    ("DELETE", "/pipelines/{name}/checkpoint"): "reset",
}


class _Requests:
    """The request metrics of this process; they start at 0 with the process."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._lock = threading.Lock()

    def add(self, tally: Tally) -> None:
        """Add the tally of a request."""
        with self._lock:
            self._tally.join(tally)

    def series(self) -> list[Stored]:
        """Return the current value of every series."""
        with self._lock:
            rows, _ = self._tally.rows("")
        return [Stored("", row["name"], orjson.loads(row["labels"]), row["value"]) for row in rows]


_requests = _Requests()

_process = ProcessCollector(registry=None)
"""CPU, memory and open files of this process, under the names of all Prometheus clients."""


class RequestMetrics:
    """ASGI middleware that counts requests by route, method and status, and pipeline actions.

    Routes that act on a pipeline set `request.state.tenant` to its tenant.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500  # if the application fails before a response starts

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})
        try:
            await self._app(scope, receive, answered)
        finally:
            _requests.add(_tally_of(scope, status, time.monotonic() - began))


def _tally_of(scope: Scope, status: int, seconds: float) -> Tally:
    # Labels only have names of known routes: names that clients send are unbounded.
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if route != "none" else "any"
    tally = Tally()
    tally.add(API_REQUESTS, route=route, method=method, status=str(status))
    tally.observe(API_SECONDS, seconds, route=route, method=method)
    action = _ACTIONS.get((method, route))
    if action is not None:
        result = "success" if status < 400 else "error"
        tenant = scope["state"].get("tenant", "")
        tally.add(API_ACTIONS, action=action, result=result, tenant=tenant)
    return tally


class _Snapshot(Collector):
    """A collector with metrics that were already gathered, for the encoder."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._metrics


@router.get("/metrics", response_class=Response)
def metrics(request: Request, context: Context) -> Response:
    """Return all metrics in Prometheus text format, or as OpenMetrics if the client accepts it."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    families = list(collect(context.store, context.pipelines(), _requests.series()))
    return Response(encode(_Snapshot([*families, *_process.collect()])), media_type=content_type)
