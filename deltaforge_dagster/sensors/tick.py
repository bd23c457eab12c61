"""One tick: reports dead runs as failed and ends their tasks, publishes, and may start a run.

Both the sensor and the schedule of a pipeline call `tick`, with the pipeline as it is `current`:
definitions are only as new as the loaded code location. A tick reads no data: it checks the source
(`source_watch`) and reads the rest from the state store. A problem that prevents capture is shown
as the failing check `source` of the pipeline's `changes` and in the tick's message; the next tick
tries again. During a run, ticks also report when a sink begins to fail or has everything again
(check `delivered`), and when changes are held or could not be delivered (checks `holds` and
`dead_letters`). The checks that cost more are evaluated by a run at its end, and by ticks while a
run goes on for longer than `EVALUATED_SECONDS`.

Each tick records which code it belongs to, and a run that other code has started then ends. A tick
may watch the source for a while (`watch_room`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import UTC, datetime

import dagster as dg

from deltaforge_dagster import __version__
from deltaforge_dagster.assets.checks import (
    costly,
    delivered,
    freshness,
    kept_back,
    preflight_evaluation,
    source_evaluation,
)
from deltaforge_dagster.assets.lake_tables import publish_writes
from deltaforge_dagster.assets.names import (
    CODE_TAG,
    PIPELINE_TAG,
    REASON_TAG,
    RUN_TAG,
    asset_key,
    job_name,
)
from deltaforge_dagster.assets.publish import publish
from deltaforge_dagster.assets.schemas import publish_versions
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.dagster_private import get_next_cron_tick
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.catalog import reread
from deltaforge_dagster.pipeline.control.unread_log import HeadWatch
from deltaforge_dagster.pipeline.control.work import NoWork, Work, find_work
from deltaforge_dagster.pipeline.health.health import Health, health
from deltaforge_dagster.pipeline.health.preflight import preflight_source
from deltaforge_dagster.pipeline.health.recorded import (
    capture_failed,
    findings_of,
    note_broken,
    note_tick,
)
from deltaforge_dagster.pipeline.health.source_watch import inspect_source
from deltaforge_dagster.resources.left_tasks import end_left_tasks
from deltaforge_dagster.sensors.every_tick import NOT_WELL
from deltaforge_dagster.sensors.report import (
    report_again,
    report_change,
    report_health,
    report_turn,
)
from deltaforge_dagster.sensors.watch_room import WatchRoom
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.records import LeaseRow
from deltaforge_dagster.state.store import StateStore

_HELD_SECONDS = 30.0
"""A code location that has not ticked for so long no longer works on its pipelines."""

LOST_SECONDS = 30.0
"""A run whose lease expired this long ago is dead."""

NO_LEASE_SECONDS = 180.0
"""A run that started this long ago and does not hold the lease is dead."""

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
"""The statuses of a run that has not ended."""

EVALUATED_SECONDS = 900.0
"""How often the costly checks are evaluated while one run works."""


def tick(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    build_source: Callable[[], Source],
    journal: Journal,
    *,
    outdated: bool = False,
    room: WatchRoom | None = None,
) -> dg.RunRequest | dg.SkipReason:
    """Return the run to start for a pipeline, or why none is needed now.

    If the source has nothing new, and there is room, watch it for up to four seconds, and answer
    once it has.

    Args:
        instance: The Dagster instance.
        store: The state store.
        loaded: The pipeline as its file is now.
        build_source: Builds its source.
        journal: The journal.
        outdated: Whether Dagster's definitions are older than the file and wait for Reload.
        room: Limits how many ticks watch at a time; None for a tick that checks the source only
            once.
    """
    began = time.monotonic()
    live = _unfinished_runs(instance, loaded.name)
    ended = _report_dead(instance, store, loaded.name, live)
    if not _lease_is_active(store, loaded.name):
        _publish(instance, store, loaded, journal)
        publish_versions(instance, store, loaded.name, instance.report_runless_asset_event)
        publish_writes(instance, store, loaded, instance.report_runless_asset_event)
    _report_state(instance, store, loaded)
    note_tick(store, loaded.name, outdated=outdated)
    code = code_version()
    if store.pipelines.code(loaded.name) != code:
        store.pipelines.note_code(loaded.name, code)
    remaining = [record for record in live if record.dagster_run.run_id not in ended]
    lease = store.leases.get(loaded.name)
    active = lease is not None and lease.active_at(store.now())
    if remaining or active:
        state = _report_source(instance, store, loaded, None)
        holder = str(lease.run_id if lease and active else remaining[0].dagster_run.run_id)
        _evaluate_in_turn(instance, store, loaded, build_source, holder)
        return _skip(state, f"run {holder[:8]} is working on it")
    if lease is not None:
        end_left_tasks(lease)
    next_look = _next_look(store, loaded)
    problem = inspect_source(store, loaded, build_source, journal, next_look)
    watching: AbstractContextManager[HeadWatch | None] = nullcontext()
    # A run that reads a snapshot is requested after this tick, and must not wait for the end of a
    # watch.
    if room is not None and problem is None and store.snapshots.unfinished(loaded.name) is None:
        watching = room.watch(instance, build_source, began)
    with watching as watch:  # before the source is checked, so that no later commit is missed
        work = _find_work(store, loaded, build_source, problem, next_look)
        state = _report_source(instance, store, loaded, build_source)
        if (
            watch is not None
            and isinstance(work, NoWork)
            and work.after is not None
            and watch.sees_changes(work.after)
            and not _unfinished_runs(instance, loaded.name)
        ):
            # During the watch, the pipeline may have been paused, or a run may have begun.
            work = _find_work(store, loaded, build_source, None, next_look, changed=True)
    if isinstance(work, Work):
        return dg.RunRequest(
            job_name=job_name(loaded.name),
            tags={RUN_TAG: "live", REASON_TAG: work.reason, CODE_TAG: code},
        )
    return _skip(state, work.detail if isinstance(work, NoWork) else str(work))


def current(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    location: str | None = None,
) -> LoadedPipeline | dg.SkipReason:
    """Return a pipeline as its file or document is now, or why no run can be started.

    Problems of the file are reported in the check `source` of the pipeline's `changes`.

    Args:
        instance: The Dagster instance.
        store: The state store.
        loaded: The pipeline as the definitions have it.
        location: The code location that ticks; another one that has the pipeline, too, does nothing
            while this one ticks. None if that is not known.
    """
    holder = None if location is None else _holder(store, loaded, location)
    if holder != location:
        return dg.SkipReason(
            f"{NOT_WELL}{loaded.name} is in two code locations, and {holder} works on it: this one "
            f"({location}) does nothing; remove the pipeline from one of them"
        )
    pipeline = reread(store, loaded)
    if pipeline is None:
        note_broken(store, loaded.name)
        return dg.SkipReason("the pipeline was removed; reload the code location")
    if isinstance(pipeline, BrokenPipeline):
        note_broken(store, pipeline.name)
        state = health(store, pipeline)
        report_change(instance, source_evaluation(loaded.name, state.uncaptured))
        report_health(instance, store, loaded.name, state)
        return dg.SkipReason(f"{NOT_WELL}file: {pipeline.error}")
    return pipeline


def _holder(store: StateStore, loaded: LoadedPipeline, location: str) -> str:
    """Return the code location that works on a pipeline: the first that ticked, while it ticks.

    If the pipeline has moved to another location, that one works on it a little later.
    """
    # Three ticks, so that a location whose tick is late does not lose the pipeline.
    seconds = max(_HELD_SECONDS, 3.0 * loaded.spec.spec.engine.dagster.sensor_interval_seconds)
    holders = Kv(store.database, "code_location")
    holder = (holders.get(loaded.name) or location.encode()).decode()
    noted = _held.get((loaded.name, location))
    if holder == location and (noted is None or time.monotonic() - noted > seconds / 3):
        holders.put(loaded.name, location.encode(), ttl=seconds)
        _held[loaded.name, location] = time.monotonic()
    return holder


_held: dict[tuple[str, str], float] = {}
"""By pipeline and code location, when this process last noted who works on it (monotonic)."""


def code_version() -> str:
    """Return which code this process has: our version, and the image if Dagster's chart names it.

    Other changes of a project's code are not seen.
    """
    image = os.environ.get("DAGSTER_CURRENT_IMAGE")
    return __version__ if image is None else f"{__version__} in {image}"


def _find_work(
    store: StateStore,
    loaded: LoadedPipeline,
    build_source: Callable[[], Source],
    problem: DeltaforgeError | None,
    next_look: float,
    *,
    changed: bool = False,
) -> Work | NoWork | DeltaforgeError:
    """Return the result of `find_work`, or its error, which is recorded unless it is `problem`."""
    try:
        return find_work(store, loaded, build_source, problem, changed=changed)
    except DeltaforgeError as error:
        if error is not problem:
            capture_failed(store, loaded.name, "tick", error, next_look)
        return error


def _next_look(store: StateStore, loaded: LoadedPipeline) -> float:
    """Return when the sensor or schedule of a pipeline ticks next, by the store's clock."""
    now, options = store.now(), loaded.spec.spec.engine.dagster
    if options.schedule is None:
        return now + options.sensor_interval_seconds
    return get_next_cron_tick(options.schedule, datetime.fromtimestamp(now, UTC), None).timestamp()


