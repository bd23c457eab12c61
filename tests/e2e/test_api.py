"""`deltaforge serve` as a process: a pipeline from its making to its end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from deltaforge_dagster.definitions import build_definitions
from tests.api.conftest import document
from tests.e2e.deployment import Deployment, eventually
from tests.fix_spark import SparkAddress

pytestmark = [pytest.mark.e2e]

TOKEN = {"Authorization": "Bearer of-this-test"}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """An installation without pipelines; nothing of it runs yet, and nothing needs Spark."""
    made = Deployment(
        tmp_path / "deployment",
        SparkAddress("sc://localhost:1", None),
        {"DELTAFORGE_API_TOKEN": "of-this-test"},
    )
    yield made
    made.close()


def defined(deployment: Deployment) -> set[str]:
    """Return the sensors that a new process would load."""
    repository = build_definitions(deployment.settings).get_repository_def()
    return {sensor.name for sensor in repository.sensor_defs}


def test_a_pipeline_from_its_making_to_its_end(deployment: Deployment) -> None:
    """Made over REST it is in what Dagster loads; paused, resumed, and gone when it is removed."""
    addresses = ("--port", "0", "--metrics-addr", "127.0.0.1:0")
    server = deployment.spawn("-m", "deltaforge_dagster", "serve", *addresses)
    said = eventually(
        lambda: re.search(r"(http://\S+) serves.*, (http://\S+) their", deployment.output(server)),
        what="the start",
    )

    def shown(line: str) -> bool:
        return line in deployment.output(server)

    with httpx.Client(base_url=said[1], headers=TOKEN, timeout=300) as client:
        assert (
            client.get("/pipelines", headers={"Authorization": "Bearer wrong"}).status_code == 401
        )

        made = client.post("/pipelines", json=document("made"))
        assert made.status_code == 200, made.text
        assert "made_work" in defined(deployment)

        for call, status in (("pause", "paused"), ("resume", "running")):
            assert client.post(f"/pipelines/made/{call}").json()["status"] == status
            assert client.get("/pipelines/made").json()["status"] == status
            # Each look is some seconds after the last, and the line after that.
            line = f'"message":"the pipeline is {status}","pipeline":"made"'
            eventually(partial(shown, line), what=line)

        paused = 'deltaforge_pipeline_pauses_total{pipeline="made"} 1.0'
        for metrics in ("/metrics", said[2]):
            assert paused in client.get(metrics).text
        assert httpx.get(said[2], timeout=300).status_code == 401

        assert client.delete("/pipelines/made").status_code == 204
        assert client.get("/pipelines").json() == []
        assert "made_work" not in defined(deployment)
    server.send_signal(signal.SIGTERM)
    server.wait(120)
    assert "Traceback" not in deployment.output(server)
