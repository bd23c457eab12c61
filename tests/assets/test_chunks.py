"""Tests of the snapshot asset from the pipeline file to the sink, with real Spark, a database and runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
from typer.testing import CliRunner

from deltaforge_dagster.assets.names import (
    RUN_TAG,
    chunks_name,
    snapshot_job_name,
    snapshot_key,
)
from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.pipeline.failpoints import VARIABLE
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.spark]


def execute(
    instance: dg.DagsterInstance, tags: Mapping[str, str], partition: str | None = None
) -> list[str]:
    """Execute the job, and return the partitions that it has reported.

    Events are the run's own if somebody chose a partition, and otherwise of no run.
    """
    job = build_definitions(Settings.from_env(), single_process=True).resolve_job_def(
        snapshot_job_name("feed")
    )
    result = job.execute_in_process(instance=instance, tags=tags, partition_key=partition)
    assert result.success
    records = instance.fetch_materializations(
        snapshot_key("feed"), limit=99, ascending=True
    ).records
    of_run = "" if partition is None else result.run_id
    return [str(record.partition_key) for record in records if record.run_id == of_run]


def run_killed_after_a_chunk() -> int:
    """Read in a process that is killed once a chunk is recorded; return its exit status."""
    command = [sys.executable, "-m", "deltaforge_dagster", "snapshot", "run", "feed"]
    environment = {**os.environ, VARIABLE: "chunk-noted"}
    return subprocess.run(command, env=environment, check=False).returncode


def status() -> dict[str, object]:
    """Return the output of `deltaforge snapshot status`."""
    result = CliRunner().invoke(app, ["snapshot", "status", "feed", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.output.splitlines()[-1])
    return found


def test_rows_of_before_reach_the_sink(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command requests a snapshot, the job reads and publishes each chunk, and the run delivers the rows with op `r`.

    A reader killed earlier left the chunks that it had not recorded, and each row is delivered once. Materializing a
    partition again reads and delivers only that chunk again.
    """
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "feed.yaml"))
    spark_server.use(tmp_path / "home", monkeypatch)
    shop.execute("INSERT INTO customers SELECT n, 'Zoë ' || n FROM generate_series(1, 30) n")
    tables = "[public.customers, public.orders]\n      snapshot: {mode: never, chunk_size: 10}"
    text = shop.pipeline("feed", tables=tables)
    with (
        opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as feed,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        asked = CliRunner().invoke(
            app, ["snapshot", "start", "feed", "--tables", "public.customers"]
        )
        assert asked.exit_code == 0, asked.output
        killed = run_killed_after_a_chunk()
        assert killed == -signal.SIGKILL
        assert cast("dict[str, Any]", status()["progress"])["public.customers"]["read"] == 1
        first = execute(instance, {RUN_TAG: "snapshot"})
        feed.catch_up()

        assert first[0] == "public.customers/000001"
        assert instance.get_dynamic_partitions(chunks_name("feed")) == first
        events = [json.loads(one["df-event"]) for one in feed.delivered("customers")]
        assert [one["after"]["id"] for one in events] == list(range(1, 31))
        assert {(one["op"], one["source"]["snapshot"]) for one in events} == {("r", "true")}
        assert "lsn" not in events[0]["source"]
        assert status()["state"] == "spliced"

        again = execute(instance, {}, partition=first[0])
        feed.catch_up()

        assert again == first[:1]
        more = [json.loads(one["df-event"]) for one in feed.delivered("customers")][30:]
        assert [one["after"]["id"] for one in more] == list(range(1, 11))

        shop.execute("INSERT INTO orders SELECT n, n, 1.50 FROM generate_series(1, 5) n")
        feed.catch_up()
        run = [
            "snapshot",
            "run",
            "feed",
            "--tables",
            "public.orders",
            "--where",
            "id > 3",
            "--json",
        ]
        ran = CliRunner().invoke(app, run)
        assert ran.exit_code == 0, ran.output
        feed.catch_up()
        orders = [json.loads(one["df-event"]) for one in feed.delivered("orders")][5:]
        assert [(one["op"], one["after"]) for one in orders] == [
            ("r", {"id": number, "customer": number, "total": "1.50"}) for number in (4, 5)
        ]
