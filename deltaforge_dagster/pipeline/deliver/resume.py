"""Decide where a sink resumes, from its checkpoint and the position that the sink itself keeps.

A sink that delivers exactly once stores its own position with the data. Usually both agree, or the
sink is slightly ahead because a run died before it wrote the checkpoint. They differ after
something was restored, reset or created again:

=====================================  ==========================================================
the sink's position is                 the sink resumes
=====================================  ==========================================================
absent                                 after the checkpoint
of this uid and lineage, sent last     after the checkpoint; changes in between were not for it
of this uid and lineage, newer         after the position; the checkpoint advances
of this uid and lineage, older         after the position: the sink has lost data, which is sent
                                       again from the journal with a warning; *stop* if the
                                       journal no longer has it
of this uid, of another lineage        after the checkpoint: it was reset, or later changes were
                                       delivered at least once, so the position is outdated
of another uid, checkpoint overrules   after the checkpoint, for the same reasons
of our lineage, but of another uid     the journal was rebuilt: after the checkpoint if the
                                       position is from before the journal, else as below
otherwise                              at the *source position*: the journal was created again, or
                                       the state store was restored from a backup
=====================================  ==========================================================

In the last case the event that the position names is looked up in the present journal, waiting
until capture has reached it, and the sink resumes after it: everything before it in the log has
arrived. If the event is not where it must be, if the journal starts after it, or if it is of
another source, the sink stops. A change that may not have been delivered is never skipped.

`lineage` is the checkpoint incarnation: a random id of the series of deliveries that a checkpoint
belongs to. This module only decides; `resumption` reads what it needs and carries out the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaforge_dagster.errors import CorruptLog, PositionLost
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import CheckpointRow


class Segment(Protocol):
    """The fields of a segment's row in the state store that the decision depends on."""

    @property
    def segment(self) -> int:
        """Number of the segment."""
        ...

    @property
    def segment_id(self) -> str:
        """Its random id."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        ...

    @property
    def start_position(self) -> str:
        """Where it starts, JSON text."""
        ...

    @property
    def end_position(self) -> str:
        """Where it ends, JSON text."""
        ...


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """The journal that a position is compared with.

    Attributes:
        uid: Of the pipeline, new whenever the journal starts afresh.
        source: Id of the pipeline's source.
        next_segment: Number of the segment to be captured next.
        start: Where its first segment starts, JSON text; where the next one will start if it is
            empty.
    """

    uid: str
    source: str
    next_segment: int
    start: str


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """A place in the journal up to which everything has arrived.

    The fields are those of `CheckpointRow`.
    """

    segment: int
    ordinal: int
    complete: bool

    @classmethod
    def of(cls, checkpoint: CheckpointRow) -> JournalPlace:
        """Return the place of a checkpoint."""
        return cls(checkpoint.segment, checkpoint.ordinal, checkpoint.complete)

    @property
    def next_row(self) -> tuple[int, int]:
        """Segment and ordinal to send next; comparable."""
        return (self.segment + 1, 0) if self.complete else (self.segment, self.ordinal + 1)


@dataclass(frozen=True, slots=True)
class SkipToEvent:
    """What a sink has according to its own position: everything up to and including an event.

    Attributes:
        event_id: The last event that has arrived.
        start: Position before which everything has arrived; segments that end there or earlier need
            no search.
        end: Position that the event precedes; equal to `start` if the event is the last one before
            it.
    """

    event_id: str
    start: Position
    end: Position


@dataclass(frozen=True, slots=True)
class SkipSegments:
    """What a sink has according to its checkpoint: whole segments that end at `end` or earlier."""

    end: Position


Skip = SkipToEvent | SkipSegments


def decide(
    checkpoint: CheckpointRow,
    position: SinkPosition,
    segment: Segment | None,
    journal: JournalEnd,
) -> JournalPlace | SkipToEvent:
    """Return where a sink resumes that keeps a position of its own.

    Args:
        checkpoint: The sink's checkpoint.
        position: The sink's own position.
        segment: The journal's segment with the number in the position, None if there is none.
        journal: The journal's identity and extent.

    Raises:
        PositionLost: The sink can resume neither after the checkpoint nor after its position.
    """
    stays = JournalPlace.of(checkpoint)
    ours = position.uid == journal.uid
    if position.lineage != checkpoint.lineage:
        return stays if ours or checkpoint.overrules else _by_source(position, journal)
    if not ours:
        return stays if checkpoint.overrules else _after_rebuild(checkpoint, position, journal)
    sent_segment, _ = sent = checkpoint.sent
    if (position.segment, position.ordinal) == sent:
        if segment is None or segment.segment_id == position.segment_id:
            return stays
    elif segment is None and position.segment < min(journal.next_segment, sent_segment + 1):
        raise PositionLost(
            f"the sink has lost data: it holds what was sent up to segment {position.segment}, "
            f"checkpointed was segment {sent_segment}, and what lies between is no longer in "
            "the journal"
        )
    if segment is None or segment.segment_id != position.segment_id:
        return _by_source(position, journal)
    complete = position.ordinal >= segment.rows - 1
    return JournalPlace(position.segment, position.ordinal, complete)


def find_event(
    skip: SkipToEvent,
    stays: JournalPlace,
    segments: Sequence[Segment],
    captured: Position,
    find: Callable[[Segment, str], int | None],
) -> JournalPlace | None:
    """Return the place of the last event that a sink has received.

    Positions only limit where the event is searched; nothing is skipped unless the event was found.

    Args:
        skip: The event.
        stays: The place before the first of `segments`.
        segments: All of the journal's segments, in order.
        captured: The captured position, read before `segments`.
        find: Returns the ordinal of an event in a segment, None when it is not there.

    Returns:
        The place; None when it will only be known once more has been captured.

    Raises:
        PositionLost: The event should be in these segments, and is not.
    """
    begin: Position = parse_position(segments[0].start_position) if segments else captured
    if skip.end <= begin:
        if skip.start < skip.end:
            raise _not_found(skip)
        return stays
    for segment in segments:
        start: Position = parse_position(segment.start_position)
        end: Position = parse_position(segment.end_position)
        if skip.end <= start:
            break
        if end < skip.end and end <= skip.start:
            continue
        ordinal = find(segment, skip.event_id)
        if ordinal is not None:
            return JournalPlace(segment.segment, ordinal, complete=ordinal == segment.rows - 1)
    if skip.end <= captured:
        raise _not_found(skip)
    return None


def find_segment(
    skip: SkipSegments, stays: JournalPlace, segments: Iterable[Segment], captured: Position
) -> JournalPlace | None:
    """Return the place after the segments that a sink has; None as for `find_event`.

    `segments` are those after its checkpoint; `stays` is returned if it has none of them.
    """
    reached = stays
    for segment in segments:
        end: Position = parse_position(segment.end_position)
        # A segment that ends where it starts contains a released hold or snapshot chunks: its
        # position does not tell whether the sink has it.
        if not end <= skip.end or segment.start_position == segment.end_position:
            return reached
        reached = JournalPlace(segment.segment, segment.rows - 1, complete=True)
    return reached if skip.end <= captured else None


def _by_source(position: SinkPosition, journal: JournalEnd) -> SkipToEvent:
    if position.source != journal.source:
        raise PositionLost(
            f"the position that the sink holds is one of source {position.source!r}, this pipeline "
            f"reads {journal.source!r}"
        )
    begin: Position = parse_position(journal.start)
    try:
        start: Position = parse_position(position.start)
        end: Position = parse_position(position.end)
    except CorruptLog as error:
        raise PositionLost(f"the position that the sink holds is unreadable: {error}") from error
    if not type(start) is type(end) is type(begin):
        raise PositionLost("the position that the sink holds is one of another kind of source")
    if end < begin:
        raise PositionLost(
            f"the sink holds what was sent up to {position.end}, the journal begins later, at "
            f"{journal.start}: whether changes lie between cannot be known"
        )
    return SkipToEvent(position.event_id, start, end)


def _after_rebuild(
    checkpoint: CheckpointRow, position: SinkPosition, journal: JournalEnd
) -> JournalPlace | SkipToEvent:
    """Decide after the journal was rebuilt and the checkpoint kept.

    The rebuild made sure that everything before the new journal has arrived. So a position before
    the new journal is sound if it is not older than what the checkpoint covered.
    """
    if checkpoint.skip is not None:
        end: Position = parse_position(position.end)
        begin: Position = parse_position(journal.start)
        had: Position = parse_position(checkpoint.skip)
        if had <= end <= begin:
            return JournalPlace.of(checkpoint)
    return _by_source(position, journal)


def _not_found(skip: SkipToEvent) -> PositionLost:
    return PositionLost(
        f"the last event that the sink holds, {skip.event_id}, is not in the journal before "
        f"{skip.end.to_json()}, where it should be"
    )
