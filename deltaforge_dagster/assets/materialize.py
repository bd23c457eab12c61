"""A Materialize of ranges chosen in the UI: verifies, replays, catches up or previews them."""

import dataclasses

import dagster as dg

from deltaforge_dagster.assets.names import (
    CAUGHT_UP_METADATA,
    RUN_TAG,
    asset_key,
    range_number,
)
from deltaforge_dagster.assets.preview import observation
from deltaforge_dagster.assets.publish import RunObserver, materialization
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.pipeline.control.closed_ranges import (
    CHANGES,
    keeps_what_it_has,
    publication_of,
    split_by_delivery,
)
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.encode.encoder import Encoder, RegisteredVersions
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.pipeline.replay.preview import preview
from deltaforge_dagster.pipeline.replay.replay import (
    ReplayedRange,
    Reprocessing,
    replay,
    verify,
)
from deltaforge_dagster.pipeline.run.catch_up import catch_up
from deltaforge_dagster.pipeline.run_context import RunContext


def materialize_chosen(
    context: dg.AssetExecutionContext, loaded: LoadedPipeline, run_context: RunContext
) -> None:
    """Verify, replay, catch up or preview the chosen ranges, as the run's tag says.

    Raises:
        NotAllowed: No ranges were chosen, or the tag is unknown.
        DeltaforgeError: Something could not be done; the message says what, and why.
    """
    ranges = _chosen(context, loaded)
    shown_only = context.run.tags.get(RUN_TAG) == "preview"
    (_preview if shown_only else _materialize)(context, loaded, run_context, ranges)


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
    """Log observations of `changes` that preview the output of the current processors."""
    for number in ranges:
        previewed = preview(run_context, loaded.name, number, chain_of(loaded.spec))
        context.log_event(observation(loaded.name, previewed))


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

    Only ranges that the sink has can be reprocessed; the others are delivered as the journal
    recorded them.
    """
    reprocess = context.run.tags.get(RUN_TAG) == "reprocess"

    def log(done: ReplayedRange) -> None:
        counts = {"reprocessed" if reprocess else "replayed": done.messages}
        _log_again(context, run_context, loaded.name, sink_id, done.range, **counts)

    delivered, lacking = split_by_delivery(run_context.store, loaded.name, sink_id, ranges)
    if reprocess and lacking:
        raise NotAllowed(
            f"{loaded.name}: sink {sink_id} does not have range {lacking[0].range} yet; "
            "only ranges that it has can be reprocessed"
        )
    if reprocess and keeps_what_it_has(loaded.spec, sink_id):
        raise NotAllowed(
            f"{loaded.name}: the tables of sink {sink_id} keep what they have, so a range cannot "
            "be reprocessed for it; give the sink another id and other tables, and have them "
            "filled with `start: journal`"
        )
    if delivered and keeps_what_it_has(loaded.spec, sink_id):
        for row in delivered:
            context.log.info(
                "the tables of sink %s have range %d, and keep what they have: nothing was written",
                sink_id,
                row.range,
            )
            log(ReplayedRange(row.range, row.last_segment - row.first_segment + 1, 0))
    elif delivered:
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
                encoder=Encoder(
                    loaded.spec,
                    run_context.journal,
                    sessions,
                    run_id,
                    warn,
                    RegisteredVersions(run_context.store.schemas, loaded.name),
                ),
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
            observer=RunObserver(
                context, run_context, loaded, chosen=[(sink_id, row.range) for row in lacking]
            ),
        )
        context.log_event(
            dg.AssetObservation(
                asset_key(loaded.name, sink_id),
                description=(
                    f"caught up to range {lacking[-1].range}: {pluralize(messages, 'message')} sent"
                ),
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
