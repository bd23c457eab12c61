"""Rows of the state store as frozen values, as the rest of the package uses them.

Positions are JSON text (`positions`), times are seconds since 1970 by the store's own clock,
`counts` maps a table's full name to changes per op: `{"public.orders": {"c": 3, "u": 1}}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from deltaforge_dagster.errors import and_run
from deltaforge_dagster.tables import Contained

DesiredState = Literal["running", "paused", "stopped"]
"""Desired state of a pipeline: `paused` delivers but captures nothing; `stopped` runs nothing."""

Attachment = Literal["attached", "paused", "detached"]
"""Whether segments are kept for a sink and delivered, kept but not delivered, or neither."""

SinkStart = Literal["tail", "journal", "snapshot"]
"""Where a sink starts that is added later: with the next captured segment (`tail`), with the oldest
segment of the journal, or with the next captured segment and a snapshot of the existing rows."""

HoldState = Literal["held", "released", "journaled"]
"""State of a hold, see `holds`."""

DeadLetterState = Literal["dead", "redrive", "waiting"]
"""State of a dead letter, see `dead_letters`."""

Trigger = Literal["timer", "limits", "shutdown", "cancelled"]
"""Why a segment ended: its age, its size, the run's end or pause, or an error of the source."""

Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One pipeline; `uid` changes whenever its journal starts from scratch."""

    name: str
    uid: str
    spec_hash: str
    start_position: str | None
    captured_position: str | None
    confirmed_position: str | None
    next_segment: int
    next_range: int
    desired_state: DesiredState
    probe_after: float
    """The sensor does not query the source before this time (back-off after empty runs)."""
    probe_wait: float
    """Last back-off in seconds; doubled by an empty run, 0 after a run that captured changes."""
    capture_pause: str | None = None
    """Why capture is paused (the journal is full), None if it is not."""
    failure: str | None = None
    """Why nothing is captured now (`Failure`, JSON text), None while capture works."""
    findings: str | None = None
    """Findings of the source's last check (list of `NotedFinding`, JSON text), None before it."""
    ticked_at: float | None = None
    """When a sensor or schedule last ticked, accurate to a few seconds; None if none ever has."""
    source_seen_at: float | None = None
    """When the source last answered, accurate to a few seconds; None if it never has."""
    file: str | None = None
    """Absolute path of the file last used for it; None if the store keeps the document."""
    outdated_since: float | None = None
    """Since when Dagster's definitions are older than the file and wait for Reload, or None."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a pipeline captures nothing.

    Attributes:
        by: Where the failure occurred: in the sensor's `tick`, or in a `run`, which reads more of
            the source than a tick does.
        kind: Kind of the error, as in metrics.
        message: What is wrong, and what to do.
        since: When the failure first occurred.
        next_attempt_at: When capture is retried automatically; None if a user must act first.
        subject: What fails: the `source`, or the `journal` (which includes the state store).
        remedy: The commands that fix it; empty if the message says what to do.
    """

    by: Literal["tick", "run"]
    kind: str
    message: str
    since: float
    next_attempt_at: float | None = None
    subject: Literal["source", "journal"] = "source"
    remedy: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NotedFinding:
    """A stored finding: the source is not set up as capture needs it (`sources.findings`).

    Attributes:
        subject: What the finding concerns: `publication`, `slot`, `tables` ...
        level: `error` if changes are not captured or about to be lost, otherwise `warning`.
        text: What was found.
        remedy: Statements for the server, or commands, that fix the problem; text where an earlier
            version noted it.
        since: When it was first found.
    """

    subject: str
    level: Literal["warning", "error"]
    text: str
    remedy: Sequence[str] | str | None
    since: float


LOOK_SECONDS = 30.0
"""How long the result of looking at the source's log remains valid."""


