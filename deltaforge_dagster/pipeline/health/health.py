"""Whether a pipeline works: the one answer that `status`, the API, metrics, checks and ticks give.

`health` derives it from the pipeline's file and the state store alone: runs and ticks record in the
store what only a server can tell (`recorded`). So `health` is cheap, works while servers are down,
and gives the same answer everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import (
    Commands,
    and_run,
    commands_of,
)
from deltaforge_dagster.pipeline.committed import awaited_sinks, go_on_command
from deltaforge_dagster.pipeline.control.specs import last_spec
from deltaforge_dagster.pipeline.health.recorded import (
    failure_of,
    findings_of,
    noted_broken,
    remedy_of,
)
from deltaforge_dagster.pipeline.health.undelivered import saturation, sinks_that_lack
from deltaforge_dagster.pipeline.plural import duration, pluralize, size
from deltaforge_dagster.sources.findings import CAUTION
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.state.records import (
    CheckpointRow,
    EarlyConfirmation,
    LeaseRow,
    PipelineRow,
    SourceLog,
)
from deltaforge_dagster.state.since import CAPTURE_PAUSED, RETENTION, notice_of
from deltaforge_dagster.state.store import StateStore

Status = Literal["running", "paused", "stopped", "failed"]
Severity = Literal["warning", "error"]

_RELOAD = "press Reload in its UI (Deployment, Code locations)"
_REPORTED = "what the process that works on it reports is shown"
_SINK, _SINKS = "sink ", "sinks "
_SILENT_INTERVALS = 6
_SILENT_SECONDS = 90.0
_SCHEDULED_SECONDS = 25 * 3600.0
"""How long after its last tick a scheduled pipeline counts as at work in another process."""
_DANGER_SECONDS = 3600.0
"""Health warns when log that is needed is discarded within this time, at the present rate."""
_RETENTION_SECONDS = 3 * 3600.0
"""Retention is due every hour; health warns when it has not run for this long."""


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """Something that keeps a pipeline from working as it should.

    Attributes:
        subject: The part concerned: `file`, `source`, `publication`, `journal`, `sensor`, `sink ID`
            ...
        severity: `error` when changes are not captured or not delivered, or about to be lost.
        text: What is wrong, in a sentence; no secret, no value of a row.
        remedy: Commands or statements to run one after the other as they stand; empty where the
            text says what to do.
        since: When it first occurred; None if unknown.
        next_attempt_at: When there is another automatic attempt; None if somebody must fix it.
    """

    subject: str
    severity: Severity
    text: str
    remedy: Commands = ()
    since: float | None = None
    next_attempt_at: float | None = None

    @property
    def line(self) -> str:
        """What it is about, what is wrong and the remedy, as one line."""
        return f"{self.subject}: {and_run(self.text, self.remedy)}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; times are seconds since 1970."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a pipeline.

    Attributes:
        status: The desired state, or `failed` if changes are not captured although they should be.
        problems: What is wrong: errors first, and among them those that prevent capture.
        seen_at: When a run or a tick last worked on it; None if none ever did.
        log: What was last seen of the source's log; None if it was never checked.
        early: Since when and why the log is confirmed before changes are delivered; None if it is
            not.
    """

    status: Status
    problems: tuple[HealthProblem, ...] = ()
    seen_at: float | None = None
    log: SourceLog | None = None
    early: EarlyConfirmation | None = None

    @property
    def well(self) -> bool:
        """Whether there is no error."""
        return not any(problem.severity == "error" for problem in self.problems)

    @property
    def error(self) -> str | None:
        """The first error's text, None where there is none."""
        return next(
            (problem.text for problem in self.problems if problem.severity == "error"), None
        )

    @property
    def uncaptured(self) -> HealthProblem | None:
        """The first error that prevents capture; None if none does, or capture is not desired."""
        return self.problems[0] if self.status == "failed" else None


