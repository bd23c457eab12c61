"""What Dagster gets to see of a directory of pipeline files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml

from deltaforge_dagster.assets.names import RUN_TAG
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.state.since import FILE_BROKEN
from deltaforge_dagster.state.store import StateStore

HEAVY = {"pyspark", "pandas", "grpc", "numba", "psycopg", "httpx"}
"""What reading, encoding and sending need, and what takes longer to import than all the rest."""


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
                    "dsn": "postgres://u:geheim@localhost:1/app",
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


def settings_of(folder: Path, **others: str) -> Settings:
    """Return the settings of an installation with a directory of pipelines, and the test's own home."""
    home = os.environ["DELTAFORGE_HOME"]
    return Settings.from_env(
        {"DELTAFORGE_PIPELINES": str(folder), "DELTAFORGE_HOME": home, **others}
    )


def load(folder: Path) -> dg.Definitions:
    """Build the definitions of a directory, and let Dagster check that they fit together."""
    definitions = build_definitions(settings_of(folder))
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

    assert asset_keys(definitions) == {
        "shop/changes",
        "shop/sinks/cache",
        "shop/sinks/search",
        "shop/health",
        "shop/schemas",
        "shop/snapshot",
    }
    assert checks(definitions) == {
        ("shop/changes", "agreement"),
        ("shop/changes", "contiguity"),
        ("shop/changes", "dead_letters"),
        ("shop/changes", "holds"),
        ("shop/changes", "preflight"),
        ("shop/changes", "source"),
        ("shop/health", "well"),
        ("shop/sinks/cache", "delivered"),
        ("shop/sinks/cache", "freshness"),
        ("shop/sinks/search", "delivered"),
        ("shop/sinks/search", "freshness"),
    }
    graph = definitions.resolve_asset_graph()
    for key in definitions.resolve_all_asset_keys():
        node = graph.get(key)
        assert node.group_name == "shop"
        if (
            key.path[-1] == "health"
        ):  # the Catalog's list hides failing checks of assets with partitions
            assert node.partitions_def is None
            continue
        assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)
        own = {"snapshot": "shop/chunks", "schemas": "shop/tables"}
        assert node.partitions_def.name == own.get(key.path[-1], "shop/ranges")
        assert node.backfill_policy == dg.BackfillPolicy.single_run()
    assert graph.get(dg.AssetKey(["shop", "sinks", "cache"])).parent_keys == {
        dg.AssetKey(["shop", "changes"])
    }
    assert names(definitions) == {
        "shop_run",
        "shop_snapshot",
        "shop_work",
        "pipeline_files",
        "deltaforge_retention",
        "deltaforge_retention_hourly",
    }
    sensor = sensor_of(definitions, "shop_work")
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
    assert sensor.minimum_interval_seconds == 4
    assert {target.job_name for target in sensor.targets} == {"shop_run", "shop_snapshot"}


def test_names_that_dagster_refuses_stay_different(tmp_path: Path) -> None:
    """Hyphens and dots are kept in asset keys; `a-b`, `a.b` and `a_b` are three pipelines."""
    for name in ("a-b", "a.b", "a_b"):
        write(tmp_path, name)

    definitions = load(tmp_path)

    assert asset_keys(definitions) == {
        f"{name}/{asset}"
        for name in ("a-b", "a.b", "a_b")
        for asset in ("changes", "health", "schemas", "sinks/cache", "snapshot")
    }
    assert len({name for name in names(definitions) if name.endswith("_run")}) == 3
    assert len({name for name in names(definitions) if name.endswith("_work")}) == 3
    assert {"a_b_run", "a_b_work"} < names(definitions)


def test_sinks_whose_names_dagster_takes_for_one(tmp_path: Path) -> None:
    """Sinks `a-b`, `a.b` and `a_b` of one pipeline are three assets, each with its own check."""
    sinks = ("a-b", "a.b", "a_b")
    write(tmp_path, "x-y", sinks=sinks)

    definitions = load(tmp_path)

    own = {f"x-y/{asset}" for asset in ("changes", "health", "schemas", "snapshot")}
    keys = own | {f"x-y/sinks/{sink}" for sink in sinks}
    assert asset_keys(definitions) == keys
    assert {(f"x-y/sinks/{sink}", "delivered") for sink in sinks} < checks(definitions)
    graph = definitions.resolve_asset_graph()
    for sink in sinks:
        node = graph.get(dg.AssetKey(["x-y", "sinks", sink]))
        assert node.parent_keys == {dg.AssetKey(["x-y", "changes"])}


@pytest.mark.parametrize(
    "name", ["shop_run", "shop_work", "shop_snapshot", "deltaforge_retention", "forget"]
)
def test_a_pipeline_may_be_called_like_a_job(tmp_path: Path, name: str) -> None:
    """What we name after pipelines, or for ourselves, is never in the way of another pipeline."""
    write(tmp_path, "shop")
    write(tmp_path, name)

    assert f"{name}/changes" in asset_keys(load(tmp_path))


