"""The REST API as one ASGI application, and the page that describes it.

The page is made from the OpenAPI document. It loads nothing from other servers, and needs no
script.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from deltaforge_dagster import __version__
from deltaforge_dagster.api import dead_letters, metrics, pipelines, readiness, schemas
from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.errors import add_handlers
from deltaforge_dagster.api.guard import Guard, RequestLimits
from deltaforge_dagster.api.metrics import RequestMetrics
from deltaforge_dagster.api.shapes import Problem

documentation_router = APIRouter(include_in_schema=False)

_ROUTERS = (
    documentation_router,
    readiness.router,
    metrics.router,
    pipelines.router,
    pipelines.desired_state_router,
    pipelines.checkpoints_router,
    dead_letters.router,
    schemas.router,
    schemas.sensing_router,
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


PATH = "/docs"

_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; \
color-scheme: light dark }
code, pre { font: 14px/1.4 ui-monospace, monospace }
pre { overflow-x: auto; padding: .5rem; border: 1px solid #8884 }
summary { cursor: pointer; padding: .25rem 0 }
details { border-bottom: 1px solid #8884 }
table { border-collapse: collapse } td { padding: .1rem .75rem .1rem 0; vertical-align: top }
"""


@documentation_router.get(PATH)
def documentation(request: Request) -> HTMLResponse:
    """Return the page."""
    return HTMLResponse(page(request.app.openapi()), headers=_HEADERS)


def page(document: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    sections: dict[str, list[str]] = {}
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            tag = call.get("tags", ["Other"])[0]
            sections.setdefault(tag, []).append("".join(_call(method, path, call)))
    shapes = document.get("components", {}).get("schemas", {})
    return "".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
            f"<h1>{html.escape(title)}</h1>{_text(info.get('description', ''))}",
            '<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>',
            *(f"<h2>{html.escape(tag)}</h2>{''.join(calls)}" for tag, calls in sections.items()),
            "<h2>Shapes</h2>",
            *(
                f'<details id="{html.escape(name)}"><summary>'
                f"<code>{html.escape(name)}</code></summary>"
                f"{_shape(shape)}</details>"
                for name, shape in shapes.items()
            ),
            "</html>",
        ]
    )


def _call(method: str, path: str, call: Mapping[str, Any]) -> Iterator[str]:
    text = call.get("description", call.get("summary", ""))
    first = text.partition("\n")[0]
    yield (
        f"<details><summary><code>{method.upper()} {html.escape(path)}</code> "
        f"{_inline(first)}</summary>"
    )
    yield _text(text.partition("\n")[2])
    parameters = call.get("parameters", ())
    if parameters:
        yield "<table>"
        for parameter in parameters:
            needed = "required" if parameter.get("required") else "optional"
            yield (
                f"<tr><td><code>{html.escape(parameter['name'])}</code>"
                f"<td>{html.escape(parameter['in'])}, {needed}"
                f"<td>{_inline(parameter.get('description', ''))}"
            )
        yield "</table>"
    if body := call.get("requestBody"):
        yield f"<p>Body</p>{_content(body)}"
    for status, answer in call["responses"].items():
        yield f"<p>{html.escape(status)}: {_inline(answer['description'])}</p>{_content(answer)}"
    yield "</details>"


def _content(holder: Mapping[str, Any]) -> str:
    return "".join(
        f"<p>{html.escape(kind)}</p>{_shape(content.get('schema', {}))}"
        for kind, content in holder.get("content", {}).items()
    )


def _shape(shape: Mapping[str, Any]) -> str:
    """Return a JSON Schema as text, with links to the shapes that it names."""
    text = html.escape(json.dumps(shape, indent=2, ensure_ascii=False), quote=False)
    linked = re.sub(r'"#/components/schemas/(\w+)"', r'<a href="#\1">\1</a>', text)
    return f"<pre>{linked}</pre>"


def _text(text: str) -> str:
    return "".join(f"<p>{_inline(part)}</p>" for part in text.split("\n\n") if part.strip())


def _inline(text: str) -> str:
    """Return a description in Markdown as HTML: only code between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
