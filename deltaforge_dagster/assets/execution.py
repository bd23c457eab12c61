"""The work of a pipeline asset's op: a live run, a Materialize of chosen ranges, or checks.

The op imports this module when it runs; the definitions do not, because a code server does not need
it. Spark and the kernels, which take a second to import, are imported by a live run once it holds
the lease (`pipeline.run`), and by a Materialize when it begins (`materialize`).
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import dagster as dg

from deltaforge_dagster.assets.checks import evaluate
from deltaforge_dagster.assets.chunks import SnapshotBeside
from deltaforge_dagster.assets.names import (
    CODE_TAG,
    COMMAND,
    OUTCOME_METADATA,
    REASON_TAG,
    RUN_TAG,
    UNTIL_TAG,
    asset_key,
)
from deltaforge_dagster.assets.publish import RunObserver
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.logs import setup_logs
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.health.health import sinks_by_error
from deltaforge_dagster.pipeline.health.preflight import preflight_source
from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import RunContext, RunOptions
from deltaforge_dagster.resources.platform import Opened
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.state.metrics import run_failure


def execute(context: dg.AssetExecutionContext, loaded: LoadedPipeline, opened: Opened) -> None:
    """Do what this Dagster run was started for.

    Raises:
        DeltaforgeError: The work could not be done; the message says why.
        dg.Failure: The run ended, but capture or the lease failed, every sink is down, or the
            snapshot could not be read.
    """
    setup_logs()
    arrow_without_pandas()
    run_context = build_run_context(opened, loaded)
    # A re-execution from the UI has its parent's tags, but is treated as a Materialize.
    if context.run.tags.get(RUN_TAG) == "live" and context.run.parent_run_id is None:
        _run_live(context, loaded, run_context)
        return
    if context.selected_asset_keys:
        # Imports what live runs do not need.
        from deltaforge_dagster.assets import materialize  # noqa: PLC0415 - see above

        materialize.materialize_chosen(context, loaded, run_context)
    problem = _source_problem(run_context)
    for evaluation in _evaluations(context, loaded, run_context, problem):
        if evaluation.asset_check_key in context.selected_asset_check_keys:
            context.log_event(evaluation)


def _run_live(
    context: dg.AssetExecutionContext, loaded: LoadedPipeline, run_context: RunContext
) -> None:
    observer = RunObserver(context, run_context, loaded)
    beside = None
    of_command = context.run.tags.get(REASON_TAG) == COMMAND
    if of_command:
        beside = SnapshotBeside(context, loaded, run_context)
    run = LiveRun(
        loaded,
        run_context,
        RunOptions(
            context.run.run_id,
            observer,
            until_caught_up=context.run.tags.get(UNTIL_TAG) == "caught up",
            awaits=lambda: beside is not None and beside.works,
            code=context.run.tags.get(CODE_TAG),
        ),
    )
    try:
        with _failures_counted(run_context, loaded.name):
            outcome = run.execute()
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        if run.interrupted is not None:
            _report(context, loaded, run.interrupted)
        if of_command or _is_canceled(context):
            raise
        # A launcher evicts the run, and nothing has failed: its range is closed, its lease free.
        context.log.info("asked to end: the next run continues, and evaluates the checks")
        return
    finally:
        if beside is not None:
            beside.end()
    if not outcome.had_lease:
        context.log.info("another run holds pipeline %s; nothing to do", loaded.name)
        return
    _report_end(context, loaded, run_context, outcome)
    problem = failure_of(outcome)
    if problem is None and beside is not None and beside.error is not None:
        problem = f"the snapshot could not be read: {beside.error}"
    if problem is not None:
        run_context.store.metrics.count(loaded.name, run_failure("failed"))
        raise dg.Failure(problem, allow_retries=False)


def _report_end(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    outcome: RunOutcome,
) -> None:
    """Report what a run did, and the results of all checks."""
    _report(context, loaded, outcome)
    try:
        for evaluation in _evaluations(context, loaded, run_context, outcome.capture_error):
            context.instance.report_runless_asset_event(evaluation)
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        # All work is done and recorded, so the run must not count as interrupted.
        context.log.info("asked to end: the next run evaluates the checks")


def _is_canceled(context: dg.AssetExecutionContext) -> bool:
    """Return whether somebody has terminated the run in Dagster, which then records it so."""
    run = context.instance.get_run_by_id(context.run.run_id)
    return run is not None and run.status is dg.DagsterRunStatus.CANCELING


def _report(context: dg.AssetExecutionContext, loaded: LoadedPipeline, outcome: RunOutcome) -> None:
    """Log an observation of `changes` with what a run did."""
    context.log.info(_summary(outcome))
    context.log_event(
        dg.AssetObservation(
            asset_key(loaded.name, CHANGES),
            description=_summary(outcome),
            metadata={
                "captured": outcome.captured,
                **{f"delivered/{sink}": count for sink, count in outcome.delivered.items()},
                OUTCOME_METADATA: dg.MetadataValue.json(dataclasses.asdict(outcome)),
            },
        )
    )


@contextmanager
def _failures_counted(run_context: RunContext, pipeline: str) -> Iterator[None]:
    """Count a run that ends with an error as failed; a lost lease is counted by its next holder."""
    try:
        yield
    except DeltaforgeError as error:
        if not isinstance(error, LeaseLost):
            with suppress(DeltaforgeError):  # the store itself may have failed
                run_context.store.metrics.count(pipeline, run_failure("failed"))
        raise


def _evaluations(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    problem: str | None,
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the current result of every check of the pipeline."""
    source = run_context.build_source()
    try:
        findings = preflight_source(source, run_context.store, loaded)
    finally:
        source.close()
    yield from evaluate(context.instance, run_context.store, loaded, problem, findings)


def _source_problem(run_context: RunContext) -> str | None:
    """Return why the source's head cannot be read, None if it can."""
    source = run_context.build_source()
    try:
        source.head()
    except DeltaforgeError as error:
        return str(error)
    finally:
        source.close()
    return None


def failure_of(outcome: RunOutcome) -> str | None:
    """Return why a run failed: capture failed, the lease was lost, or every sink is down.

    Returns None if it did not fail.
    """
    asked = outcome.reason in {
        "asked",
        "paused",
        "stopped",
        "pipeline file changed",
        "pipeline file removed",
        "code changed",
    }
    if outcome.capture_error is not None and not asked:
        return f"capture failed: {outcome.capture_error}"
    if outcome.reason == "lease lost":
        return (
            "the lease was lost: the state store could not be reached, or another run has taken "
            "over"
        )
    attached = outcome.delivered.keys() - set(outcome.detached)
    if attached and attached == outcome.sink_errors.keys():
        problems = sinks_by_error(outcome.sink_errors).items()
        return "every sink is down: " + "; ".join(
            f"{', '.join(sinks)}: {error}" for error, sinks in problems
        )
    return None


def _summary(outcome: RunOutcome) -> str:
    sent = ", ".join(f"{count} to {sink}" for sink, count in sorted(outcome.delivered.items()))
    summary = (
        f"run ended ({outcome.reason}): {pluralize(outcome.captured, 'change')} captured in "
        f"{pluralize(outcome.segments, 'segment')} and {pluralize(outcome.ranges, 'range')}; "
        f"sent {sent or 'nothing'}"
    )
    if outcome.paused is not None:
        summary += f"; capture is paused: {outcome.paused}"
    if outcome.detached:
        summary += f"; detached: {', '.join(outcome.detached)}"
    if outcome.paused_sinks:
        summary += f"; paused: {', '.join(outcome.paused_sinks)}"
    return summary
