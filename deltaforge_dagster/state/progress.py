"""Computes which ranges have reached which sinks: what can be published, and what can be deleted.

A sink *has* a range if its checkpoint is complete at or past the range's last segment, and if it was
given the whole range: a sink that is added later starts in the middle of the journal and does not get
what comes before (`first_segment` of its checkpoint).
"""

from __future__ import annotations

import math

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    union_all,
)

from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.rows import between, read_rows
from deltaforge_dagster.state.tables import checkpoints, published, ranges, segments, undelivered

CHANGES = "changes"
"""Name of the asset of captured changes; there is also one asset per sink."""

_ours = checkpoints.c.pipeline == ranges.c.pipeline
_passed: ColumnElement[bool] = or_(
    checkpoints.c.segment > ranges.c.last_segment,
    and_(checkpoints.c.segment == ranges.c.last_segment, checkpoints.c.complete),
)
_given_whole: ColumnElement[bool] = ranges.c.first_segment >= checkpoints.c.first_segment


def _is_published(asset: ColumnElement[str]) -> ColumnElement[bool]:
    return exists().where(
        published.c.pipeline == ranges.c.pipeline,
        published.c.range == ranges.c.range,
        published.c.asset == asset,
    )


def unpublished(connection: Connection, pipeline: str) -> list[tuple[int, str]]:
    """Return the (range, asset) pairs that are due and not yet published, in log order.

    Within each range, `changes` comes first, then the sinks that have it, by name.
    """
    closed = and_(ranges.c.pipeline == pipeline, ranges.c.state == "closed")
    query = union_all(
        select(ranges.c.range, literal(0), literal(CHANGES)).where(
            closed, not_(_is_published(literal(CHANGES)))
        ),
        select(ranges.c.range, literal(1), checkpoints.c.sink)
        .join_from(ranges, checkpoints, _ours)
        .where(closed, _passed, _given_whole, not_(_is_published(checkpoints.c.sink))),
    )
    rows = sorted((number, order, asset) for number, order, asset in connection.execute(query))
    return [(number, asset) for number, _, asset in rows]


def _kept_from(connection: Connection, pipeline: str, closed_before: float) -> int | None:
    """Return the first segment that must stay in the journal, or None if all can be deleted.

    All segments before it belong to ranges that were closed before `closed_before`, that every
    attached sink has passed, and whose assets are all published.
    """
    needed = or_(
        ranges.c.state == "open",
        ranges.c.closed_at >= closed_before,
        not_(_is_published(literal(CHANGES))),
        exists().where(
            _ours,
            checkpoints.c.state != "detached",
            or_(
                not_(_passed),
                and_(_given_whole, not_(_is_published(checkpoints.c.sink))),
            ),
        ),
    )
    query = select(func.min(ranges.c.first_segment)).where(ranges.c.pipeline == pipeline, needed)
    return connection.execute(query).scalar()


def expirable(connection: Connection, pipeline: str, closed_before: float) -> list[SegmentRow]:
    """Return the segments before the first one that must stay in the journal, oldest first."""
    kept = _kept_from(connection, pipeline, closed_before)
    return read_rows(
        connection,
        SegmentRow,
        segments.c.pipeline == pipeline,
        *between(segments.c.segment, None, None if kept is None else kept - 1),
        order=segments.c.segment,
    )


def expire_segments(connection: Connection, pipeline: str, wanted: set[int]) -> list[SegmentRow]:
    """Delete those of the given segments that are no longer needed, and return them."""
    gone = [row for row in expirable(connection, pipeline, math.inf) if row.segment in wanted]
    if gone:
        for table in (segments, undelivered):
            connection.execute(
                delete(table).where(
                    table.c.pipeline == pipeline, table.c.segment == bindparam("number")
                ),
                [{"number": row.segment} for row in gone],
            )
    return gone


def expire_ranges(connection: Connection, pipeline: str, wanted: set[int]) -> list[int]:
    """Delete those of the given ranges that have no segments left, with their publication records."""
    empty = select(ranges.c.range).where(
        ranges.c.pipeline == pipeline,
        ranges.c.state == "closed",
        not_(
            exists().where(
                segments.c.pipeline == ranges.c.pipeline, segments.c.range == ranges.c.range
            )
        ),
    )
    gone = sorted(wanted.intersection(connection.execute(empty).scalars()))
    for table in (ranges, published) if gone else ():
        connection.execute(
            delete(table).where(table.c.pipeline == pipeline, table.c.range == bindparam("number")),
            [{"number": number} for number in gone],
        )
    return gone
