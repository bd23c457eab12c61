"""Rebuilds a pipeline's journal after files of it were lost, or resets a whole pipeline on request.

The source keeps its log from the confirmed position on, so changes beyond that position that a sink
lacks can be captured again. The rebuilt journal gets a new uid and no segments of the old one. The
numbers of segments and ranges continue, since no number is ever reused. Changes beyond the
confirmed position that a sink already has are captured again as well, but skipped for this sink: up
to its checkpoint's former source position, or the sink's own position if it keeps one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy import Connection, case, delete, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state import holds, snapshots, source_state
from deltaforge_dagster.state.checkpoints import status_columns
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    known_pipeline,
    pipelines,
    published,
    ranges,
    read_checkpoints,
    segments,
    table_commits,
    undelivered,
)
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow
from deltaforge_dagster.state.since import write_early
from deltaforge_dagster.state.snapshot_records import RECOVERY
from deltaforge_dagster.state.table_commits import Destination, begin_resyncs


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of rebuilding a journal.

    Attributes:
        position: Position at which capture resumes, JSON text.
        segments: Number of segments dropped.
        ranges: Number of ranges dropped.
        lossy: Sinks that will never receive some changes that they lack.
        held: Holds that were dropped: their events may never reach a sink.
        detached: Sinks that remain detached, and can be attached only at the journal's tail.
    """

    position: str
    segments: int
    ranges: int
    lossy: list[str]
    held: list[str]
    detached: list[str]


