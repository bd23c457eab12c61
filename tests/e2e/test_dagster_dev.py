"""`deltaforge dev` runs the pipelines here, and so does plain `dagster dev` with workspace.yaml."""

from __future__ import annotations

import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaforge_dagster.assets.names import asset_key
from deltaforge_dagster.cli.installation.dagster_processes import THREAD_VARIABLES, THREADS
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started
from tests.e2e.webserver import Webserver
from tests.fix_spark import SparkAddress

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

WORKSPACE = Path(__file__).parents[2] / "workspace.yaml"


def serve_and_deliver(
    shop: Shop, deployment: Deployment, *command: str, port: int, ready: str = ""
) -> subprocess.Popen[bytes]:
    """Start a command in the directory of `pipelines`, and prove that the UI and the runs work.

    Nothing names the pipeline's file; one of its sinks is a file with a relative path. A row that is written
    once the command has said `ready` arrives; without that, one that is written after the first tick.
    """
    more = "    - {type: file, config: {id: lines, path: lines.jsonl}}\n"
    deployment.add("plain", shop.pipeline("plain", more_sinks=more))
    process = deployment.spawn(
        "-m", *command, "--port", str(port), more={"DELTAFORGE_PIPELINES": ""}
    )
    eventually(lambda: answers(f"http://127.0.0.1:{port}/server_info"), what="the UI")
    if ready:
        eventually(lambda: ready in deployment.output(process), what=ready)
    else:
        eventually(lambda: started(deployment, "plain"), what="the first tick")

    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")

    eventually(lambda: len(shop.entries("plain.customers")) == 1, what="the delivery")
    eventually((deployment.folder / "lines.jsonl").exists, what="the file")
    return process


def test_dagster_dev(shop: Shop, deploy: Callable[..., Deployment]) -> None:
    """Nothing but Dagster's own command: the UI answers, the sensor starts a run, a row arrives."""
    serve_and_deliver(shop, deploy(), "dagster", "dev", "-w", str(WORKSPACE), port=free_port())


def test_deltaforge_dev(
    shop: Shop, deploy: Callable[..., Deployment], spark_server: SparkAddress
) -> None:
    """The same for ours, which ends everything in order, also when a script started it with `&`.

    It says since when changes are captured. It is asked to end again and again. A pipeline that is added shows by
    itself. Its code server, webserver and daemon give a run's process longer to start than Dagster does, and the code
    server has more threads.
    """
    # It would end a server of its own; the tests' one is named to it.
    elsewhere = SparkAddress(spark_server.remote, None)
    deployment = deploy(elsewhere, environment={"DAGSTER_GRPC_TIMEOUT_SECONDS": ""})
    port = free_port()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = serve_and_deliver(
            shop,
            deployment,
            "deltaforge_dagster",
            "dev",
            port=port,
            ready="plain: capturing since ",
        )
    finally:
        signal.signal(signal.SIGINT, before)

    deployment.add("late", shop.pipeline("late"))
    shown = Webserver(f"http://127.0.0.1:{port}").assets
    eventually(lambda: asset_key("late", CHANGES) in shown(), what="the new pipeline's asset")

    assert deployment.told("DAGSTER_GRPC_TIMEOUT_SECONDS", "300") >= 3
    assert all(deployment.told(name, str(THREADS)) >= 3 for name in THREAD_VARIABLES)

    def ended() -> bool:
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    eventually(ended, what="the end", every=0.3)

    assert process.returncode == 0, deployment.output(process)
    assert deployment.members() == []
    store = deployment.store()
    assert [row.state for row in store.ranges.read("plain")] == ["closed"]
    store.close()


def answers(url: str) -> bool:
    """Say whether a page can be had."""
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False
