"""Going on after an open: `resume` decides, this reads what it needs and writes what it says.

One for each deliverer. `begin` looks at the sink's own position after the sink was opened;
`settle` then moves the checkpoint to where the sink really stands, at once or after capture has
got there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

import pyarrow.compute as pc

from deltaforge_dagster.errors import NotAllowed, PositionLost, SinkRejected
from deltaforge_dagster.journal import files
from deltaforge_dagster.pipeline import resume
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.resume import Place, Skip, SkipSegments, SkipToEvent
from deltaforge_dagster.positions import parse_position
from deltaforge_dagster.sinks.base import Origin, Sink, SinkPosition
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow, SegmentRow
from deltaforge_dagster.state.store import StateStore


class Resumption:
    """Finds where one sink goes on, each time it was opened.

    Args:
        sink_id: The sink.
        pipeline: The pipeline.
        source: Id of the pipeline's source.
        store: Where checkpoints and segments are.
        journal: Where events are looked up.
        lease: What the checkpoint is written under.
        warn: Told what people should hear of.
    """

    def __init__(
        self,
        *,
        sink_id: str,
        pipeline: str,
        source: str,
        store: StateStore,
        journal: files.Journal,
        lease: HeldLease,
        warn: Callable[[str], None],
    ) -> None:
        self._sink_id = sink_id
        self._pipeline = pipeline
        self._source = source
        self._store = store
        self._journal = journal
        self._lease = lease
        self._warn = warn
        self._uid = ""
        self._goal: Place | Skip | None = None
        self._vanished = False
        self._searched: set[str] = set()
        self._warned = False

    def begin(self, sink: Sink, checkpoint: CheckpointRow) -> None:
        """Look at the position of a sink that was just opened.

        Raises:
            PositionLost: The sink cannot go on; the message says why, and what to do.
            SinkRejected: What the sink holds is no position.
        """
        row = self._row()
        self._uid = row.uid
        self._searched.clear()
        self._goal = None
        position = _position(sink, checkpoint) if sink.exactly_once else None
        kept = checkpoint.lineage is not None and not checkpoint.overrules
        self._vanished = sink.exactly_once and position is None and kept
        if position is not None:
            segment = self._store.segment(self._pipeline, position.segment)
            try:
                goal = resume.decide(checkpoint, position, segment, self._facts(row))
            except PositionLost as error:
                raise self._with_remedy(error) from error
            if goal != Place.of(checkpoint):
                self._goal = goal
        if self._goal is None and checkpoint.skip is not None:
            self._goal = SkipSegments(parse_position(checkpoint.skip))

    def settle(self, sink: Sink, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Return the checkpoint to go on after, written; None while capture must go on first.

        Raises:
            PositionLost: The sink cannot go on; the message says why, and what to do.
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
            self._lease.write(lambda writer: writer.set_notice(self._sink_id, notice))
            self._say(notice)
            self._vanished = False
            checkpoint = replace(checkpoint, notice=notice)
        elif checkpoint.notice is not None and not self._warned:
            delivered = not (sink.exactly_once and checkpoint.overrules)
            if delivered:  # since a run before this one said it
                self._lease.write(lambda writer: writer.set_notice(self._sink_id, None))
                checkpoint = replace(checkpoint, notice=None)
        if sink.exactly_once and checkpoint.lineage is None:
            lineage = uuid.uuid4().hex
            self._lease.write(lambda writer: writer.set_lineage(self._sink_id, lineage))
            checkpoint = replace(checkpoint, lineage=lineage, overrules=True)
        return checkpoint

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

    def _find(self, skip: Skip, checkpoint: CheckpointRow) -> Place | None:
        row = self._row()
        captured = parse_position(_reached(row))
        if isinstance(skip, SkipSegments):
            after = self._store.segments(self._pipeline, first=checkpoint.whole_segment + 1)
            return resume.find_segment(skip, Place.of(checkpoint), after, captured)
        segments = self._store.segments(self._pipeline)
        begin = segments[0].segment if segments else row.next_segment
        stays = Place(begin - 1, -1, complete=True)
        return resume.find_event(skip, stays, segments, captured, self._ordinal)

    def _ordinal(self, segment: resume.Segment, event_id: str) -> int | None:
        """Return where an event is in a segment; what was searched in vain is not read again."""
        assert isinstance(segment, SegmentRow)
        if segment.segment_id in self._searched:
            return None
        first = 0
        for batch in self._journal.batches(segment, ["event_id"]):
            found = pc.index(batch.column("event_id"), event_id).as_py()
            if found >= 0:
                return first + int(found)
            first += batch.num_rows
        self._searched.add(segment.segment_id)
        return None

    def _resume_at(self, place: Place, checkpoint: CheckpointRow) -> CheckpointRow:
        notice = None
        if place.next_row < Place.of(checkpoint).next_row:
            holds, had = place.next_row, Place.of(checkpoint).next_row
            notice = (
                f"the sink had lost data: it has acknowledged everything before row {had[1]} of "
                f"segment {had[0]}, but holds only what is before row {holds[1]} of segment "
                f"{holds[0]}; the rest is sent again from the journal"
            )
        try:
            self._lease.write(
                lambda writer: writer.resume_at(
                    self._sink_id, place.segment, place.ordinal, place.complete, notice=notice
                )
            )
        except NotAllowed as error:  # retention was faster
            raise self._with_remedy(PositionLost(str(error))) from error
        if notice is not None:
            self._say(notice)
        return self._store.checkpoints(self._pipeline)[self._sink_id]

    def _say(self, notice: str) -> None:
        self._warned = True
        self._warn(f"sink {self._sink_id}: {notice}")

    def _facts(self, row: PipelineRow) -> resume.Journal:
        first = self._store.segments(self._pipeline, limit=1)
        start = first[0].start_position if first else _reached(row)
        return resume.Journal(row.uid, self._source, row.next_segment, start)

    def _row(self) -> PipelineRow:
        row = self._store.pipeline(self._pipeline)
        assert row is not None
        return row

    def _with_remedy(self, error: PositionLost) -> PositionLost:
        return PositionLost(
            f"sink {self._sink_id}: {error}; decide where it goes on: deltaforge checkpoint reset "
            f"{self._pipeline} --sink {self._sink_id} --to oldest|tail|range:N"
        )


def _reached(row: PipelineRow) -> str:
    """Return where capture stands; capture begins, and fixes it, before anything is delivered."""
    position = row.captured_position or row.start_position
    assert position is not None
    return position


def _position(sink: Sink, checkpoint: CheckpointRow) -> SinkPosition | None:
    """Return the sink's own position; what is none does not matter to a checkpoint that overrules."""
    try:
        return sink.position()
    except SinkRejected:
        if checkpoint.overrules:
            return None
        raise