def test_a_schedule_takes_the_sensors_place(tmp_path: Path) -> None:
    """With `engine.dagster.schedule` a pipeline has a running schedule, and no sensor."""
    write(tmp_path, "nightly", schedule="30 2 * * *")

    definitions = load(tmp_path)

    assert names(definitions) == {
        "nightly_run",
        "nightly_snapshot",
        "nightly_snapshots",
        "nightly_schedule",
        "pipeline_files",
        "deltaforge_retention",
        "deltaforge_retention_hourly",
    }
    schedule = definitions.get_repository_def().get_schedule_def("nightly_schedule")
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.cron_schedule == "30 2 * * *"
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING


def test_a_broken_file_stops_nobody(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Good pipelines load beside broken files, which show as assets with a failing check."""
    write(tmp_path, "shop")
    (tmp_path / "cut-off.yaml").write_text("metadata: {name: shop2, tenant: ")
    broken = write(tmp_path, "no-sinks", sinks=())

    definitions = load(tmp_path)

    assert asset_keys(definitions) == {
        "shop/changes",
        "shop/health",
        "shop/schemas",
        "shop/sinks/cache",
        "shop/snapshot",
        "cut-off/health",
        "no-sinks/health",
    }
    assert ("cut-off/health", "well") in checks(definitions)
    assert {"shop_work", "pipeline_files"} < names(definitions)
    sensor = sensor_of(definitions, "pipeline_files")
    with pytest.raises(dg.Failure, match=f"NOT WELL: {broken}:"):
        sensor.evaluate_tick(dg.build_sensor_context(instance))
    key = dg.AssetCheckKey(dg.AssetKey(["no-sinks", "health"]), "well")
    (shown,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=5)
    assert shown.event is not None
    evaluation = shown.event.dagster_event.asset_check_evaluation_data  # type: ignore[union-attr]
    assert not evaluation.passed
    assert "spec.sinks" in str(evaluation.description)
    with Platform(settings_of(tmp_path)).open() as opened:
        for name in ("no-sinks", "cut-off"):
            assert opened.store.pipelines.since(name, FILE_BROKEN) is not None


def test_a_file_that_breaks_keeps_what_it_has(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Assets, checks and jobs stay as they were; whoever starts a run is told file, line and cause."""
    path = write(tmp_path, "shop", sinks=("cache", "search"))
    document = yaml.safe_load(path.read_text())
    script = {"id": "js", "type": "javascript", "inline": "function processBatch(e) { return e }"}
    document["spec"]["processors"] = [script]
    path.write_text(yaml.safe_dump(document))
    with Platform(settings_of(tmp_path)).open() as opened:
        register(opened.store, load_pipeline(path))
    before = load(tmp_path)
    path.write_text(path.read_text().replace("tenant: acme", "tenant: ''"))

    definitions = load(tmp_path)

    assert asset_keys(definitions) == asset_keys(before)
    assert checks(definitions) == checks(before)
    assert names(before) - names(definitions) == {"shop_work"}, "nothing starts a run by itself"
    for key in asset_keys(before) - {"shop/health"}:
        then, now = (
            one.resolve_asset_graph().get(dg.AssetKey.from_user_string(key))
            for one in (before, definitions)
        )
        assert (now.code_version, now.metadata) == (then.code_version, then.metadata)
    for job in ("shop_run", "shop_snapshot"):
        ran = definitions.resolve_job_def(job).execute_in_process(
            instance=instance, raise_on_error=False, tags={RUN_TAG: "live"}
        )
        assert not ran.success
        (failed,) = [one for one in ran.all_events if one.is_step_failure]
        failure = failed.step_failure_data.user_failure_data
        assert failure is not None
        assert str(failure.description).startswith(f"{path}:3: metadata.tenant: ")


@pytest.mark.parametrize("reloaded", ["before", "after"])
def test_a_removed_pipeline_leaves_the_catalog(
    tmp_path: Path, instance: dg.DagsterInstance, reloaded: str
) -> None:
    """Its assets go, whether Dagster reloads its definitions before or after it is removed."""
    path = write(tmp_path, "shop")
    key = dg.AssetKey(["shop", "changes"])
    with Platform(settings_of(tmp_path)).open() as opened:
        register(opened.store, load_pipeline(path))
        definitions = load(tmp_path)
        instance.report_runless_asset_event(dg.AssetMaterialization(key))
        path.unlink()
        if reloaded == "before":
            definitions = load(tmp_path)
        sensor = sensor_of(definitions, "pipeline_files")
        sensor.evaluate_tick(dg.build_sensor_context(instance))
        assert key in instance.get_asset_keys(["shop"])

        opened.store.pipelines.remove("shop")
        sensor.evaluate_tick(dg.build_sensor_context(instance))
        assert instance.get_asset_keys(["shop"]) == []


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    """An installation without pipelines loads: it has nothing but retention, and looks for files."""
    assert names(load(tmp_path)) == {
        "pipeline_files",
        "deltaforge_retention",
        "deltaforge_retention_hourly",
    }


def test_a_second_look_reports_nothing_new(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """The check of a broken file is written when its problem changes, not at every tick."""
    broken = write(tmp_path, "no-sinks", sinks=())
    key = dg.AssetCheckKey(dg.AssetKey(["no-sinks", "health"]), "well")

    def loaded_count() -> int:
        sensor = sensor_of(load(tmp_path), "pipeline_files")
        with pytest.raises(dg.Failure, match="NOT WELL"):
            sensor.evaluate_tick(dg.build_sensor_context(instance))
        return len(instance.event_log_storage.get_asset_check_execution_history(key, limit=5))

    assert loaded_count() == 1
    assert loaded_count() == 1
    broken.write_text(broken.read_text().replace("tenant: acme", "tenant: ''"))
    assert loaded_count() == 2


@pytest.mark.parametrize(
    "module",
    [
        "deltaforge_dagster.definitions",
        "deltaforge_dagster.cli.main",
        "deltaforge_dagster.cli.installation.run",
        "deltaforge_dagster.assets.execution",
    ],
)
def test_loading_is_quick(module: str) -> None:
    """Neither the definitions, `deltaforge --help` nor what a run begins with import Spark or the kernels."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert HEAVY & set(loaded.stdout.split()) == set()


def test_strict_reading(tmp_path: Path) -> None:
    """With `DELTAFORGE_STRICT=true` a file with an unknown field is a broken one."""
    path = write(tmp_path, "shop")
    path.write_text(path.read_text() + "colour: red\n")

    lenient = build_definitions(settings_of(tmp_path))
    strict = build_definitions(settings_of(tmp_path, DELTAFORGE_STRICT="true"))

    assert asset_keys(lenient) == {
        "shop/changes",
        "shop/health",
        "shop/schemas",
        "shop/sinks/cache",
        "shop/snapshot",
    }
    assert asset_keys(strict) == {"shop/health"}


def kept(state: Path, folder: Path) -> Settings:
    """Return an installation whose state store keeps one pipeline, `made`."""
    (folder / "pipelines").mkdir()
    document = yaml.safe_load(write(folder, "made").read_text())
    store = StateStore.open(f"sqlite:///{state}")
    store.pipelines.add_document("made", json.dumps(document))
    store.close()
    return Settings.from_env(
        {
            "DELTAFORGE_PIPELINES": str(folder / "pipelines"),
            "DELTAFORGE_STATE_URL": f"sqlite:///{state}",
        }
    )


def test_pipelines_of_the_state_store(tmp_path: Path) -> None:
    """They are loaded beside the files, without being any."""
    settings = kept(tmp_path / "state.db", tmp_path)
    write(settings.pipelines, "filed")

    definitions = build_definitions(settings)

    dg.Definitions.validate_loadable(definitions)
    assert {"made/changes", "made/sinks/cache", "filed/changes"} <= asset_keys(definitions)
    assert {"made_work", "filed_work"} <= names(definitions)


def test_a_state_store_that_cannot_be_read(tmp_path: Path) -> None:
    """The files load; one failing check stands for what the store keeps."""
    settings = kept(tmp_path / "state.db", tmp_path)
    write(settings.pipelines, "filed")
    (tmp_path / "state.db").write_bytes(b"something else, as long as a header of SQLite" * 9)

    definitions = build_definitions(settings)

    assert "filed/changes" in asset_keys(definitions)
    assert ("pipelines-of-the-state-store/health", "well") in checks(definitions)


def test_a_sensor_looks_at_the_pipeline_as_it_is_now(tmp_path: Path) -> None:
    """Definitions are older than a change; of a pipeline that is gone nothing comes back."""
    settings = kept(tmp_path / "state.db", tmp_path)
    sensor = sensor_of(build_definitions(settings), "made_work")
    platform = Platform(settings)
    with dg.DagsterInstance.ephemeral() as instance:

        def looked() -> str:
            context = dg.build_sensor_context(instance)
            try:
                return str(sensor.evaluate_tick(context).skip_message)
            except dg.Failure as red:  # its source is not there
                return str(red)

        with platform.open() as opened:
            stored = opened.store.pipelines.document("made")
            assert stored is not None
            document = json.loads(stored.document)
            document["spec"]["sinks"][0]["config"]["id"] = "other"
            opened.store.pipelines.replace_document("made", 1, json.dumps(document))
            assert "connection refused" in looked()
            assert list(opened.store.checkpoints.read("made")) == ["other"]

            opened.store.pipelines.remove("made")
            assert "removed" in looked()
            assert opened.store.pipelines.read() == []
