"""What release 0.1.0 wrote, this code reads: its state, its journal, and what it still owes a sink."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from deltaforge_dagster import __version__
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.replay.replay import replay
from deltaforge_dagster.pipeline.run.live import LiveRun
from deltaforge_dagster.pipeline.run_context import RunOptions
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.conftest import Shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Watcher

WRITTEN = Path(__file__).parents[1] / "fixtures" / "release_0_1_0"


@pytest.mark.spark
@pytest.mark.redis
def test_the_installation_of_a_release_goes_on(
    redis_server: RedisServer,
    redis_client: object,
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its files verify; the sink that was down gets what it lacks, a replay what it had: to the byte."""
    home = tmp_path / "first"
    shutil.copytree(WRITTEN, home)
    said = (
        (home / "lines.jsonl").read_text().replace("deltaforge-0.1.0", f"deltaforge-{__version__}")
    )
    lines = said.splitlines()
    shop = Shop("postgres://nobody@127.0.0.1:1/shop", redis_server.uri)
    monkeypatch.setenv("SHOP_DSN", shop.dsn)
    monkeypatch.setenv("REDIS_URI", redis_server.uri)
    monkeypatch.setenv("LINES", str(tmp_path / "lines.jsonl"))
    settings = Settings.from_env({"DELTAFORGE_HOME": str(home), **spark_server.settings(home)})
    loaded = load_pipeline(home / "first.yaml")

    with Platform(settings, single_process=True).open() as opened:
        store, context = opened.store, build_run_context(opened, loaded)
        assert [row.range for row in store.ranges.read("first")] == [1, 2, 3]
        for segment in store.segments.read("first"):
            opened.journal.verify(segment)
        assert store.checkpoints.read("first")["redis"].segment == 1
        store.pipelines.set_desired_state("first", "paused")  # the database is gone
        watcher = Watcher(store, "first")
        options = RunOptions(str(uuid.uuid4()), watcher, until_caught_up=True)
        outcome = LiveRun(loaded, context, options).execute()
        assert (outcome.sink_errors, outcome.behind) == ({}, {})

        with context.replay_sessions() as sessions:
            run_id = str(uuid.uuid4())
            replay(
                store,
                loaded.spec,
                "lines",
                [1],
                encoder=Encoder(loaded.spec, opened.journal, sessions, run_id),
                build_sink=lambda: context.build_sink("lines"),
                run_id=run_id,
                progress=lambda _: None,
            )

    assert [one["df-event"] for one in shop.entries("first.customers")] == lines[40:]
    (again,) = tmp_path.glob("lines.jsonl.replay-*")
    assert again.read_text().splitlines() == lines[:40]
