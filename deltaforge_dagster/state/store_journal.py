"""The journal in the state store: ranges, segments, holds, publication and deletion."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sqlalchemy import func, select

from deltaforge_dagster.state import holds, progress, rebuild
from deltaforge_dagster.state.database import clock, upsert
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.rebuild import Rebuilt
from deltaforge_dagster.state.records import HoldPartRow, HoldRow, RangeRow, SegmentRow
from deltaforge_dagster.state.rows import between, read_rows
from deltaforge_dagster.state.store_base import StoreBase
from deltaforge_dagster.state.tables import published, ranges, segments


class StoreJournal(StoreBase):
    """The part of a `StateStore` about the journal."""

    def ranges(
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
        with self.database.read() as connection:
            return read_rows(connection, RangeRow, *where, order=order, limit=limit)

    def range(self, name: str, number: int) -> RangeRow | None:
        """Return one range, or None if it does not exist (any more)."""
        found = self.ranges(name, first=number, last=number)
        return found[0] if found else None

    def ranges_behind(self, name: str, segment: int) -> builtins.range:
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
        with self.database.read() as connection:
            first = connection.execute(lacking).scalar()
            last = connection.execute(newest).scalar()
        return builtins.range(0) if first is None else builtins.range(first, (last or first) + 1)

    def segments(
        self,
        name: str,
        *,
        first: int | None = None,
        last: int | None = None,
        limit: int | None = None,
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last` (inclusive), by number."""
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        with self.database.read() as connection:
            return read_rows(connection, SegmentRow, *where, order=segments.c.segment, limit=limit)

    def segment(self, name: str, number: int) -> SegmentRow | None:
        """Return one segment, or None if it does not exist (any more)."""
        found = self.segments(name, first=number, last=number)
        return found[0] if found else None

    def processed_counts(self, name: str, *, first: int, last: int) -> dict[str, Counter[str]]:
        """Return the processors' counts over segments; empty if a segment is not decided yet."""
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        query = select(segments.c.chain_hash, segments.c.processed_counts).where(*where)
        counts: dict[str, Counter[str]] = {}
        with self.database.read() as connection:
            for chain_hash, counted in connection.execute(query):
                if chain_hash is None:
                    return {}
                for processor, more in (counted or {}).items():
                    counts.setdefault(processor, Counter()).update(more)
        return counts

    def chains(self, name: str, *, first: int, last: int) -> set[str]:
        """Return the hashes of the chains that processed segments; "" stands for unprocessed ones."""
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        query = select(segments.c.chain_hash).where(*where).distinct()
        with self.database.read() as connection:
            return {one for (one,) in connection.execute(query) if one is not None}

    def journal_bytes(self, name: str, *, after: int = 0) -> int:
        """Return the size of the journal's segments with a number above `after`, by default of all."""
        size = segments.c.bytes + func.coalesce(segments.c.processed_bytes, 0)
        query = select(func.sum(size)).where(
            segments.c.pipeline == name, segments.c.segment > after
        )
        with self.database.read() as connection:
            return int(connection.execute(query).scalar() or 0)

    def rebuild_journal(self, name: str, *, accept_loss: bool) -> Rebuilt:
        """Rebuild the journal from the confirmed position, after files of it were lost.

        The pipeline gets a new uid, its segments and ranges are dropped, and changes beyond the
        confirmed position are captured again, under new numbers. Sinks skip those that they already
        have. The files of the old uid are not needed afterwards.

        Args:
            name: The pipeline.
            accept_loss: Proceed even if sinks lack changes from before the confirmed position, which
                the source may have discarded and the sinks will never receive, or if events are held.

        Raises:
            NotAllowed: A run holds the lease, there is no such pipeline, nothing was captured
                yet, or changes would be lost.
        """
        with self.database.write() as connection:
            return rebuild.rebuild_journal(connection, name, accept_loss=accept_loss)

    def holds(self, name: str) -> list[HoldRow]:
        """Return a pipeline's holds, oldest first; see `state.holds`."""
        with self.database.read() as connection:
            return holds.read_holds(connection, name)

    def held_parts(
        self, name: str, kind: str | None = None, subject: str | None = None
    ) -> list[HoldPartRow]:
        """Return the files of one hold, or of all holds, in the order of their events."""
        with self.database.read() as connection:
            return holds.read_parts(connection, name, kind, subject)

    def release_hold(self, name: str, kind: str, subject: str, mend: str) -> HoldRow:
        """Release a hold, so that the next run writes its events to the journal.

        `mend` is the remedy that the source needs to decode the events, JSON text.

        Raises:
            NotAllowed: There is no such hold, or its events are already in the journal.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            return holds.release(connection, name, kind, subject, mend)

    def published(self, name: str, first: int, last: int) -> set[tuple[int, str]]:
        """Return the published (range, asset) pairs of the ranges `first` to `last`."""
        query = select(published.c.range, published.c.asset).where(
            published.c.pipeline == name, *between(published.c.range, first, last)
        )
        with self.database.read() as connection:
            return set(connection.execute(query))

    def mark_published(self, name: str, range: int, asset: str) -> bool:  # noqa: A002
        """Record that a materialization was written; return False if that was already recorded."""
        with self.database.write() as connection:
            marked = connection.execute(
                upsert(connection, published)
                .values(pipeline=name, range=range, asset=asset, published_at=clock())
                .on_conflict_do_nothing()
                .returning(published.c.range)
            )
            return marked.first() is not None

    def unpublished(self, name: str) -> list[tuple[int, str]]:
        """Return the (range, asset) pairs to publish, in log order.

        For each closed range, these are `changes` and every sink that has the whole range
        (`progress`), except the pairs that are marked as published.
        """
        with self.database.read() as connection:
            return progress.unpublished(connection, name)

    def expirable_segments(self, name: str, before: float) -> list[SegmentRow]:
        """Return the segments that are no longer needed, oldest first; always a prefix of all.

        Their ranges were closed before `before` (store's clock), every attached sink has passed
        them, and all their assets are published.
        """
        with self.database.read() as connection:
            return progress.expirable(connection, name, before)

    def expire_segments(self, name: str, numbers: Sequence[int]) -> list[SegmentRow]:
        """Delete those of the given segments that are no longer needed, and return them.

        Delete the files of the returned rows afterwards: a crash in between leaves files without
        a row, which the journal sweeps, but never a row without its file.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            return progress.expire_segments(connection, name, set(numbers))

    def expire_ranges(self, name: str, numbers: Sequence[int]) -> list[int]:
        """Delete ranges without segments and their publication records; return their numbers."""
        with self.database.write() as connection:
            lock_lease(connection, name)
            return progress.expire_ranges(connection, name, set(numbers))
