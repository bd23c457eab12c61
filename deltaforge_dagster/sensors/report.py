"""Reporting a check without a run, once per change of what it says."""

from __future__ import annotations

import dagster as dg

_HISTORY = 10


def newest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> dg.AssetCheckEvaluation | None:
    """Return a check's newest evaluation; entries of planned or dead runs have none."""
    history = instance.event_log_storage.get_asset_check_execution_history(key, limit=_HISTORY)
    for record in history:
        event = record.event.dagster_event if record.event is not None else None
        if event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            return event.asset_check_evaluation_data
    return None


def report_change(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` unless the check's newest evaluation says the same.

    A check that was never evaluated counts as passed: a first success is not written.
    """
    shown = newest_evaluation(instance, evaluation.asset_check_key)
    if shown is None:
        same = evaluation.passed
    else:
        same = (shown.passed, shown.description) == (evaluation.passed, evaluation.description)
    if not same:
        instance.report_runless_asset_event(evaluation)


def report_turn(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` when the check has passed so far and fails now, or the other way round."""
    shown = newest_evaluation(instance, evaluation.asset_check_key)
    if evaluation.passed != (shown is None or shown.passed):
        instance.report_runless_asset_event(evaluation)
