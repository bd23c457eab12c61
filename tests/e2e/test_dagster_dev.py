"""Plain `dagster dev`, from the checkout's workspace.yaml, runs the pipelines as well."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaforge_dagster.servers.process import free_port
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

WORKSPACE = Path(__file__).parents[2] / "workspace.yaml"


@pytest.mark.timeout(300)
def test_dagster_dev_serves_the_ui_and_delivers(
    shop: Shop, deploy: Callable[..., Deployment]
) -> None:
    """Nothing but Dagster's own command: the UI answers, the sensor starts a run, a row arrives."""
    deployment = deploy()
    deployment.add("plain", shop.pipeline("plain"))
    port = free_port()
    deployment.spawn("-m", "dagster", "dev", "-w", str(WORKSPACE), "-p", str(port))
    eventually(lambda: answers(f"http://127.0.0.1:{port}/server_info"), what="the UI")
    eventually(lambda: started(deployment, "plain"), what="the first tick")

    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")

    eventually(lambda: len(shop.entries("plain.customers")) == 1, what="the delivery")


def answers(url: str) -> bool:
    """Say whether a page can be had."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False
