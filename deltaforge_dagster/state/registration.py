"""Pipelines and their sinks as the files name them: where a sink starts, and starts again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, delete, func, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.database import clock, upsert
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow
from deltaforge_dagster.state.rows import known_pipeline, position_before, read_checkpoints
from deltaforge_dagster.state.tables import checkpoints, leases, pipelines, segments


def register_pipeline(
    connection: Connection, name: str, spec_hash: str, sinks: Collection[str]
) -> PipelineRow:
    """Make pipeline, lease and checkpoints agree with a file (`StateStore.register_pipeline`)."""
    _insert_missing(connection, name, spec_hash)
    held = lock_lease(connection, name)
    connection.execute(
        update(pipelines).where(pipelines.c.name == name).values(spec_hash=spec_hash)
    )
    pipeline = known_pipeline(connection, name)
    existing = read_checkpoints(connection, name)
    resume, position = _minimum_resume_point(connection, pipeline, existing.values())
    for sink in sorted(set(sinks) - set(existing)):
        connection.execute(
            insert(checkpoints).values(
                pipeline=name,
                sink=sink,
                state="attached",
                first_segment=resume,
                overrules=False,  # a position in the sink may be of an earlier state store
                **_standing(resume - 1, -1, True, position),
            )
        )
    if not held.live:
        connection.execute(
            delete(checkpoints).where(
                checkpoints.c.pipeline == name, checkpoints.c.sink.not_in(sorted(sinks))
            )
        )
    return pipeline


def reset_checkpoint(
    connection: Connection, name: str, sink: str, segment: int, *, ordinal: int, complete: bool
) -> CheckpointRow:
    """Set a checkpoint by hand (`StateStore.reset_checkpoint`)."""
    held = lock_lease(connection, name)
    if held.live:
        raise NotAllowed(f"pipeline {name!r} is held by run {held.run_id}; stop it, then reset")
    before = read_checkpoints(connection, name).get(sink)
    if before is None:
        raise NotAllowed(f"pipeline {name!r} has no sink {sink!r}")
    pipeline = known_pipeline(connection, name)
    position = position_before(connection, pipeline, segment + 1 if complete else segment)
    whole_from = segment + 1 if complete or ordinal >= 0 else segment
    skips = (segment, complete, ordinal) > (before.segment, before.complete, before.ordinal)
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.pipeline == name, checkpoints.c.sink == sink)
        .values(
            first_segment=whole_from if skips else min(whole_from, before.first_segment),
            overrules=True,
            **_standing(segment, ordinal, complete, position),
        )
    )
    return read_checkpoints(connection, name)[sink]


def attach_sink(connection: Connection, name: str, sink: str, *, tail: bool) -> CheckpointRow:
    """Attach a detached sink again (`StateStore.attach_sink`)."""
    lock_lease(connection, name)
    row = read_checkpoints(connection, name).get(sink)
    if row is None:
        raise NotAllowed(f"pipeline {name!r} has no sink {sink!r}")
    if row.attached:
        raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is attached")
    pipeline = known_pipeline(connection, name)
    values: dict[str, Any] = {"failures": 0, "next_attempt_at": 0.0, "last_error": None}
    if tail:
        goes_on = pipeline.next_segment
        position = position_before(connection, pipeline, goes_on)
        values = _standing(goes_on - 1, -1, True, position) | {
            "first_segment": goes_on,
            "overrules": True,
        }
    else:
        _check_in_journal(connection, pipeline, row)
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.pipeline == name, checkpoints.c.sink == sink)
        .values(state="attached", **values)
    )
    return read_checkpoints(connection, name)[sink]


def _check_in_journal(
    connection: Connection, pipeline: PipelineRow, checkpoint: CheckpointRow
) -> None:
    goes_on = checkpoint.whole_segment + 1
    try:
        position_before(connection, pipeline, goes_on)
    except NotAllowed:
        raise NotAllowed(
            f"pipeline {pipeline.name!r}: segment {goes_on}, with which sink {checkpoint.sink!r} "
            "would go on, is no longer in the journal; --tail lets it go on with what is captured "
            "next, and everything between never arrives there"
        ) from None


def _insert_missing(connection: Connection, name: str, spec_hash: str) -> None:
    connection.execute(
        upsert(connection, pipelines)
        .values(
            name=name,
            uid=uuid4().hex,
            spec_hash=spec_hash,
            next_segment=1,
            next_range=1,
            want="running",
            probe_after=0.0,
            probe_wait=0.0,
        )
        .on_conflict_do_nothing()
    )
    connection.execute(
        upsert(connection, leases)
        .values(pipeline=name, epoch=0, expires_at=0.0)
        .on_conflict_do_nothing()
    )


def _standing(segment: int, ordinal: int, complete: bool, position: str | None) -> dict[str, Any]:
    return {
        "segment": segment,
        "ordinal": ordinal,
        "complete": complete,
        "source_position": position,
        "failures": 0,
        "next_attempt_at": 0.0,
        "last_error": None,
        "updated_at": clock(),
        "lineage": None,
        "skip": None,
        "notice": None,
    }


def _minimum_resume_point(
    connection: Connection, pipeline: PipelineRow, existing: Collection[CheckpointRow]
) -> tuple[int, str | None]:
    """Return the segment that the hindmost sink goes on with, and the position it starts at."""
    attached = [row for row in existing if row.attached]
    if attached:
        last = min(attached, key=lambda row: (row.segment, row.complete, row.ordinal))
        return last.segment + 1 if last.complete else last.segment, last.source_position
    query = select(func.min(segments.c.segment)).where(segments.c.pipeline == pipeline.name)
    first = connection.execute(query).scalar() or pipeline.next_segment
    return first, position_before(connection, pipeline, first)
