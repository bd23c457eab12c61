"""The models of response and request bodies, as the OpenAPI document shows them.

Functions make the models of a pipeline from what the state store has (`info`, `ops`).
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field

from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.pipeline.committed import sink_lag_seconds
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.specs import kept_form
from deltaforge_dagster.pipeline.health.health import Health, health
from deltaforge_dagster.state.records import CheckpointRow
from deltaforge_dagster.state.store import StateStore

Status = Literal["running", "paused", "stopped", "failed"]


class Problem(BaseModel):
    """The body of every error response. `error` and `message` have the same text."""

    error: str
    code: str
    message: str


class SinkCheckpoint(BaseModel):
    """The checkpoint of a sink."""

    sink_id: str
    position: Annotated[
        dict[str, Any] | None,
        Field(description="Position in the source's log; null before the first change."),
    ]
    age_seconds: Annotated[float, Field(description="Seconds since the checkpoint last moved.")]


class LogState(BaseModel):
    """What was last seen of the source's log, from where the pipeline stands."""

    seen_at: Annotated[float, Field(description="Seconds since 1970.")]
    bytes: Annotated[
        int | None,
        Field(
            description="Bytes of log after the captured position, of whatever tables; null if "
            "unknown."
        ),
    ]
    growing_since: Annotated[
        float | None, Field(description="Since when each look found more than the one before.")
    ]
    unread: Annotated[
        bool | None,
        Field(description="Whether it has changes to capture; null if nobody looked for them."),
    ]
    retained: Annotated[
        int | None, Field(description="Bytes of log that the server keeps for this pipeline.")
    ]
    receiving_rows: Annotated[
        int, Field(description="Rows so far of a transaction that is being received.")
    ]
    receiving_since: Annotated[float | None, Field(description="When its first rows came.")]
    unread_since: Annotated[
        float | None,
        Field(
            description="Since when, at the earliest, there has been log after the captured "
            "position."
        ),
    ]
    unconfirmed: Annotated[
        int | None, Field(description="Bytes of log after the confirmed position.")
    ]
    unconfirmed_since: Annotated[
        float | None, Field(description="Since when, at the earliest, there has been some.")
    ]
    limit: Annotated[
        int | None,
        Field(
            description="Bytes that the server keeps for this pipeline at most; null if any amount."
        ),
    ]
    room: Annotated[
        int | None,
        Field(
            description="Bytes before the captured position that a server which discards log by "
            "age still has."
        ),
    ]
    kept_seconds: Annotated[
        float | None, Field(description="For how long such a server keeps its log.")
    ]
    limited_by: Annotated[
        str | None, Field(description="The server's setting for `limit` or `kept_seconds`.")
    ]
    growth: Annotated[
        float | None, Field(description="Bytes per second by which `retained` grows.")
    ]
    seconds_left: Annotated[
        float | None,
        Field(
            description="When log that is needed is discarded at this rate, in seconds after "
            "`seen_at`."
        ),
    ]


class EarlyConfirmed(BaseModel):
    """That the source's log is confirmed up to what the journal has, before it is delivered."""

    since: Annotated[float, Field(description="Seconds since 1970.")]
    why: str


class VerifiedTable(BaseModel):
    """A table of a sink that was compared as a whole and found equal to the source's."""

    sink: str
    table: Annotated[str, Field(description="Full name of the source's table.")]
    verified_through: Annotated[
        dict[str, Any],
        Field(description="Position in the source's log up to which the sink had everything."),
    ]
    verified_at: Annotated[float, Field(description="Seconds since 1970.")]
    rows: Annotated[int, Field(description="Rows that were compared.")]


class Ops(BaseModel):
    """The operational state of a pipeline."""

    lag_seconds: Annotated[
        float | None,
        Field(
            description="Age of the oldest captured change that an attached sink lacks; 0 if none."
        ),
    ] = None
    dlq_entries: int
    sink_errors: Annotated[
        dict[str, str], Field(description="The last error of each sink that is failing.")
    ]
    uptime_seconds: Annotated[
        float | None, Field(description="Uptime of the live run; null without one.")
    ] = None
    checkpoints: list[SinkCheckpoint]
    source_log: LogState | None = None
    confirmed_early: EarlyConfirmed | None = None
    verified: Annotated[
        list[VerifiedTable], Field(description="The newest proof of each table of a sink.")
    ] = []


class Trouble(BaseModel):
    """A problem of a pipeline."""

    subject: Annotated[
        str,
        Field(description="`file`, `source`, `publication`, `journal`, `sensor`, `sink ID` ..."),
    ]
    severity: Annotated[
        Literal["warning", "error"],
        Field(description="`error`: changes are not captured or delivered, or about to be lost."),
    ]
    text: str
    remedy: Annotated[
        list[str],
        Field(
            description="Commands or statements to run one after the other; empty if the text says "
            "what to do."
        ),
    ]
    since: Annotated[float | None, Field(description="Seconds since 1970.")]
    next_attempt_at: Annotated[
        float | None,
        Field(description="Time of the next automatic attempt; null if manual action is needed."),
    ]


class PipeInfo(BaseModel):
    """A pipeline."""

    name: str
    status: Status
    spec: Annotated[
        dict[str, Any] | None,
        Field(
            description="`metadata` and `spec` with all defaults, secrets masked and scripts as "
            "their hashes; null when it cannot be loaded."
        ),
    ]
    error: Annotated[str | None, Field(description="The first of its errors.")] = None
    problems: Annotated[list[Trouble], Field(description="All problems, errors first.")]
    seen_at: Annotated[
        float | None,
        Field(description="Time of the last activity of a run or tick, in seconds since 1970."),
    ] = None


