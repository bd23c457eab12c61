"""`spec.engine`: every field of our own, which the original does not have.

Numbers named `seconds` are seconds, `ms` milliseconds, `bytes` bytes.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from deltaforge_dagster.config.alerts import AlertHook
from deltaforge_dagster.config.blocks import Block, Count, Seconds
from deltaforge_dagster.config.checkpoint import CheckpointOptions
from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.cron import cron_problem
from deltaforge_dagster.config.snapshot import SnapshotOptions

MIB, GIB = 1 << 20, 1 << 30


class RunLimits(Block):
    """How long a run lives, and how it holds its lease."""

    max_seconds: Seconds = 900.0
    """A run ends after this time; the next one goes on."""
    idle_seconds: Seconds = 30.0
    """A run ends when nothing was captured and no sink moved for so long."""
    lease_seconds: Seconds = 30.0
    """How long the right to work on the pipeline lasts without renewal: the time until another run
    may take over from one that died.
    """
    renew_seconds: Seconds = 5.0
    """How often it is renewed; at most half of `lease_seconds`."""

    @model_validator(mode="after")
    def _check_renewal(self) -> RunLimits:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise ValueError(
                "renew_seconds must be at most half of lease_seconds (one late renewal would "
                "lose the lease)"
            )
        return self


class RangeLimits(Block):
    """Where a range closes: at the first limit it reaches."""

    max_seconds: Seconds = 60.0
    """After this time."""
    max_events: Count = 2_000_000
    """At this many changes."""
    max_bytes: Count = GIB
    """At this size of journal files."""


class SegmentLimits(Block):
    """Where a segment ends: between `min_ms` and `max_ms`, earlier when it is large."""

    min_ms: Annotated[int, Field(ge=0)] = 50
    """No earlier than this (except at its size limits), and only if a sink waits for work."""
    max_events: Count = 200_000
    """At this many changes."""
    max_bytes: Count = 64 * MIB
    """At this size."""
    max_ms: Count = 1000
    """At the latest after this time."""

    @model_validator(mode="after")
    def _check_times(self) -> SegmentLimits:
        if self.min_ms > self.max_ms:
            raise ValueError("min_ms must not be above max_ms")
        return self


class DeliverLimits(Block):
    """How a deliverer catches up, and how it waits after a failure."""

    max_bytes: Count = 32 * MIB
    """Journal that one Spark job prepares at most, while a sink catches up."""
    backoff_initial_seconds: Seconds = 1.0
    """Wait after a sink's first failure; doubles with each further one."""
    backoff_max_seconds: Seconds = 60.0
    """The longest wait after a failure."""

    @model_validator(mode="after")
    def _check_backoff(self) -> DeliverLimits:
        if self.backoff_initial_seconds > self.backoff_max_seconds:
            raise ValueError("backoff_initial_seconds must not be above backoff_max_seconds")
        return self


class JournalLimits(Block):
    """How large the journal may get, how long it is kept, and when the source may forget."""

    max_bytes: Count = 10 * GIB
    """Of all segments together. At the limit delivered segments go early, optional sinks that hold
    the journal are detached, and otherwise capture pauses until 80 %
    ([guarantees](guarantees.md#when-the-journal-is-full)).
    """
    confirm: Literal["delivered", "captured"] = "delivered"
    """What the source may forget: what the commit policy counts as delivered, or already what the
    journal holds.
    """
    retention_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 24.0
    """How long a segment is kept for replays, unless the journal is full before. One that an
    attached sink still needs is always kept.
    """


class DeadLetterOptions(Block):
    """What comes after a change that went to the dead letters (`spec.journal`)."""

    hold_key: bool = False
    """Later changes of the same row wait behind it in the queue, in order. Needs
    `spec.journal.enabled`.
    """


class Freshness(Block):
    """How old a change may be that was captured and that a sink still lacks."""

    warn_seconds: Seconds = 60.0
    """The sink's check `freshness` warns beyond this."""
    error_seconds: Seconds = 600.0
    """And fails beyond this."""

    @model_validator(mode="after")
    def _check_order(self) -> Freshness:
        if self.warn_seconds > self.error_seconds:
            raise ValueError("warn_seconds must not be above error_seconds")
        return self