def health(store: StateStore, pipeline: LoadedPipeline | BrokenPipeline) -> Health:
    """Return the health of a pipeline, from its file and the state store.

    Raises:
        StoreUnavailable: The store cannot be asked.
    """
    row = store.pipelines.get(pipeline.name)
    if isinstance(pipeline, BrokenPipeline) and pipeline.gone and row is not None:
        return _health_without_file(store, row, pipeline)
    if isinstance(pipeline, BrokenPipeline) and pipeline.unset and row is not None:
        last = last_spec(store, row)
        if _is_at_work(store, row, last):
            lacks = ", ".join(pipeline.unset)
            note = f"this process cannot check the file, because it lacks {lacks}; {_REPORTED}"
            return _with_note(_health(store, row, last), note)
    if row is None and isinstance(pipeline, LoadedPipeline):
        never = (
            "nothing has worked on it yet: neither a sensor nor `deltaforge run`. If a Dagster is "
            f"running that does not reload by itself, {_RELOAD}"
        )
        since = _changed_at(pipeline)
        return Health(
            "running", (HealthProblem("sensor", "warning", never, ("deltaforge dev",), since),)
        )
    if isinstance(pipeline, LoadedPipeline):
        assert row is not None
        return _health(store, row, pipeline.spec)
    seen_at = None if row is None else _seen_at(row, store.leases.get(row.name), store.now())
    broken = HealthProblem(
        "file",
        "error",
        str(pipeline.error),
        ("deltaforge validate",),
        _broken_since(store, pipeline, row),
    )
    return Health("failed", (broken,), seen_at)


def health_without_file(store: StateStore, row: PipelineRow) -> Health:
    """Return the health of a pipeline from the state store alone, because its last file is unknown.

    Raises:
        StoreUnavailable: The store cannot be asked.
    """
    return _health(store, row, None)


def _health_without_file(store: StateStore, row: PipelineRow, missing: BrokenPipeline) -> Health:
    """Return the health of a pipeline whose file is missing.

    It has failed, unless another process, which can load the file, works on it.
    """
    last = last_spec(store, row)
    if _is_at_work(store, row, last):
        note = f"{missing.error}, seen from here; {_REPORTED}"
        return _with_note(_health(store, row, last), note)
    seen = store.pipelines.source_log(row.name)
    kept = None
    if last is not None:
        source = last.spec.source
        size = None if seen is None else seen.retained
        kept = source_types()[source.type].kept_log(source.config, size)
    text = str(missing.error) + ("" if kept is None else f"; {kept}")
    if kept is not None and seen is not None and seen.retained is not None:
        text += f" (measured {_ago(store.now() - seen.seen_at)} ago)"
    problem = HealthProblem(
        "file",
        "error",
        f"{text}. Restore the file, or remove the pipeline",
        (f"deltaforge remove {row.name}",),
        _broken_since(store, missing, row),
    )
    return Health("failed", (problem,), _seen_at(row, store.leases.get(row.name), store.now()))


def _is_at_work(store: StateStore, row: PipelineRow, spec: PipelineSpec | None) -> bool:
    """Whether a process that can load the pipeline's file ticks for it, or runs it."""
    now, lease = store.now(), store.leases.get(row.name)
    if lease is not None and lease.active_at(now):
        return True
    if row.ticked_at is None or noted_broken(store, row.name, row) is not None:
        return False
    scheduled = spec is not None and spec.spec.engine.dagster.schedule is not None
    return now - row.ticked_at <= (_SCHEDULED_SECONDS if scheduled else _patience(spec))


def _with_note(state: Health, text: str) -> Health:
    """Return a health with a warning about the file added after its other problems."""
    return replace(state, problems=(*state.problems, HealthProblem("file", "warning", text)))


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _broken_since(
    store: StateStore, broken: BrokenPipeline, row: PipelineRow | None
) -> float | None:
    """Return since when a file cannot be loaded.

    This is the time that a tick recorded, or else when the file was last changed or used.
    """
    noted = noted_broken(store, broken.name, row)
    if noted is not None:
        return noted
    times = (_changed_at(broken), None if row is None else row.ticked_at)
    return max((time for time in times if time is not None), default=None)


def _changed_at(pipeline: LoadedPipeline | BrokenPipeline) -> float | None:
    """Return when a pipeline's file was last changed, None if it has none or the file is gone."""
    with contextlib.suppress(OSError):
        return None if pipeline.path is None else pipeline.path.stat().st_mtime
    return None


