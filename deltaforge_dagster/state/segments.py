"""Segments of the journal: reading, adding, the record of their processed rows, and deletion."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import metrics
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.tables import (
    between,
    known_pipeline,
    pipelines,
    read_rows,
    segments,
    undelivered,
)
from deltaforge_dagster.state.holds import HoldWrites
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.ranges import kept_from, known_range, update_range
from deltaforge_dagster.state.records import (
    Counts,
    HoldPart,
    HoldRow,
    Lease,
    NewSegment,
    Processed,
    SegmentRow,
)
from deltaforge_dagster.tables import Contained, contained

_SAMPLE = 50
"""How many segments `about_bytes` adds up."""


class SegmentRepository:
    """The segments of all pipelines: `StateStore.segments`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(
        self,
        name: str,
        *,
        first: int | None = None,
        last: int | None = None,
        limit: int | None = None,
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last` (inclusive), by number."""
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        with self._database.read() as connection:
            return read_rows(connection, SegmentRow, *where, order=segments.c.segment, limit=limit)

    def get(self, name: str, number: int) -> SegmentRow | None:
        """Return one segment, or None if it does not exist (any more)."""
        rows = self.read(name, first=number, last=number)
        return rows[0] if rows else None

    def processed_counts(self, name: str, *, first: int, last: int) -> dict[str, Counter[str]]:
        """Return the processors' counts over segments.

        Empty if one of the segments may still be processed.
        """
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        query = select(segments.c.chain_hash, segments.c.processed_counts).where(*where)
        counts: dict[str, Counter[str]] = {}
        with self._database.read() as connection:
            for chain_hash, counted in connection.execute(query):
                if chain_hash is None:
                    return {}
                for processor, more in (counted or {}).items():
                    counts.setdefault(processor, Counter()).update(more)
        return counts

    def chains(self, name: str, *, first: int, last: int) -> set[str]:
        """Return the hashes of the chains that processed segments; "" for unprocessed ones."""
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        query = select(segments.c.chain_hash).where(*where).distinct()
        with self._database.read() as connection:
            return {
                chain_hash for (chain_hash,) in connection.execute(query) if chain_hash is not None
            }

    def total_bytes(self, name: str, *, after: int = 0) -> int:
        """Return the size of the segments with a number above `after`, by default of all."""
        size = segments.c.bytes + func.coalesce(segments.c.processed_bytes, 0)
        query = select(func.sum(size)).where(
            segments.c.pipeline == name, segments.c.segment > after
        )
        with self._database.read() as connection:
            return int(connection.execute(query).scalar() or 0)

    def about_bytes(self, name: str, *, after: int, last: int) -> int:
        """Return the approximate size of segments, extrapolated from the last `_SAMPLE` of them.

        It is cheap enough for every tick.

        Args:
            name: The pipeline.
            after: The segments with a higher number count.
            last: The number of the last segment.
        """
        # A range of numbers rather than a LIMIT, for which PostgreSQL may read and sort all rows.
        with self._database.read() as connection:
            total, count = connection.execute(
                select(
                    func.sum(segments.c.bytes + func.coalesce(segments.c.processed_bytes, 0)),
                    func.count(),
                ).where(
                    segments.c.pipeline == name,
                    segments.c.segment.between(max(after, last - _SAMPLE) + 1, last),
                )
            ).one()
        return int(total) * max(count, last - after) // count if count else 0

    def expirable(self, name: str, before: float) -> list[SegmentRow]:
        """Return the segments that are no longer needed, oldest first; always a prefix of all.

        Their ranges were closed before `before` (store's clock), every attached sink has passed
        them, and all their assets are published.
        """
        with self._database.read() as connection:
            return _expirable(connection, name, before)

    def expire(self, name: str, numbers: Sequence[int]) -> list[SegmentRow]:
        """Delete those of the given segments that are no longer needed, and return them.

        Delete the files of the returned rows afterwards: a crash in between leaves files without
        a row, which the journal sweeps, but never a row without its file.
        """
        wanted = set(numbers)
        with self._database.write() as connection:
            lock_lease(connection, name)
            gone = [row for row in _expirable(connection, name, math.inf) if row.segment in wanted]
            for table in (segments, undelivered) if gone else ():
                connection.execute(
                    delete(table).where(
                        table.c.pipeline == name, table.c.segment == bindparam("number")
                    ),
                    [{"number": row.segment} for row in gone],
                )
        return gone


class SegmentWrites:
    """Adds segments and the record of their processed rows: `FencedWriter.segments`."""

    def __init__(self, connection: Connection, lease: Lease, holds: HoldWrites) -> None:
        self._connection = connection
        self._pipeline = lease.pipeline
        self._epoch = lease.epoch
        self._holds = holds

    def add(
        self,
        segment: NewSegment,
        range: int,  # noqa: A002
        *,
        parked: Iterable[HoldPart] = (),
        released: HoldRow | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Add a segment to an open range, and advance the captured position.

        The segment's file must be durable. Adding the same segment again has no effect.

        Args:
            segment: The segment.
            range: Number of the range.
            parked: Files of parked events from before the segment's end.
            released: The hold whose last events this segment contains; it becomes `journaled`.
            tally: Metrics to count with it.

        Raises:
            NotAllowed: The range is not open, or the segment's number is not the next one.
        """
        pipeline = known_pipeline(self._connection, self._pipeline)
        row = known_range(self._connection, self._pipeline, range)
        if segment.segment == pipeline.next_segment - 1 and self._is_stored(segment, range):
            return
        expected = {pipeline.next_segment, row["last_segment"] + 1}
        if row["state"] != "open" or expected != {segment.segment}:
            raise NotAllowed(
                f"pipeline {self._pipeline!r}: segment {segment.segment} cannot follow in range "
                f"{range} ({row['state']}, ends with segment {row['last_segment']}); "
                f"the pipeline's next segment is {pipeline.next_segment}"
            )
        counts = {table: dict(ops) for table, ops in segment.counts.items()}
        versions = dict(segment.schema_versions)
        self._connection.execute(
            insert(segments).values(
                pipeline=self._pipeline,
                range=range,
                epoch=self._epoch,
                created_at=clock(),
                segment=segment.segment,
                segment_id=segment.segment_id,
                path=segment.path,
                checksum=segment.checksum,
                content_hash=segment.content_hash,
                rows=segment.rows,
                bytes=segment.bytes,
                start_position=segment.start_position,
                end_position=segment.end_position,
                counts=counts,
                schema_versions=versions,
                first_ts_us=segment.first_ts_us,
                last_ts_us=segment.last_ts_us,
                received_at=segment.received_at,
                trigger=segment.trigger,
            )
        )
        metrics.count(self._connection, self._pipeline, tally)
        first = row["last_segment"] < row["first_segment"]
        update_range(
            self._connection,
            self._pipeline,
            range,
            {
                "last_segment": segment.segment,
                "end_position": segment.end_position,
                "rows": row["rows"] + segment.rows,
                "bytes": row["bytes"] + segment.bytes,
                "counts": _sum(row["counts"], counts),
                "schema_versions": _together(row["schema_versions"], versions),
                "first_ts_us": segment.first_ts_us
                if first
                else min(row["first_ts_us"], segment.first_ts_us),
                "last_ts_us": segment.last_ts_us
                if first
                else max(row["last_ts_us"], segment.last_ts_us),
            },
        )
        self._connection.execute(
            update(pipelines)
            .where(pipelines.c.name == self._pipeline)
            .values(captured_position=segment.end_position, next_segment=segment.segment + 1)
        )
        # First, because newly parked events of the same table come after the released ones.
        if released is not None:
            self._holds.journaled(released, segment.segment)
        self._holds.add(parked)

    def leave_as_captured(self, up_to: int) -> None:
        """Decide that segments up to a number, if still undecided, are delivered unprocessed."""
        self._connection.execute(
            update(segments)
            .where(
                segments.c.pipeline == self._pipeline,
                segments.c.segment <= up_to,
                segments.c.chain_hash.is_(None),
            )
            .values(chain_hash="")
        )

    def add_processed(
        self, processed: Iterable[Processed], tallies: Mapping[int, Tally] | None = None
    ) -> None:
        """Record the processors' output for segments; the first record of a segment is final.

        The segment's tally in `tallies` is counted together with it.
        """
        for output in processed:
            noted = self._connection.execute(
                update(segments)
                .where(
                    segments.c.pipeline == self._pipeline,
                    segments.c.segment == output.segment,
                    segments.c.chain_hash.is_(None),
                )
                .values(
                    chain_hash=output.chain_hash,
                    processed_path=output.path,
                    processed_checksum=output.checksum,
                    processed_content_hash=output.content_hash,
                    processed_rows=output.rows,
                    processed_bytes=output.bytes,
                    processed_counts={name: dict(counts) for name, counts in output.counts.items()},
                )
            )
            if noted.rowcount and tallies is not None:
                metrics.count(self._connection, self._pipeline, tallies.get(output.segment))

    def _is_stored(self, segment: NewSegment, number: int) -> bool:
        query = select(segments.c.segment).where(
            segments.c.pipeline == self._pipeline,
            segments.c.segment == segment.segment,
            segments.c.segment_id == segment.segment_id,
            segments.c.range == number,
        )
        return self._connection.execute(query).first() is not None


def _expirable(connection: Connection, pipeline: str, closed_before: float) -> list[SegmentRow]:
    kept = kept_from(connection, pipeline, closed_before)
    return read_rows(
        connection,
        SegmentRow,
        segments.c.pipeline == pipeline,
        *between(segments.c.segment, None, None if kept is None else kept - 1),
        order=segments.c.segment,
    )


def _together(
    before: Mapping[str, Contained], after: Mapping[str, Contained]
) -> dict[str, Contained]:
    more = {table: contained(before.get(table), versions) for table, versions in after.items()}
    return {**before, **more}


def _sum(left: Counts, right: Counts) -> dict[str, dict[str, int]]:
    total = {table: dict(ops) for table, ops in left.items()}
    for table, ops in right.items():
        into = total.setdefault(table, {})
        for op, count in ops.items():
            into[op] = into.get(op, 0) + count
    return total
