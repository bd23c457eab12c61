"""Reporting a check without a run, once per change of what it says.

A run that is at work has announced that it will evaluate the checks, and until it has, the UI shows them
as in progress whatever they said before. A check that fails meanwhile is therefore said once more.
"""

from __future__ import annotations

import dagster as dg

_HISTORY = 10


def newest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> dg.AssetCheckEvaluation | None:
    """Return a check's newest evaluation; entries of planned or dead runs have none."""
    return _newest(instance, key)[0]


def report_change(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` unless the check's newest evaluation says the same, and can be seen.

    A check that was never evaluated counts as passed: a first success is not written.
    """
    shown, hidden = _newest(instance, evaluation.asset_check_key)
    if shown is None:
        same = evaluation.passed
    else:
        same = (shown.passed, shown.description) == (evaluation.passed, evaluation.description)
    if not same or (hidden and not evaluation.passed):
        instance.report_runless_asset_event(evaluation)


def report_turn(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` when the check has passed so far and fails now, or the other way round.

    Also when it fails and that cannot be seen, or with another severity than before.
    """
    shown, hidden = _newest(instance, evaluation.asset_check_key)
    turned = evaluation.passed != (shown is None or shown.passed)
    if shown is not None and not shown.passed and not evaluation.passed:
        turned = shown.severity != evaluation.severity
    if turned or (hidden and not evaluation.passed):
        instance.report_runless_asset_event(evaluation)


def _newest(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> tuple[dg.AssetCheckEvaluation | None, bool]:
    """Return a check's newest evaluation, and whether a run has announced another since."""
    history = instance.event_log_storage.get_asset_check_execution_history(key, limit=_HISTORY)
    for number, record in enumerate(history):
        event = record.event.dagster_event if record.event is not None else None
        if event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            return event.asset_check_evaluation_data, number > 0
    return None, bool(history)
