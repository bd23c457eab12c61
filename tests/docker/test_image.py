"""The image, built and run: its services' own commands and settings, in containers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.docker.compose import DOCKER, image_command, services
from tests.docker.containers import Containers, found_engine
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually

__all__ = ["shop"]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.soak("image"),
    pytest.mark.timeout(7200),
]

ROWS = 5000
KERNELS = ("find", "/opt/kernels", "-type", "f")


@pytest.fixture
def state_url(postgres_server: PostgresServer) -> str:
    """A state store's database."""
    return postgres_server.create_database()


@pytest.fixture
def containers(
    shop: Shop, postgres_server: PostgresServer, state_url: str, tmp_path: Path
) -> Iterator[Containers]:
    """Our services with one pipeline, not started; PostgreSQL and Redis are this machine's."""
    engine = found_engine()
    secrets = {"POSTGRES_PASSWORD": "unused", "DELTAFORGE_API_TOKEN": "let-me-in-to-the-image"}
    ours = services(secrets, "compose.yaml")
    ours["code"].command.extend(image_command())
    dagster = postgres_server.create_database()
    port = {name: str(free_port()) for name in ("code", "webserver", "api", "metrics", "spark")}
    places = {
        "deltaforge:unused@postgres:5432/dagster": dagster.partition("://")[2],
        "deltaforge:unused@postgres:5432/deltaforge": state_url.partition("://")[2],
        "0.0.0.0": "127.0.0.1",
        "0.0.0.0:9000": f"127.0.0.1:{port['metrics']}",
        "spark:15002": f"127.0.0.1:{port['spark']}",
        "webserver:3000": f"127.0.0.1:{port['webserver']}",
        "15002": port["spark"],
        "3000": port["webserver"],
        "8080": port["api"],
        "4000": port["code"],
    }
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "boxed.yaml").write_text(shop.pipeline("boxed"))
    workspace = (DOCKER / "workspace.yaml").read_text()
    (tmp_path / "workspace.yaml").write_text(
        workspace.replace("host: code", "host: 127.0.0.1").replace("4000", port["code"])
    )
    made = Containers(engine, engine.built(), ours, tmp_path, places)
    yield made
    made.remove()


def test_a_pipeline_delivers_from_containers(
    containers: Containers, shop: Shop, state_url: str
) -> None:
    """All services get healthy, rows arrive, no kernel is compiled, nobody is root, and all end in time."""
    for name in ("spark", "code"):
        containers.start(name)
    eventually(partial(containers.healthy, "code"), seconds=400, what="health of code", every=1)
    compiled = containers.execute("code", *KERNELS)
    for name in ("webserver", "daemon", "api"):
        containers.start(name)
    for name in ("spark", "webserver", "api"):
        eventually(
            partial(containers.healthy, name), seconds=400, what=f"health of {name}", every=1
        )
    with closing(StateStore.open(state_url)) as store:
        eventually(
            lambda: (
                (row := store.pipelines.get("boxed")) is not None and row.start_position is not None
            ),
            seconds=400,
            what="the first tick",
        )
    shop.execute(f"INSERT INTO customers SELECT n, md5(n::text) FROM generate_series(1, {ROWS}) n")

    def arrived() -> list[int]:
        events = [json.loads(entry["df-event"]) for entry in shop.entries("boxed.customers")]
        return sorted(event["after"]["id"] for event in events)

    eventually(lambda: arrived() == list(range(1, ROWS + 1)), seconds=600, what="rows", every=1)
    assert containers.execute("code", "id", "-u").strip() == "1000"
    assert "boxed" in containers.execute("code", "deltaforge", "status")
    assert compiled.strip()
    for name in ("code", "api"):
        assert containers.execute(name, *KERNELS) == compiled
    for name in ("api", "daemon", "webserver", "spark", "code"):
        assert containers.stop(name, seconds=60) != 137, f"{name} had to be killed"
