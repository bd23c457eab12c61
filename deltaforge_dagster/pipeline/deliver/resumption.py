"""Decide where a sink resumes after it was opened: after its checkpoint or its own position.

A sink that delivers exactly once stores its own position with the data. Usually both agree, or the
sink is slightly ahead because a run died before it wrote the checkpoint. They differ after
something was restored, reset or created again:

======================================  =========================================================
the sink's position is                  the sink resumes
======================================  =========================================================
absent                                  after the checkpoint
of this uid and incarnation, sent last  after the checkpoint; changes in between were not for it
of this uid and incarnation, newer      after the position; the checkpoint advances
of this uid and incarnation, older      after the position: the sink has lost data, which is
                                        sent again from the journal with a warning; *stop* if
                                        the journal no longer has it
of this uid, of another incarnation     after the checkpoint: it was reset, or later changes were
                                        delivered at least once, so the position is outdated
of another uid, checkpoint overrules    after the checkpoint, for the same reasons
of our incarnation, but of another uid  the journal was rebuilt: after the checkpoint if the
                                        position is from before the journal, else as below
otherwise                               at the *source position*: the journal was created again,
                                        or the state store was restored from a backup
======================================  =========================================================

In the last case the event that the position names is looked up in the present journal, waiting
until capture has reached it, and the sink resumes after it: everything before it in the log has
arrived. If the event is not where it must be, if the journal starts after it, or if it is of
another source, the sink stops. A change that may not have been delivered is never skipped.

The *uid* is that of the pipeline's journal. The *incarnation* of a checkpoint is the random id of
the series of deliveries that it belongs to; a reset begins another one. `decide`, `find_event` and
`find_segment` only decide; `Resumption`, of which each deliverer has one, reads what they need and
applies the decision. Its `begin` reads the sink's own position after the sink was opened; `settle`
then moves the checkpoint to where the sink really is, at once or when capture has reached that
place.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import pyarrow.compute as pc

from deltaforge_dagster.errors import CorruptLog, NotAllowed, PositionLost, SinkRejected
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sinks.base import Origin, Sink, SinkPosition
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.checkpoints import NOTHING
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow, SegmentRow


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
        uid: Uid of the pipeline, which is new whenever the journal starts from scratch.
        source: Id of the pipeline's source.
        next_segment: Number of the segment to be captured next.
        start: Position at which its first segment starts, JSON text; if the journal is empty, where
            the next segment will start.
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
    """Return where a sink that stores its own position resumes.

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
    if position.incarnation != checkpoint.incarnation:
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


