"""Tests of reporting checks without a run: changes, and results that a live run would hide."""

import asyncio
from collections.abc import Callable

import dagster as dg
import pytest
from dagster._core.loader import LoadingContextForTest

from deltaforge_dagster.sensors.report import report_again, report_change, report_turn
from tests.e2e.deployment import eventually

KEY = dg.AssetCheckKey(dg.AssetKey(["orders", "changes"]), "source")

Report = Callable[[dg.DagsterInstance, dg.AssetCheckEvaluation], None]


def evaluation(problem: str | None) -> dg.AssetCheckEvaluation:
    """Return a result of the check."""
    return dg.AssetCheckEvaluation(
        asset_key=KEY.asset_key, check_name=KEY.name, passed=problem is None, description=problem
    )


@dg.asset_check(asset=KEY.asset_key, name=KEY.name)
def source() -> dg.AssetCheckResult:
    """An op whose check is announced when its run is created; nothing executes the run."""
    raise AssertionError


def begin_run(instance: dg.DagsterInstance) -> None:
    """Create a run that announces the check, as each live run does."""
    definitions = dg.Definitions(
        assets=[dg.AssetSpec(KEY.asset_key)],
        asset_checks=[source],
        jobs=[dg.define_asset_job("work", selection=dg.AssetSelection.checks(source))],
    )
    instance.create_run_for_job(definitions.resolve_job_def("work"))


def outcomes(instance: dg.DagsterInstance) -> list[str | None]:
    """Return the written results, oldest first; `...` for announcements."""
    history = instance.event_log_storage.get_asset_check_execution_history(KEY, limit=20)
    found: list[str | None] = []
    for record in reversed(history):
        event = record.event.dagster_event if record.event else None
        done = event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION
        found.append(event.asset_check_evaluation_data.description if event and done else "...")
    return found


def publish_range(instance: dg.DagsterInstance) -> None:
    """Have a run materialize the asset, as a live run does while it works."""

    @dg.op
    def emit(context: dg.OpExecutionContext) -> None:
        context.log_event(dg.AssetMaterialization(KEY.asset_key))

    @dg.job
    def publishing() -> None:
        emit()

    assert publishing.execute_in_process(instance=instance).success


def is_shown(instance: dg.DagsterInstance) -> bool:
    """Return whether the UI shows the newest result, by the UI's own comparison."""
    (record,) = instance.event_log_storage.get_asset_check_execution_history(KEY, limit=1)
    return asyncio.run(record.targets_latest_materialization(LoadingContextForTest(instance)))


def until_shown(instance: dg.DagsterInstance, report: Callable[[], None]) -> None:
    """Report until the UI shows the result: SQLite stores the time of a check in whole seconds."""

    def shown() -> bool:
        report()
        return is_shown(instance)

    eventually(shown, what="the result")


@pytest.mark.parametrize("report", [report_change, report_turn])
def test_once_per_change(report: Report) -> None:
    """A first success is not written; a failure is written once, and so is the recovery."""
    with dg.DagsterInstance.ephemeral() as instance:
        for problem in (None, "down", "down", None, None):
            report(instance, evaluation(problem))

        assert outcomes(instance) == ["down", None]


@pytest.mark.parametrize("report", [report_change, report_turn])
def test_a_failure_is_seen_while_a_run_works(report: Report) -> None:
    """The run's announcement hides earlier results: a failure is written again, a success is not."""
    with dg.DagsterInstance.ephemeral() as instance:
        report(instance, evaluation("down"))
        begin_run(instance)
        report(instance, evaluation("down"))
        report(instance, evaluation("down"))
        assert outcomes(instance) == ["down", "...", "down"]

        report(instance, evaluation(None))
        begin_run(instance)
        report(instance, evaluation(None))
        assert outcomes(instance) == ["down", "...", "down", None, "..."]


def test_what_changes_is_told() -> None:
    """A changed reason is written by `report_change` only."""
    with dg.DagsterInstance.ephemeral() as instance:
        report_turn(instance, evaluation("down"))
        report_turn(instance, evaluation("slow"))
        assert outcomes(instance) == ["down"]
        report_change(instance, evaluation("slow"))
        assert outcomes(instance) == ["down", "slow"]


@pytest.mark.parametrize("problem", [None, "down"], ids=["passed", "failed"])
@pytest.mark.parametrize("report", [report_change, report_turn])
def test_a_range_that_is_published_hides_nothing(report: Report, problem: str | None) -> None:
    """A result older than the newest range, which the UI shows as "Not evaluated", is written again."""
    with dg.DagsterInstance.ephemeral() as instance:
        report(instance, evaluation("first"))
        instance.report_runless_asset_event(evaluation(problem))
        assert is_shown(instance)
        publish_range(instance)
        assert not is_shown(instance)
        before = len(outcomes(instance))

        until_shown(instance, lambda: report(instance, evaluation(problem)))
        said = outcomes(instance)
        report(instance, evaluation(problem))

        assert set(said[before:]) == {problem}
        assert outcomes(instance) == said


@pytest.mark.parametrize("problem", [None, "down"], ids=["passed", "failed"])
def test_what_was_said_last_is_said_again(problem: str | None) -> None:
    """`report_again` keeps the last result visible, and writes nothing if there is none."""
    with dg.DagsterInstance.ephemeral() as instance:
        report_again(instance, KEY)
        assert outcomes(instance) == []
        instance.report_runless_asset_event(evaluation(problem))
        report_again(instance, KEY)
        assert outcomes(instance) == [problem]
        publish_range(instance)
        until_shown(instance, lambda: report_again(instance, KEY))
        said = outcomes(instance)
        report_again(instance, KEY)
        assert set(said) == {problem}
        assert outcomes(instance) == said
