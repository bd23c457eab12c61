"""What Dagster gets to see of a directory of pipeline files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions

HEAVY = {"pyspark", "pandas", "grpc", "numba"}
"""What reading, preparing and sending need, and what takes longer to import than all the rest."""


def write(
    folder: Path, name: str, *, sinks: tuple[str, ...] = ("cache",), schedule: str | None = None
) -> Path:
    """Write a good pipeline file."""
    path = folder / f"{name}.yaml"
    document = {
        "metadata": {"name": name, "tenant": "acme"},
        "spec": {
            "source": {
                "type": "postgres",
                "config": {
                    "id": "pg",
                    "dsn": "postgres://u:geheim@localhost/app",
                    "slot": "orders",
                    "publication": "orders",
                    "tables": ["public.orders"],
                },
            },
            "sinks": [
                {"type": "file", "config": {"id": sink, "path": f"/tmp/{sink}"}} for sink in sinks
            ],
            "engine": {"dagster": {"schedule": schedule}} if schedule else {},
        },
    }
    path.write_text(yaml.safe_dump(document))
    return path


def load(folder: Path) -> dg.Definitions:
    """Build the definitions of a directory, and let Dagster check that they fit together."""
    definitions = build_definitions(Settings.from_env({"DELTAFORGE_PIPELINES": str(folder)}))
    dg.Definitions.validate_loadable(definitions)
    return definitions


def asset_keys(definitions: dg.Definitions) -> set[str]:
    """Return the asset keys as the UI writes them."""
    return {key.to_user_string() for key in definitions.resolve_all_asset_keys()}


def checks(definitions: dg.Definitions) -> set[tuple[str, str]]:
    """Return the checks as (asset, check)."""
    graph = definitions.resolve_asset_graph()
    return {(key.asset_key.to_user_string(), key.name) for key in graph.asset_check_keys}


def names(definitions: dg.Definitions) -> set[str]:
    """Return the names of all jobs, sensors and schedules that we made."""
    repository = definitions.get_repository_def()
    return {
        *(job.name for job in repository.get_all_jobs() if not job.name.startswith("__")),
        *(sensor.name for sensor in repository.sensor_defs),
        *(schedule.name for schedule in repository.schedule_defs),
    }


def sensor_of(definitions: dg.Definitions, name: str) -> dg.SensorDefinition:
    """Return a sensor."""
    return definitions.get_repository_def().get_sensor_def(name)


def test_a_pipeline_is_its_changes_and_its_sinks(tmp_path: Path) -> None:
    """Each has its asset on the pipeline's own partitions, with its checks; a sensor starts runs."""
    write(tmp_path, "shop", sinks=("cache", "search"))

    definitions = load(tmp_path)

    assert asset_keys(definitions) == {"shop/changes", "shop/sinks/cache", "shop/sinks/search"}
    assert checks(definitions) == {
        ("shop/changes", "agreement"),
        ("shop/changes", "contiguity"),
        ("shop/changes", "holds"),
        ("shop/changes", "preflight"),
        ("shop/changes", "source"),
        ("shop/sinks/cache", "delivered"),
        ("shop/sinks/search", "delivered"),
    }
    graph = definitions.resolve_asset_graph()
    for key in definitions.resolve_all_asset_keys():
        node = graph.get(key)
        assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)
        assert node.partitions_def.name == "shop/ranges"
        assert node.backfill_policy == dg.BackfillPolicy.single_run()
        assert node.group_name == "shop"
    assert graph.get(dg.AssetKey(["shop", "sinks", "cache"])).parent_keys == {
        dg.AssetKey(["shop", "changes"])
    }
    assert names(definitions) == {
        "shop_run",
        "shop_work",
        "deltaforge_retention",
        "deltaforge_retention_hourly",
    }
    sensor = sensor_of(definitions, "shop_work")
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
    assert sensor.minimum_interval_seconds == 5


