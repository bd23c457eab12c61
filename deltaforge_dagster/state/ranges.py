"""Ranges of the journal, Dagster's partitions: reading, opening, closing, publishing, deleting.

A sink *has* a range if its checkpoint is complete at or past the range's last segment, and if it
was given the whole range: a sink that is added later starts in the middle of the journal and does
not get what comes before (`first_segment` of its checkpoint). A closed range is published as
`changes`, and for each sink that has it; its segments can be deleted once every attached sink has
passed it and all of this is published.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    not_,
    or_,
    select,
    union_all,
    update,
)

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.tables import (
    between,
    checkpoints,
    known_pipeline,
    pipelines,
    published,
    ranges,
    read_rows,
    segments,
)
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.records import Lease, RangeRow

CHANGES = "changes"
"""Name of the asset of captured changes; there is also one asset per sink."""

_same_pipeline = checkpoints.c.pipeline == ranges.c.pipeline
_passed: ColumnElement[bool] = or_(
    checkpoints.c.segment > ranges.c.last_segment,
    and_(checkpoints.c.segment == ranges.c.last_segment, checkpoints.c.complete),
)
_given_whole: ColumnElement[bool] = ranges.c.first_segment >= checkpoints.c.first_segment


class RangeRepository:
    """The ranges of all pipelines: `StateStore.ranges`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(
        self,
        name: str,
        *,
        state: Literal["open", "closed"] | None = None,
        first: int | None = None,
        last: int | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> list[RangeRow]:
        """Return the ranges from `first` to `last` (inclusive), by number."""
        where = [ranges.c.pipeline == name, *between(ranges.c.range, first, last)]
        if state is not None:
            where.append(ranges.c.state == state)
        order = ranges.c.range.desc() if newest_first else ranges.c.range
        with self._database.read() as connection:
            return read_rows(connection, RangeRow, *where, order=order, limit=limit)

    def get(self, name: str, number: int) -> RangeRow | None:
        """Return one range, or None if it does not exist (any more)."""
        rows = self.read(name, first=number, last=number)
        return rows[0] if rows else None

    def behind(self, name: str, segment: int) -> builtins.range:
        """Return the numbers of the ranges that contain segments after this one."""
        lacking = (
            select(segments.c.range)
            .where(segments.c.pipeline == name, segments.c.segment > segment)
            .order_by(segments.c.segment)
            .limit(1)
        )
        newest = (
            select(ranges.c.range)
            .where(ranges.c.pipeline == name)
            .order_by(ranges.c.range.desc())
            .limit(1)
        )
        with self._database.read() as connection:
            first = connection.execute(lacking).scalar()
            last = connection.execute(newest).scalar()
        return builtins.range(0) if first is None else builtins.range(first, (last or first) + 1)

    def published(self, name: str, first: int, last: int) -> set[tuple[int, str]]:
        """Return the published (range, asset) pairs of the ranges `first` to `last`."""
        query = select(published.c.range, published.c.asset).where(
            published.c.pipeline == name, *between(published.c.range, first, last)
        )
        with self._database.read() as connection:
            return set(connection.execute(query))

    def mark_published(self, name: str, range: int, asset: str) -> bool:  # noqa: A002
        """Record that a materialization was written; return False if that was already recorded."""
        with self._database.write() as connection:
            marked = connection.execute(
                upsert(connection, published)
                .values(pipeline=name, range=range, asset=asset, published_at=clock())
                .on_conflict_do_nothing()
                .returning(published.c.range)
            )
            return marked.first() is not None

    def unpublished(self, name: str) -> list[tuple[int, str]]:
        """Return the (range, asset) pairs that are due and not yet published, in log order.

        Within each closed range, `changes` comes first, then the sinks that have it, by name.
        """
        closed = and_(ranges.c.pipeline == name, ranges.c.state == "closed")
        query = union_all(
            select(ranges.c.range, literal(0), literal(CHANGES)).where(
                closed, not_(_is_published(literal(CHANGES)))
            ),
            select(ranges.c.range, literal(1), checkpoints.c.sink)
            .join_from(ranges, checkpoints, _same_pipeline)
            .where(closed, _passed, _given_whole, not_(_is_published(checkpoints.c.sink))),
        )
        with self._database.read() as connection:
            rows = sorted(
                (number, order, asset) for number, order, asset in connection.execute(query)
            )
        return [(number, asset) for number, _, asset in rows]

    def first_given(self, name: str) -> dict[str, int]:
        """Return the first range that a sink was given, for each sink that lacks ranges before it.

        A sink that lacks only ranges that are gone is left out.
        """
        query = (
            select(
                checkpoints.c.sink,
                func.min(ranges.c.range),
                func.min(case((_given_whole, ranges.c.range))),
            )
            .join_from(ranges, checkpoints, _same_pipeline)
            .where(ranges.c.pipeline == name, checkpoints.c.first_segment > 1)
            .group_by(checkpoints.c.sink)
        )
        with self._database.read() as connection:
            return {
                sink: first
                for sink, oldest, first in connection.execute(query)
                if first is not None and first > oldest
            }

    def expire(self, name: str, numbers: Sequence[int]) -> list[int]:
        """Delete those of the ranges that have no segments left, and what was published of them.

        Returns:
            The numbers of the deleted ranges.
        """
        empty = select(ranges.c.range).where(
            ranges.c.pipeline == name,
            ranges.c.state == "closed",
            not_(
                exists().where(
                    segments.c.pipeline == ranges.c.pipeline, segments.c.range == ranges.c.range
                )
            ),
        )
        with self._database.write() as connection:
            lock_lease(connection, name)
            gone = sorted(set(numbers).intersection(connection.execute(empty).scalars()))
            for table in (ranges, published) if gone else ():
                connection.execute(
                    delete(table).where(
                        table.c.pipeline == name, table.c.range == bindparam("number")
                    ),
                    [{"number": number} for number in gone],
                )
            return gone


class RangeWrites:
    """Opens and closes the ranges of a lease holder: `FencedWriter.ranges`."""

    def __init__(self, connection: Connection, lease: Lease) -> None:
        self._connection = connection
        self._pipeline = lease.pipeline
        self._epoch = lease.epoch

    def open(self, start_position: str, spec_hash: str, first_segment: int) -> int:
        """Open the next range, which begins with `first_segment`, and return its number.

        Call it in the same block that adds this segment, since a range always has a segment.

        Raises:
            NotAllowed: A range is open, or `first_segment` is not the pipeline's next one.
        """
        pipeline = known_pipeline(self._connection, self._pipeline)
        already = self._open_row()
        if already is not None:
            if (already["first_segment"], already["epoch"]) == (first_segment, self._epoch):
                return int(already["range"])
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: range {already['range']} is still open; "
                "close it first"
            )
        if first_segment != pipeline.next_segment:
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: a range cannot begin with segment {first_segment}, "
                f"the next one is {pipeline.next_segment}"
            )
        number = pipeline.next_range
        self._connection.execute(
            insert(ranges).values(
                pipeline=self._pipeline,
                range=number,
                state="open",
                epoch=self._epoch,
                spec_hash=spec_hash,
                first_segment=first_segment,
                last_segment=first_segment - 1,
                start_position=start_position,
                end_position=start_position,
                rows=0,
                bytes=0,
                counts={},
                schema_versions={},
                first_ts_us=0,
                last_ts_us=0,
                opened_at=clock(),
            )
        )
        self._connection.execute(
            update(pipelines)
            .where(pipelines.c.name == self._pipeline)
            .values(next_range=number + 1)
        )
        return number

    def close(self, range: int, reason: str, content_hash: str) -> None:  # noqa: A002
        """Close a range for good; closing it again with the same content has no effect.

        Raises:
            NotAllowed: The range has no segment, or is already closed with another content hash.
        """
        row = known_range(self._connection, self._pipeline, range)
        if row["state"] == "closed" and row["content_hash"] == content_hash:
            return
        if row["state"] != "open" or row["last_segment"] < row["first_segment"]:
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: range {range} is {row['state']} with segments "
                f"{row['first_segment']} to {row['last_segment']} and cannot be closed"
            )
        update_range(
            self._connection,
            self._pipeline,
            range,
            {
                "state": "closed",
                "close_reason": reason,
                "content_hash": content_hash,
                "closed_at": clock(),
            },
        )

    def _open_row(self) -> RowMapping | None:
        query = select(ranges).where(ranges.c.pipeline == self._pipeline, ranges.c.state == "open")
        return self._connection.execute(query).mappings().first()