def sinks_by_error(errors: Mapping[str, str]) -> dict[str, list[str]]:
    """Return sinks by their error, each error once.

    A server that is down fails every sink that it has.

    Args:
        errors: The error of each sink.
    """
    sinks: dict[str, list[str]] = {}
    for sink, error in sorted(errors.items()):
        sinks.setdefault(error.removeprefix(f"sink {sink}: "), []).append(sink)
    return sinks


def _merged(problems: Iterable[HealthProblem]) -> list[HealthProblem]:
    """Return problems with each text once.

    Sinks that fail for the same reason become one problem. A problem whose text is the end of
    another one's is dropped: a run and a tick may report the same failure of the source, the run in
    more words.
    """
    merged: dict[tuple[str, str, Commands], HealthProblem] = {}
    for problem in problems:
        is_sink = problem.subject.startswith(_SINK)
        key = problem.severity, problem.text if is_sink else problem.line, problem.remedy
        earlier = merged.get(key)
        if earlier is None:
            merged[key] = problem
        elif earlier.subject != problem.subject:
            names = earlier.subject.removeprefix(_SINKS).removeprefix(_SINK)
            subject = f"{_SINKS}{names}, {problem.subject.removeprefix(_SINK)}"
            merged[key] = replace(
                earlier,
                subject=subject,
                since=_earliest(earlier.since, problem.since),
                next_attempt_at=_earliest(earlier.next_attempt_at, problem.next_attempt_at),
            )
    distinct = merged.values()
    return [
        problem
        for problem in distinct
        if not any(
            other.text.endswith(f": {problem.text}") and other.remedy == problem.remedy
            for other in distinct
        )
    ]


def _earliest(left: float | None, right: float | None) -> float | None:
    return min((time for time in (left, right) if time is not None), default=None)


def _health(store: StateStore, row: PipelineRow, spec: PipelineSpec | None) -> Health:
    now, lease = store.now(), store.leases.get(row.name)
    capture = list(_capture(store, row, spec, lease, now)) if row.desired_state == "running" else []
    other_problems = [] if row.desired_state == "stopped" else list(_delivery(store, row, spec))
    for problem in _dagster(store, row, now):
        (capture if problem.severity == "error" else other_problems).append(problem)
    failed = any(problem.severity == "error" for problem in capture)
    if row.outdated_since is not None and spec is not None:
        text = f"Dagster shows the pipeline as its file was before it was changed; {_RELOAD}"
        other_problems.append(
            HealthProblem("definitions", "warning", text, since=row.outdated_since)
        )
    log, early = store.pipelines.source_log(row.name), store.pipelines.early_confirmation(row.name)
    other_problems += [*_source_log(row.name, log, early), *_journal(store, row, spec)]
    problems = sorted(
        _merged([*capture, *other_problems]), key=lambda problem: problem.severity != "error"
    )
    return Health(
        "failed" if failed else row.desired_state,
        tuple(problems),
        _seen_at(row, lease, now),
        log,
        early,
    )


def _capture(
    store: StateStore,
    row: PipelineRow,
    spec: PipelineSpec | None,
    lease: LeaseRow | None,
    now: float,
) -> Iterator[HealthProblem]:
    """Yield problems of capture."""
    failure = failure_of(row)
    if failure is not None:
        yield HealthProblem(
            failure.subject,
            "error",
            failure.message,
            (*failure.remedy, *remedy_of(row.name, failure.kind))
            if failure.subject == "source"
            else tuple(failure.remedy),
            since=failure.since,
            next_attempt_at=failure.next_attempt_at,
        )
    for finding in findings_of(row):
        if failure is not None and (finding.subject, finding.text) == (
            failure.subject,
            failure.message,
        ):
            continue  # the check found the same problem as capture
        yield HealthProblem(
            finding.subject, finding.level, finding.text, commands_of(finding.remedy), finding.since
        )
    if row.capture_pause is not None:
        text = f"capture is paused: {row.capture_pause}"
        since = store.pipelines.since(row.name, CAPTURE_PAUSED)
        yield HealthProblem("journal", "warning", text, since=since)
    silent = _silent_since(row, spec, lease, now)
    if silent is not None:
        yield HealthProblem(
            "sensor",
            "error",
            "nothing works on it: no run, and no tick of its sensor; is Dagster's daemon at work, "
            "and the sensor switched on?",
            ("deltaforge dev",),
            silent,
        )


