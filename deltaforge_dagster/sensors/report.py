"""Reporting a check without a run, once per change of what it says.

Two things hide from the UI what was said of a check:

- A run at work has announced that it will evaluate the checks: until it has, they are *in progress*,
  whatever they said before. A check that fails meanwhile is said once more; a success is not.
- A range was published after the check was reported: the UI then says *Not evaluated*, since
  it wants a result for the newest materialization. What was said last is said once more, good or bad.
"""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg
from dagster._core.instance import RUNLESS_RUN_ID
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord

from deltaforge_dagster.assets.health import health_evaluation
from deltaforge_dagster.pipeline.health import Health

_HISTORY = 10


@dataclass(frozen=True, slots=True)
class _Newest:
    """What was said last of a check, and what hides it.

    Attributes:
        evaluation: It; None when the check was never evaluated.
        announced: A run has announced another one since.
        overtaken: The asset was materialized since, by somebody else.
    """

    evaluation: dg.AssetCheckEvaluation | None
    announced: bool = False
    overtaken: bool = False

    def hides(self, evaluation: dg.AssetCheckEvaluation) -> bool:
        """Whether this outcome, though known, would not be seen."""
        return self.overtaken or (self.announced and not evaluation.passed)


def newest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> dg.AssetCheckEvaluation | None:
    """Return a check's newest evaluation; entries of planned or dead runs have none."""
    return _newest(instance, key).evaluation


def report_change(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` unless the check's newest evaluation says the same, and can be seen.

    A check that was never evaluated counts as passed: a first success is not written.
    """
    newest = _newest(instance, evaluation.asset_check_key)
    shown = newest.evaluation
    if shown is None:
        same = evaluation.passed
    else:
        same = (shown.passed, shown.description) == (evaluation.passed, evaluation.description)
    if not same or newest.hides(evaluation):
        instance.report_runless_asset_event(evaluation)


def report_health(instance: dg.DagsterInstance, name: str, found: Health) -> None:
    """Write how a pipeline does whenever that changes, also for the first time.

    A materialization goes along with the check: without one the Catalog calls the asset *Never materialized*.
    """
    evaluation = health_evaluation(name, found)
    shown = newest_evaluation(instance, evaluation.asset_check_key)
    if shown is None or (shown.passed, shown.description) != (
        evaluation.passed,
        evaluation.description,
    ):
        metadata = {"status": found.status, "problems": len(found.problems)}
        instance.report_runless_asset_event(
            dg.AssetMaterialization(evaluation.asset_key, metadata=metadata)
        )
        instance.report_runless_asset_event(evaluation)
    else:
        report_again(instance, evaluation.asset_check_key)


def report_turn(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` when the check has passed so far and fails now, or the other way round.

    Also when it cannot be seen, or fails with another severity than before.
    """
    newest = _newest(instance, evaluation.asset_check_key)
    shown = newest.evaluation
    turned = evaluation.passed != (shown is None or shown.passed)
    if shown is not None and not shown.passed and not evaluation.passed:
        turned = shown.severity != evaluation.severity
    if turned or newest.hides(evaluation):
        instance.report_runless_asset_event(evaluation)


def report_again(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> None:
    """Write what was said last of a check once more, if that cannot be seen."""
    newest = _newest(instance, key)
    if newest.evaluation is not None and newest.hides(newest.evaluation):
        instance.report_runless_asset_event(newest.evaluation)


def _newest(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> _Newest:
    history = instance.event_log_storage.get_asset_check_execution_history(key, limit=_HISTORY)
    for number, record in enumerate(history):
        event = record.event.dagster_event if record.event is not None else None
        if event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            evaluation = event.asset_check_evaluation_data
            if number > 0:
                return _Newest(evaluation, announced=True)
            return _Newest(evaluation, overtaken=_is_overtaken(instance, record))
    return _Newest(None, announced=bool(history))


def _is_overtaken(instance: dg.DagsterInstance, record: AssetCheckExecutionRecord) -> bool:
    """Whether the asset was materialized after a check of it was reported without a run.

    A run evaluates checks when it has published all; what has no run either does not overtake. This is the
    UI's own comparison: on SQLite, which knows seconds only, it may take one report more.
    """
    if record.run_id != RUNLESS_RUN_ID:
        return False
    newest = instance.get_latest_materialization_event(record.key.asset_key)
    if newest is None or newest.run_id == RUNLESS_RUN_ID:
        return False
    return newest.timestamp >= record.create_timestamp
