"""Reporting a check without a run, once per change of what it says."""

from __future__ import annotations

import dagster as dg


def report_change(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` unless the check's newest evaluation says the same.

    A check that was never evaluated counts as passed: a first success is not written.
    """
    latest = instance.event_log_storage.get_asset_check_execution_history(
        check_key=evaluation.asset_check_key, limit=1
    )
    event = latest[0].event.dagster_event if latest and latest[0].event is not None else None
    if event is None:
        same = evaluation.passed
    else:
        shown = event.asset_check_evaluation_data
        same = (shown.passed, shown.description) == (evaluation.passed, evaluation.description)
    if not same:
        instance.report_runless_asset_event(evaluation)