def test_names_that_dagster_refuses_stay_different(tmp_path: Path) -> None:
    """Hyphens and dots are kept in asset keys; `a-b`, `a.b` and `a_b` are three pipelines."""
    for name in ("a-b", "a.b", "a_b"):
        write(tmp_path, name)

    definitions = load(tmp_path)

    assert asset_keys(definitions) == {
        f"{name}/{asset}" for name in ("a-b", "a.b", "a_b") for asset in ("changes", "sinks/cache")
    }
    assert len({name for name in names(definitions) if name.endswith("_run")}) == 3
    assert len({name for name in names(definitions) if name.endswith("_work")}) == 3
    assert {"a_b_run", "a_b_work"} < names(definitions)


def test_a_schedule_takes_the_sensors_place(tmp_path: Path) -> None:
    """With `engine.dagster.schedule` a pipeline has a running schedule, and no sensor."""
    write(tmp_path, "nightly", schedule="30 2 * * *")

    definitions = load(tmp_path)

    assert names(definitions) == {
        "nightly_run",
        "nightly_schedule",
        "deltaforge_retention",
        "deltaforge_retention_hourly",
    }
    schedule = definitions.get_repository_def().get_schedule_def("nightly_schedule")
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.cron_schedule == "30 2 * * *"
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING


def test_a_broken_file_stops_nobody(tmp_path: Path) -> None:
    """Good pipelines load beside broken files, which show as assets with a failing check."""
    write(tmp_path, "shop")
    (tmp_path / "cut-off.yaml").write_text("metadata: {name: shop2, tenant: ")
    broken = write(tmp_path, "no-sinks", sinks=())

    definitions = load(tmp_path)

    assert asset_keys(definitions) == {
        "shop/changes",
        "shop/sinks/cache",
        "cut-off/pipeline_file",
        "no-sinks/pipeline_file",
    }
    assert ("cut-off/pipeline_file", "file") in checks(definitions)
    assert {"shop_work", "broken_pipeline_files"} < names(definitions)
    instance = dg.DagsterInstance.ephemeral()
    sensor = sensor_of(definitions, "broken_pipeline_files")
    tick = sensor.evaluate_tick(dg.build_sensor_context(instance))
    assert f"{broken}:" in str(tick.skip_message)
    key = dg.AssetCheckKey(dg.AssetKey(["no-sinks", "pipeline_file"]), "file")
    (shown,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=5)
    assert shown.event is not None
    evaluation = shown.event.dagster_event.asset_check_evaluation_data  # type: ignore[union-attr]
    assert not evaluation.passed
    assert "spec.sinks" in str(evaluation.description)


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    """An installation without pipelines loads: it has nothing but retention."""
    assert names(load(tmp_path)) == {"deltaforge_retention", "deltaforge_retention_hourly"}


def test_a_second_look_reports_nothing_new(tmp_path: Path) -> None:
    """The check of a broken file is written when its problem changes, not at every tick."""
    broken = write(tmp_path, "no-sinks", sinks=())
    instance = dg.DagsterInstance.ephemeral()
    key = dg.AssetCheckKey(dg.AssetKey(["no-sinks", "pipeline_file"]), "file")

    def look() -> int:
        sensor = sensor_of(load(tmp_path), "broken_pipeline_files")
        sensor.evaluate_tick(dg.build_sensor_context(instance))
        return len(instance.event_log_storage.get_asset_check_execution_history(key, limit=5))

    assert look() == 1
    assert look() == 1
    broken.write_text(broken.read_text().replace("tenant: acme", "tenant: ''"))
    assert look() == 2


@pytest.mark.parametrize(
    "module", ["deltaforge_dagster.definitions", "deltaforge_dagster.cli.main"]
)
def test_loading_is_quick(module: str) -> None:
    """Neither the definitions nor `deltaforge --help` import Spark or the kernels."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert HEAVY & set(loaded.stdout.split()) == set()
