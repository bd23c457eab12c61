"""A SQLite file as source: a run that is killed while it reads, delivers or tidies up loses nothing."""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.work import ensure_start, register
from deltaforge_dagster.pipeline.failpoints import VARIABLE
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.state.store import StateStore
from tests.fix_spark import SparkAddress
from tests.kills import child
from tests.state.make import expire

pytestmark = [pytest.mark.spark]

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source:
    type: turso
    config:
      {{id: shop, url: "{folder}/shop.db", tables: [items], auto_create_triggers: true, poll_interval_ms: 20, batch_size: 7}}
  sinks:
    - {{type: file, config: {{id: files, path: "{folder}/out.jsonl"}}}}
  engine:
    segment: {{max_events: 20}}
    run: {{lease_seconds: 20, renew_seconds: 1}}
"""
STEPS = ("segment-file-written:2", "segment-row-written", "sink-sent", "source-confirmed", None)


def test_nothing_is_lost(tmp_path: Path, spark_server: SparkAddress) -> None:
    """The file has every version of every row, first seen in order; what was captured is deleted."""
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE.format(name=f"k-{uuid.uuid4().hex[:8]}", folder=tmp_path))
    environment = {
        "DELTAFORGE_HOME": str(tmp_path / "home"),
        **spark_server.settings(tmp_path / "home"),
    }
    execute(
        tmp_path,
        "PRAGMA journal_mode = WAL",
        "CREATE TABLE items (id INTEGER PRIMARY KEY, version)",
    )
    begin(path, environment)
    ended = []
    for version, step in enumerate(STEPS):
        write(tmp_path, version)
        process = child.start(
            path,
            {**environment, **({} if step is None else {VARIABLE: step})},
            f"run-{version}",
            until_caught_up=True,
        )
        process.join(150)
        ended.append(process.exitcode)
        process.kill()
        process.join()
        process.close()
        let_go(environment)

    seen: dict[int, list[int]] = defaultdict(list)
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        row = json.loads(line)["after"]
        if row["version"] not in seen[row["id"]]:
            seen[row["id"]].append(row["version"])
    assert ended == [-9] * (len(STEPS) - 1) + [0]
    assert seen == {id_: list(range(len(STEPS))) for id_ in range(50)}


def write(folder: Path, version: int) -> None:
    """Give every row its next version."""
    if version == 0:
        execute(folder, *(f"INSERT INTO items VALUES ({id_}, 0)" for id_ in range(50)))
    else:
        execute(folder, f"UPDATE items SET version = {version}")


def execute(folder: Path, *statements: str) -> None:
    """Run statements, each for itself."""
    with closing(
        sqlite3.connect(folder / "shop.db", isolation_level=None, timeout=60)
    ) as connection:
        for statement in statements:
            connection.execute(statement)


def let_go(environment: dict[str, str]) -> None:
    """Let the lease of a run that died be over: no busy machine loses it, and it lasts long."""
    store = StateStore.open(Settings.from_env({**os.environ, **environment}).state_url)
    expire(store)
    store.close()


def begin(path: Path, environment: dict[str, str]) -> None:
    """Fix where the pipeline begins: now."""
    loaded = load_pipeline(path)
    with Platform(Settings.from_env({**os.environ, **environment})).open() as opened:
        source = build_run_context(opened, loaded).build_source()
        try:
            ensure_start(opened.store, loaded, register(opened.store, loaded), source)
        finally:
            source.close()
