"""The scaled installation, its own commands and settings, on one machine without containers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import psycopg
import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.work import find_work
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.docker.cluster import Cluster
from tests.docker.compose import ROOT
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually

__all__ = ["shop"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.soak("faults"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """The services, started."""
    with contextlib.ExitStack() as stack:
        made = Cluster(tmp_path / "cluster", stack)
        made.start()
        yield made


class Pipeline:
    """A pipeline whose runs are processes with the code server's environment."""

    def __init__(self, shop: Shop, cluster: Cluster, folder: Path, *, more_sinks: str = "") -> None:
        self._shop = shop
        self._path = folder / "afar.yaml"
        self._path.write_text(
            shop.pipeline("afar", tables="[public.customers]", more_sinks=more_sinks)
        )
        self.environment = {
            **os.environ,
            **cluster.environment,
            "DELTAFORGE_HOME": str(folder / "home"),
            "DELTAFORGE_STATE_URL": f"sqlite:///{folder}/state.db",
            "PYTHONWARNINGS": "ignore",
        }

    def fix_start(self) -> None:
        """Let everything count that is committed from now on."""
        loaded = load_pipeline(self._path)
        with Platform(Settings.from_env(self.environment)).open() as opened:
            find_work(opened.store, loaded, opened.source_builder(loaded))

    def begin(self) -> subprocess.Popen[str]:
        """Begin a run that ends when it is caught up."""
        command = [sys.executable, "-m", "tests.pipeline.lone_run", str(self._path), str(16 << 20)]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, text=True
        )

    def run(self) -> dict[str, object]:
        """Execute such a run and return its outcome."""
        return ended(self.begin())

    def insert(self, first: int, last: int) -> None:
        """Insert customers in one transaction."""
        self._shop.execute(
            f"INSERT INTO customers SELECT n, md5(n::text) FROM generate_series({first}, {last}) n"
        )

    def delivered(self) -> list[int]:
        """Return the ids in Redis, in order, each once."""
        entries = [json.loads(one["df-event"]) for one in self._shop.entries("afar.customers")]
        return list(dict.fromkeys(one["after"]["id"] for one in entries))


def ended(run: subprocess.Popen[str]) -> dict[str, object]:
    """Wait for a run and return its outcome."""
    output, _ = run.communicate(timeout=1200)
    outcome: dict[str, object] = json.loads(output.splitlines()[-1])
    return outcome


@pytest.mark.timeout(2400)
def test_spark_standalone_with_its_journal_on_object_storage(
    shop: Shop, cluster: Cluster, tmp_path: Path
) -> None:
    """Rows arrive, few or many, over TLS and two workers; the loss of one worker loses nothing.

    Every file is in the bucket, and encoded messages are gone again; but what a task of the lost worker still writes when
    its run has ended stays until it is swept.
    """
    pipeline = Pipeline(shop, cluster, tmp_path)
    pipeline.fix_start()

    pipeline.insert(1, 3)  # so few that they are not worth a task
    few = pipeline.run()
    assert (few["captured"], few["capture_error"], few["sink_errors"]) == (3, None, {})
    assert pipeline.delivered() == [1, 2, 3]

    pipeline.insert(4, 10_000)
    for first in range(10_001, 30_001, 5_000):
        pipeline.insert(first, first + 4_999)
    run = pipeline.begin()
    eventually(lambda: len(shop.entries("afar.customers")) > 3, seconds=1200, what="a task's work")
    cluster.workers[0].stop(signal.SIGKILL, 10)
    assert ended(run)["captured"] == 29_997
    for _ in range(5):  # a job may have failed for good with its executor; the next run goes on
        if len(pipeline.delivered()) == 30_000:
            break
        pipeline.run()

    assert pipeline.delivered() == list(range(1, 30_001))
    pipeline.insert(30_001, 40_000)
    last = pipeline.run()
    assert pipeline.delivered() == list(range(1, 40_001))
    bucket = tmp_path / "cluster" / "data" / "journal"
    store = StateStore.open(Settings.from_env(pipeline.environment).state_url)
    kept = {path for segment in store.segments.read("afar") for path in segment.paths}
    store.close()
    files = {str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()}
    assert {path for path in files if path.endswith(".parquet")} == {
        f"deltaforge/{path}" for path in kept
    }
    assert not [path for path in files if f"/prepared/{last['run_id']}." in path]
    assert not (tmp_path / "home" / "journal").exists()


@pytest.mark.timeout(2400)
def test_tables_and_objects_from_a_journal_on_object_storage(
    shop: Shop, cluster: Cluster, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """They have what the source has: tasks read their segments from the bucket."""
    copy = postgres_server.create_database()
    pipeline = Pipeline(
        shop,
        cluster,
        tmp_path,
        more_sinks=f"""\
    - {{type: postgres, config: {{id: copy, dsn: "{copy}", commit_seconds: 0.1}}}}
    - {{type: s3, config: {{id: files, local: true, bucket: "{tmp_path}/files"}}}}
""",
    )
    pipeline.fix_start()
    pipeline.insert(1, 5_000)
    shop.execute(
        "UPDATE customers SET name = 'b' WHERE id <= 10", "DELETE FROM customers WHERE id > 4990"
    )

    outcome = pipeline.run()

    assert (outcome["captured"], outcome["capture_error"], outcome["sink_errors"]) == (
        5_020,
        None,
        {},
    )
    query = "SELECT count(*), sum(id), count(*) FILTER (WHERE name = 'b') FROM customers"
    with psycopg.connect(copy) as connection:
        assert connection.execute(query).fetchone() == (4_990, 4_990 * 4_991 // 2, 10)
    files = f"{tmp_path}/files/**/*.parquet"
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT op, count(*) FROM '{files}' GROUP BY 1 ORDER BY 1"
        ).fetchall()
    assert found == [("c", 5_000), ("d", 10), ("u", 10)]