@dataclass(frozen=True, slots=True)
class SourceLog:
    """What was last seen of the source's log, relative to the pipeline's positions.

    Bytes include the log of tables that are not captured.

    Attributes:
        seen_at: When the log was last looked at.
        bytes: Bytes of log after the captured position; None if the source does not know.
        growing_since: Since when each look has found more of it than the one before; None if the
            last one did not.
        unread: Whether it has changes that are to be captured; None if that was not checked.
        retained: Bytes of log that the server keeps because of the pipeline; None if it keeps none.
        receiving_rows: Rows so far of a transaction that is being received; 0 if none is.
        receiving_since: When its first rows came.
        unread_since: Since when, at the earliest, there has been log after the captured position;
            None if there is none.
        unconfirmed: Bytes of log after the confirmed position; None if that is unknown.
        unconfirmed_since: Since when, at the earliest, there has been log after the confirmed
            position.
        limit: How many bytes the server keeps because of the pipeline at most; None if any amount.
        room: Bytes before the captured position that the server still has, if it discards its log
            by age.
        kept_seconds: For how long such a server keeps its log.
        limited_by: The server's setting for `limit` or `kept_seconds`.
        growth: Bytes per second by which `retained` grows; None if it does not.
        seconds_left: When `limit` or `kept_seconds` is reached if nothing changes, in seconds after
            `seen_at`; None if it is not.
    """

    seen_at: float
    bytes: int | None = None
    growing_since: float | None = None
    unread: bool | None = None
    retained: int | None = None
    receiving_rows: int = 0
    receiving_since: float | None = None
    unread_since: float | None = None
    unconfirmed: int | None = None
    unconfirmed_since: float | None = None
    limit: int | None = None
    room: int | None = None
    kept_seconds: float | None = None
    limited_by: str | None = None
    growth: float | None = None
    seconds_left: float | None = None

    def all_read(self, now: float) -> bool:
        """Return whether a look at the log that is still valid found nothing to capture."""
        fresh = now - self.seen_at <= LOOK_SECONDS
        return fresh and not self.receiving_rows and (self.bytes == 0 or self.unread is False)


@dataclass(frozen=True, slots=True)
class EarlyConfirmation:
    """Says that log is confirmed up to the journal's end, before delivery (`confirm: auto`).

    Attributes:
        since: Since when it is.
        why: Why it is, in a sentence.
    """

    since: float
    why: str


@dataclass(frozen=True, slots=True)
class LogLook:
    """One look at the source's log, kept for comparison with later ones.

    Attributes:
        at: When the log was looked at.
        end: Where the log ended, JSON text.
        retained: Bytes of log that the server kept because of the pipeline; None if it keeps none.
    """

    at: float
    end: str
    retained: int | None = None


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

    def active_at(self, now: float) -> bool:
        """Return whether a run holds the lease at `now`, a time of the store's clock."""
        return self.run_id is not None and self.expires_at > now


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment that capture has written, for insertion; capture assigns its number."""

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
    """When the segment's first change arrived from the source, by the clock of the run."""
    trigger: Trigger | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class SegmentRow(NewSegment):
    """A segment of the journal.

    What sinks receive of a segment is decided once: `chain_hash` is null until then. It is empty if
    sinks receive the rows as they were captured, or else the hash of the processor chain whose
    output the `processed_` fields describe (`processed_path` is null if the output has no rows).
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
    """The sinks that receive a segment of snapshot rows for some sinks only; empty for all."""

    def is_for(self, sink: str) -> bool:
        """Return whether a sink receives the rows; if not, its checkpoint skips them."""
        return not self.sinks or sink in self.sinks

    @property
    def delivered(self) -> SegmentRow:
        """The segment as sinks receive it: its own rows, or the output of the processors."""
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
        """Paths of the segment's files."""
        return (self.path, *((self.processed_path,) if self.processed_path else ()))


@dataclass(frozen=True, slots=True)
class Processed:
    """The output of a processor chain for one segment.

    Attributes:
        segment: Number of the segment.
        chain_hash: Hash of the chain.
        path: Path of the output file; None if the output has no rows.
        checksum: SHA-256 of the file.
        content_hash: Hash of the rows.
        rows: Number of rows.
        bytes: Size of the file.
        counts: The processors' counts, by processor.
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
    """A range of consecutive segments, a partition in Dagster; `open` until closed for good."""

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
    """How far one sink has acknowledged, without gaps.

    Every row of the journal up to and including (`segment`, `ordinal`) has arrived. If `complete`
    is true, the segment has no further rows, and the next row to send is in `segment + 1`.
    `source_position` is the end of the last complete segment. The sink has been given every segment
    from `first_segment` on (a sink that was added later or reset forward lacks earlier ones). While
    `state` is `paused`, segments are kept for the sink but not sent; while it is `detached`, they
    are not kept either, and nothing waits for the sink.

    A sink that delivers exactly once keeps a position of its own, which carries the checkpoint
    incarnation under which it was sent (`incarnation`): the random id of an unbroken series of such
    deliveries. `incarnation` is None before the first of them, and again after a reset or an
    at-least-once delivery. While `overrules` is true, a position of another incarnation in the sink
    does not count: the checkpoint was set explicitly or has moved past that position, and nothing
    has been delivered under its own incarnation yet.
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
    """When the checkpoint last moved; failures, pauses and a detachment do not change it."""
    first_segment: int
    state: Attachment = "attached"
    incarnation: str | None = None
    overrules: bool = False
    skip: str | None = None
    """The sink has every segment that ends at or before this position, even past the checkpoint."""
    notice: str | None = None
    """A message for users although delivery continues, such as that the sink had lost data."""
    sent_segment: int | None = None
    sent_ordinal: int | None = None
    """The row that the sink's own position names, if it is not the checkpoint's row: the rows after
    it were not for this sink or became dead letters.
    """
    began: str | None = None
    """Where the sink started, as text for users, if it was added to a pipeline already running."""
    snapshot_due: bool = False
    """No snapshot was requested for the sink since it started.

    Its `start` says whether it needs one.
    """
    failing_since: float | None = None
    """When the first of the sink's `failures` occurred; for a sink that was detached without
    failures, when that happened. None if there is neither, or if it is not known.
    """
    remedy: Sequence[str] | None = None
    """The commands that fix the last error; None or empty if its text says what to do."""

    @property
    def error_line(self) -> str | None:
        """The last error, with the commands that fix it."""
        return None if self.last_error is None else and_run(self.last_error, self.remedy)

    @property
    def attached(self) -> bool:
        """Whether segments are kept for the sink, and the commit policy may wait for it."""
        return self.state != "detached"

    @property
    def paused(self) -> bool:
        """Whether delivery to the sink is paused."""
        return self.state == "paused"

    @property
    def whole_segment(self) -> int:
        """Number of the last segment that has arrived completely."""
        return self.segment if self.complete else self.segment - 1

    @property
    def sent(self) -> tuple[int, int]:
        """Segment and ordinal of the row that the sink's own position names, if it keeps one."""
        if self.sent_segment is None or self.sent_ordinal is None:
            return self.segment, self.ordinal
        return self.sent_segment, self.sent_ordinal


