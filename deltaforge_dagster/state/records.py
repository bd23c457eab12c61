"""Rows of the state store as frozen values; what the rest of the package sees of it.

Positions are JSON text (`positions`), times are seconds since 1970 by the store's own clock,
`counts` maps a table's full name to changes per op: `{"public.orders": {"c": 3, "u": 1}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Want = Literal["running", "paused", "stopped"]
"""What people asked for: `paused` captures nothing but still delivers; `stopped` runs nothing."""

Attachment = Literal["attached", "detached"]
"""Whether the journal keeps its segments for a sink; a detached one gets nothing."""

HoldState = Literal["held", "released", "journaled"]
"""What becomes of held events, see `holds`."""

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
    want: Want
    probe_after: float
    """The sensor does not ask the source before this time (back-off after empty runs)."""
    probe_wait: float
    """Seconds waited last; doubles after an empty run, 0 after a run that captured."""
    capture_pause: str | None = None
    """Why the last run paused capture (the journal is full), None when it did not or went on."""


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
    schema_versions: Mapping[str, str]
    first_ts_us: int
    last_ts_us: int


@dataclass(frozen=True, slots=True)
class SegmentRow(NewSegment):
    """A segment of the journal."""

    range: int
    epoch: int
    created_at: float


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
    schema_versions: Mapping[str, str]
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
    `state` is `detached` nothing is sent to it, and nothing waits or is kept for it.

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
    first_segment: int
    state: Attachment = "attached"
    lineage: str | None = None
    overrules: bool = False
    skip: str | None = None
    """The sink has every segment that ends at or before this position, beyond the checkpoint too."""
    notice: str | None = None
    """What people should hear of although the sink goes on: data that it had lost."""

    @property
    def attached(self) -> bool:
        """Whether segments are kept for it and sent to it."""
        return self.state == "attached"

    @property
    def whole_segment(self) -> int:
        """Number of the last segment that has arrived whole."""
        return self.segment if self.complete else self.segment - 1


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
