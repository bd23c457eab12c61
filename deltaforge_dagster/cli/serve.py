"""`deltaforge serve`: the REST API of this installation, and its metrics."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer
import uvicorn

from deltaforge_dagster.api.app import build_app
from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.dagster_reload import DagsterReload
from deltaforge_dagster.api.guard import DEFAULT_LIMITS, Limits, is_loopback
from deltaforge_dagster.config.logs import setup_logs
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.resources.instance import local_instance
from deltaforge_dagster.resources.platform import Platform

TOKEN = "DELTAFORGE_API_TOKEN"  # noqa: S105 - the name of the variable
_CONNECTIONS = 200


def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=0, max=65535)] = 8080,
    dagster_url: Annotated[
        str | None,
        typer.Option(
            envvar="DELTAFORGE_DAGSTER_URL",
            help="Dagster's webserver, such as http://127.0.0.1:3000: reloaded after each change.",
        ),
    ] = None,
    body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", min=1, help="Largest body of a request.")
    ] = DEFAULT_LIMITS.body_bytes,
    rate: Annotated[
        float,
        typer.Option("--max-requests-per-second", min=0.1, help="Of one address, on average."),
    ] = DEFAULT_LIMITS.requests_per_second,
) -> None:
    """Serve the REST API and the metrics until Ctrl-C.

    With DELTAFORGE_API_TOKEN in the environment every request must carry it
    (`Authorization: Bearer TOKEN`). Without it only this machine can ask.
    """
    setup_logs()
    token = os.environ.get(TOKEN, "").strip() or None
    if token is None and not is_loopback(host):
        raise SettingsError(f"--host {host}: other machines may ask only with a token, set {TOKEN}")
    settings = Settings.from_env()
    if settings.state_url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: only the run itself can see that state")
    listening = _listen(host, port)
    with listening, Platform(settings).open() as opened, local_instance(settings) as instance:
        context = ApiContext(
            settings,
            opened.store,
            Journal(settings.journal_url),
            instance,
            DagsterReload(dagster_url),
        )
        count = len(context.pipelines())
        app = build_app(context, token=token, limits=Limits(body_bytes, rate))
        address, number = listening.getsockname()[:2]
        where = f"[{address}]:{number}" if ":" in address else f"{address}:{number}"
        typer.echo(f"http://{where} serves {count} pipelines; Ctrl-C ends it")
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise SettingsError(f"--host {host} --port {port}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """Return what went wrong; what Python adds names the address once more."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return str(error.strerror or error)
    return os.strerror(error.errno)
