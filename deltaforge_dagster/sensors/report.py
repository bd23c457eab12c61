"""Reports the results of checks without a run, once per change.

Two things hide a reported result in the UI:

- A live run has announced that it will evaluate the checks. Until it has, the UI shows them as *in
  progress*, whatever their last result was. A failure is reported again meanwhile; a success is
  not.
- A range was published after the check was reported. The UI then shows *Not evaluated*, since it
  expects a result for the newest materialization. The last result is reported again, whether it is
  a failure or a success.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import dagster as dg

from deltaforge_dagster.assets.pipeline import health_evaluation
from deltaforge_dagster.dagster_private import RUNLESS_RUN_ID, AssetCheckExecutionRecord
from deltaforge_dagster.pipeline.committed import segments_behind, sink_lag_seconds
from deltaforge_dagster.pipeline.health.health import Health
from deltaforge_dagster.state.store import StateStore

_HISTORY = 10  # so many evaluations that were announced and never came are passed over
_PLOT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest evaluation of a check, and what hides it in the UI.

    Attributes:
        evaluation: The evaluation, None if the check was never evaluated.
        announced: Whether a run has announced another evaluation since.
        overtaken: Whether a run has materialized the asset since.
    """

    evaluation: dg.AssetCheckEvaluation | None
    announced: bool = False
    overtaken: bool = False

    def hides(self, evaluation: dg.AssetCheckEvaluation) -> bool:
        """Return whether the UI would not show this result although it was reported."""
        return self.overtaken or (self.announced and not evaluation.passed)


@dataclass(frozen=True, slots=True)
class _Plotted:
    """The last written figures of a pipeline, and the monotonic time of their last computation."""

    figures: Mapping[str, float]
    seen: float = field(default_factory=time.monotonic)

    @property
    def is_old(self) -> bool:
        """Whether it is time to compute the figures again."""
        return time.monotonic() - self.seen >= _PLOT_SECONDS


_plotted: dict[str, _Plotted] = {}
"""By pipeline, the figures that this process has written."""


def newest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> dg.AssetCheckEvaluation | None:
    """Return a check's newest evaluation, None if it has none; planned ones do not count."""
    return _newest(instance, key).evaluation


def report_change(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` unless the check's newest evaluation is the same and visible.

    A check that was never evaluated counts as passed, so a first success is not written.
    """
    newest = _newest(instance, evaluation.asset_check_key)
    shown = newest.evaluation
    if shown is None:
        same = evaluation.passed
    else:
        same = (shown.passed, shown.description) == (evaluation.passed, evaluation.description)
    if not same or newest.hides(evaluation):
        instance.report_runless_asset_event(evaluation)


def report_health(
    instance: dg.DagsterInstance,
    store: StateStore,
    name: str,
    state: Health,
    *,
    plots: bool = True,
) -> None:
    """Write the health of a pipeline when it changes, and the first time.

    A materialization is written with the check, because otherwise the Catalog shows *Never
    materialized*. Its figures can be plotted: with `plots`, one is also written every minute while
    they change.
    """
    evaluation = health_evaluation(name, state)
    shown = newest_evaluation(instance, evaluation.asset_check_key)
    changed = shown is None or (shown.passed, shown.description) != (
        evaluation.passed,
        evaluation.description,
    )
    last = _plotted.get(name)
    if changed or (plots and (last is None or last.is_old)):
        figures = _figures(store, name, state)
        if changed or last is None or last.figures != figures:
            metadata = {"status": state.status, **figures}
            instance.report_runless_asset_event(
                dg.AssetMaterialization(evaluation.asset_key, metadata=metadata)
            )
        _plotted[name] = _Plotted(figures)
    if changed:
        instance.report_runless_asset_event(evaluation)
    else:
        report_again(instance, evaluation.asset_check_key)


def _figures(store: StateStore, name: str, state: Health) -> Mapping[str, float]:
    """Return the figures of a pipeline that are plotted."""
    figures: dict[str, float] = {"problems": len(state.problems)}
    log = state.log
    if log is not None:
        measured = {
            "log_ahead_bytes": log.bytes,
            "log_unconfirmed_bytes": log.unconfirmed,
            "log_retained_bytes": log.retained,
            "log_limit_bytes": log.limit,
            "log_seconds_left": None if log.seconds_left is None else round(log.seconds_left),
        }
        figures |= {name: value for name, value in measured.items() if value is not None}
    figures["confirmed_early"] = int(state.early is not None)
    row = store.pipelines.get(name)
    if row is not None:
        sinks = [
            checkpoint
            for checkpoint in store.checkpoints.read(name).values()
            if checkpoint.attached
        ]
        lags = (sink_lag_seconds(store, row, checkpoint, store.now()) for checkpoint in sinks)
        figures["lag_seconds"] = round(max(lags, default=0.0), 1)
        figures["behind_segments"] = max(
            (segments_behind(row, checkpoint) for checkpoint in sinks), default=0
        )
        figures["dead_letters"] = store.dead_letters.depth(name).entries
    return figures


def report_turn(instance: dg.DagsterInstance, evaluation: dg.AssetCheckEvaluation) -> None:
    """Write `evaluation` if the check has turned from passed to failed or from failed to passed.

    Also write it if it is hidden, or if the check fails with another severity than before.
    """
    newest = _newest(instance, evaluation.asset_check_key)
    shown = newest.evaluation
    turned = evaluation.passed != (shown is None or shown.passed)
    if shown is not None and not shown.passed and not evaluation.passed:
        turned = shown.severity != evaluation.severity
    if turned or newest.hides(evaluation):
        instance.report_runless_asset_event(evaluation)


def report_again(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> None:
    """Write the newest evaluation of a check again, if it is hidden."""
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
    """Return whether a run materialized the asset after its check was reported without a run.

    An evaluation by a run is never overtaken, since runs evaluate checks after publishing; nor is
    it by a materialization without a run. The comparison is the UI's own. On SQLite, which stores
    whole seconds, it may cause one additional report.
    """
    if record.run_id != RUNLESS_RUN_ID:
        return False
    newest = instance.get_latest_materialization_event(record.key.asset_key)
    if newest is None or newest.run_id == RUNLESS_RUN_ID:
        return False
    return newest.timestamp >= record.create_timestamp
