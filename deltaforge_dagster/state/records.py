"""Rows of the state store as frozen values; what the rest of the package sees of it.

Positions are JSON text (`positions`), times are seconds since 1970 by the store's own clock,
`counts` maps a table's full name to changes per op: `{"public.orders": {"c": 3, "u": 1}}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from deltaforge_dagster.tables import Contained

DesiredState = Literal["running", "paused", "stopped"]
"""Desired state of a pipeline: `paused` captures nothing but still delivers; `stopped` runs nothing."""

Attachment = Literal["attached", "paused", "detached"]
"""What the journal does for a sink: keeps segments and delivers them, keeps them, or neither."""

SinkStart = Literal["tail", "journal", "snapshot"]
"""Where a sink begins that is added later: with what is captured next, as far back as can be, or with
what is captured next and the rows that are in the tables already."""

HoldState = Literal["held", "released", "journaled"]
"""What becomes of held events, see `holds`."""

DeadLetterState = Literal["dead", "redrive", "waiting"]
"""What a dead letter waits for, see `dead_letters`."""

Trigger = Literal["timer", "limits", "shutdown", "cancelled"]
"""Why a segment ended: its time, its size, the run's end or pause, or an error of the source."""

Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One pipeline; `uid` is new whenever its journal starts afresh."""

    name: str
    uid: str
    spec_hash: str
    start_position: str | None
    captured_position: str | None
    confirmed_position: str | None
    next_segment: int
    next_range: int
    want: DesiredState
    probe_after: float
    """The sensor does not ask the source before this time (back-off after empty runs)."""
    probe_wait: float
    """Seconds waited last; doubles after an empty run, 0 after a run that captured."""
    capture_pause: str | None = None
    """Why the last run paused capture (the journal is full), None when it did not or went on."""
    failure: str | None = None
    """Why nothing is captured now (`Failure`, JSON text), None while capture works."""
    findings: str | None = None
    """What the newest look at the source found (list of `NotedFinding`, JSON text), None before the first."""
    ticked_at: float | None = None
    """When a sensor or schedule ticked last, to within some seconds; None when none ever has."""
    source_seen_at: float | None = None
    """When the source answered last, to within some seconds; None before the first time."""
    file: str | None = None
    """Absolute path of its file when it was at work last; None for one that the store keeps."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a pipeline captures nothing.

    Attributes:
        by: Who met it: the sensor's `tick`, or a `run`, which reads what a tick does not.
        kind: Of the error, as in metrics.
        message: What is wrong, and what to do.
        since: When it was met first.
        next_attempt_at: When capture is tried again by itself; None when a person must act first.
        subject: What fails: the `source`, or the `journal` with the state store.
    """

    by: Literal["tick", "run"]
    kind: str
    message: str
    since: float
    next_attempt_at: float | None = None
    subject: Literal["source", "journal"] = "source"


@dataclass(frozen=True, slots=True)
class NotedFinding:
    """A point in which the source is not as capture needs it (`sources.findings`).

    Attributes:
        subject: What it is about: `publication`, `slot`, `tables` ...
        level: `error` when changes are not captured, or are about to be lost; otherwise `warning`.
        text: What was found.
        remedy: Statements for the server, or a command, that change it.
        since: When it was found first.
    """

    subject: str
    level: Literal["warning", "error"]
    text: str
    remedy: str | None
    since: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a pipeline, as its holder remembers it."""

    pipeline: str
    run_id: str
    epoch: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """The lease as stored; `run_id` stays when it expires, and is None once released."""

    pipeline: str
    epoch: int
    run_id: str | None
    expires_at: float
    session_id: str | None

    def held_at(self, now: float) -> bool:
        """Say whether somebody holds the lease at `now`, by the store's clock."""
        return self.run_id is not None and self.expires_at > now


