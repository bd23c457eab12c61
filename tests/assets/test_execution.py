"""Tests of how the op chooses between a live run and a Materialize."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.assets import execution
from deltaforge_dagster.assets.checks import check_specs
from deltaforge_dagster.assets.names import RUN_TAG, UNTIL_TAG, job_name
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress

__all__ = ["shop"]

pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.spark]


def make_job() -> dg.JobDefinition:
    """Return the job of the pipeline `twice` of this environment's installation."""
    return build_definitions(Settings.from_env()).resolve_job_def(job_name("twice"))


def test_a_run_that_is_ended_among_its_checks_ends_quietly(
    shop: Shop, tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM during the checks leaves them to the next run, since all other work is done."""
    file = tmp_path / "twice.yaml"
    file.write_text(shop.pipeline("twice"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(file))
    spark_server.use(tmp_path / "home", monkeypatch)

    def ask_at_this_moment(*_: object) -> list[Finding]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal interrupts what is asked")

    monkeypatch.setattr(execution, "preflight_source", ask_at_this_moment)
    tags = {RUN_TAG: "live", UNTIL_TAG: "caught up"}
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        ended = make_job().execute_in_process(instance=instance, tags=tags)

        assert ended.success
        logged = instance.all_logs(ended.run_id)
        assert any("asked to end" in entry.user_message for entry in logged)


def make_resident_job() -> dg.JobDefinition:
    """Return the same; Dagster keeps what a function has made, so each test has a function of its own."""
    return make_job()


@pytest.mark.soak("kills")
def test_a_run_that_gets_a_signal_ends_in_order(
    shop: Shop, tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its range is closed and its lease free. A launcher that evicts it fails nothing; Terminate cancels it."""
    file = tmp_path / "twice.yaml"
    file.write_text(shop.pipeline("twice", run="{max_seconds: 0}", range_="{max_seconds: 600}"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(file))
    spark_server.use(tmp_path / "home", monkeypatch)
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        closing(StateStore.open(Settings.from_env().state_url)) as store,
    ):
        caught_up = {RUN_TAG: "live", UNTIL_TAG: "caught up"}
        assert make_job().execute_in_process(instance=instance, tags=caught_up).success

        def status_after_signal(number: int, *, terminated: bool) -> dg.DagsterRunStatus:
            shop.execute(f"INSERT INTO customers VALUES ({number}, 'Ada')")

            def signal_it() -> None:
                eventually(lambda: len(shop.entries("twice.customers")) == number, what="it")
                if terminated:
                    instance.report_run_canceling(instance.get_runs(limit=1)[0])
                os.kill(os.getpid(), signal.SIGTERM)

            sender = threading.Thread(target=signal_it, daemon=True)
            sender.start()
            job = dg.reconstructable(make_resident_job)
            with dg.execute_job(job, instance=instance, tags={RUN_TAG: "live"}):
                return instance.get_runs(limit=1)[0].status

        assert status_after_signal(1, terminated=False) is dg.DagsterRunStatus.SUCCESS
        assert status_after_signal(2, terminated=True) is dg.DagsterRunStatus.CANCELED
        ranges = store.ranges.read("twice")
        assert [(row.state, row.close_reason, row.rows) for row in ranges] == [
            ("closed", "run ended", 1)
        ] * 2
        assert store.ranges.unpublished("twice") == []
        lease = store.leases.get("twice")
        assert lease is not None
        assert not lease.active_at(store.now())


def assert_checks_are_of_no_run(
    instance: dg.DagsterInstance, live: dg.ExecuteInProcessResult
) -> None:
    """Assert that a live run has announced no check, so none was in progress, and has reported all."""
    assert not [
        event for event in live.all_events if event.event_type_value.startswith("ASSET_CHECK")
    ]
    for spec in check_specs(load_pipeline(Path(os.environ["DELTAFORGE_PIPELINES"]))):
        history = instance.event_log_storage.get_asset_check_execution_history(spec.key, limit=9)
        assert [record.run_id for record in history] == [""], spec.key


def test_a_re_executed_live_run_is_not_live(
    shop: Shop, tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UI copies tags to a re-execution, which captures nothing and says what to do instead."""
    file = tmp_path / "twice.yaml"
    file.write_text(shop.pipeline("twice"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(file))
    spark_server.use(tmp_path / "home", monkeypatch)
    tags = {RUN_TAG: "live", UNTIL_TAG: "caught up"}
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        live = make_job().execute_in_process(instance=instance, tags=tags)
        assert live.success
        assert_checks_are_of_no_run(instance, live)
        shop.execute("INSERT INTO customers VALUES (1, 'Ada')")

        with dg.execute_job(
            dg.reconstructable(make_job),
            instance=instance,
            tags=tags,
            reexecution_options=dg.ReexecutionOptions(parent_run_id=live.run_id),
        ) as again:
            (failed,) = [event for event in again.all_events if event.is_step_failure]

    described = failed.step_failure_data.user_failure_data
    assert described is not None
    assert "choose the ranges to materialize" in str(described.description)
    assert shop.entries("twice.customers") == []
