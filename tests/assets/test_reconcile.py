"""Tables that are compared in Dagster: by a click, as a job that may repair them, and when the file says."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import lake_table_key
from deltaforge_dagster.assets.reconcile import reconcile_job_name, reconciled_key
from deltaforge_dagster.assets.resync import resync_job_name
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.sensors.reconcile import due_comparison
from deltaforge_dagster.state.store import StateStore
from tests.assets.test_lake_tables import NAMES, SINK, commit, installation
from tests.pipeline.reconcile.conftest import make_copied
from tests.pipeline.reconcile.copies import MakeCopied, goods, rows
from tests.state.make import NAME, held

__all__ = ["make_copied"]


@dg.job(name=reconcile_job_name(NAME))
def noop() -> None:
    """Stand for the job, which must not begin twice."""


TABLES = [KnownTable(SINK, ("public", name)) for name in NAMES]


def compare(instance: dg.DagsterInstance, **config: Any) -> dict[str, dg.AssetCheckEvaluation]:
    """Execute the job; return the result of each sink's table."""
    job = build_definitions(Settings.from_env()).resolve_job_def(reconcile_job_name("feed"))
    (op,) = (node.name for node in job.nodes)
    ended = job.execute_in_process(
        instance=instance, run_config={"ops": {op: {"config": config}}} if config else None
    )
    assert ended.success
    return {
        evaluation.asset_key.path[1]: evaluation
        for evaluation in ended.get_asset_check_evaluations()
    }