def known_range(connection: Connection, pipeline: str, number: int) -> RowMapping:
    """Return the row of a range that must exist.

    Raises:
        NotAllowed: It does not exist.
    """
    query = select(ranges).where(ranges.c.pipeline == pipeline, ranges.c.range == number)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotAllowed(f"pipeline {pipeline!r} has no range {number}")
    return row


def update_range(
    connection: Connection, pipeline: str, number: int, values: Mapping[str, Any]
) -> None:
    """Set columns of a range."""
    this = (ranges.c.pipeline == pipeline) & (ranges.c.range == number)
    connection.execute(update(ranges).where(this).values(**values))


def kept_from(connection: Connection, pipeline: str, closed_before: float) -> int | None:
    """Return the first segment that must stay in the journal, or None if all can be deleted.

    All segments before it belong to ranges that were closed before `closed_before`, that every
    attached sink has passed, and whose assets are all published.
    """
    needed = or_(
        ranges.c.state == "open",
        ranges.c.closed_at >= closed_before,
        not_(_is_published(literal(CHANGES))),
        exists().where(
            _same_pipeline,
            checkpoints.c.state != "detached",
            or_(
                not_(_passed),
                and_(_given_whole, not_(_is_published(checkpoints.c.sink))),
            ),
        ),
    )
    query = select(func.min(ranges.c.first_segment)).where(ranges.c.pipeline == pipeline, needed)
    return connection.execute(query).scalar()


def _is_published(asset: ColumnElement[str]) -> ColumnElement[bool]:
    return exists().where(
        published.c.pipeline == ranges.c.pipeline,
        published.c.range == ranges.c.range,
        published.c.asset == asset,
    )