class Resumption:
    """Determines where a sink resumes, each time it was opened.

    Args:
        context: The sink.

    Attributes:
        looked_up_to: Position up to which the event to resume after was searched and not found, or
            None.
    """

    def __init__(self, context: DeliveryContext) -> None:
        self.looked_up_to: str | None = None
        run = context.run
        self._sink_id = context.sink_id
        self._pipeline = run.lease.pipeline
        self._source = context.spec.spec.source.config.id
        self._store = run.store
        self._segments = context.segments
        self._journal = run.journal
        self._lease = run.lease
        self._warn = run.warn
        self._uid = ""
        self._goal: JournalPlace | Skip | None = None
        self._vanished = False
        self._searched: set[str] = set()
        self._warned = False

    def begin(self, sink: Sink, checkpoint: CheckpointRow) -> None:
        """Read the position of a sink that was just opened.

        Raises:
            PositionLost: The sink cannot resume; the message says why, and what to do.
            SinkRejected: What the sink stores as its position cannot be parsed.
        """
        row = self._pipeline_row()
        self._uid = row.uid
        self._searched.clear()
        self._goal = None
        position = _position(sink, checkpoint) if sink.exactly_once else None
        if position is not None and (token := position.redriven):
            self._lease.write(lambda writer: writer.dead_letters.redriven_up_to(token))
        kept = checkpoint.incarnation is not None and not checkpoint.overrules
        self._vanished = sink.exactly_once and position is None and kept
        if position is not None:
            segment = self._segments.segment(position.segment)
            try:
                goal = decide(checkpoint, position, segment, self._journal_end(row))
            except PositionLost as error:
                raise self._with_remedy(error) from error
            if goal != JournalPlace.of(checkpoint):
                self._goal = goal
        if self._goal is None and checkpoint.skip is not None:
            self._goal = SkipSegments(parse_position(checkpoint.skip))

    def settle(self, sink: Sink, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Write and return the checkpoint to resume after; None while more must be captured first.

        Raises:
            PositionLost: The sink cannot resume; the message says why, and what to do.
        """
        goal = self._goal
        if isinstance(goal, SkipToEvent | SkipSegments):
            try:
                goal = self._find(goal, checkpoint)
            except PositionLost as error:
                raise self._with_remedy(error) from error
            if goal is None:
                return None
        if goal is not None:
            checkpoint = self._resume_at(goal, checkpoint)
            self._goal = None
        elif self._vanished:
            notice = (
                "the position that the sink kept is gone, so it goes on after the checkpoint; if "
                "the sink was emptied, deltaforge checkpoint reset delivers again"
            )
            self._lease.write(lambda writer: writer.checkpoints.set_notice(self._sink_id, notice))
            self._log(notice)
            self._vanished = False
            checkpoint = replace(checkpoint, notice=notice)
        elif checkpoint.notice is not None and not self._warned:
            delivered = not (sink.exactly_once and checkpoint.overrules)
            if delivered:  # since an earlier run set the notice
                self._lease.write(lambda writer: writer.checkpoints.set_notice(self._sink_id, None))
                checkpoint = replace(checkpoint, notice=None)
        if sink.exactly_once and checkpoint.incarnation is None:
            incarnation = uuid.uuid4().hex
            self._lease.write(
                lambda writer: writer.checkpoints.set_incarnation(self._sink_id, incarnation)
            )
            segment, ordinal = NOTHING
            checkpoint = replace(
                checkpoint,
                incarnation=incarnation,
                overrules=True,
                sent_segment=segment,
                sent_ordinal=ordinal,
            )
        return checkpoint

    def skip_segments(self, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Move the checkpoint past the segments that a sink without its own position has.

        `CheckpointRow.skip` says which.

        Returns:
            The checkpoint to resume after, None while more must be captured first.
        """
        assert checkpoint.skip is not None
        goal = self._find(SkipSegments(parse_position(checkpoint.skip)), checkpoint)
        return None if goal is None else self._resume_at(goal, checkpoint)

    def origin(self, row: SegmentRow, checkpoint: CheckpointRow) -> Origin:
        """Return the origin of the messages of a segment, for a sink that keeps its position."""
        assert checkpoint.incarnation is not None
        return Origin(
            pipeline=self._pipeline,
            uid=self._uid,
            incarnation=checkpoint.incarnation,
            source=self._source,
            start=row.start_position,
            end=row.end_position,
            rows=row.rows,
        )

    def redrive_origin(self, sink: Sink, checkpoint: CheckpointRow, attempt: str) -> Origin:
        """Return the origin of redelivered dead letters.

        With it, a sink stores its unchanged position.

        Args:
            sink: The open sink, for which `settle` has returned a checkpoint.
            checkpoint: Its checkpoint.
            attempt: Prefix of the tokens of these entries.
        """
        position = sink.position()
        incarnation = (self._uid, checkpoint.incarnation)
        if position is None or (position.uid, position.incarnation) != incarnation:
            position = self._position_at(checkpoint)
        return Origin(
            pipeline=self._pipeline,
            uid=self._uid,
            incarnation=position.incarnation,
            source=self._source,
            start=position.start,
            end=position.end,
            rows=0,
            redrive=replace(position, redriven=f"{attempt}:"),
        )

    def _position_at(self, checkpoint: CheckpointRow) -> SinkPosition:
        """Return the position of a sink that has everything up to its checkpoint."""
        assert checkpoint.incarnation is not None
        row = self._segments.segment(checkpoint.segment)
        reached = checkpoint.source_position or _reached(self._pipeline_row())
        inside = row is not None and not checkpoint.complete
        return SinkPosition(
            uid=self._uid,
            incarnation=checkpoint.incarnation,
            segment=checkpoint.segment,
            segment_id="" if row is None else row.segment_id,
            ordinal=checkpoint.ordinal,
            event_id=self._event_id(row, checkpoint.ordinal),
            start=row.start_position if row is not None and inside else reached,
            end=row.end_position if row is not None and inside else reached,
            source=self._source,
        )

    def _event_id(self, row: SegmentRow | None, ordinal: int) -> str:
        """Return the id of the event at an ordinal; empty if the journal no longer has it."""
        if row is None or ordinal < 0:
            return ""
        for batch in self._journal.batches(row, ["ordinal", "event_id"]):
            index = pc.index(batch.column("ordinal"), ordinal).as_py()
            if index >= 0:
                return cast("str", batch.column("event_id")[index].as_py())
        return ""

    def _find(self, skip: Skip, checkpoint: CheckpointRow) -> JournalPlace | None:
        row = self._pipeline_row()
        reached = self._segments.reached(_reached(row))
        captured = parse_position(reached)
        if isinstance(skip, SkipSegments):
            after = self._segments.segments(first=checkpoint.whole_segment + 1)
            goal = find_segment(skip, JournalPlace.of(checkpoint), after, captured)
        else:
            segments = self._segments.segments()
            begin = segments[0].segment if segments else row.next_segment
            stays = JournalPlace(begin - 1, -1, complete=True)
            goal = find_event(skip, stays, segments, captured, self._ordinal)
        if goal is None:
            self.looked_up_to = reached
        return goal

    def _ordinal(self, segment: Segment, event_id: str) -> int | None:
        """Return an event's ordinal in a segment; None if it is not there.

        A segment that was searched without success is not read again.
        """
        assert isinstance(segment, SegmentRow)
        if segment.segment_id in self._searched:
            return None
        first = 0
        for batch in self._journal.batches(segment, ["event_id"]):
            index = pc.index(batch.column("event_id"), event_id).as_py()
            if index >= 0:
                return first + int(index)
            first += batch.num_rows
        self._searched.add(segment.segment_id)
        return None

    def _resume_at(self, goal: JournalPlace, checkpoint: CheckpointRow) -> CheckpointRow:
        notice = None
        if goal.next_row < JournalPlace.of(checkpoint).next_row:
            holds, had = goal.next_row, JournalPlace.of(checkpoint).next_row
            notice = (
                f"the sink had lost data: it has acknowledged everything before row {had[1]} of "
                f"segment {had[0]}, but holds only what is before row {holds[1]} of segment "
                f"{holds[0]}; the rest is sent again from the journal"
            )
        try:
            self._lease.write(
                lambda writer: writer.checkpoints.resume_at(
                    self._sink_id, goal.segment, goal.ordinal, goal.complete, notice=notice
                )
            )
        except NotAllowed as error:  # retention has deleted the segment meanwhile
            raise self._with_remedy(PositionLost(str(error))) from error
        if notice is not None:
            self._log(notice)
        return self._store.checkpoints.read(self._pipeline)[self._sink_id]

    def _log(self, notice: str) -> None:
        self._warned = True
        self._warn(f"sink {self._sink_id}: {notice}")

    def _journal_end(self, row: PipelineRow) -> JournalEnd:
        first = self._store.segments.read(self._pipeline, limit=1)
        start = first[0].start_position if first else _reached(row)
        return JournalEnd(row.uid, self._source, row.next_segment, start)

    def _pipeline_row(self) -> PipelineRow:
        row = self._store.pipelines.get(self._pipeline)
        assert row is not None
        return row

    def _with_remedy(self, error: PositionLost) -> PositionLost:
        return PositionLost(
            f"sink {self._sink_id}: {error}; decide where it goes on: deltaforge checkpoint reset "
            f"{self._pipeline} --sink {self._sink_id} --to oldest|tail|range:N"
        )


def _reached(row: PipelineRow) -> str:
    """Return the captured position; before anything was captured, the start position.

    The start position is fixed before anything is delivered.
    """
    position = row.captured_position or row.start_position
    assert position is not None
    return position


def _position(sink: Sink, checkpoint: CheckpointRow) -> SinkPosition | None:
    """Return the sink's own position.

    One that cannot be parsed is ignored if the checkpoint overrules it.
    """
    try:
        return sink.position()
    except SinkRejected:
        if checkpoint.overrules:
            return None
        raise
