"""Reporting a check without a run, once per change of what it says."""

from __future__ import annotations

import dagster as dg

_HISTORY = 10


def report_change(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` unless the check's newest evaluation says the same.

    A check that was never evaluated counts as passed: a first success is not written.
    """
    history = instance.event_log_storage.get_asset_check_execution_history(
        check_key=evaluation.asset_check_key, limit=_HISTORY
    )
    # A run that is planned or died has an entry without an evaluation.
    shown = next((one.evaluation for one in history if one.evaluation is not None), None)
    if shown is None:
        same = evaluation.passed
    else:
        same = (shown.passed, shown.description) == (evaluation.passed, evaluation.description)
    if not same:
        instance.report_runless_asset_event(evaluation)
