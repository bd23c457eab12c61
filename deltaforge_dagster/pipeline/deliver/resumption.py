"""Resume a sink after it was opened.

`resume` decides where; this module reads what the decision needs, and applies it. Each deliverer
has one. `begin` reads the sink's own position after the sink was opened; `settle` then moves the
checkpoint to where the sink really is, at once or when capture has reached that place.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import cast

import pyarrow.compute as pc

from deltaforge_dagster.errors import NotAllowed, PositionLost, SinkRejected
from deltaforge_dagster.pipeline.deliver import resume
from deltaforge_dagster.pipeline.deliver.resumption import (
    JournalPlace,
    Skip,
    SkipSegments,
    SkipToEvent,
)
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.sinks.base import Origin, Sink, SinkPosition
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.checkpoints import NOTHING
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow, SegmentRow


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
        kept = checkpoint.lineage is not None and not checkpoint.overrules
        self._vanished = sink.exactly_once and position is None and kept
        if position is not None:
            segment = self._segments.segment(position.segment)
            try:
                goal = resume.decide(checkpoint, position, segment, self._journal_end(row))
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
        if sink.exactly_once and checkpoint.lineage is None:
            lineage = uuid.uuid4().hex
            self._lease.write(lambda writer: writer.checkpoints.set_lineage(self._sink_id, lineage))
            segment, ordinal = NOTHING
            checkpoint = replace(
                checkpoint,
                lineage=lineage,
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
        assert checkpoint.lineage is not None
        return Origin(
            pipeline=self._pipeline,
            uid=self._uid,
            lineage=checkpoint.lineage,
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
        lineage = (self._uid, checkpoint.lineage)
        if position is None or (position.uid, position.lineage) != lineage:
            position = self._position_at(checkpoint)
        return Origin(
            pipeline=self._pipeline,
            uid=self._uid,
            lineage=position.lineage,
            source=self._source,
            start=position.start,
            end=position.end,
            rows=0,
            redrive=replace(position, redriven=f"{attempt}:"),
        )

    def _position_at(self, checkpoint: CheckpointRow) -> SinkPosition:
        """Return the position of a sink that has everything up to its checkpoint."""
        assert checkpoint.lineage is not None
        row = self._segments.segment(checkpoint.segment)
        reached = checkpoint.source_position or _reached(self._pipeline_row())
        inside = row is not None and not checkpoint.complete
        return SinkPosition(
            uid=self._uid,
            lineage=checkpoint.lineage,
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
            goal = resume.find_segment(skip, JournalPlace.of(checkpoint), after, captured)
        else:
            segments = self._segments.segments()
            begin = segments[0].segment if segments else row.next_segment
            stays = JournalPlace(begin - 1, -1, complete=True)
            goal = resume.find_event(skip, stays, segments, captured, self._ordinal)
        if goal is None:
            self.looked_up_to = reached
        return goal

    def _ordinal(self, segment: resume.Segment, event_id: str) -> int | None:
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

    def _journal_end(self, row: PipelineRow) -> resume.JournalEnd:
        first = self._store.segments.read(self._pipeline, limit=1)
        start = first[0].start_position if first else _reached(row)
        return resume.JournalEnd(row.uid, self._source, row.next_segment, start)

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
    """Return the captured position, or else the start position.

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