def _source_log(
    pipeline: str, log: SourceLog | None, early: EarlyConfirmation | None
) -> Iterator[HealthProblem]:
    """Yield warnings that log may be discarded unread, or is confirmed before delivery."""
    if log is not None and (danger := _danger(log)) is not None:
        yield HealthProblem("source log", "warning", danger)
    if early is not None:
        yield HealthProblem(
            "confirm",
            "warning",
            f"the source's log is confirmed up to what the journal has, because {early.why}: until "
            "sinks have caught up, only the journal has what they lack "
            f"(if it is lost: deltaforge recover {pipeline})",
            since=early.since,
        )


def _danger(log: SourceLog) -> str | None:
    """Return why the server may soon discard log that is needed; None if it may not."""
    soon = log.seconds_left is not None and log.seconds_left < _DANGER_SECONDS
    left = (
        ""
        if log.seconds_left is None
        else f"; at this rate changes are lost in {duration(log.seconds_left)}"
    )
    if log.limit is None or log.retained is None:
        by_age = f"the server removes log by age, captured or not ({log.limited_by}){left}"
        return by_age if soon else None
    if not soon and log.retained < CAUTION * log.limit:
        return None
    captured = (log.unconfirmed or 0) - (log.bytes or 0)
    why = "not captured yet" if captured < log.retained / 2 else "captured, but not delivered yet"
    return (
        f"the server retains {size(log.retained)} of log for it, most of it {why}, and retains at "
        f"most {size(log.limit)} ({log.limited_by}){left}"
    )


def _journal(
    store: StateStore, row: PipelineRow, spec: PipelineSpec | None
) -> Iterator[HealthProblem]:
    """Yield a warning that the journal fills up with what sinks lack, before capture pauses."""
    if spec is None or row.capture_pause is not None:
        return
    limit = spec.spec.engine.journal.max_bytes
    behind = [
        checkpoint
        for checkpoint in store.checkpoints.read(row.name).values()
        if checkpoint.attached
    ]
    if not behind:
        return
    delivered = min(checkpoint.whole_segment for checkpoint in behind)
    lacking = store.segments.about_bytes(row.name, after=delivered, last=row.next_segment - 1)
    if lacking >= CAUTION * limit:
        yield HealthProblem(
            "journal room",
            "warning",
            f"the journal has about {size(lacking)} that sinks lack, of at most {size(limit)} "
            "(engine.journal.max_bytes); when it is full, optional sinks are detached, or capture "
            "pauses and the source retains its log",
        )


def _dagster(store: StateStore, row: PipelineRow, now: float) -> Iterator[HealthProblem]:
    """Yield problems of Dagster: runs it could not start, and a retention that does not run."""
    for launch in store.pipelines.launches(row.name):
        if row.desired_state == "running" or launch.level == "warning":
            yield HealthProblem(launch.subject, launch.level, launch.text, since=launch.since)
    awaited = store.pipelines.since(row.name, RETENTION)
    if awaited is not None and now - awaited > _RETENTION_SECONDS:
        yield HealthProblem(
            "retention",
            "warning",
            "the hourly job that deletes old data has not run for three hours, so what every sink "
            "has is not deleted: is its schedule switched on, and do its runs succeed?",
            since=awaited,
        )


def _silent_since(
    row: PipelineRow, spec: PipelineSpec | None, lease: LeaseRow | None, now: float
) -> float | None:
    """Return since when a pipeline with a sensor has had neither tick nor run.

    Returns:
        The time; None if that is not unusually long ago.
    """
    if spec is None or row.ticked_at is None or spec.spec.engine.dagster.schedule is not None:
        return None
    seen = _seen_at(row, lease, now)
    return seen if seen is not None and now - seen > _patience(spec) else None


def _patience(spec: PipelineSpec | None) -> float:
    """Return for how long a pipeline with a sensor may be without a tick."""
    if spec is None:
        return _SILENT_SECONDS
    interval = spec.spec.engine.dagster.sensor_interval_seconds
    return max(_SILENT_SECONDS, _SILENT_INTERVALS * interval)


def _seen_at(row: PipelineRow, lease: LeaseRow | None, now: float) -> float | None:
    if lease is not None and lease.active_at(now):
        return now
    return max(
        (time for time in (row.ticked_at, row.source_seen_at) if time is not None), default=None
    )