@dataclass(frozen=True, slots=True)
class HoldPart:
    """A durable file of parked events.

    Attributes:
        kind: Kind of the hold: `table` or `schema` (see `holds`).
        subject: Subject of the hold: a table's full name.
        reason: Why the events are held, for users; only the first part's reason is stored.
        since_position: A position before all of these events, JSON text.
        path: Path relative to the journal's root.
        checksum: SHA-256 of the file.
        events: Number of events in the file.
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
    """A hold. `since` is a time, `since_position` a position before all parked events.

    `remedy` is what the user gave for decoding the events of a released hold, such as a table's
    definition: JSON text in a format of the source.
    """

    kind: str
    subject: str
    state: HoldState
    reason: str
    since: float
    since_position: str
    events: int
    bytes: int
    remedy: str | None
    last_segment: int | None

    def passed(self, whole_segment: int) -> bool:
        """Return whether a sink that has everything up to `whole_segment` has all parked events."""
        return self.state == "journaled" and whole_segment >= (self.last_segment or 0)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `--json` prints them, where the remedy is called mend."""
        names = {"remedy": "mend"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class HoldPartRow:
    """A file of a hold; `number` gives the order of the files of a pipeline."""

    kind: str
    subject: str
    number: int
    path: str
    checksum: str
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NewDeadLetter:
    """A change that one sink does not receive for now, for insertion by its deliverer.

    Attributes:
        event_id: Event id of the change.
        segment: Segment of the change in the journal.
        ordinal: Ordinal of the change in that segment.
        state: `dead`, or `waiting` for an earlier dead letter of the same key.
        error_kind: `routing`, `serialization` or `too_large`; `waiting` if it only waits.
        error_message: The reason, for users; contains no value of a row.
        table_name: Full name of the table.
        row_key: Key of the row, JSON text; None if the change has none.
        old_key: Previous key, if the change is an update of the key, else None.
        holds: Whether later changes of the key wait behind this one.
        source_cursor: Position of the change in the source's log, a JSON object as text.
        event: The native event, JSON text; without its row images if they are too large.
        payload_truncated: Whether the row images are left out.
        path: File of the journal that contains the whole change.
        checksum: SHA-256 of that file.
        place: Index of the change in the file, from 0.
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
    """An entry of the dead letter queue; `seq` increases and is never reused.

    `attempts` counts failed deliveries. `token` identifies the entry in the redrive attempt under
    way; a sink that keeps its own position stores the token of the last entry that has arrived.
    """

    seq: int
    sink: str
    attempts: int
    token: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class DeadLetterDepth:
    """Size and counters of a pipeline's dead letter queue.

    Attributes:
        entries: Number of entries, of all sinks.
        dead: Number of entries that wait for a decision of a user.
        oldest: When the oldest entry was added; None if there is none.
        evicted: Number of entries dropped so far by the policy `drop_oldest`.
        rejected: Number of changes refused so far by the policy `reject`.
        expired: Number of entries dropped so far because of their age.
    """

    entries: int
    dead: int
    oldest: float | None
    evicted: int
    rejected: int
    expired: int