@pytest.mark.spark
@pytest.mark.postgres
def test_tables_are_compared_and_repaired_on_request(
    make_copied: MakeCopied, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    """The check of each table says what differs and has the report; a run repairs only if its configuration says so."""
    copied = make_copied("postgres", "goods", goods)
    copied.deliver(rows(1, 5))
    monkeypatch.setenv("DELTAFORGE_HOME", str(copied.feed.path.parent / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(copied.feed.path))
    copied.damage("UPDATE goods SET name = 'secret' WHERE id = 3", "DELETE FROM goods WHERE id = 4")

    for _ in range(2):  # nothing is repaired without a request
        checks = compare(instance)
        assert checks["past"].passed
        assert "proof_age_seconds" in checks["past"].metadata
        assert (checks["copy"].passed, checks["copy"].severity) == (
            False,
            dg.AssetCheckSeverity.ERROR,
        )
        assert checks["copy"].description == "DIFFERS: 1 missing, 1 different"
        report: Any = checks["copy"].metadata["report"].value
        assert (report["columns"], report["coverage"]) == ({"name": 1}, 1.0)
        assert "secret" not in str(report)
    (record,) = instance.fetch_observations(
        lake_table_key("feed", "copy", ("public", "goods")), limit=1
    ).records
    assert record.asset_observation is not None
    assert record.asset_observation.metadata["reconcile_missing"].value == 1
    assert not record.asset_observation.tags

    repaired = compare(instance, repair=True)["copy"]
    assert repaired.passed
    assert repaired.description == "repaired: DIFFERS: 1 missing, 1 different; equal"
    assert repaired.metadata["verified_through"].value
    assert not compare(instance, max_seconds=0)

    def resync(**config: Any) -> tuple[bool, str]:
        job = build_definitions(Settings.from_env()).resolve_job_def(resync_job_name("feed"))
        (op,) = (node.name for node in job.nodes)
        ended = job.execute_in_process(
            instance=instance,
            run_config={"ops": {op: {"config": config}}},
            raise_on_error=False,
        )
        failures = [event.step_failure_data for event in ended.all_events if event.is_step_failure]
        logged = [entry.user_message for entry in instance.all_logs(ended.run_id)]
        return ended.success, "\n".join([*logged, *map(str, failures)])

    resyncs = copied.feed.store.table_commits.resyncs
    done, said = resync(sink="copy")
    assert (done, resyncs("feed")) == (True, [])
    assert "public.goods: 1 table of copy would be recreated" in said
    done, said = resync(sink="nowhere", dry_run=False)
    assert (done, "has no sink 'nowhere'" in said) == (False, True)
    assert resync(sink="copy", tables=["public.goods"], dry_run=False)[0]
    assert [wanted.sink for wanted in resyncs("feed")] == ["copy"]


def loaded_with(tmp_path: Path, reconcile: str) -> LoadedPipeline:
    """Return the pipeline of an installation with options of comparisons."""
    installation(tmp_path, "delta")
    path = tmp_path / "orders.yaml"
    path.write_text(path.read_text() + f"  engine:\n    reconcile: {reconcile}\n")
    return load_pipeline(path)


def test_each_table_has_a_check(tmp_path: Path) -> None:
    """So have tables that Dagster takes for one when it makes Python names of them; without `every`, no schedule."""
    settings = installation(tmp_path, "delta")
    with closing(StateStore.open(settings.state_url)) as store:
        commit(store, held(store, SINK), 1, *NAMES)
    repository = build_definitions(settings).get_repository_def()

    job = repository.get_job(reconcile_job_name(NAME))
    assert job.asset_layer.asset_graph.asset_check_keys == {
        reconciled_key(NAME, table) for table in TABLES
    }
    assert not repository.has_schedule_def(f"{reconcile_job_name(NAME)}_schedule")


def test_tables_are_compared_when_they_are_due(
    tmp_path: Path, instance: dg.DagsterInstance, sqlite_store: StateStore
) -> None:
    """A run compares those whose last comparison was long ago, but not beside another run."""
    loaded = loaded_with(tmp_path, "{every: 7d, rate: 5000}")
    claims = sqlite_store.reconciliations
    for table, compared in zip(TABLES, (True, False, True, False), strict=True):
        claims.claim(NAME, SINK, table.name, "somebody", 60)
        claims.release(NAME, SINK, table.name, "somebody", compared=compared)

    request = due_comparison(instance, sqlite_store, loaded, TABLES)

    assert isinstance(request, dg.RunRequest)
    assert request.asset_check_keys == [reconciled_key(NAME, TABLES[n]) for n in (1, 3)]
    limits = {"config": {"rate": 5000.0}}
    assert request.run_config == {"ops": {f"{NAME}_reconcile_tables": limits}}
    other = due_comparison(instance, sqlite_store, loaded, [TABLES[2]])
    assert isinstance(other, dg.SkipReason)
    assert other.skip_message == "every table was compared within 7d"
    run = instance.create_run_for_job(noop, status=dg.DagsterRunStatus.STARTED)
    beside = due_comparison(instance, sqlite_store, loaded, TABLES)
    assert isinstance(beside, dg.SkipReason)
    assert beside.skip_message == f"run {run.run_id[:8]} is comparing"


@pytest.mark.parametrize(
    ("hour", "left"), [(22, 6.0), (23, 5.0), (0, 4.0), (3, 1.0), (4, None), (12, None)]
)
def test_the_window(  # noqa: PLR0917 - fixtures
    tmp_path: Path,
    instance: dg.DagsterInstance,
    sqlite_store: StateStore,
    monkeypatch: pytest.MonkeyPatch,
    hour: int,
    left: float | None,
) -> None:
    """Nothing begins outside of it, also if it has a midnight in it, and a run ends with it."""
    loaded = loaded_with(tmp_path, '{every: 12h, window: "22:00-04:00"}')
    monkeypatch.setattr(sqlite_store, "now", lambda: 20_000 * 86_400 + hour * 3600.0)

    request = due_comparison(instance, sqlite_store, loaded, TABLES[:1])

    if left is None:
        assert isinstance(request, dg.SkipReason)
        assert request.skip_message == "tables are compared in the window 22:00-04:00 (UTC)"
    else:
        assert isinstance(request, dg.RunRequest)
        (config,) = request.run_config["ops"].values()
        assert config == {"config": {"max_seconds": left * 3600}}


def test_the_schedule(tmp_path: Path) -> None:
    """It is on, begins with the window, and asks for a run of the job."""
    loaded = loaded_with(tmp_path, '{every: 7d, window: "01:30-05:00"}')
    settings = Settings.from_env(
        {"DELTAFORGE_PIPELINES": str(loaded.path), "DELTAFORGE_HOME": str(tmp_path / "home")}
    )
    with closing(StateStore.open(settings.state_url)) as store:
        commit(store, held(store, SINK), 1, "orders")
    repository = build_definitions(settings).get_repository_def()
    schedule = repository.get_schedule_def(f"{reconcile_job_name(NAME)}_schedule")
    assert schedule.cron_schedule == "30 1 * * *"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        tick = schedule.evaluate_tick(dg.build_schedule_context(instance))
    assert tick.run_requests or "window" in (tick.skip_message or "")
