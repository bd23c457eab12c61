"""Registers pipelines and their sinks, and sets, attaches, pauses and resumes sinks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, delete, func, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import snapshots
from deltaforge_dagster.state.database import clock, upsert
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow, SinkStart
from deltaforge_dagster.state.rows import known_pipeline, position_before, read_checkpoints
from deltaforge_dagster.state.stored_specs import first_numbers
from deltaforge_dagster.state.tables import checkpoints, leases, pipelines, segments

_WORKING: Mapping[str, Any] = {
    "failures": 0,
    "next_attempt_at": 0.0,
    "last_error": None,
    "failing_since": None,
}
"""Columns of a checkpoint whose sink does not fail."""


def register_pipeline(
    connection: Connection,
    name: str,
    spec_hash: str,
    sinks: Collection[str],
    starts: Mapping[str, SinkStart],
) -> PipelineRow:
    """Make pipeline, lease and checkpoints agree with the file (`StateStore.register_pipeline`)."""
    _insert_missing(connection, name, spec_hash)
    held = lock_lease(connection, name)
    connection.execute(
        update(pipelines).where(pipelines.c.name == name).values(spec_hash=spec_hash)
    )
    pipeline = known_pipeline(connection, name)
    existing = read_checkpoints(connection, name)
    at_work = pipeline.captured_position is not None
    gone = sorted(set(existing) - set(sinks))
    for sink in sorted(set(sinks) - set(existing)):
        first, why = _beginning(connection, pipeline, existing.values(), starts.get(sink))
        began = f"added; begins with segment {first}, {why}{_renamed(gone)}" if at_work else None
        position = position_before(connection, pipeline, first)
        connection.execute(
            insert(checkpoints).values(
                pipeline=name,
                sink=sink,
                state="attached",
                first_segment=first,
                overrules=False,  # the sink may hold a position of an earlier state store
                began=began,
                snapshot_due=starts.get(sink) == "snapshot",
                **standing(first - 1, -1, True, position),
            )
        )
    if not held.live:
        connection.execute(
            delete(checkpoints).where(
                checkpoints.c.pipeline == name, checkpoints.c.sink.not_in(sorted(sinks))
            )
        )
        snapshots.cancel_without_sinks(connection, name, sinks)
    return pipeline


def reset_checkpoint(
    connection: Connection, name: str, sink: str, segment: int, *, ordinal: int, complete: bool
) -> CheckpointRow:
    """Reset a checkpoint on request of a user (`StateStore.reset_checkpoint`)."""
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
    moved = {
        "first_segment": whole_from if skips else min(whole_from, before.first_segment),
        "overrules": True,
        **standing(segment, ordinal, complete, position),
    }
    return _set_state(connection, name, sink, moved)


def attach_sink(connection: Connection, name: str, sink: str, *, tail: bool) -> CheckpointRow:
    """Attach a detached sink again (`StateStore.attach_sink`)."""
    row = _sink(connection, name, sink)
    if row.attached:
        raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is attached")
    pipeline = known_pipeline(connection, name)
    values = dict(_WORKING)
    if tail:
        goes_on = pipeline.next_segment
        position = position_before(connection, pipeline, goes_on)
        values = standing(goes_on - 1, -1, True, position) | {
            "first_segment": goes_on,
            "overrules": True,
        }
    else:
        _check_in_journal(connection, pipeline, row)
    return _set_state(connection, name, sink, {"state": "attached", **values})


def pause_sink(connection: Connection, name: str, sink: str) -> CheckpointRow:
    """Stop sending to a sink, but keep everything for it (`StateStore.pause_sink`)."""
    row = _sink(connection, name, sink)
    if row.state != "attached":
        raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is {row.state}")
    return _set_state(connection, name, sink, {"state": "paused"})


def resume_sink(connection: Connection, name: str, sink: str) -> CheckpointRow:
    """Resume delivery to a paused sink (`StateStore.resume_sink`)."""
    row = _sink(connection, name, sink)
    if row.state == "detached":
        raise NotAllowed(
            f"pipeline {name!r}: sink {sink!r} is detached: nothing was kept for it since then; "
            f"deltaforge sink attach {name} {sink} lets it go on"
        )
    if row.state != "paused":
        raise NotAllowed(f"pipeline {name!r}: sink {sink!r} is not paused")
    return _set_state(connection, name, sink, {"state": "attached", **_WORKING})


def _sink(connection: Connection, name: str, sink: str) -> CheckpointRow:
    lock_lease(connection, name)
    rows = read_checkpoints(connection, name)
    if sink not in rows:
        names = ", ".join(rows) or "none"
        raise NotAllowed(f"pipeline {name!r} has no sink {sink!r} (there is: {names})")
    return rows[sink]


def _set_state(
    connection: Connection, name: str, sink: str, values: Mapping[str, Any]
) -> CheckpointRow:
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.pipeline == name, checkpoints.c.sink == sink)
        .values(**values)
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
    segment, number = first_numbers(connection, name)
    connection.execute(
        upsert(connection, pipelines)
        .values(
            name=name,
            uid=uuid4().hex,
            spec_hash=spec_hash,
            next_segment=segment,
            next_range=number,
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


def standing(segment: int, ordinal: int, complete: bool, position: str | None) -> dict[str, Any]:
    """Return the columns of a checkpoint that is set to a new place, regardless of its old state."""
    return {
        "segment": segment,
        "ordinal": ordinal,
        "complete": complete,
        "source_position": position,
        **_WORKING,
        "updated_at": clock(),
        "lineage": None,
        "sent_segment": None,
        "sent_ordinal": None,
        "skip": None,
        "notice": None,
    }


def _beginning(
    connection: Connection,
    pipeline: PipelineRow,
    existing: Collection[CheckpointRow],
    start: SinkStart | None,
) -> tuple[int, str]:
    """Return the first segment for a new sink, and the reason as text."""
    if start == "tail":
        return pipeline.next_segment, "with what was captured after it was added (start: tail)"
    if start == "snapshot":
        return pipeline.next_segment, (
            "with what was captured after it was added; a snapshot brings it the rows of before "
            "(start: snapshot)"
        )
    attached = [row for row in existing if row.attached]
    if attached and start is None:
        last = min(attached, key=lambda row: (row.whole_segment, row.ordinal))
        return last.whole_segment + 1, f"where sink {last.sink}, the hindmost, stood"
    query = select(func.min(segments.c.segment)).where(segments.c.pipeline == pipeline.name)
    first = connection.execute(query).scalar() or pipeline.next_segment
    return first, "the journal's oldest" + (" (start: journal)" if start else "")


def _renamed(gone: Collection[str]) -> str:
    if not gone:
        return ""
    return (
        f"; {', '.join(gone)} is no longer in the file: a renamed sink is a new one, so if this is "
        "the same destination, it gets again what lies after that segment, and nothing before it"
    )