class PipeDetail(PipeInfo):
    """A pipeline with its operational state."""

    ops: Ops | None


class PipeChange(PipeInfo):
    """A pipeline that was created or changed."""

    warnings: list[str]
    dagster: Annotated[str, Field(description="Whether Dagster has already loaded the change.")]


class Ready(BaseModel):
    """The server is ready."""

    status: Literal["ready"] = "ready"
    pipelines: list[PipeInfo]


class Healthy(BaseModel):
    """No pipeline has an error."""

    status: Literal["healthy"] = "healthy"
    pipelines: int
    problems: Annotated[
        dict[str, list[Trouble]] | None,
        Field(description="Warnings by pipeline; absent if there are none."),
    ] = None


class Unhealthy(BaseModel):
    """Pipelines have errors: changes are not captured, or not delivered."""

    status: Literal["unhealthy"] = "unhealthy"
    failed_pipelines: list[str]
    problems: Annotated[
        dict[str, list[Trouble]], Field(description="Problems by pipeline, errors first.")
    ]


class LogLevel(BaseModel):
    """The current log filter."""

    level: str


class Version(BaseModel):
    """The version of the server."""

    version: str


class Valid(BaseModel):
    """The result for a valid spec."""

    valid: Literal[True] = True
    pipeline: str
    source_type: str
    sink_count: int
    warnings: list[str]


class Invalid(BaseModel):
    """The result for an invalid spec."""

    valid: Literal[False] = False
    error: str


class Count(BaseModel):
    """The number of dead letters."""

    count: int


class UpTo(BaseModel):
    """The dead letters to discard: all up to this number."""

    up_to_seq: Annotated[int, Field(ge=1, lt=2**63)]


class Acked(BaseModel):
    """The number of discarded dead letters."""

    acked: int


class Purged(BaseModel):
    """The number of discarded dead letters."""

    purged: int


class Redrive(BaseModel):
    """The dead letters to deliver again; every dead entry if no field is set."""

    seqs: Annotated[
        list[Annotated[int, Field(ge=1, lt=2**63)]] | None, Field(min_length=1, max_length=1000)
    ] = None
    sink_id: str | None = None


class Redriven(BaseModel):
    """The number of dead letters that the pipeline's run will deliver again."""

    redriven: int


def info(store: StateStore, pipeline: AnyPipeline) -> PipeInfo:
    """Return a pipeline with its status."""
    state = health(store, pipeline)
    spec = shown(pipeline.spec) if isinstance(pipeline, LoadedPipeline) else None
    return PipeInfo(
        name=pipeline.name,
        status=state.status,
        spec=spec,
        error=None if state.error is None else mask(state.error),
        problems=troubles(state),
        seen_at=state.seen_at,
    )


def troubles(state: Health) -> list[Trouble]:
    """Return a pipeline's problems, with secrets masked."""
    return [
        Trouble(**{**problem.to_json(), "text": mask(problem.text)}) for problem in state.problems
    ]


def shown(spec: PipelineSpec) -> dict[str, Any]:
    """Return a spec with secrets masked and scripts replaced by hashes.

    Scripts may contain values of variables.
    """
    return kept_form(spec)


def sink_checkpoints(store: StateStore, name: str) -> list[SinkCheckpoint]:
    """Return the checkpoint of each sink of a pipeline."""
    now = store.now()
    return [_checkpoint(row, now) for row in store.checkpoints.read(name).values()]


def ops(context: ApiContext, name: str) -> Ops | None:
    """Return the operational state of a pipeline, None if the state store does not have it yet."""
    store = context.store
    row = store.pipelines.get(name)
    if row is None:
        return None
    now = store.now()
    sinks = store.checkpoints.read(name).values()
    attached = [
        sink_lag_seconds(store, row, checkpoint, now) for checkpoint in sinks if checkpoint.attached
    ]
    log, early = store.pipelines.source_log(name), store.pipelines.early_confirmation(name)
    return Ops(
        lag_seconds=max(attached, default=None),
        dlq_entries=store.dead_letters.depth(name).entries,
        sink_errors={
            checkpoint.sink: mask(checkpoint.error_line)
            for checkpoint in sinks
            if checkpoint.error_line
        },
        uptime_seconds=_uptime(context, name, now),
        checkpoints=[_checkpoint(checkpoint, now) for checkpoint in sinks],
        source_log=None if log is None else LogState(**asdict(log)),
        confirmed_early=None if early is None else EarlyConfirmed(**asdict(early)),
        verified=[VerifiedTable(**proof.to_json()) for proof in store.reconciliations.proofs(name)],
    )


def _checkpoint(row: CheckpointRow, now: float) -> SinkCheckpoint:
    position = None if row.source_position is None else orjson.loads(row.source_position)
    age = max(0.0, now - row.updated_at)
    return SinkCheckpoint(sink_id=row.sink, position=position, age_seconds=age)


def _uptime(context: ApiContext, name: str, now: float) -> float | None:
    """Return the uptime of the run that holds the lease, since the start that Dagster recorded."""
    lease = context.store.leases.get(name)
    if lease is None or lease.run_id is None or not lease.active_at(now):
        return None
    record = context.instance.get_run_record_by_id(lease.run_id)
    if record is None or record.start_time is None:
        return None
    return max(0.0, time.time() - record.start_time)