def _skip(state: Health, detail: str) -> dg.SkipReason:
    """Return why no run is started, with errors first, so that the list of ticks shows them."""
    errors = [
        f"{NOT_WELL}{problem.line}" for problem in state.problems if problem.severity == "error"
    ]
    return dg.SkipReason(
        "; ".join([*errors, *([] if errors and detail in errors[0] else [detail])])
    )


def _report_source(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    build_source: Callable[[], Source] | None,
) -> Health:
    """Report the health of the pipeline in the checks `source`, `well` and `preflight`.

    Args:
        instance: The Dagster instance.
        store: The state store, where ticks and runs record what they find.
        loaded: The pipeline.
        build_source: Builds its source, to evaluate `preflight` when the findings about the source
            have changed; None during a run, which evaluates `preflight` at its end.

    Returns:
        The health of the pipeline.
    """
    state = health(store, loaded)
    report_change(instance, source_evaluation(loaded.name, state.uncaptured))
    plots = loaded.spec.spec.engine.dagster.reports_ranges
    report_health(instance, store, loaded.name, state, plots=plots)
    row = store.pipelines.get(loaded.name)
    lacks = [] if row is None else [finding.text for finding in findings_of(row)]
    if build_source is None or _preflighted.get(loaded.name, []) == lacks:
        return state
    with closing(build_source()) as source:
        findings = preflight_source(source, store, loaded)
    report_change(instance, preflight_evaluation(loaded.name, findings))
    _preflighted[loaded.name] = lacks
    return state