@dataclass(frozen=True, slots=True)
class NewSegment:
    """What capture knows of a segment it has written; the store numbers nothing itself."""

    segment: int
    segment_id: str
    path: str
    checksum: str
    content_hash: str
    rows: int
    bytes: int
    start_position: str
    end_position: str
    counts: Counts
    schema_versions: Mapping[str, Contained]
    first_ts_us: int
    last_ts_us: int
    received_at: float | None = field(default=None, kw_only=True)
    """When its first change came from the source, by the clock of the run."""
    trigger: Trigger | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class SegmentRow(NewSegment):
    """A segment of the journal.

    What sinks get of it is decided once, and noted here: `chain_hash` is null until then, empty for the
    rows as they were captured, else that of the chain of processors whose output the
    `processed_` fields describe (`processed_path` is null when nothing was left).
    """

    range: int
    epoch: int
    created_at: float
    chain_hash: str | None = None
    processed_path: str | None = None
    processed_checksum: str | None = None
    processed_content_hash: str | None = None
    processed_rows: int | None = None
    processed_bytes: int | None = None
    processed_counts: Mapping[str, Mapping[str, int]] | None = None
    sinks: Sequence[str] = ()
    """The sinks that get it, where it has rows of a snapshot that is for some; empty for all."""

    def is_for(self, sink: str) -> bool:
        """Whether a sink gets its rows; the checkpoint of one that does not passes them."""
        return not self.sinks or sink in self.sinks

    @property
    def delivered(self) -> SegmentRow:
        """The segment as sinks get it: its own rows, or those that processors made of them."""
        if not self.chain_hash:
            return self
        return replace(
            self,
            path=self.processed_path or "",
            checksum=self.processed_checksum or "",
            content_hash=self.processed_content_hash or "",
            rows=self.processed_rows or 0,
            bytes=self.processed_bytes or 0,
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files of the segment."""
        return (self.path, *((self.processed_path,) if self.processed_path else ()))


@dataclass(frozen=True, slots=True)
class Processed:
    """What a chain of processors made of a segment.

    Attributes:
        segment: Its number.
        chain_hash: Of the chain.
        path: The file; None when nothing was left.
        checksum: SHA-256 of the file.
        content_hash: Hash of the rows.
        rows: How many there are.
        bytes: Size of the file.
        counts: What the processors counted, by processor.
    """

    segment: int
    chain_hash: str
    path: str | None
    checksum: str | None
    content_hash: str | None
    rows: int
    bytes: int
    counts: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RangeRow:
    """A range: consecutive segments, Dagster's partition. `open` until it is closed, once."""

    range: int
    state: Literal["open", "closed"]
    epoch: int
    spec_hash: str
    first_segment: int
    last_segment: int
    start_position: str
    end_position: str
    rows: int
    bytes: int
    counts: Counts
    schema_versions: Mapping[str, Contained]
    first_ts_us: int
    last_ts_us: int
    content_hash: str | None
    close_reason: str | None
    opened_at: float
    closed_at: float | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """How far one sink has acknowledged, gap-free.

    Every row of the journal up to and including (`segment`, `ordinal`) has arrived. `complete`
    says that the segment has no further row; the next one to send is then in `segment + 1`.
    `source_position` is the end of the last complete segment. The sink was given every segment
    from `first_segment` on (a sink added later, or reset forward, lacks what lies before). While
    `state` is `paused` nothing is sent to it, and everything is kept for it; while it is `detached`
    nothing waits or is kept for it either.

    A sink that delivers exactly once keeps a position of its own, which carries the `lineage`
    under which it was sent: the random id of an unbroken series of such deliveries. It is None
    before the first of them, and again after a reset or a delivery at least once. While the
    checkpoint `overrules`, a position of another lineage in the sink means nothing: the checkpoint
    was set by hand, or moved past it, and nothing has been delivered under its lineage yet.
    """

    sink: str
    segment: int
    ordinal: int
    complete: bool
    source_position: str | None
    failures: int
    next_attempt_at: float
    last_error: str | None
    updated_at: float
    """When the checkpoint moved last: failures, pauses and a detachment leave it."""
    first_segment: int
    state: Attachment = "attached"
    lineage: str | None = None
    overrules: bool = False
    skip: str | None = None
    """The sink has every segment that ends at or before this position, beyond the checkpoint too."""
    notice: str | None = None
    """What people should hear of although the sink goes on: data that it had lost."""
    sent_segment: int | None = None
    sent_ordinal: int | None = None
    """The row that the sink's own position names, where that is not the checkpoint's: what came after
    it was not for this sink, or became dead letters."""
    began: str | None = None
    """Where it began when it was added to a pipeline at work, for people; None for a first sink."""
    snapshot_due: bool = False
    """No snapshot was wanted for it since it began; its `start` says whether it is to get one."""

    @property
    def attached(self) -> bool:
        """Whether segments are kept for it, and the source waits for it if the policy says so."""
        return self.state != "detached"

    @property
    def paused(self) -> bool:
        """Whether somebody wants nothing sent to it for now."""
        return self.state == "paused"

    @property
    def whole_segment(self) -> int:
        """Number of the last segment that has arrived whole."""
        return self.segment if self.complete else self.segment - 1

    @property
    def sent(self) -> tuple[int, int]:
        """Segment and ordinal that the sink's own position names, if it keeps one."""
        if self.sent_segment is None or self.sent_ordinal is None:
            return self.segment, self.ordinal
        return self.sent_segment, self.sent_ordinal


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A durable file of events that are kept back.

    Attributes:
        kind: What is held: `table`.
        subject: Which one: a table's full name.
        reason: Why, for people; kept of the first part only.
        since_position: A position before all of these events, JSON text.
        path: Relative to the journal's root.
        checksum: SHA-256 of the file's bytes.
        events: How many events it has.
        bytes: Size of the file.
    """

    kind: str
    subject: str
    reason: str
    since_position: str
    path: str
    checksum: str
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HoldRow:
    """A hold. `since` is a time, `since_position` a position before everything that is held.

    `mend` is what a released one's events are to be decoded with, JSON text in the source's words.
    """

    kind: str
    subject: str
    state: HoldState
    reason: str
    since: float
    since_position: str
    events: int
    bytes: int
    mend: str | None
    last_segment: int | None

    def passed(self, whole_segment: int) -> bool:
        """Say whether a sink that has everything up to a segment has everything that was held."""
        return self.state == "journaled" and whole_segment >= (self.last_segment or 0)


@dataclass(frozen=True, slots=True)
class HoldPartRow:
    """A file of a hold; `number` orders the files of a pipeline."""

    kind: str
    subject: str
    number: int
    path: str
    checksum: str
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NewDeadLetter:
    """A change that one sink does not get for now, as its deliverer knows it.

    Attributes:
        event_id: Of the change.
        segment: Where it stands in the journal.
        ordinal: See `segment`.
        state: `dead`, or `waiting` for an earlier one of its key.
        error_kind: `routing`, `serialization` or `too_large`; `waiting` for one that waits.
        error_message: Why, for people; no value of a row.
        table_name: Full name of its table.
        row_key: Its key, JSON text; None for a change without one.
        old_key: The key it had before an update that changed it, else None.
        holds: Whether later changes of its key wait behind it.
        source_cursor: Where it stands in the source's log, a JSON object as text.
        event: The native event, JSON text; without its row images when it is too large.
        payload_truncated: Whether that is so.
        path: File of the journal with the whole change.
        checksum: SHA-256 of that file.
        place: Which change of the file it is, from 0.
    """

    event_id: str
    segment: int
    ordinal: int
    state: DeadLetterState
    error_kind: str
    error_message: str
    table_name: str
    row_key: str | None
    old_key: str | None
    holds: bool
    source_cursor: str
    event: str
    payload_truncated: bool
    path: str
    checksum: str
    place: int


@dataclass(frozen=True, slots=True)
class DeadLetterRow(NewDeadLetter):
    """An entry of the queue; `seq` increases and is never used again.

    `attempts` counts the deliveries that failed. `token` names the attempt under way, by which a sink
    that keeps its own position says what of it has arrived.
    """

    seq: int
    sink: str
    attempts: int
    token: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class DeadLetterDepth:
    """How full a pipeline's queue is.

    Attributes:
        entries: How many there are, of all sinks.
        dead: How many of them wait for a person.
        oldest: When the oldest came; None when there is none.
        evicted: How many `drop_oldest` has dropped so far.
        rejected: How many `reject` has kept out so far.
        expired: How many were dropped for their age so far.
    """

    entries: int
    dead: int
    oldest: float | None
    evicted: int
    rejected: int
    expired: int
