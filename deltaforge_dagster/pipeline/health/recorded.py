"""What runs and ticks record about a pipeline's health: only they can tell what a server says.

They record why capture fails (`Failure`), what the source lacks (`NotedFinding`), the last tick,
and since when the pipeline's file cannot be loaded. `health.health` derives its answer from this.

A run reads the log, a tick does not. A failure of a run that does not pass by itself is over when a
run reads the log again; any other failure is over when a tick or a run can use the source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from deltaforge_dagster.errors import (
    Commands,
    DeltaforgeError,
    JournalDamaged,
    PositionLost,
    Retryable,
    StoreUnavailable,
    and_run,
)
from deltaforge_dagster.pipeline.control.secret_changes import with_restart_hint
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.records import Failure, NotedFinding, PipelineRow
from deltaforge_dagster.state.since import FILE_BROKEN
from deltaforge_dagster.state.store import StateStore

NOTED_EVERY = 15.0
"""Seconds after which the time of an unchanged check is recorded again."""


def failure_of(row: PipelineRow) -> Failure | None:
    """Return why capture of a pipeline fails; None if it works."""
    return None if row.failure is None else Failure(**json.loads(row.failure))


def findings_of(row: PipelineRow) -> list[NotedFinding]:
    """Return what the last check of a pipeline's source found wrong."""
    return (
        []
        if row.findings is None
        else [NotedFinding(**fields) for fields in json.loads(row.findings)]
    )


def noted_broken(store: StateStore, name: str, row: PipelineRow | None) -> float | None:
    """Return when a tick first found that a file cannot be loaded.

    Returns None if a tick has used the file since.
    """
    noted = store.pipelines.since(name, FILE_BROKEN)
    used = None if row is None else row.ticked_at
    return None if noted is None or (used is not None and used > noted) else noted


def capture_failed(
    store: StateStore,
    name: str,
    by: Literal["tick", "run"],
    error: DeltaforgeError,
    next_attempt_at: float | None,
) -> None:
    """Record why capture fails.

    A tick does not replace a failure that a run has recorded if somebody must fix it, or if the
    run's failure is one of the journal and the tick's one of the source. `since` stays that of the
    first of consecutive failures of the same subject (source or journal), even if their messages
    differ.

    Args:
        store: Where it is recorded.
        name: The pipeline.
        by: Whether the error occurred in a tick or in a run.
        error: The error.
        next_attempt_at: When capture is automatically tried again, by the store's clock; ignored if
            somebody must fix the error.
    """
    row = store.pipelines.get(name)
    if row is None:
        return
    recorded = failure_of(row)
    subject = _subject(error)
    if by == "tick" and recorded is not None and recorded.by == "run":
        same = recorded.subject == subject and recorded.next_attempt_at is not None
        if not (same or _is_ended_by_tick(recorded)):
            return
    since = recorded.since if recorded is not None and recorded.subject == subject else store.now()
    attempt = next_attempt_at if isinstance(error, Retryable) else None
    text = with_restart_hint(store, name, error)
    store.pipelines.set_failure(
        name, Failure(by, error.kind, text, since, attempt, subject, error.remedy)
    )


def capture_works(store: StateStore, name: str, by: Literal["tick", "run"]) -> None:
    """Record that a run reads the log, or that a tick could use the source."""
    row = store.pipelines.get(name)
    failure = None if row is None else failure_of(row)
    if failure is not None and (by == "run" or failure.by == "tick" or _is_ended_by_tick(failure)):
        store.pipelines.set_failure(name, None)


def source_answers(store: StateStore, name: str) -> None:
    """Record that the source answers queries, so that an outage is over."""
    row = store.pipelines.get(name)
    failure = None if row is None else failure_of(row)
    if failure is not None and _is_ended_by_tick(failure):
        store.pipelines.set_failure(name, None)


def note_findings(store: StateStore, name: str, findings: Sequence[Finding]) -> None:
    """Record that the source answered, and what it lacks.

    A finding that persists keeps its `since`.
    """
    row = store.pipelines.get(name)
    if row is None:
        return
    now = store.now()
    before = findings_of(row)
    since = {(finding.subject, finding.text): finding.since for finding in before}
    noted = [
        NotedFinding(
            finding.subject,
            "error" if finding.level == "error" else "warning",
            finding.text,
            finding.commands,
            since.get((finding.subject, finding.text), now),
        )
        for finding in findings
        if finding.bad
    ]
    if noted != before or row.findings is None or now - (row.source_seen_at or 0) >= NOTED_EVERY:
        store.pipelines.note_source_seen(name, noted)


def note_tick(store: StateStore, name: str, *, outdated: bool = False) -> None:
    """Record a tick of a sensor or schedule.

    Args:
        store: Where it is recorded.
        name: The pipeline.
        outdated: Whether the tick's definitions are older than the pipeline's file.
    """
    row, now = store.pipelines.get(name), store.now()
    if row is None:
        return
    since = (row.outdated_since or now) if outdated else None
    if now - (row.ticked_at or 0) >= NOTED_EVERY or since != row.outdated_since:
        store.pipelines.note_tick(name, since)


def note_broken(store: StateStore, name: str) -> None:
    """Record that a file cannot be loaded.

    Does nothing if that is recorded since the last tick that could use the file.
    """
    if noted_broken(store, name, store.pipelines.get(name)) is None:
        store.pipelines.note_since(name, FILE_BROKEN)


def with_remedy(name: str, error: DeltaforgeError) -> str:
    """Return the text of a capture error, with the commands that fix it."""
    remedy = remedy_of(name, error.kind) if _subject(error) == "source" else ()
    return and_run(error.text, (*error.remedy, *remedy))


def remedy_of(name: str, kind: str) -> Commands:
    """Return the `deltaforge` commands that fix a source failure of this kind; empty if none do."""
    if kind != PositionLost.kind:
        return ()
    return (f"deltaforge recover {name}",)


def _subject(error: DeltaforgeError) -> Literal["source", "journal"]:
    return "journal" if isinstance(error, StoreUnavailable | JournalDamaged) else "source"


def _is_ended_by_tick(failure: Failure) -> bool:
    """Whether a tick that can use the source shows that a failure is over."""
    return failure.next_attempt_at is not None and failure.subject == "source"