def _evaluate_in_turn(
    instance: dg.DagsterInstance,
    store: StateStore,
    loaded: LoadedPipeline,
    build_source: Callable[[], Source],
    run_id: str,
) -> None:
    """Report what the costly checks find, every `EVALUATED_SECONDS` of a run."""
    now = time.monotonic()
    evaluated_run, evaluated_at = _evaluated.get(loaded.name, ("", now))
    if run_id == evaluated_run and now - evaluated_at < EVALUATED_SECONDS:
        return
    _evaluated[loaded.name] = run_id, now
    if run_id != evaluated_run:  # it has just begun
        return
    with closing(build_source()) as source:
        findings = preflight_source(source, store, loaded)
    for evaluation in costly(instance, store, loaded, findings):
        report_change(instance, evaluation)


_evaluated: dict[str, tuple[str, float]] = {}
"""By pipeline, the run during which the costly checks were last evaluated, and when."""

_preflighted: dict[str, list[str]] = {}
"""By pipeline, the findings about the source when a tick last evaluated the check `preflight`."""

_published: dict[str, object] = {}
"""By uid of the pipeline, the state after everything due was published.

Nothing is due until this state changes.
"""


def _publish(
    instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline, journal: Journal
) -> None:
    """Publish what is due; skip the search if neither ranges nor checkpoints have changed."""
    pipeline = loaded.name
    row = store.pipelines.get(pipeline)
    if row is None:
        return
    newest = store.ranges.read(pipeline, limit=1, newest_first=True)
    due_by = (
        [(range_row.range, range_row.state) for range_row in newest],
        [
            (sink, checkpoint.segment, checkpoint.complete, checkpoint.first_segment)
            for sink, checkpoint in sorted(store.checkpoints.read(pipeline).items())
        ],
    )
    if _published.get(row.uid) != due_by:
        publish(
            instance,
            store,
            pipeline,
            instance.report_runless_asset_event,
            journal,
            wanted=lambda _: loaded.spec.spec.engine.dagster.reports_ranges,
        )
        _published[row.uid] = due_by