class DagsterOptions(Block):
    """How the pipeline shows and starts in Dagster."""

    schedule: str | None = None
    """Five fields of cron: look for work on this schedule instead of a sensor."""
    sensor_interval_seconds: Annotated[int, Field(gt=0)] = 5
    """How often the sensor looks, at most; Dagster's daemon does so every five seconds. Its UI shows a second less."""
    group: str | None = None
    """Asset group in the UI, of letters, digits and `_`; by default the pipeline's own."""
    freshness: Freshness = Freshness()
    """When a sink counts as late."""

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, schedule: str | None) -> str | None:
        problem = cron_problem(schedule) if schedule is not None else None
        if problem:
            raise ValueError(problem)
        return schedule

    @field_validator("group")
    @classmethod
    def _check_group(cls, group: str | None) -> str | None:
        if group is not None and not re.fullmatch(r"[A-Za-z0-9_]+", group):
            raise ValueError("must be letters, digits and `_` (Dagster allows no other groups)")
        return group


class ValueOptions(Block):
    """How values look in events, where there is a choice (docs/types.md)."""

    toast: Literal["unchanged", "omit", "reselect"] = "unchanged"
    """PostgreSQL: a large value that an update did not touch, which the log does not have:
    `{"_unchanged":true}`, the column left out, or the row's value of now
    ([types](types.md#unchanged-large-values)).
    """
    postgres_timestamp: Literal["text", "iso"] = "text"
    """PostgreSQL: a `timestamp` as the server prints it (`"2026-03-01 12:34:56"`), or in the form of ISO 8601
    (`"2026-03-01T12:34:56"`, a `timestamptz` with its offset, `"2026-03-01T12:34:56+00:00"`).
    """
    mysql_enum: Literal["label", "index"] = "label"
    """MySQL: an ENUM as its label, or as the label's number from 1 on."""
    mysql_set: Literal["labels", "bits"] = "labels"
    """MySQL: a SET as labels separated by commas, or as a number with a bit for each."""
    mysql_timestamp: Literal["iso", "micros"] = "iso"
    """MySQL: a TIMESTAMP as `"2026-03-01T12:00:00.000000Z"`, or as microseconds since 1970."""
    mysql_binary: Literal["base64", "text"] = "base64"
    """MySQL: a BINARY or VARBINARY as `{"_base64":"..."}`, or as a string where its bytes are
    UTF-8.
    """


class SchemaOptions(Block):
    """What happens when a captured table gets another form."""

    on_schema_change: Literal["continue", "pause_table"] = "continue"
    """`pause_table`: from the first row of a new form on a table's changes are kept back, in order,
    until somebody approves the form; other tables go on ([schemas](schemas.md#approval)).
    """

    @property
    def pauses(self) -> bool:
        """Whether new forms wait for approval."""
        return self.on_schema_change == "pause_table"


class PostgresOptions(Block):
    """How a PostgreSQL server is used, where there is a choice."""

    failover_slot: bool = False
    """Make the slot one that replicas keep a copy of (PostgreSQL 17). Means nothing for a slot
    that exists.
    """
    heartbeat_seconds: Seconds | None = None
    """How often a run writes a small message of its own into the log, so that the slot moves while
    only other databases of the server write.
    """


class Engine(Block):
    """Fields of our own: everything that the original does not have."""

    run: RunLimits = RunLimits()
    """One Dagster run of the pipeline."""
    range: RangeLimits = RangeLimits()
    """A range, Dagster's partition, closes at the first of these."""
    segment: SegmentLimits = SegmentLimits()
    """A segment ends between two transactions."""
    deliver: DeliverLimits = DeliverLimits()
    """How sinks catch up, and wait after failures."""
    journal: JournalLimits = JournalLimits()
    """How large the journal may get."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """How often checkpoints are written, and where a new pipeline begins."""
    dlq: DeadLetterOptions = DeadLetterOptions()
    """What comes after a dead letter."""
    dagster: DagsterOptions = DagsterOptions()
    """How the pipeline shows and starts in Dagster."""
    alerts: tuple[AlertHook, ...] = ()
    """Who is told when checks and runs fail ([logs.md](logs.md#alerts))."""
    columns: ColumnOptions = ColumnOptions()
    """What is hidden of rows at capture ([columns.md](columns.md))."""
    schemas: SchemaOptions = SchemaOptions()
    """What happens when a table gets another form ([schemas.md](schemas.md))."""
    values: ValueOptions = ValueOptions()
    """How values look ([types.md](types.md))."""
    postgres: PostgresOptions = PostgresOptions()
    """How a PostgreSQL server is used ([postgres.md](postgres.md))."""
    snapshot: SnapshotOptions = SnapshotOptions()
    """How snapshots use the journal's disk ([snapshots.md](snapshots.md))."""
