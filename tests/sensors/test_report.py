"""What is written of a check without a run: changes, and what a run at work would hide."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg
import pytest

from deltaforge_dagster.sensors.report import report_change, report_turn

KEY = dg.AssetCheckKey(dg.AssetKey(["orders", "changes"]), "source")

Report = Callable[[dg.DagsterInstance, dg.AssetCheckEvaluation], None]


def evaluation(problem: str | None) -> dg.AssetCheckEvaluation:
    """Return an outcome of the check."""
    return dg.AssetCheckEvaluation(
        asset_key=KEY.asset_key, check_name=KEY.name, passed=problem is None, description=problem
    )


@dg.asset_check(asset=KEY.asset_key, name=KEY.name)
def source() -> dg.AssetCheckResult:
    """Announced when its run is made; in this test nothing executes the run."""
    raise AssertionError


def begin_run(instance: dg.DagsterInstance) -> None:
    """Make a run that announces the check, as each live run does."""
    definitions = dg.Definitions(
        assets=[dg.AssetSpec(KEY.asset_key)],
        asset_checks=[source],
        jobs=[dg.define_asset_job("work", selection=dg.AssetSelection.checks(source))],
    )
    instance.create_run_for_job(definitions.resolve_job_def("work"))


def outcomes(instance: dg.DagsterInstance) -> list[str | None]:
    """Return what was written, the oldest first; `...` for what was only announced."""
    history = instance.event_log_storage.get_asset_check_execution_history(KEY, limit=20)
    found: list[str | None] = []
    for record in reversed(history):
        event = record.event.dagster_event if record.event else None
        done = event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION
        found.append(event.asset_check_evaluation_data.description if event and done else "...")
    return found


@pytest.mark.parametrize("report", [report_change, report_turn])
def test_once_per_change(report: Report) -> None:
    """A first success is not written; a failure is, once, and so is its end."""
    with dg.DagsterInstance.ephemeral() as instance:
        for problem in (None, "down", "down", None, None):
            report(instance, evaluation(problem))

        assert outcomes(instance) == ["down", None]


@pytest.mark.parametrize("report", [report_change, report_turn])
def test_a_failure_is_seen_while_a_run_works(report: Report) -> None:
    """The run's announcement hides what was said: a failure is said once more, a success not."""
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
    """A change of the reason is one for `report_change` only."""
    with dg.DagsterInstance.ephemeral() as instance:
        report_turn(instance, evaluation("down"))
        report_turn(instance, evaluation("slow"))
        assert outcomes(instance) == ["down"]
        report_change(instance, evaluation("slow"))
        assert outcomes(instance) == ["down", "slow"]