def _delivery(
    store: StateStore, row: PipelineRow, spec: PipelineSpec | None
) -> Iterator[HealthProblem]:
    """Yield problems of delivery, holds and dead letters."""
    checkpoints = store.checkpoints.read(row.name)
    counts = checkpoints.keys() if spec is None else awaited_sinks(spec, checkpoints)
    for checkpoint in checkpoints.values():
        yield from _sink(store, row.name, checkpoint, counts=checkpoint.sink in counts)
    yield from _lacking(store, row.name)
    yield from _gaps(store, row.name, spec, checkpoints)
    for hold in store.holds.read(row.name):
        if hold.state != "journaled":
            text = (
                f"{hold.kind} {hold.subject}: {pluralize(hold.events, 'event')} kept back; "
                f"{hold.reason}"
            )
            yield HealthProblem(
                "holds", "error", text, (f"deltaforge hold list {row.name}",), hold.since
            )
    depth = store.dead_letters.depth(row.name)
    full = None if spec is None else saturation(depth, spec.spec.journal.dlq.max_entries)
    if depth.entries:
        waiting = depth.entries - depth.dead
        text = f"{pluralize(depth.dead, 'change')} could not be delivered"
        text += f", {waiting:,} on their way or behind them" if waiting else ""
        text += "" if full is None else f"; {full[1]}"
        severity: Severity = "warning" if full is None else full[0]
        listing = f"deltaforge dlq list {row.name}"
        yield HealthProblem("dead letters", severity, text, (listing,), depth.oldest)


def _lacking(store: StateStore, pipeline: str) -> Iterator[HealthProblem]:
    """Yield tables whose older rows lack the source's values of a column.

    The column was added or got another type, and the log does not contain the values of existing
    rows.
    """
    lacking = [stored for stored in store.table_commits.tables(pipeline) if stored.write.lacking]
    histories = (
        {history.name: history for history in store.schemas.histories(pipeline)} if lacking else {}
    )
    for stored in lacking:
        table = ".".join(stored.write.source)
        columns = histories[table].names_now(stored.write.lacking)
        if columns:
            text = (
                f"rows of {'.'.join(stored.write.destination)} that were there when the source's "
                f"table got {'column' if len(columns) == 1 else 'columns'} {', '.join(columns)}, "
                "or another type for it, have null or their former values there: what the source "
                "gave them is not in its log"
            )
            command = f"deltaforge resync {pipeline} --sink {stored.sink} --tables {table}"
            yield HealthProblem(
                f"sink {stored.sink}", "warning", text, (command,), stored.written_at
            )


def _gaps(
    store: StateStore,
    pipeline: str,
    spec: PipelineSpec | None,
    checkpoints: Mapping[str, CheckpointRow],
) -> Iterator[HealthProblem]:
    """Yield the tables with a gap in the source's log, until every sink has their rows."""
    gaps = store.gaps.read(pipeline)
    if not gaps or spec is None:
        return
    for lack in sinks_that_lack(store, spec, gaps, checkpoints):
        yield HealthProblem(
            f"table {lack.gap.table}", "error", lack.text, lack.remedy, lack.gap.until
        )


def _sink(
    store: StateStore, pipeline: str, checkpoint: CheckpointRow, *, counts: bool
) -> Iterator[HealthProblem]:
    subject = f"sink {checkpoint.sink}"
    if not checkpoint.attached:
        text = checkpoint.last_error or "detached: it gets nothing"
        command = go_on_command(pipeline, checkpoint.sink, checkpoint.state)
        yield HealthProblem(subject, "warning", text, (command,), checkpoint.failing_since)
    elif checkpoint.failures:
        yield HealthProblem(
            subject,
            "error" if counts else "warning",
            (checkpoint.last_error or "it fails").removeprefix(f"{subject}: "),
            tuple(checkpoint.remedy or ()),
            since=checkpoint.failing_since,
            next_attempt_at=checkpoint.next_attempt_at,
        )
    if checkpoint.notice is not None:
        since = store.pipelines.since(pipeline, notice_of(checkpoint.sink))
        yield HealthProblem(subject, "warning", checkpoint.notice, since=since)
