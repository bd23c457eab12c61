"""An API server over a separate installation, in a thread of the test's process."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from deltaforge_dagster.api.app import build_app
from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.api.guard import RequestLimits
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from deltaforge_dagster.state.store import StateStore

MANY = RequestLimits(requests_per_second=100_000)
"""Limits that no test reaches by accident."""


def document(name: str, **spec: Any) -> dict[str, Any]:
    """Return a valid pipeline as JSON; its source and its sinks are never contacted."""
    source = {
        "id": "db",
        "dsn": "postgres://app:geheim@localhost:1/app",
        "slot": "slot_" + "".join(filter(str.isalnum, name)).lower(),
        "publication": "api",
        "tables": ["public.orders"],
    }
    sink = {"id": "redis", "uri": "redis://:geheim@localhost:1", "stream": "orders"}
    return {
        "metadata": {"name": name, "tenant": "acme"},
        "spec": {
            "source": {"type": "postgres", "config": source},
            "sinks": [{"type": "redis", "config": sink}],
            **spec,
        },
    }


@dataclass
class Api:
    """A running API.

    Attributes:
        context: The installation that it serves.
        client: An HTTP client for it.
    """

    context: ApiContext
    client: httpx.Client

    @property
    def store(self) -> StateStore:
        """The state store."""
        return self.context.store

    def file(self, name: str, text: str) -> Path:
        """Write a pipeline file."""
        path = self.context.settings.pipelines / f"{name}.yaml"
        path.write_text(text)
        return path

    def create(self, name: str, **spec: Any) -> dict[str, Any]:
        """Create a pipeline."""
        answer = self.client.post("/pipelines", json=document(name, **spec))
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made


@contextmanager
def served(
    context: ApiContext,
    token: str | None,
    limits: RequestLimits = MANY,
    build: Callable[..., FastAPI] = build_app,
) -> Iterator[str]:
    """Run a server in a thread, and yield its address."""
    app = build(context, token=token, limits=limits)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    # Connections wait in the socket's queue until the thread takes them.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="session")
def empty_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty state store to copy, because creating its tables takes a second."""
    path = tmp_path_factory.mktemp("api") / "state.db"
    StateStore.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance; only the routes that read runs use it."""
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


@pytest.fixture
def serve(
    tmp_path: Path, empty_state: Path, instance: dg.DagsterInstance
) -> Iterator[Callable[..., Api]]:
    """Start APIs over one installation, each with its own token and limits."""
    settings = replace(Settings.from_env(), pipelines=tmp_path / "pipelines")
    settings.pipelines.mkdir()
    settings.home.mkdir()
    shutil.copy(empty_state, settings.home / "state.db")
    with ExitStack() as owned:
        store = StateStore.open(settings.state_url)
        owned.callback(store.close)

        def start(
            token: str | None = None, limits: RequestLimits = MANY, dagster_url: str | None = None
        ) -> Api:
            journal = Journal(settings.journal_url)
            context = ApiContext(settings, store, journal, instance, DagsterReload(dagster_url))
            url = owned.enter_context(served(context, token, limits))
            client = owned.enter_context(httpx.Client(base_url=url, timeout=120))
            return Api(context, client)

        yield start


@pytest.fixture
def api(serve: Callable[..., Api]) -> Api:
    """A running API without a token."""
    return serve()