class JournalRepository:
    """The journals of all pipelines as wholes: `StateStore.journals`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def not_recapturable(self, name: str) -> list[str]:
        """Return the sinks that lack changes that only the journal has.

        These are changes from before the confirmed position.
        """
        with self._database.read() as connection:
            pipeline = known_pipeline(connection, name)
            sinks, position = read_checkpoints(connection, name), pipeline.confirmed_position
            return [] if position is None else _lossy(connection, pipeline, sinks, position)

    def rebuild(self, name: str, *, accept_loss: bool) -> Rebuilt:
        """Rebuild a journal from the confirmed position, after files of it were lost.

        The pipeline gets a new uid, its segments and ranges are dropped, and changes beyond the
        confirmed position are captured again, under new numbers. Sinks skip those that they already
        have. The files of the old uid are not needed afterwards.

        Args:
            name: The pipeline.
            accept_loss: Proceed even if sinks lack changes from before the confirmed position,
                which the source may have discarded and the sinks will never receive, or if events
                are held.

        Raises:
            NotAllowed: A run holds the lease, there is no such pipeline, nothing was captured
                yet, or changes would be lost.
        """
        with self._database.write() as connection:
            locked = lock_lease(connection, name)
            if locked.live:
                raise NotAllowed(
                    f"pipeline {name!r} is held by run {locked.run_id}; stop it, then rebuild"
                )
            pipeline = known_pipeline(connection, name)
            position = pipeline.confirmed_position or pipeline.start_position
            if position is None:
                raise NotAllowed(f"pipeline {name!r} has captured nothing yet; there is no journal")
            kept = [f"{hold.kind} {hold.subject}" for hold in holds.read_holds(connection, name)]
            if kept and not accept_loss:
                raise NotAllowed(
                    f"pipeline {name!r} holds {', '.join(kept)}: what is captured again would no "
                    "longer be told from what sinks have; release it (deltaforge hold release, or "
                    "approve), let a run deliver it, then rebuild; --accept-loss goes on without "
                    "what is held"
                )
            holds.drop_all(connection, name)
            write_early(connection, name, None)
            sinks = read_checkpoints(connection, name)
            lossy = _lossy(connection, pipeline, sinks, position)
            if lossy and not accept_loss:
                raise NotAllowed(
                    f"pipeline {name!r}: sinks {', '.join(lossy)} lack changes that the source was "
                    f"told it may forget (before {position}), so they cannot be captured again. If "
                    "their segment files cannot be brought back: "
                    f"deltaforge recover {name} gives every sink the rows that exist now; "
                    "--accept-loss goes on without these changes"
                )
            delivered = min(
                (checkpoint.whole_segment for checkpoint in sinks.values() if checkpoint.attached),
                default=0,
            )
            snapshots.lose_journal(connection, name, delivered)
            dropped = [
                connection.execute(delete(table).where(table.c.pipeline == name)).rowcount
                for table in (segments, ranges, published, undelivered, table_commits)
            ]
            connection.execute(
                update(pipelines)
                .where(pipelines.c.name == name)
                .values(
                    uid=uuid4().hex, captured_position=position, probe_after=0.0, probe_wait=0.0
                )
            )
            for checkpoint in sinks.values():
                if checkpoint.attached:
                    _start_afresh(connection, pipeline, checkpoint, position)
            detached = sorted(sink for sink, checkpoint in sinks.items() if not checkpoint.attached)
            return Rebuilt(position, dropped[0], dropped[1], lossy, kept, detached)

    def reset(self, name: str) -> PipelineRow:
        """Reset a pipeline to the state of a new one: a new uid, no position, no journal, no holds.

        Its start position is determined as for a new pipeline. Every sink receives everything from
        there on, whatever it already holds; detached sinks are attached again. The numbers of
        segments and ranges continue. The desired state, paused sinks, table versions and dead
        letters are kept.

        Raises:
            NotAllowed: A run holds the lease, or there is no such pipeline.
        """
        with self._database.write() as connection:
            _reset(connection, name)
            return known_pipeline(connection, name)

    def recover(self, name: str, tables: Mapping[str, Mapping[Destination, str]]) -> PipelineRow:
        """Reset a pipeline, and request that every sink gets the source's rows again.

        Args:
            name: The pipeline.
            tables: The tables that are recreated before they get the rows: full names of the
                source's tables by destination, by sink.

        Raises:
            NotAllowed: A run holds the lease, or there is no such pipeline.
        """
        with self._database.write() as connection:
            _reset(connection, name)
            source_state.forget_gaps(connection, name)
            for sink, destinations in tables.items():
                begin_resyncs(connection, name, sink, destinations)
            snapshots.request_for_all(connection, name, RECOVERY)
            return known_pipeline(connection, name)


def _reset(connection: Connection, name: str) -> None:
    locked = lock_lease(connection, name)
    if locked.live:
        raise NotAllowed(f"pipeline {name!r} is held by run {locked.run_id}; stop it, then reset")
    pipeline = known_pipeline(connection, name)
    holds.drop_all(connection, name)
    snapshots.forget(connection, name)
    for table in (segments, ranges, published, undelivered, table_commits):
        connection.execute(delete(table).where(table.c.pipeline == name))
    source_state.forget_server(connection, name)
    source_state.forget_definitions(connection, name)
    write_early(connection, name, None)
    connection.execute(
        update(pipelines)
        .where(pipelines.c.name == name)
        .values(
            uid=uuid4().hex,
            start_position=None,
            captured_position=None,
            confirmed_position=None,
            capture_pause=None,
            failure=None,
            probe_after=0.0,
            probe_wait=0.0,
        )
    )
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.pipeline == name)
        .values(
            first_segment=pipeline.next_segment,
            state=case((checkpoints.c.state == "detached", "attached"), else_=checkpoints.c.state),
            overrules=True,
            began=None,
            snapshot_due=True,
            **status_columns(pipeline.next_segment - 1, -1, True, None),
        )
    )


def _lossy(
    connection: Connection,
    pipeline: PipelineRow,
    sinks: Mapping[str, CheckpointRow],
    position: str,
) -> list[str]:
    """Return the attached sinks that lack changes from before the confirmed position."""
    return sorted(
        sink
        for sink, checkpoint in sinks.items()
        if checkpoint.attached and _lacks(connection, pipeline, checkpoint, position)
    )


def _lacks(
    connection: Connection, pipeline: PipelineRow, checkpoint: CheckpointRow, position: str
) -> bool:
    """Return whether a sink lacks changes from before the confirmed position.

    The confirmed position is the end of a segment, or in a part of the log without changes that was
    passed when every sink had everything. So no segment has changes on both sides of it.
    """
    number = checkpoint.whole_segment + 1
    if number >= pipeline.next_segment:
        return False
    query = select(segments.c.end_position).where(
        segments.c.pipeline == pipeline.name, segments.c.segment == number
    )
    end_position = connection.execute(query).scalar()
    if end_position is None:
        return True
    end: Position = parse_position(end_position)
    confirmed: Position = parse_position(position)
    return end <= confirmed


def _start_afresh(
    connection: Connection, pipeline: PipelineRow, checkpoint: CheckpointRow, position: str
) -> None:
    """Let a sink continue with the next segment, except for changes that it already has.

    Its source position becomes that of the journal, because the source must not discard changes
    that will be captured again, even if this sink already has them.
    """
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.pipeline == pipeline.name, checkpoints.c.sink == checkpoint.sink)
        .values(
            segment=pipeline.next_segment - 1,
            ordinal=-1,
            complete=True,
            first_segment=pipeline.next_segment,
            source_position=position,
            sent_segment=None,
            sent_ordinal=None,
            skip=checkpoint.skip or checkpoint.source_position,
            failures=0,
            next_attempt_at=0.0,
            last_error=None,
            remedy=None,
            failing_since=None,
            updated_at=clock(),
        )
    )
