"""Runs that share nothing with whoever starts them but state store, journal on object storage, and Spark Connect."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.docker.cluster import Cluster
from tests.docker.compose import DOCKER, ROOT
from tests.docker.launchers import FOLDER
from tests.docker.test_scaled import cluster
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started
from tests.fix_spark import SparkAddress

__all__ = ["cluster", "shop"]

pytestmark = [
    pytest.mark.soak("dagster"),
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(2400),
]

LONE = """\
run_launcher:
  module: tests.docker.launchers
  class: LoneRunLauncher
"""


@pytest.fixture(params=["default", "lone"])
def deployment(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    postgres_server: PostgresServer,
    tmp_path: Path,
) -> Iterator[Deployment]:
    """Dagster with its storage in PostgreSQL, as in `docker/`, and one of the launchers."""
    runs = tmp_path / "runs"
    runs.mkdir()
    dagster = postgres_server.create_database().replace("postgres", "postgresql+psycopg2", 1)
    environment = {
        name: value
        for name, value in cluster.environment.items()
        if not name.startswith("DAGSTER_") and name != "DELTAFORGE_STATE_URL"
    }
    environment |= {"DAGSTER_POSTGRES_URL": dagster, FOLDER: str(runs), "PYTHONPATH": str(ROOT)}
    remote = SparkAddress(environment["DELTAFORGE_SPARK_REMOTE"], None)
    made = Deployment(
        tmp_path / "deployment",
        remote,
        environment=environment,
        dagster_yaml=(DOCKER / "dagster.yaml").read_text() + LONE * (request.param == "lone"),
        state_url=postgres_server.create_database(),
    )
    yield made
    for noted in runs.glob("*/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(noted.read_text()), signal.SIGKILL)
    made.close()


def test_a_run_needs_nothing_of_its_launchers_machine(
    shop: Shop, deployment: Deployment, tmp_path: Path
) -> None:
    """Few and many rows arrive, once; the journal is in the bucket alone. Evicted, the resident run succeeds, and the next one goes on."""
    run = "{max_seconds: 0, lease_seconds: 60, renew_seconds: 1}"
    deployment.add("lone", shop.pipeline("lone", tables="[public.customers]", run=run))
    deployment.start()
    eventually(lambda: started(deployment, "lone"), what="the first tick", seconds=600)

    def delivered() -> list[int]:
        entries = shop.entries("lone.customers")
        return [json.loads(fields["df-event"])["after"]["id"] for fields in entries]

    def insert(first: int, last: int) -> None:
        shop.execute(f"INSERT INTO customers SELECT n, 'x' FROM generate_series({first}, {last}) n")
        eventually(
            lambda: delivered() == list(range(1, last + 1)), what="the delivery", seconds=900
        )

    insert(1, 3)
    insert(4, 6_000)  # worth tasks of Spark
    pid = eventually(lambda: deployment.run_pid("lone"), what="the run")
    os.kill(pid, signal.SIGTERM)
    eventually(
        lambda: deployment.live_runs("lone")[0].dagster_run.is_finished, what="the end of the run"
    )
    insert(6_001, 6_003)

    first, second = deployment.live_runs("lone")
    assert first.dagster_run.status is dg.DagsterRunStatus.SUCCESS
    assert second.dagster_run.status is dg.DagsterRunStatus.STARTED
    store = deployment.store()
    assert {row.state for row in store.ranges.read("lone")[:-1]} == {"closed"}
    assert store.ranges.read("lone")[0].close_reason in {"run ended", "max_seconds"}
    store.close()
    assert not (deployment.folder / "home" / "journal").exists()
    bucket = tmp_path / "cluster" / "data" / "journal"
    assert list(bucket.rglob("*.parquet"))
    folders = list((tmp_path / "runs").iterdir())
    if folders:
        assert len(folders) == 2
        assert not list((tmp_path / "runs").rglob("*.parquet"))
