"""Records in the state store what `health` must know of Dagster.

This is that Dagster is at work, and which runs it could not start. A run whose process does not
start is shown as failed only in Dagster's list of runs, which users of `deltaforge status` do not
see. Such a run has failed without ever having begun (`RunRecord.start_time`). A finding names the
last runs of a job that could not be started. It is removed when a run of that job has begun, or
after a day.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, partial

import dagster as dg

from deltaforge_dagster.assets.names import PIPELINE_TAG, RETENTION_JOB, job_name
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.state.records import NotedFinding
from deltaforge_dagster.state.since import RETENTION, WATCHED
from deltaforge_dagster.state.store import StateStore

_EVERY_SECONDS = 15.0
_WATCHED_SECONDS = 60.0
"""Precision of the recorded time at which Dagster was last at work."""
_ABSENT_SECONDS = 900.0
"""If Dagster was last seen at work longer ago than this, it was down.

Retention does not count as missed for that time.
"""
_REMEMBERED = timedelta(days=1)
_RUNS = 100
"""How many runs are examined at most, newest first: of all failed ones, and of each job."""
_LONGEST_CAUSE = 300


class LaunchWatch:
    """Looks at the runs of an installation, every 15 seconds at most."""

    def __init__(self) -> None:
        self._due = 0.0

    def look(
        self, instance: dg.DagsterInstance, store: StateStore, pipelines: Collection[str]
    ) -> None:
        """Record for each pipeline which runs could not be started, and that Dagster is at work.

        Args:
            instance: The Dagster instance.
            store: The state store; pipelines that it does not know yet are left out.
            pipelines: The names of the installation's pipelines.
        """
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _EVERY_SECONDS
        names = {row.name for row in store.pipelines.read()} & {*pipelines}
        failing = _failing(instance, names)
        for name in names:
            _note_at_work(store, name)
            if store.pipelines.launches(name) != failing[name]:
                store.pipelines.note_launches(name, failing[name])


def _note_at_work(store: StateStore, name: str) -> None:
    now, seen = store.now(), store.pipelines.since(name, WATCHED)
    if seen is None or now - seen > _ABSENT_SECONDS:
        store.pipelines.note_since(name, RETENTION)
    if seen is None or now - seen > _WATCHED_SECONDS:
        store.pipelines.note_since(name, WATCHED)


def _failing(
    instance: dg.DagsterInstance, names: Collection[str]
) -> defaultdict[str, list[NotedFinding]]:
    """Return, for each pipeline, the jobs whose last runs could not be started."""
    failed = instance.get_run_records(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.FAILURE], updated_after=datetime.now(UTC) - _REMEMBERED
        ),
        limit=_RUNS,
    )
    unstarted: defaultdict[str, list[dg.RunRecord]] = defaultdict(list)
    for record in failed:
        if record.start_time is None:
            unstarted[record.dagster_run.job_name].append(record)
    cause_of = cache(partial(_cause, instance))  # a run of the retention job concerns all pipelines
    failing: defaultdict[str, list[NotedFinding]] = defaultdict(list)
    for job, records in sorted(unstarted.items()):
        newest = instance.get_run_records(dg.RunsFilter(job_name=job), limit=_RUNS)
        begun = [record for record in newest if record.start_time is not None]
        for name in names:
            after = max((run.create_timestamp for run in _runs_of(name, begun)), default=None)
            last = [
                record
                for record in _runs_of(name, records)
                if after is None or record.create_timestamp > after
            ]
            if last:
                failing[name].append(_finding(name, job, last, cause_of))
    return failing


def _runs_of(name: str, records: Iterable[dg.RunRecord]) -> list[dg.RunRecord]:
    """Return the runs that were to work for a pipeline."""
    return [record for record in records if _works_for(record.dagster_run, name)]


def _works_for(run: dg.DagsterRun, name: str) -> bool:
    keys = {
        *(run.asset_selection or ()),
        *(key.asset_key for key in run.asset_check_selection or ()),
    }
    return (
        run.job_name == RETENTION_JOB
        or run.tags.get(PIPELINE_TAG) == name
        or any(key.path[0] == name for key in keys)
    )


def _finding(
    name: str, job: str, last: Sequence[dg.RunRecord], cause_of: Callable[[str], str]
) -> NotedFinding:
    runs = "run" if len(last) == 1 else pluralize(len(last), "run")
    return NotedFinding(
        "runs",
        # The sensor's runs are those that capture and deliver; the next tick starts another one.
        "error" if job == job_name(name) and len(last) > 1 else "warning",
        f"Dagster could not start the last {runs} of {job}: {cause_of(last[0].dagster_run.run_id)}",
        None,
        last[-1].create_timestamp.timestamp(),
    )


def _cause(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return why a run was not started: the first sentence of Dagster's last error about it."""
    cause = f"see the page of run {run_id[:8]}"
    for kind in (dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.ENGINE_EVENT):
        for record in instance.all_logs(run_id, of_type=kind):
            event = record.dagster_event
            if event is None:
                continue
            if not event.is_engine_event:
                cause = event.message or cause
            elif event.engine_event_data.error is not None:
                cause = event.engine_event_data.error.message
    # The message is preceded by the class of the error.
    message = cause.strip().splitlines()[0].rpartition("Error: ")[2]
    return message.partition(". ")[0].rstrip(".")[:_LONGEST_CAUSE]
