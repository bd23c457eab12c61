"""The shapes of answers and of requests' bodies, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

Status = Literal["running", "paused", "stopped", "failed"]


class Problem(BaseModel):
    """Every error's body. `error` and `message` say the same."""

    error: str
    code: str
    message: str


class SinkCheckpoint(BaseModel):
    """How far a sink has acknowledged."""

    sink_id: str
    position: Annotated[
        dict[str, Any] | None, Field(description="Of the source; null before the first change.")
    ]
    age_seconds: Annotated[float, Field(description="Since it moved last.")]


class Ops(BaseModel):
    """How a pipeline does."""

    lag_seconds: Annotated[
        float | None,
        Field(
            description="Age of the oldest captured change that an attached sink lacks; 0: none."
        ),
    ] = None
    dlq_entries: int
    sink_errors: Annotated[
        dict[str, str], Field(description="The last error of each sink that is failing.")
    ]
    uptime_seconds: Annotated[
        float | None, Field(description="Of the run that works on it; null while none does.")
    ] = None
    checkpoints: list[SinkCheckpoint]


class Trouble(BaseModel):
    """Something that keeps a pipeline from working as it should."""

    subject: Annotated[
        str,
        Field(description="`file`, `source`, `publication`, `journal`, `sensor`, `sink ID` ..."),
    ]
    severity: Annotated[
        Literal["warning", "error"],
        Field(description="`error`: changes are not captured or delivered, or about to be lost."),
    ]
    text: str
    remedy: Annotated[str | None, Field(description="A command or statement to paste.")]
    since: Annotated[float | None, Field(description="Seconds since 1970.")]
    next_attempt_at: Annotated[
        float | None,
        Field(description="When it is tried again by itself; null when a person must act."),
    ]


class PipeInfo(BaseModel):
    """A pipeline."""

    name: str
    status: Status
    spec: Annotated[
        dict[str, Any] | None,
        Field(
            description="`metadata` and `spec` with all defaults, secrets masked and scripts as their "
            "hashes; null when it cannot be loaded."
        ),
    ]
    error: Annotated[str | None, Field(description="The first of its errors.")] = None
    problems: Annotated[list[Trouble], Field(description="All that is wrong, errors first.")]
    seen_at: Annotated[
        float | None,
        Field(description="When a run or tick was seen at work last, seconds since 1970."),
    ] = None


class PipeDetail(PipeInfo):
    """One pipeline, and how it does."""

    ops: Ops | None


class PipeChange(PipeInfo):
    """A pipeline that was made or changed."""

    warnings: list[str]
    dagster: Annotated[str, Field(description="Whether Dagster knows of it already.")]


class Ready(BaseModel):
    """The server can answer."""

    status: Literal["ready"] = "ready"
    pipelines: list[PipeInfo]


class Healthy(BaseModel):
    """No pipeline has an error."""

    status: Literal["healthy"] = "healthy"
    pipelines: int
    problems: Annotated[
        dict[str, list[Trouble]] | None,
        Field(description="Warnings, by pipeline; not there without any."),
    ] = None


class Unhealthy(BaseModel):
    """Pipelines have errors: changes are not captured, or not delivered."""

    status: Literal["unhealthy"] = "unhealthy"
    failed_pipelines: list[str]
    problems: Annotated[
        dict[str, list[Trouble]], Field(description="What is wrong, by pipeline, errors first.")
    ]


class LogLevel(BaseModel):
    """The filter of logs in force."""

    level: str


class Version(BaseModel):
    """Which release answers."""

    version: str


class Valid(BaseModel):
    """A spec that can run."""

    valid: Literal[True] = True
    pipeline: str
    source_type: str
    sink_count: int
    warnings: list[str]


class Invalid(BaseModel):
    """A spec that cannot run."""

    valid: Literal[False] = False
    error: str


class Count(BaseModel):
    """How many dead letters there are."""

    count: int


class UpTo(BaseModel):
    """Which dead letters are given up."""

    up_to_seq: Annotated[int, Field(ge=1, lt=2**63)]


class Acked(BaseModel):
    """How many dead letters were given up."""

    acked: int


class Purged(BaseModel):
    """How many dead letters were given up."""

    purged: int


class Redrive(BaseModel):
    """Which dead letters are delivered again; every dead one when nothing is said."""

    seqs: Annotated[
        list[Annotated[int, Field(ge=1, lt=2**63)]] | None, Field(min_length=1, max_length=1000)
    ] = None
    sink_id: str | None = None


class Redriven(BaseModel):
    """How many dead letters are delivered again, by the pipeline's run."""

    redriven: int