def _report_state(instance: dg.DagsterInstance, store: StateStore, loaded: LoadedPipeline) -> None:
    """Report which sinks fail or are late, which have caught up again, and which changes are held.

    A working sink that is only behind does not fail `delivered`; `freshness` fails when the file's
    limit is passed.
    """
    rows = store.checkpoints.read(loaded.name)
    failing = {
        asset_key(loaded.name, sink)
        for sink, row in rows.items()
        if row.failures or row.state != "attached"
    }
    for evaluation in delivered(store, loaded):
        if evaluation.passed or evaluation.asset_key in failing:
            report_turn(instance, evaluation)
        else:  # the sink is catching up: its last result stays valid
            report_again(instance, evaluation.asset_check_key)
    for evaluation in freshness(store, loaded):
        report_change(instance, evaluation)
    for evaluation in kept_back(store, loaded):
        report_turn(instance, evaluation)  # their texts count events and change constantly


def _unfinished_runs(instance: dg.DagsterInstance, pipeline: str) -> Sequence[dg.RunRecord]:
    return instance.get_run_records(
        dg.RunsFilter(tags={PIPELINE_TAG: pipeline, RUN_TAG: "live"}, statuses=UNFINISHED)
    )


def _lease_is_active(store: StateStore, pipeline: str) -> bool:
    lease = store.leases.get(pipeline)
    return lease is not None and lease.active_at(store.now())


def _other_holder(
    instance: dg.DagsterInstance, lease: LeaseRow | None, live: Sequence[dg.RunRecord]
) -> Sequence[dg.RunRecord]:
    """Return the unfinished run that holds the lease if it is a Materialize, else nothing."""
    if lease is None or lease.run_id is None:
        return []
    if any(record.dagster_run.run_id == lease.run_id for record in live):
        return []
    return instance.get_run_records(dg.RunsFilter(run_ids=[lease.run_id], statuses=UNFINISHED))


def _report_dead(
    instance: dg.DagsterInstance,
    store: StateStore,
    pipeline: str,
    records: Sequence[dg.RunRecord],
) -> set[str]:
    """Report dead runs as failed that nothing else would end, such as after a crash of the host.

    Args:
        instance: The Dagster instance.
        store: The state store with the lease.
        pipeline: The pipeline.
        records: Its unfinished live runs.

    Returns:
        The ids of the runs that were reported, which may include a Materialize that was catching up
        a sink.
    """
    lease = store.leases.get(pipeline)
    ended = set()
    for record in [*records, *_other_holder(instance, lease, records)]:
        run = record.dagster_run
        if run.status in (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED):
            continue
        if lease is not None and lease.run_id == run.run_id:
            dead = store.now() - lease.expires_at > LOST_SECONDS
            why = "it lost its lease"
        else:
            begun = record.start_time or record.update_timestamp.timestamp()
            dead = time.time() - begun > NO_LEASE_SECONDS
            why = "it never took the lease"
        if dead:
            instance.report_run_failed(run, f"the run's process is gone: {why}")
            ended.add(run.run_id)
    return ended
