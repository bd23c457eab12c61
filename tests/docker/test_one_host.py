"""The installation on one host: its services' own commands and settings, without containers."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.installation.process import ServerProcess, free_port
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.docker.compose import DOCKER, image_command, services
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually

__all__ = ["shop"]

pytestmark = [pytest.mark.e2e, pytest.mark.postgres, pytest.mark.redis]

TOKEN = "let-me-in-to-one-host"
QUESTION = """{
  workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } }
  instance { daemonHealth { allDaemonStatuses { daemonType healthy required } } }
}"""


class Host:
    """The services, started; `code`, `webserver`, `api` and its metrics at ports of their own."""

    def __init__(self, folder: Path, postgres: PostgresServer, pipeline: str) -> None:
        secrets = {"POSTGRES_PASSWORD": "unused", "DELTAFORGE_API_TOKEN": TOKEN}
        self._services = services(secrets, "compose.yaml")
        self._folder = folder
        self.ports = {name: free_port() for name in ("code", "webserver", "api", "metrics")}
        dagster, state = postgres.create_database(), postgres.create_database()
        self._places = {
            "deltaforge:unused@postgres:5432/dagster": dagster.partition("://")[2],
            "deltaforge:unused@postgres:5432/deltaforge": state.partition("://")[2],
            "0.0.0.0": "127.0.0.1",
            "0.0.0.0:9000": f"127.0.0.1:{self.ports['metrics']}",
            "3000": str(self.ports["webserver"]),
            "8080": str(self.ports["api"]),
            "workspace.yaml": str(folder / "workspace.yaml"),
        }
        (folder / "pipelines").mkdir()
        (folder / "pipelines" / "host.yaml").write_text(pipeline)
        text = (DOCKER / "workspace.yaml").read_text()
        text = text.replace("host: code", "host: 127.0.0.1")
        (folder / "workspace.yaml").write_text(text.replace("4000", str(self.ports["code"])))
        (folder / "dagster").mkdir()
        (folder / "dagster" / "dagster.yaml").write_text((DOCKER / "dagster.yaml").read_text())
        self._machine = {
            "DAGSTER_HOME": str(folder / "dagster"),
            "DELTAFORGE_HOME": str(folder / "home"),
            "DELTAFORGE_PIPELINES": str(folder / "pipelines"),
        }
        self._running: dict[str, ServerProcess] = {}
        self.environment = {**self._services["code"].here(self._places), **self._machine}

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start what is ours, the code server by the image's command."""
        self._services["code"].command.extend(image_command())
        self._places["4000"] = str(self.ports["code"])
        for name in ("code", "webserver", "daemon", "api"):
            process: ServerProcess = self._services[name].start(
                self._folder / name, self._places, self._machine
            )
            self._running[name] = process
            stack.callback(self.stop, name)

    def stop(self, name: str) -> None:
        """Stop a service; safe to call twice."""
        self._running[name].stop(signal.SIGTERM, 20)

    def healthy(self, name: str) -> bool:
        """Run the health check that the compose file has for a service."""
        program, *words = self._services[name].check(self._places)
        assert program == "python"
        checked = subprocess.run([sys.executable, *words], check=False, capture_output=True)
        return checked.returncode == 0

    def unhealthy(self, name: str) -> bool:
        """Run it likewise, for a service that has ended."""
        return not self.healthy(name)

    def ask(self, service: str, path: str, body: dict[str, str] | None = None) -> Any:
        """Return a service's JSON answer, None while there is none."""
        text = self.text(service, path, body)
        return None if text is None else json.loads(text)

    def text(self, service: str, path: str, body: dict[str, str] | None = None) -> str | None:
        """Return a service's answer, None while there is none."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[service]}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            text: str = answer.read().decode()
            return text
        return None


@pytest.fixture
def host(shop: Shop, postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Host]:
    """The services with one pipeline."""
    with contextlib.ExitStack() as stack:
        made = Host(tmp_path, postgres_server, shop.pipeline("host"))
        made.start(stack)
        yield made


def test_the_services_find_each_other(host: Host) -> None:
    """The UI has the definitions, the daemon lives and has a first tick, the API knows the pipeline.

    The health checks say of each that it is there, and then that it is gone.
    """

    def settled() -> bool:
        answer = host.ask("webserver", "/graphql", {"query": QUESTION})
        if answer is None:
            return False
        entries = answer["data"]["workspaceOrError"]["locationEntries"]
        daemons = answer["data"]["instance"]["daemonHealth"]["allDaemonStatuses"]
        loaded = [(one["locationOrLoadError"] or {}).get("__typename") for one in entries]
        needed = [one["healthy"] for one in daemons if one["required"]]
        return loaded == ["RepositoryLocation"] and bool(needed) and all(needed)

    eventually(settled, seconds=400, what="the UI with a living daemon", every=1)
    store = StateStore.open(Settings.from_env(host.environment).state_url)
    try:
        eventually(
            lambda: (
                (row := store.pipelines.get("host")) is not None and row.start_position is not None
            ),
            seconds=200,
            what="the first tick",
        )
    finally:
        store.close()

    ready = eventually(lambda: host.ask("api", "/readyz"), seconds=200, what="the API")
    assert [one["name"] for one in ready["pipelines"]] == ["host"]
    metrics = host.text("metrics", "/metrics")
    assert metrics is not None
    assert 'deltaforge_pipeline_status{pipeline="host"} 1.0' in metrics

    for name in ("code", "webserver", "api"):
        eventually(functools.partial(host.healthy, name), seconds=200, what=f"health of {name}")
        host.stop(name)
        eventually(functools.partial(host.unhealthy, name), seconds=60, what=f"end of {name}")
