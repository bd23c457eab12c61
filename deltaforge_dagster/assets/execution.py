"""The work of a pipeline asset's op: a live run, a Materialize of chosen ranges, or checks.

The op imports this module when it runs; the definitions do not, because it imports Spark and the kernels, which
take seconds to import and which a code server never needs.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import dagster as dg

from deltaforge_dagster.assets.checks import evaluate
from deltaforge_dagster.assets.chunks import SnapshotBeside
from deltaforge_dagster.assets.names import (
    CAUGHT_UP_METADATA,
    COMMAND,
    OUTCOME_METADATA,
    REASON_TAG,
    RUN_TAG,
    UNTIL_TAG,
    asset_key,
    range_number,
)
from deltaforge_dagster.assets.preview import observation
from deltaforge_dagster.assets.publish import add_partition, materialization, publish
from deltaforge_dagster.assets.schemas import publish_versions
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.logs import setup_logs
from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, NotAllowed
from deltaforge_dagster.pipeline.control.publication import CHANGES, publication_of
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.health.source_preflight import preflight
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.pipeline.replay.preview import preview
from deltaforge_dagster.pipeline.replay.replay import (
    ReplayedRange,
    replay,
    split_by_delivery,
    verify,
)
from deltaforge_dagster.pipeline.replay.reprocessing import Reprocessing
from deltaforge_dagster.pipeline.run.catch_up import catch_up
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import RunContext, RunOptions
from deltaforge_dagster.resources.platform import Opened
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.state.metrics import run_failure


def execute(context: dg.AssetExecutionContext, loaded: LoadedPipeline, opened: Opened) -> None:
    """Do what this Dagster run was started for.

    Raises:
        DeltaforgeError: The work could not be done; the message says why.
        dg.Failure: The run ended, but capture or the lease failed, every sink is down, or the snapshot could
            not be read.
    """
    setup_logs()
    run_context = build_run_context(opened, loaded)
    # A re-execution from the UI has its parent's tags, but is treated as a Materialize.
    if context.run.tags.get(RUN_TAG) == "live" and context.run.parent_run_id is None:
        _run_live(context, loaded, run_context)
        return
    if context.selected_asset_keys:
        ranges = _chosen(context, loaded)
        shown_only = context.run.tags.get(RUN_TAG) == "preview"
        (_preview if shown_only else _materialize)(context, loaded, run_context, ranges)
    _evaluate(context, loaded, run_context, _source_problem(run_context))


class _RunObserver:
    """Publishes a live run in Dagster: partitions when ranges open, events when they are due."""

    def __init__(
        self, context: dg.AssetExecutionContext, run_context: RunContext, pipeline: str
    ) -> None:
        self._context = context
        self._run_context = run_context
        self._pipeline = pipeline

    def range_opened(self, number: int) -> None:
        add_partition(self._context.instance, self._pipeline, number)
        self._context.log.info("range %s opened", number)

    def publish(self) -> None:
        instance, run_context = self._context.instance, self._run_context
        publish(instance, run_context.store, self._pipeline, self._emit, run_context.journal)
        publish_versions(instance, run_context.store, self._pipeline, self._context.log_event)

    def warn(self, message: str) -> None:
        self._context.log.warning(message)

    def _emit(self, event: dg.AssetMaterialization) -> None:
        self._context.log_event(event)
        failpoint("range-published")


def _run_live(
    context: dg.AssetExecutionContext, loaded: LoadedPipeline, run_context: RunContext
) -> None:
    observer = _RunObserver(context, run_context, loaded.name)
    beside = None
    if context.run.tags.get(REASON_TAG) == COMMAND:
        beside = SnapshotBeside(context, loaded, run_context)
    run = LiveRun(
        loaded,
        run_context,
        RunOptions(
            context.run.run_id,
            observer,
            until_caught_up=context.run.tags.get(UNTIL_TAG) == "caught up",
            awaits=lambda: beside is not None and beside.works,
        ),
    )
    try:
        with _failures_counted(run_context, loaded.name):
            outcome = run.execute()
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        if run.interrupted is not None:
            _report(context, loaded, run.interrupted)
        raise
    finally:
        if beside is not None:
            beside.end()
    if not outcome.held:
        context.log.info("another run holds pipeline %s; nothing to do", loaded.name)
        return
    _report(context, loaded, outcome)
    try:
        _evaluate(context, loaded, run_context, outcome.capture_error)
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        # All work is done and recorded, so the run must not count as interrupted.
        context.log.info("asked to end: the next run evaluates the checks")
    problem = failure_of(outcome)
    if problem is None and beside is not None and beside.error is not None:
        problem = f"the snapshot could not be read: {beside.error}"
    if problem is not None:
        run_context.store.metrics.count(loaded.name, run_failure("failed"))
        raise dg.Failure(problem, allow_retries=False)


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
    """Count a run that ends with an error as failed; if it lost its lease, the next holder counts it."""
    try:
        yield
    except DeltaforgeError as error:
        if not isinstance(error, LeaseLost):
            with suppress(DeltaforgeError):  # the store itself may have failed
                run_context.store.metrics.count(pipeline, run_failure("failed"))
        raise


def _evaluate(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    problem: str | None,
) -> None:
    """Log the result of every check that this Dagster run has to evaluate."""
    source = run_context.build_source()
    try:
        findings = preflight(source, run_context.store, loaded)
    finally:
        source.close()
    for evaluation in evaluate(context.instance, run_context.store, loaded, problem, findings):
        if evaluation.asset_check_key in context.selected_asset_check_keys:
            context.log_event(evaluation)


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
    """Return why a run failed: capture failed, the lease was lost, or every sink is down; else None."""
    asked = outcome.reason in {"asked", "paused", "stopped", "pipeline file changed"}
    if outcome.capture_error is not None and not asked:
        return f"capture failed: {outcome.capture_error}"
    if outcome.reason == "lease lost":
        return "the lease was lost: the state store could not be reached, or another run has taken over"
    attached = outcome.delivered.keys() - set(outcome.detached)
    if attached and attached == outcome.sink_errors.keys():
        problems = [f"{sink}: {error}" for sink, error in sorted(outcome.sink_errors.items())]
        return "every sink is down: " + "; ".join(problems)
    return None


def _summary(outcome: RunOutcome) -> str:
    sent = ", ".join(f"{count} to {sink}" for sink, count in sorted(outcome.delivered.items()))
    summary = (
        f"run ended ({outcome.reason}): {pluralize(outcome.captured, 'change')} captured in "
        f"{pluralize(outcome.segments, 'segment')} and {pluralize(outcome.ranges, 'range')}; sent {sent or 'nothing'}"
    )
    if outcome.paused is not None:
        summary += f"; capture is paused: {outcome.paused}"
    if outcome.detached:
        summary += f"; detached: {', '.join(outcome.detached)}"
    if outcome.paused_sinks:
        summary += f"; paused: {', '.join(outcome.paused_sinks)}"
    return summary


def _chosen(context: dg.AssetExecutionContext, loaded: LoadedPipeline) -> list[int]:
    """Return the ranges that were chosen for a Materialize, in log order."""
    if not (context.has_partition_key or context.has_partition_key_range):
        raise NotAllowed(
            f"{loaded.name}: choose the ranges to materialize; live runs are started by the "
            "pipeline's sensor, its schedule, or `deltaforge run`"
        )
    wanted = context.run.tags.get(RUN_TAG)
    if wanted not in {None, "live", "reprocess", "preview"}:
        raise NotAllowed(f"the tag {RUN_TAG} may be reprocess or preview, not {wanted}")
    return sorted(range_number(key) for key in context.partition_keys)


def _preview(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    ranges: list[int],
) -> None:
    """Log observations of `changes` with what the current processors would make of the ranges."""
    for number in ranges:
        made = preview(run_context, loaded.name, number, chain_of(loaded.spec))
        context.log_event(observation(loaded.name, made))


def _materialize(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    ranges: list[int],
) -> None:
    """Verify `changes`, and deliver the ranges to each chosen sink, again or for the first time.

    A problem with one asset does not stop the others; all problems are raised at the end.
    """
    register(run_context.store, loaded)
    assets = [CHANGES, *(sink.config.id for sink in loaded.spec.spec.sinks)]
    problems: list[DeltaforgeError] = []
    for asset in assets:
        if asset_key(loaded.name, asset) not in context.selected_asset_keys:
            continue
        try:
            if asset == CHANGES:
                _verify(context, loaded, run_context, ranges)
            else:
                _deliver(context, loaded, run_context, asset, ranges)
        except DeltaforgeError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DeltaforgeError("; ".join(map(str, problems)))


def _verify(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    ranges: list[int],
) -> None:
    for number in ranges:
        events = verify(run_context.store, run_context.journal, loaded.name, number)
        _log_again(context, run_context, loaded.name, CHANGES, number, verified=events)


def _deliver(
    context: dg.AssetExecutionContext,
    loaded: LoadedPipeline,
    run_context: RunContext,
    sink_id: str,
    ranges: list[int],
) -> None:
    """Replay the ranges that the sink has, then catch it up to the last chosen range that it lacks.

    Only ranges that the sink has can be reprocessed; the others are delivered as the journal recorded them.
    """
    reprocess = context.run.tags.get(RUN_TAG) == "reprocess"

    def log(done: ReplayedRange) -> None:
        what = {"reprocessed" if reprocess else "replayed": done.messages}
        _log_again(context, run_context, loaded.name, sink_id, done.range, **what)

    delivered, lacking = split_by_delivery(run_context.store, loaded.name, sink_id, ranges)
    if reprocess and lacking:
        raise NotAllowed(
            f"{loaded.name}: sink {sink_id} does not have range {lacking[0].range} yet; only ranges "
            "that it has can be reprocessed"
        )
    if delivered:
        run_id, warn = context.run.run_id, context.log.warning
        with run_context.replay_sessions() as sessions:
            reprocessing = Reprocessing(
                loaded.spec, run_context.store, run_context.journal, sessions, run_id
            )
            replay(
                run_context.store,
                loaded.spec,
                sink_id,
                [row.range for row in delivered],
                encoder=Encoder(loaded.spec, run_context.journal, sessions, run_id, warn),
                build_sink=lambda: run_context.build_sink(sink_id),
                run_id=run_id,
                progress=log,
                reprocessing=reprocessing if reprocess else None,
            )
    if lacking:
        messages = catch_up(
            loaded,
            run_context,
            sink_id,
            lacking[-1].last_segment,
            run_id=context.run.run_id,
            observer=_RunObserver(context, run_context, loaded.name),
        )
        context.log_event(
            dg.AssetObservation(
                asset_key(loaded.name, sink_id),
                description=f"caught up to range {lacking[-1].range}: {pluralize(messages, 'message')} sent",
                metadata={CAUGHT_UP_METADATA: messages},
            )
        )


def _log_again(
    context: dg.AssetExecutionContext,
    run_context: RunContext,
    pipeline: str,
    asset: str,
    number: int,
    **done: int,
) -> None:
    """Log a materialization with the range's metadata again, and with what this run did."""
    again = "reprocessed" in done
    publication = publication_of(run_context.store, pipeline, number, asset, reprocessed=again)
    publication = dataclasses.replace(publication, run_id=context.run.run_id)
    context.log_event(materialization(pipeline, publication, run_context.journal, done))
