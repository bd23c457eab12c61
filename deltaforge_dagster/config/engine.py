"""`spec.engine`: the fields that DeltaForge does not have.

Numbers named `seconds` are seconds, `ms` milliseconds, `bytes` bytes. The rules for columns are in
`config.columns`.

Event store replicators have options similar to `checkpoint`: a store for checkpoints, a number of
events after which they are written, and seeds for the first one. Here checkpoints are always kept
in the state store, because they are written in the transaction that compares the run's lease.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import (
    AlsoAccepts,
    Block,
    Count,
    Name,
    Seconds,
    Text,
    bare_type,
    resolved,
)
from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.sources import SnapshotOptions

MIB, GIB = 1 << 20, 1 << 30

_PERIOD = re.compile(r"[1-9][0-9]{0,3}[hd]")
_TIME = r"((?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DAY_WINDOW = re.compile(f"{_TIME}-{_TIME}")


class RunLimits(Block):
    """How long a run lives, and how it holds its lease."""

    max_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 900.0
    """A run ends after this time, at most a day, and the next one continues. With 0 a run is
    resident: it ends neither after a time nor when it is idle, but when its file, the version of
    our code or the image changes, or on request ([latency](latency.md#resident-runs)).
    """
    idle_seconds: Seconds = 30.0
    """A run ends when for this long nothing was captured and no sink made progress. A run fails
    when for this long the source could not be read or the journal not be written.
    """
    lease_seconds: Seconds = 30.0
    """How long the right to work on the pipeline lasts without renewal: the time until another run
    may take over from one that died.
    """
    renew_seconds: Seconds = 5.0
    """How often the lease is renewed; at most half of `lease_seconds`."""

    @model_validator(mode="after")
    def _check_renewal(self) -> RunLimits:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise ValueError(
                "renew_seconds must be at most half of lease_seconds (one late renewal would "
                "lose the lease)"
            )
        return self

    @property
    def resident(self) -> bool:
        """Whether a run that captures ends only on request, or when what it runs has changed."""
        return self.max_seconds == 0


class RangeLimits(Block):
    """When a range closes: at the first limit that it reaches."""

    max_seconds: Seconds = 60.0
    """It closes after this time."""
    max_events: Count = 2_000_000
    """It closes at this many changes."""
    max_bytes: Count = GIB
    """It closes at this total size of its journal files."""


class SegmentLimits(Block):
    """When a segment ends.

    As soon as a sink waits for it or sends the segment before it, after `max_ms` at the latest, or
    when it is large.
    """

    min_ms: Annotated[int, Field(ge=0)] = 40
    """The minimum time between the ends of two segments, unless a size limit is reached; before
    `max_ms`, a segment ends only if a sink waits for it or sends the segment before it.
    """
    max_events: Count = 200_000
    """It ends at this many changes."""
    max_bytes: Count = 64 * MIB
    """It ends at this size of its rows in memory."""
    max_ms: Count = 1000
    """It ends after this time at the latest."""

    @model_validator(mode="after")
    def _check_times(self) -> SegmentLimits:
        if self.min_ms > self.max_ms:
            raise ValueError("min_ms must not be above max_ms")
        return self


class DeliverLimits(Block):
    """How a deliverer catches up, and how it waits after a failure."""

    max_bytes: Count = 32 * MIB
    """How much of the journal one Spark job encodes at most while a sink catches up."""
    backoff_initial_seconds: Seconds = 1.0
    """The wait after a sink's first failure; it doubles with each further failure."""
    backoff_max_seconds: Seconds = 60.0
    """The longest wait after a failure."""

    @model_validator(mode="after")
    def _check_backoff(self) -> DeliverLimits:
        if self.backoff_initial_seconds > self.backoff_max_seconds:
            raise ValueError("backoff_initial_seconds must not be above backoff_max_seconds")
        return self


class JournalLimits(Block):
    """How large the journal may become, how long it is kept, what the source may discard."""

    max_bytes: Count = 10 * GIB
    """The maximum size of all segments together.

    At the limit, delivered segments are deleted early, then optional sinks that hold the journal
    back are detached, and otherwise capture pauses until the journal has drained to 80 %
    ([guarantees](guarantees.md#when-the-journal-is-full)).
    """
    confirm: Literal["auto", "delivered", "captured"] = "auto"
    """What the source may discard from its log: changes that the commit policy counts as delivered;
    changes as soon as the journal holds them (`captured`); or `auto`: what was delivered, until the
    log that the server retains passes `confirm_above` or sinks are behind for an hour, and from
    then on what the journal holds, until they have caught up. `auto` needs a journal and a state
    store that are durable, and is `delivered` otherwise
    ([guarantees](guarantees.md#what-the-source-may-forget)).
    """
    confirm_above: Count | None = None
    """With `confirm: auto`: how much log the server may retain before it is confirmed up to what
    the journal holds. By default 25 % of the server's limit (`max_slot_wal_keep_size`), or 10 GiB
    if it has none.
    """
    durable_disk: bool = False
    """Whether the disk that has the journal, and the state store if that is SQLite, survives the
    loss of this machine, such as a replicated network volume. `confirm: auto` relies on it.
    """
    retention_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 24.0
    """How long a segment is kept for replays, unless the journal is full earlier. A segment that an
    attached sink still needs is always kept.
    """

    @model_validator(mode="after")
    def _check_threshold(self) -> JournalLimits:
        if self.confirm_above is not None and self.confirm != "auto":
            raise ValueError(f"confirm_above needs confirm: auto, and confirm is {self.confirm}")
        return self


class DeadLetterOptions(Block):
    """What happens to the changes that follow a dead letter (`spec.journal`)."""

    hold_key: bool = False
    """Later changes of the same row wait behind the dead letter in the queue, in order. Needs
    `spec.journal.enabled`.
    """


class Freshness(Block):
    """How old a captured change may be before a sink must have received it."""

    warn_seconds: Seconds = 60.0
    """The sink's check `freshness` warns beyond this."""
    error_seconds: Seconds = 600.0
    """The sink's check `freshness` fails beyond this."""

    @model_validator(mode="after")
    def _check_order(self) -> Freshness:
        if self.warn_seconds > self.error_seconds:
            raise ValueError("warn_seconds must not be above error_seconds")
        return self


class DagsterOptions(Block):
    """How Dagster shows and starts the pipeline."""

    schedule: str | None = None
    """A cron schedule of five fields: Dagster checks for work on this schedule instead of with a
    sensor.
    """
    sensor_interval_seconds: Annotated[int, Field(gt=0)] = 5
    """The minimum time between two checks for work by the sensor; Dagster's daemon itself evaluates
    sensors every five seconds. The UI shows one second less.
    """
    group: str | None = None
    """Asset group in the UI, of letters, digits and `_`; by default each pipeline has its own
    group.
    """
    events: Literal["ranges", "tables", "observations"] = "ranges"
    """What live runs and ticks report of changes that were captured and delivered: `ranges`, a
    materialization of each range for `changes` and each sink, and of each table of a sink;
    `tables`, those of tables only; or `observations`, no materializations, but observations of
    tables. A *Materialize* reports what was chosen in any case
    ([how many events](ui.md#events-and-what-they-cost)).
    """
    freshness: Freshness = Freshness()
    """When a sink counts as late."""

    @property
    def reports_ranges(self) -> bool:
        """Whether ranges are reported, and whatever else is only plotted."""
        return self.events == "ranges"

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


class ReconcileOptions(Block):
    """When the tables of sinks are compared with the source without a request."""

    every: str | None = None
    """How long after its last comparison a table is compared again, in hours or days: `12h`, `7d`.
    By default tables are compared only on request ([reconcile](reconcile.md)).
    """
    window: str | None = None
    """The time of day, in UTC, in which tables are compared: `01:00-05:00`. What is not reached by
    its end is compared on the next day. By default at any time.
    """
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How many rows a second are read from the source at most; by default any number."""

    @field_validator("every")
    @classmethod
    def _check_every(cls, every: str | None) -> str | None:
        if every is not None and not _PERIOD.fullmatch(every):
            raise ValueError("must be a number of hours or days, such as 12h or 7d")
        return every

    @field_validator("window")
    @classmethod
    def _check_window(cls, window: str | None) -> str | None:
        times = None if window is None else _DAY_WINDOW.fullmatch(window)
        if window is not None and (times is None or times[1] == times[2]):
            raise ValueError("must be two times of a day in UTC, such as 01:00-05:00")
        return window

    @model_validator(mode="after")
    def _check_use(self) -> ReconcileOptions:
        if self.every is None and (self.window is not None or self.rate is not None):
            raise ValueError("window and rate need every: without it, nothing is compared")
        return self

    @property
    def every_seconds(self) -> float | None:
        """`every` in seconds."""
        if self.every is None:
            return None
        return int(self.every[:-1]) * (3600.0 if self.every.endswith("h") else 86_400.0)

    @property
    def cron(self) -> str:
        """When to look for tables that are due: as the window begins, or each hour."""
        if self.window is None:
            return "17 * * * *"
        return f"{int(self.window[3:5])} {int(self.window[:2])} * * *"

    def seconds_left(self, second: float) -> float | None:
        """Return how long the window stays open; None without a window, 0 if it is closed.

        Args:
            second: Seconds since midnight, UTC.
        """
        if self.window is None:
            return None
        begin, end = (int(time[:2]) * 3600 + int(time[3:]) * 60 for time in self.window.split("-"))
        length, since = (end - begin) % 86_400, (second - begin) % 86_400
        return max(0.0, length - since)


class ValueOptions(Block):
    """How events represent values that have several possible forms (docs/types.md)."""

    toast: Literal["unchanged", "omit", "reselect"] = "unchanged"
    """PostgreSQL: how an unchanged TOAST value appears, that is a large value that an update did
    not change and that the log therefore lacks: as `{"_unchanged":true}`, not at all (the column is
    left out), or with the row's current value, selected again
    ([types](types.md#unchanged-large-values)).
    """
    postgres_timestamp: Literal["text", "iso"] = "text"
    """PostgreSQL: a `timestamp` as the server prints it (`"2026-03-01 12:34:56"`), or in ISO 8601
    format (`"2026-03-01T12:34:56"`; a `timestamptz` has its offset, `"2026-03-01T12:34:56+00:00"`).
    """
    mysql_enum: Literal["label", "index"] = "label"
    """MySQL: an ENUM as its label, or as the label's index, counted from 1."""
    mysql_set: Literal["labels", "bits"] = "labels"
    """MySQL: a SET as labels separated by commas, or as a number with one bit for each label."""
    mysql_timestamp: Literal["iso", "micros"] = "iso"
    """MySQL: a TIMESTAMP as `"2026-03-01T12:00:00.000000Z"`, or as microseconds since 1970."""
    mysql_binary: Literal["base64", "text"] = "base64"
    """MySQL: a BINARY or VARBINARY as `{"_base64":"..."}`, or as a string if its bytes are valid
    UTF-8.
    """


class SchemaOptions(Block):
    """What happens when the form (the columns) of a captured table changes."""

    on_schema_change: Literal["continue", "pause_table"] = "continue"
    """`pause_table`: a table's changes are held, in order, from the first row of a new form until
    somebody approves the form; other tables continue ([schemas](schemas.md#approval)).
    """

    @property
    def pauses(self) -> bool:
        """Whether changes of a new form wait for schema approval."""
        return self.on_schema_change == "pause_table"


class PostgresOptions(Block):
    """Options for PostgreSQL servers."""

    failover_slot: bool = False
    """Create the slot as a failover slot, which standbys can synchronize (PostgreSQL 17); one that
    exists already becomes a failover slot when the next run begins.
    """
    heartbeat_seconds: Seconds | None = None
    """How often a run writes a small logical message into the log, so that the slot advances even
    while only other databases of the server are written to.
    """


DEFAULT_INSTANCE = "default"

ONLY_STATE = (
    "a checkpoint is written in the transaction that compares the run's lease, "
    "so it is where the lease is, in the state store, "
    "which DELTAFORGE_STATE_URL names (a SQLite file, PostgreSQL or memory)"
)
"""The reason, for messages, why checkpoints cannot be kept in another store."""


def _known_store(value: object) -> object:
    if value != "state":
        raise ValueError(f"must be state: {ONLY_STATE}")
    return value


class Seed(Block):
    """Where a new pipeline starts, in place of the source's own rule."""

    type: Literal["none", "chaser", "position"] = "none"
    """The form in which the position is given; `none`: no seed."""
    path: Text | None = None
    """`chaser`: a copy of the chaser file, exactly 8 bytes.

    `position`: a file that holds a position as JSON text.
    """
    position: Mapping[str, str | int | None] | None = None
    """`position`: `{lsn: "0/16B6C50"}`, or `{file: mysql-bin.000003, pos: 4, gtid_set: ...}`."""

    @model_validator(mode="after")
    def _check_form(self) -> Seed:
        if self.type == "chaser" and (self.path is None or self.position is not None):
            raise ValueError(
                "type chaser needs `path`, a copy of a file of 8 bytes, and nothing else"
            )
        if self.type == "position" and (self.path is None) == (self.position is None):
            raise ValueError("type position needs `position`, or `path`, a file that holds one")
        if self.type == "none" and (self.path or self.position):
            raise ValueError("type none reads nothing: leave path and position out")
        return self


class CheckpointOptions(Block):
    """How often checkpoints are written, what the first one is, and whose they are."""

    store: Annotated[Literal["state"], BeforeValidator(_known_store)] = "state"
    """Where checkpoints are kept: in the state store, `DELTAFORGE_STATE_URL`. Any other value is an
    error.
    """
    after: Count | None = None
    """The maximum number of messages that are acknowledged before a checkpoint is written, and
    therefore the maximum that is delivered again when a run is killed inside a segment
    (at-least-once delivery). Delivery batches are no larger than this, so small numbers are slow; 1
    sends one message at a time. By default the checkpoint is written at the end of each segment,
    and every second within a larger one. It is always written when a run ends normally.
    """
    instance_id: Name = DEFAULT_INSTANCE
    """Lets several installations run the same file with the same state store and servers: instance
    `b` of `orders` is the pipeline `orders.b`, with its own checkpoints, assets, journal and names
    on servers. Each instance needs its own `slot`, or with MySQL its own source `id`, from which
    the replica's server id is derived.
    """
    seed: Annotated[Seed, BeforeValidator(bare_type), AlsoAccepts({"const": "none"})] = Seed()
    """Where a new pipeline starts, in place of the source's own rule
    ([configuration.md](configuration.md#where-a-new-pipeline-begins)). Ignored once the pipeline
    has a position.
    """


class AlertHook(Block):
    """A receiver that is notified once when a problem begins and once when it is resolved."""

    type: Literal["webhook", "slack"]
    """`webhook`: POST a JSON object; `slack`: post a message through a Slack incoming webhook."""
    url: SecretStr
    """The URL to post to.

    Usually given through an environment variable, because anyone who knows it can post there.
    """

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        parts = urlsplit(resolved(url.get_secret_value()))
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("must be http://... or https://...")
        return url

    @field_serializer("url")
    def _mask_url(self, _url: SecretStr) -> str:
        return "***"


class Engine(Block):
    """The fields that DeltaForge does not have."""

    run: RunLimits = RunLimits()
    """How long one Dagster run of the pipeline may take, and how it holds its lease."""
    range: RangeLimits = RangeLimits()
    """A range, which is a Dagster partition, closes at the first of these limits."""
    segment: SegmentLimits = SegmentLimits()
    """Limits of a segment, which always ends between two transactions."""
    deliver: DeliverLimits = DeliverLimits()
    """How sinks catch up, and how long they wait after failures."""
    journal: JournalLimits = JournalLimits()
    """How large the journal may become, and what is kept."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """How often checkpoints are written, and where a new pipeline starts."""
    dlq: DeadLetterOptions = DeadLetterOptions()
    """What happens to the changes that follow a dead letter."""
    dagster: DagsterOptions = DagsterOptions()
    """How Dagster shows and starts the pipeline."""
    alerts: tuple[AlertHook, ...] = ()
    """Who is notified when checks and runs fail ([logs.md](logs.md#alerts))."""
    columns: ColumnOptions = ColumnOptions()
    """Which column values are hidden at capture ([columns.md](columns.md))."""
    schemas: SchemaOptions = SchemaOptions()
    """What happens when the form of a table changes ([schemas.md](schemas.md))."""
    values: ValueOptions = ValueOptions()
    """How events represent values ([types.md](types.md))."""
    postgres: PostgresOptions = PostgresOptions()
    """Options for PostgreSQL servers ([postgres.md](postgres.md))."""
    reconcile: ReconcileOptions = ReconcileOptions()
    """When the tables of sinks are compared with the source ([reconcile.md](reconcile.md))."""
    snapshot: SnapshotOptions = SnapshotOptions()
    """How much of the journal's disk snapshots may use ([snapshots.md](snapshots.md))."""


_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    ("day of week", 0, 7, {name: number for number, name in enumerate(_DAYS)}),
)
_ITEM = re.compile(r"(?a)(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>[0-9]+))?")
_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def cron_problem(text: str) -> str | None:
    """Return what is wrong with a five-field schedule (crontab(5)), or None."""
    fields = text.lower().split()
    if len(fields) != len(_FIELDS):
        return f"has {len(fields)} fields, a schedule has five (minute hour day month weekday)"
    values: list[set[int]] = []
    for field, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        ranges = [_numbers(part, low, high, names) for part in field.split(",")]
        if not all(ranges):
            return f"has a wrong {name} field (numbers from {low} to {high}, `*`, `a-b`, `*/n`)"
        values.append(set().union(*ranges))
    _, _, days, months, _ = values
    if min(days) > max(_DAYS_OF_MONTH[month - 1] for month in months):
        return "names a day that none of its months has"
    return None


def _numbers(part: str, low: int, high: int, names: dict[str, int]) -> range:
    """Return the numbers that one item of a field stands for; empty if the item is invalid."""
    match = _ITEM.fullmatch(part)
    if match is None or not 1 <= int(match["step"] or 1) <= high:
        return range(0)  # `*/90` minutes would silently run once an hour
    first = names.get(match["first"], match["first"] or low)
    last = names.get(match["last"], match["last"] or (first if match["first"] else high))
    if not (str(first).isdecimal() and str(last).isdecimal()):
        return range(0)
    if not low <= int(first) <= int(last) <= high:
        return range(0)
    return range(int(first), int(last) + 1, int(match["step"] or 1))
