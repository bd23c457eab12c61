"""Reads rows of the tables as the frozen values of `records`."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, Table, select

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    dead_letters,
    hold_parts,
    holds,
    leases,
    pipelines,
    ranges,
    segments,
)
from deltaforge_dagster.state.records import (
    CheckpointRow,
    DeadLetterRow,
    HoldPartRow,
    HoldRow,
    LeaseRow,
    PipelineRow,
    RangeRow,
    SegmentRow,
)

Row = TypeVar(
    "Row",
    PipelineRow,
    LeaseRow,
    RangeRow,
    SegmentRow,
    CheckpointRow,
    HoldRow,
    HoldPartRow,
    DeadLetterRow,
)

_TABLES: dict[type, Table] = {
    PipelineRow: pipelines,
    LeaseRow: leases,
    RangeRow: ranges,
    SegmentRow: segments,
    CheckpointRow: checkpoints,
    HoldRow: holds,
    HoldPartRow: hold_parts,
    DeadLetterRow: dead_letters,
}


def read_rows(
    connection: Connection,
    kind: type[Row],
    *where: ColumnElement[bool],
    order: ColumnElement[int] | None = None,
    limit: int | None = None,
) -> list[Row]:
    """Return the rows of a kind that match all conditions.

    The fields of the kind are columns of the same name.
    """
    table = _TABLES[kind]
    names = [field.name for field in fields(kind)]
    query = select(*(table.c[name] for name in names)).where(*where).limit(limit).order_by(order)
    return [kind(**dict(zip(names, row, strict=True))) for row in connection.execute(query)]


def find_pipeline(connection: Connection, name: str) -> PipelineRow | None:
    """Return a pipeline, or None if it was never registered."""
    rows = read_rows(connection, PipelineRow, pipelines.c.name == name)
    return rows[0] if rows else None


def known_pipeline(connection: Connection, name: str) -> PipelineRow:
    """Return a pipeline that must exist.

    Raises:
        NotAllowed: It was never registered.
    """
    row = find_pipeline(connection, name)
    if row is None:
        raise NotAllowed(f"no pipeline {name!r} in the state store")
    return row


def read_checkpoints(connection: Connection, pipeline: str) -> dict[str, CheckpointRow]:
    """Return the checkpoint of every sink of a pipeline."""
    rows = read_rows(connection, CheckpointRow, checkpoints.c.pipeline == pipeline)
    return {row.sink: row for row in rows}


def between(
    numbers: ColumnElement[int], first: int | None, last: int | None
) -> list[ColumnElement[bool]]:
    """Return the conditions that a number is in the range from `first` to `last`, inclusive."""
    conditions = []
    if first is not None:
        conditions.append(numbers >= first)
    if last is not None:
        conditions.append(numbers <= last)
    return conditions


def position_before(connection: Connection, pipeline: PipelineRow, segment: int) -> str | None:
    """Return the position at which `segment` starts.

    Raises:
        NotAllowed: The segment is neither in the journal nor the next one to be captured.
    """
    if segment == pipeline.next_segment:
        return pipeline.captured_position or pipeline.start_position
    query = select(segments.c.start_position).where(
        segments.c.pipeline == pipeline.name, segments.c.segment == segment
    )
    position = connection.execute(query).scalar()
    if position is None:
        raise NotAllowed(
            f"pipeline {pipeline.name!r}: segment {segment}, with which delivery would go on, is "
            f"not in the journal (the next one to be captured is {pipeline.next_segment})"
        )
    return str(position)
