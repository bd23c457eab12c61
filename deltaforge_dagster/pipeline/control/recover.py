"""Recover a pipeline whose position the source's log no longer has.

The cause is for example a lost slot, a purged log or another server. The same is done for a
pipeline whose journal has lost segments that sinks lack, if the source was told that it may discard
their changes.

What was committed between the last captured change and the new position is unknown. Tables of sinks
are loaded again, so they equal the source. Message sinks and object files get a snapshot: every row
that exists, but neither deletions nor intermediate versions of rows. Changes that were captured
before, and that a message sink still lacks, must be delivered first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import JournalDamaged, NotAllowed, PositionLost
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.committed import segments_behind
from deltaforge_dagster.pipeline.control.user_requests import end_run, sweep
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.pipeline.tables.resync import resynced_tables
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import Failure, PipelineRow, SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import Destination

_RUN_SECONDS = 120.0
"""How long a run that is at work may take to end."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery does.

    Attributes:
        why: What is lost.
        dropped: What is dropped at the source, and created again.
        tables: For each sink that keeps tables, the tables that are loaded again: full names of the
            source's tables by destination.
        messages: The other sinks, which get a snapshot.
        captured_until: Time of the last captured change that no sink lacks permanently, in seconds
            since 1970; None if the journal does not have it.
    """

    why: str
    dropped: Sequence[str]
    tables: Mapping[str, Mapping[Destination, str]]
    messages: Sequence[str]
    captured_until: float | None


def plan_recovery(
    store: StateStore, journal: Journal, loaded: LoadedPipeline, source: Source
) -> Recovery:
    """Return what a recovery of a pipeline would do; change nothing.

    Raises:
        NotAllowed: The log still has the pipeline's position, or changes that were captured would
            be lost for a sink.
        DeltaforgeError: The source cannot be asked.
    """
    row = register(store, loaded)
    dropped = source.reset(dry_run=True)
    damaged = _sinks_of_lost_files(store, journal, row)
    why = _cause_of_loss(row, source) or (", ".join(dropped) if dropped else None)
    if damaged:
        lost = (
            f"the journal has lost files that {', '.join(damaged)} "
            f"{'needs' if len(damaged) == 1 else 'need'}, and the source "
            "was told that it may forget their changes"
        )
        why = lost if why is None else f"{why}; {lost}"
    if why is None:
        raise NotAllowed(
            f"pipeline {loaded.name!r} has lost nothing: source and journal have what sinks lack. "
            f"To load tables again: deltaforge resync {loaded.name} --sink SINK; to read rows "
            f"again: deltaforge snapshot start {loaded.name}"
        )
    configs = [sink.config for sink in loaded.spec.spec.sinks]
    keeping = [config.id for config in configs if isinstance(config, TableSinkConfig)]
    messages = [config.id for config in configs if config.id not in keeping]
    _check_delivered(store, row, [sink for sink in messages if sink not in damaged])
    checkpoints = store.checkpoints.read(row.name)
    last = min((checkpoints[sink].whole_segment for sink in damaged), default=row.next_segment - 1)
    newest = store.segments.read(row.name, first=last, last=last)
    return Recovery(
        why,
        dropped,
        {sink: resynced_tables(store, loaded, sink) for sink in keeping},
        messages,
        newest[-1].last_ts_us / 1e6 if newest else None,
    )


def recover(
    store: StateStore,
    journal: Journal,
    loaded: LoadedPipeline,
    recovery: Recovery,
    build_source: Callable[[PipelineSpec], Source],
) -> PipelineRow:
    """Carry out a recovery: forget the journal, request what sinks get, set a new start position.

    After a crash in between, either the next run sets the start position, or the position is still
    lost and the recovery can be repeated.

    Raises:
        NotAllowed: A run holds the lease.
        DeltaforgeError: The source cannot be reached, or refuses.
    """
    before = register(store, loaded)
    row = store.journals.recover(loaded.name, recovery.tables)
    sweep(journal, before.name, before.uid)
    source = build_source(_from_now_on(loaded.spec))
    try:
        source.reset(dry_run=False)
        start = source.ensure_start()
        return store.pipelines.set_start(
            row.name,
            start.to_json(),
            source.definitions(start),
            source_id=loaded.spec.spec.source.config.id,
        )
    finally:
        source.close()


@contextmanager
def stopped(store: StateStore, row: PipelineRow) -> Iterator[None]:
    """End the run of a pipeline and let none start in the block; then restore the desired state.

    Args:
        store: The state store.
        row: The pipeline.

    Raises:
        NotAllowed: The run does not end.
    """
    try:
        end_run(store, row.name, _RUN_SECONDS)
        yield
    finally:
        store.pipelines.set_desired_state(row.name, row.desired_state)


def _cause_of_loss(row: PipelineRow, source: Source) -> str | None:
    """Return why the log does not have what follows a pipeline's position; None if it has."""
    failure = None if row.failure is None else Failure(**json.loads(row.failure))
    if failure is not None and (failure.subject, failure.kind) == ("source", PositionLost.kind):
        return failure.message  # a run may find a loss that the checks below do not
    position = row.captured_position or row.start_position
    if position is None:
        return None
    try:
        at = parse_position(position)
        source.maintain(at)
        source.has_changes(at)
    except PositionLost as error:
        return str(error)
    return None


def _sinks_of_lost_files(store: StateStore, journal: Journal, row: PipelineRow) -> list[str]:
    """Return the sinks that lack segments whose files are missing or damaged.

    Only segments that the source may have forgotten count.
    """
    checkpoints = store.checkpoints.read(row.name)
    intact: dict[int, bool] = {}
    sinks = []
    for sink in store.journals.not_recapturable(row.name):
        lacking = store.segments.read(row.name, first=checkpoints[sink].whole_segment + 1)
        for segment in lacking:
            if segment.segment not in intact:
                intact[segment.segment] = _is_intact(journal, segment)
            if not intact[segment.segment]:
                sinks.append(sink)
                break
    return sinks


def _is_intact(journal: Journal, segment: SegmentRow) -> bool:
    try:
        journal.verify(segment)
    except JournalDamaged:
        return False
    return all(map(journal.exists, segment.paths))


def _check_delivered(store: StateStore, row: PipelineRow, messages: Sequence[str]) -> None:
    """Check that nothing that was captured would be lost for a message sink.

    Raises:
        NotAllowed: A sink lacks captured changes, or changes are held.
    """
    checkpoints = store.checkpoints.read(row.name)
    for sink in messages:
        checkpoint = checkpoints.get(sink)
        if checkpoint is None or not checkpoint.attached:
            continue
        if behind := segments_behind(row, checkpoint):
            raise NotAllowed(
                f"sink {sink} lacks {pluralize(behind, 'segment')} that were captured before, and "
                "would never get them; let it have them first "
                f"(deltaforge run {row.name} --until-caught-up), or remove the sink "
                "from the file"
            )
    kept = [hold.subject for hold in store.holds.read(row.name) if hold.state != "journaled"]
    if messages and kept:
        raise NotAllowed(
            f"changes of {', '.join(kept)} are held, and message sinks would never get them; "
            f"release them first (deltaforge hold list {row.name}), and let a run deliver them"
        )


def _from_now_on(spec: PipelineSpec) -> PipelineSpec:
    """Return a spec that begins at the oldest change available, not at a position that is lost."""
    config = spec.spec.source.config
    if "start_position" not in type(config).model_fields:
        return spec
    restarted = config.model_copy(update={"start_position": "earliest"})
    source = spec.spec.source.model_copy(update={"config": restarted})
    return spec.model_copy(update={"spec": spec.spec.model_copy(update={"source": source})})
