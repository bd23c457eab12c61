"""`deltaforge serve`: serve the REST API of this installation, and its metrics."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Annotated

import typer
import uvicorn
from fastapi import FastAPI

from deltaforge_dagster.api.app import build_app, build_metrics_app
from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.guard import DEFAULT_LIMITS, RequestLimits, is_loopback
from deltaforge_dagster.api.readiness import watched
from deltaforge_dagster.config.logs import setup_logs
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from deltaforge_dagster.resources.instance import local_instance
from deltaforge_dagster.resources.platform import Platform

TOKEN = "DELTAFORGE_API_TOKEN"  # noqa: S105 - the name of the variable
_TOKEN_CHARACTERS = 16
"""Minimum length of a token; shorter ones can be guessed."""
_CONNECTIONS = 200
_NOWHERE = "none"


def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8080,
    metrics_addr: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Second address, which serves only /metrics; `{_NOWHERE}` for no second address.",
        ),
    ] = "127.0.0.1:9000",
    dagster_url: Annotated[
        str | None,
        typer.Option(
            envvar="DELTAFORGE_DAGSTER_URL",
            help=(
                "URL of Dagster's webserver, such as http://127.0.0.1:3000, "
                "to reload after each change."
            ),
        ),
    ] = None,
    body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", min=1, help="Maximum size of a request body.")
    ] = DEFAULT_LIMITS.body_bytes,
    rate: Annotated[
        float,
        typer.Option(
            "--max-requests-per-second", min=0.1, help="Average rate limit per client address."
        ),
    ] = DEFAULT_LIMITS.requests_per_second,
) -> None:
    """Serve the REST API and the metrics until Ctrl-C.

    If DELTAFORGE_API_TOKEN is set in the environment, every request must carry it
    (`Authorization: Bearer TOKEN`). Without it, the server accepts requests only from this machine.
    """
    setup_logs()
    token = os.environ.get(TOKEN, "").strip() or None
    metrics_at = None if metrics_addr == _NOWHERE else _address(metrics_addr)
    addresses = {f"--host {host}": host}
    if metrics_at is not None:
        addresses[f"--metrics-addr {metrics_addr}"] = metrics_at[0]
    _may_listen(addresses, token)
    settings = Settings.from_env()
    if settings.state_url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: only the run itself can see that state")
    limits = RequestLimits(body_bytes, rate)
    with ExitStack() as open_now:
        listening = open_now.enter_context(_listen(f"--host {host} --port {port}", host, port))
        metrics = None
        if metrics_at is not None:
            metrics = open_now.enter_context(
                _listen(f"--metrics-addr {metrics_addr}", *metrics_at, f" address, or `{_NOWHERE}`")
            )
        opened = open_now.enter_context(Platform(settings).open())
        instance = open_now.enter_context(local_instance(settings))
        context = ApiContext(
            settings,
            opened.store,
            Journal(settings.journal_url),
            instance,
            DagsterReload(dagster_url),
        )
        count = len(context.pipelines())
        open_now.enter_context(watched(context))
        also = ""
        if metrics is not None:
            app = build_metrics_app(context, token=token, limits=limits)
            open_now.enter_context(_run_in_thread(_server(app), metrics))
            also = f", {_url(metrics)}/metrics their metrics"
        typer.echo(f"{_url(listening)} serves {pluralize(count, 'pipeline')}{also}; Ctrl-C ends it")
        app = build_app(context, token=token, limits=limits)
        with suppress(KeyboardInterrupt):  # the server shuts down in order, then raises it again
            _server(app).run(sockets=[listening])


def _address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(
            f"--metrics-addr {text}: must be HOST:PORT, such as 127.0.0.1:9000, or {_NOWHERE}"
        )
    return host, int(port)


def _may_listen(addresses: Mapping[str, str], token: str | None) -> None:
    """Refuse addresses that other machines can reach if there is no token, or a short one.

    `addresses` maps each option, as it was given, to its host.
    """
    reached = [option for option, host in addresses.items() if not is_loopback(host)]
    if reached and token is None:
        raise SettingsError(
            f"{reached[0]}: other machines can reach it, so a token is needed: set {TOKEN}"
        )
    if reached and token is not None and len(token) < _TOKEN_CHARACTERS:
        raise SettingsError(
            f"{reached[0]}: other machines can reach it, and {TOKEN} has fewer than "
            f"{_TOKEN_CHARACTERS} characters; make one with: openssl rand -hex 32"
        )


def _listen(option: str, host: str, port: int, instead: str = "") -> socket.socket:
    """Return a listening socket.

    An error names the option, and `instead` what else to set it to.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise SettingsError(f"{option}: {_reason(error)}; choose another{instead}") from error


def _reason(error: OSError) -> str:
    """Return the error text without Python's additions, which repeat the address."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return str(error.strerror or error)
    return os.strerror(error.errno)


def _url(listening: socket.socket) -> str:
    address, number = listening.getsockname()[:2]
    return f"http://[{address}]:{number}" if ":" in address else f"http://{address}:{number}"


def _server(app: FastAPI) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
    )
    return uvicorn.Server(config)


@contextmanager
def _run_in_thread(server: uvicorn.Server, listening: socket.socket) -> Iterator[None]:
    """Run a server in a thread, and end it with the block; the main thread handles the signals."""
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="metrics server"
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
