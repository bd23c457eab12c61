"""The maintenance of lake tables in Dagster and as a command: an asset of each sink, on the sink's schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from typer.testing import CliRunner

from deltaforge_dagster.assets.names import maintenance_job_name, maintenance_key
from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableCommits
from tests.assets.test_lake_tables import KEY, SINK, commit, installation
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import Lake, Staging
from tests.state.make import NAME, held

JOB = maintenance_job_name(NAME, SINK)


def maintain(settings: Settings, instance: dg.DagsterInstance) -> dg.AssetMaterialization:
    """Execute the job; return the materialization of the maintenance."""
    definitions = build_definitions(settings)
    result = definitions.get_repository_def().get_job(JOB).execute_in_process(instance=instance)
    (event,) = result.asset_materializations_for_node(f"{JOB}_tables")
    assert event.asset_key == maintenance_key(NAME, SINK)
    return event


def written(settings: Settings) -> TableCommits:
    """Record commits of the table `raw.orders`; return how far the sink's tables have come."""
    store = StateStore.open(settings.state_url)
    lease = held(store, SINK)
    for number in range(1, 3):
        commit(store, lease, number, "orders")
    found = store.table_commits.read(NAME, SINK)
    store.close()
    assert found is not None
    return found


def test_on_the_sink_s_schedule(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """A schedule of each sink starts the job, unless the sink's file says `off`; without tables there is nothing to do."""
    settings = installation(tmp_path, "iceberg")
    schedule = build_definitions(settings).get_repository_def().get_schedule_def(f"{JOB}_schedule")
    assert schedule.cron_schedule == "17 3 * * *"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    StateStore.open(settings.state_url).close()
    assert maintain(settings, instance).metadata["tables"].value == 0

    file = tmp_path / "orders.yaml"
    file.write_text(
        file.read_text().replace("mode: current", "mode: current\n      maintenance: off")
    )
    without = build_definitions(settings).get_repository_def()
    assert not without.has_job(JOB)
    assert not without.has_schedule_def(f"{JOB}_schedule")


@pytest.mark.spark
def test_tables_are_maintained(
    tmp_path: Path,
    instance: dg.DagsterInstance,
    spark_server: SparkAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job compacts a table and reports its figures; the command shows what there is, and does the same."""
    settings = installation(tmp_path, "iceberg")
    file = tmp_path / "orders.yaml"
    options = "mode: current\n      maintenance: {small_files: 5}"
    file.write_text(file.read_text().replace("mode: current", options))
    spark_server.use(settings.home, monkeypatch)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))
    monkeypatch.setenv("DELTAFORGE_HOME", str(settings.home))
    settings = Settings.from_env()
    owner = written(settings).front.owner
    lake = Lake("iceberg", tmp_path, spark_server.remote)
    staging = Staging(lake, "current", destination=("raw", "orders"))
    writer = lake.writer(uid=owner, pipeline=NAME, sink_id=SINK)
    for number in range(5):
        step = staging.step({"id": number, "name": "a"}, segment=number, inserts_only=True)
        writer.commit(staging.table(step), number, lambda: None)
    lake.close()

    command = ["lake", "maintain", NAME, "--json"]
    looked = CliRunner().invoke(app, [*command, "--dry-run"])
    assert looked.exit_code == 0, looked.output
    (shown,) = json.loads(looked.stdout)["tables"]
    assert (shown["sink"], shown["due"], shown["compacted"]) == (SINK, True, False)

    event = maintain(settings, instance)
    assert {name: one.value for name, one in event.metadata.items()} == {
        "tables": 1, "compacted": 1, "cleaned": 1,
    }  # fmt: skip
    (record,) = instance.fetch_observations(KEY, limit=9).records
    assert record.asset_observation
    found: dict[str, Any] = {
        name: one.value for name, one in record.asset_observation.metadata.items()
    }
    assert found["maintenance"] == "compacted and cleaned"
    assert [found[f"files_{when}"] for when in ("before", "after")] == [5, 1]
    assert [found[f"rows_{when}"] for when in ("before", "after")] == [5, 5]

    done = CliRunner().invoke(app, [*command[:-1], "--table", "raw.orders"])
    assert done.exit_code == 0, done.output
    assert "raw.orders" in done.stdout
    assert done.stdout.rstrip().endswith("cleaned")
    for wrong, text in (
        (["--table", "raw.none"], "no table raw.none"),
        (["--sink", "x"], "no sink"),
    ):
        refused = CliRunner().invoke(app, [*command, *wrong])
        assert refused.exit_code != 0
        assert text in refused.output
