"""`deltaforge serve` as a process: a pipeline from its making to its end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deltaforge_dagster.definitions import build_definitions
from tests.api.conftest import document
from tests.e2e.deployment import Deployment, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKEN = {"Authorization": "Bearer of-this-test"}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """An installation without pipelines; nothing of it runs yet, and nothing needs Spark."""
    made = Deployment(
        tmp_path / "deployment", "sc://localhost:1", {"DELTAFORGE_API_TOKEN": "of-this-test"}
    )
    yield made
    made.stop()


def defined(deployment: Deployment) -> set[str]:
    """Return the sensors that a new process would load."""
    repository = build_definitions(deployment.settings).get_repository_def()
    return {sensor.name for sensor in repository.sensor_defs}


def test_a_pipeline_from_its_making_to_its_end(deployment: Deployment) -> None:
    """Made over REST it is in what Dagster loads; paused, resumed, and gone when it is removed."""
    server = deployment.spawn("-m", "deltaforge_dagster", "serve", "--port", "0")
    said = eventually(
        lambda: re.search(r"http://\S+(?= serves)", deployment.output(server)), what="the start"
    )
    with httpx.Client(base_url=said[0], headers=TOKEN, timeout=300) as client:
        assert (
            client.get("/pipelines", headers={"Authorization": "Bearer wrong"}).status_code == 401
        )

        made = client.post("/pipelines", json=document("made"))
        assert made.status_code == 200, made.text
        assert "made_work" in defined(deployment)

        for call, status in (("pause", "paused"), ("resume", "running")):
            assert client.post(f"/pipelines/made/{call}").json()["status"] == status
            assert client.get("/pipelines/made").json()["status"] == status

        assert client.delete("/pipelines/made").status_code == 204
        assert client.get("/pipelines").json() == []
        assert "made_work" not in defined(deployment)
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    assert "Traceback" not in deployment.output(server)
