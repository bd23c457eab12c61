"""The state store: the truth about how far every pipeline has come.

A run writes only through `StateStore.fenced`, which proves that it holds the pipeline's lease
(`fenced`). Everybody may read. What people and the sensor write (what is wanted, when to probe,
what was published) does not need the lease; a checkpoint is reset, and old segments are
forgotten, under the same lock.

Every method raises `StoreUnavailable` when the database cannot be reached or stays locked (the
next call tries again), and never puts a password into a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

from sqlalchemy import func, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state import definitions as table_notes
from deltaforge_dagster.state import holds, progress, rebuild, registration, schemas
from deltaforge_dagster.state.database import Database, clock, upsert
from deltaforge_dagster.state.fenced import FencedWriter
from deltaforge_dagster.state.leases import check_lease, lock_lease, take_lease
from deltaforge_dagster.state.migrate import migrate
from deltaforge_dagster.state.rebuild import Rebuilt
from deltaforge_dagster.state.records import (
    CheckpointRow,
    HoldPartRow,
    HoldRow,
    Lease,
    LeaseRow,
    PipelineRow,
    RangeRow,
    SegmentRow,
    Want,
)
from deltaforge_dagster.state.rows import (
    between,
    find_pipeline,
    known_pipeline,
    read_checkpoints,
    read_rows,
)
from deltaforge_dagster.state.tables import (
    checkpoints,
    leases,
    pipelines,
    published,
    ranges,
    segments,
)
from deltaforge_dagster.tables import SchemaStamp, TableSchema


class StateStore:
    """One open state store. Thread-safe; belongs to the process that opened it.

    Attributes:
        database: For the primitives: `Kv(store.database, namespace)`.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, and make or upgrade the tables; safe when several processes do it at once.

        Args:
            url: `sqlite:///path` (directories are created), `postgresql://user:password@host/db`,
                or `memory`: a new store, for this process alone, lost when it is closed.

        Raises:
            SettingsError: No such kind of URL, or a newer release has upgraded the tables.
            AuthFailed: PostgreSQL refused the credentials.
            StoreUnavailable: It cannot be reached or written.
        """
        database = Database(url)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    def now(self) -> float:
        """Return the time of the store's clock, seconds since 1970."""
        return self.database.now()

    # Pipelines

    def register_pipeline(self, name: str, spec_hash: str, sinks: Sequence[str]) -> PipelineRow:
        """Make the store agree with a pipeline's file; changes nothing when it already does.

        The first time, the pipeline gets its uid and every sink starts with segment 1. A sink
        added later starts where the sink that is furthest behind will go on (the journal's
        minimum resume point; the start of the journal when there was no sink), not at the
        beginning of time. A sink no longer listed loses its checkpoint, but not while a run holds
        the lease: its deliverer may still be at work, so that waits for the next call. A renamed
        sink is a new one.

        Raises:
            NotAllowed: A sink is called `changes`, the name of another asset.
        """
        if progress.CHANGES in sinks:
            raise NotAllowed(f"pipeline {name!r}: a sink cannot be called {progress.CHANGES!r}")
        with self.database.read() as connection:
            row = find_pipeline(connection, name)
            known = set(read_checkpoints(connection, name))
        if row is not None and (row.spec_hash, known) == (spec_hash, set(sinks)):
            return row
        with self.database.write() as connection:
            return registration.register_pipeline(connection, name, spec_hash, sinks)

    def pipeline(self, name: str) -> PipelineRow | None:
        """Return a pipeline, None when it was never registered."""
        with self.database.read() as connection:
            return find_pipeline(connection, name)

    def pipelines(self) -> list[PipelineRow]:
        """Return every pipeline, by name."""
        with self.database.read() as connection:
            return sorted(read_rows(connection, PipelineRow), key=lambda row: row.name)

    def set_start(
        self, name: str, position: str, definitions: Mapping[str, str] | None = None
    ) -> PipelineRow:
        """Fix where the pipeline starts, if nothing has fixed it yet, and return it as it now is.

        Of several callers one wins, and all see its position. It is also the source position of
        the checkpoints that have none yet. With it is kept how tables looked there (`defined`).
        """
        with self.database.write() as connection:
            won = connection.execute(
                update(pipelines)
                .where(pipelines.c.name == name, pipelines.c.start_position.is_(None))
                .values(start_position=position)
            )
            if won.rowcount:
                connection.execute(
                    update(checkpoints)
                    .where(checkpoints.c.pipeline == name, checkpoints.c.source_position.is_(None))
                    .values(source_position=position)
                )
                table_notes.define(connection, name, definitions or {}, position)
            return known_pipeline(connection, name)

    def defined(self, name: str, position: Position) -> dict[str, str]:
        """Return how tables looked at `position`, in the words of the source that noted it."""
        with self.database.read() as connection:
            return table_notes.defined(connection, name, position)

    def set_want(self, name: str, want: Want) -> None:
        """Say what the pipeline shall do; a run sees it when it next renews its lease."""
        self._update_pipeline(name, want=want)

    def set_probe(self, name: str, after: float, wait: float) -> None:
        """Let the sensor ask the source again at `after` (store's clock), `wait` s after the last."""
        self._update_pipeline(name, probe_after=after, probe_wait=wait)

    # The lease

    def acquire_lease(self, name: str, run_id: str, seconds: float) -> Lease | None:
        """Take the lease for `seconds`, with the next epoch; None while any run holds it.

        A lease that was released or has expired is free at once. The clock is the database's.

        Raises:
            NotAllowed: No such pipeline.
        """
        with self.database.write() as connection:
            return take_lease(connection, name, run_id, seconds)

    def lease(self, name: str) -> LeaseRow | None:
        """Return the lease of a pipeline, None when there is no such pipeline."""
        with self.database.read() as connection:
            found = read_rows(connection, LeaseRow, leases.c.pipeline == name)
        return found[0] if found else None

    def schema_stamp(self, name: str, tenant: str, table: TableSchema) -> SchemaStamp | None:
        """Return the stamp of a table version, None when it was never registered."""
        with self.database.read() as connection:
            return schemas.find(connection, name, tenant, table)

    def table_versions(self, name: str) -> list[list[TableSchema]]:
        """Return every version of every table that the pipeline has captured, oldest first."""
        with self.database.read() as connection:
            return schemas.versions(connection, name)

    @contextmanager
    def fenced(self, lease: Lease) -> Iterator[FencedWriter]:
        """Yield the writer of a lease holder; what it wrote is committed when the block ends.

        One transaction, all or nothing. Keep it short, call no other method of the store inside,
        and run it again after `StoreUnavailable` if you like (`fenced`).

        Raises:
            LeaseLost: The lease was released, has expired (even if nobody took it since), or
                another run holds it. Nothing was written.
        """
        with self.database.write() as connection:
            check_lease(connection, lease)
            yield FencedWriter(connection, lease)

    # The journal

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
        """Return ranges by number, those from `first` to `last` (both included)."""
        where = [ranges.c.pipeline == name, *between(ranges.c.range, first, last)]
        if state is not None:
            where.append(ranges.c.state == state)
        order = ranges.c.range.desc() if newest_first else ranges.c.range
        with self.database.read() as connection:
            return read_rows(connection, RangeRow, *where, order=order, limit=limit)

    def range(self, name: str, number: int) -> RangeRow | None:
        """Return one range, None when it does not exist (any more)."""
        found = self.ranges(name, first=number, last=number)
        return found[0] if found else None

    def segments(
        self,
        name: str,
        *,
        first: int | None = None,
        last: int | None = None,
        limit: int | None = None,
    ) -> list[SegmentRow]:
        """Return segments by number, those from `first` to `last` (both included)."""
        where = [segments.c.pipeline == name, *between(segments.c.segment, first, last)]
        with self.database.read() as connection:
            return read_rows(connection, SegmentRow, *where, order=segments.c.segment, limit=limit)

    def segment(self, name: str, number: int) -> SegmentRow | None:
        """Return one segment, None when it does not exist (any more)."""
        found = self.segments(name, first=number, last=number)
        return found[0] if found else None

    def journal_bytes(self, name: str, *, after: int = 0) -> int:
        """Return the size of the journal's segments with a number above `after`: of all."""
        query = select(func.sum(segments.c.bytes)).where(
            segments.c.pipeline == name, segments.c.segment > after
        )
        with self.database.read() as connection:
            return int(connection.execute(query).scalar() or 0)

    # Sinks

    def checkpoints(self, name: str) -> dict[str, CheckpointRow]:
        """Return the checkpoint of every sink of a pipeline."""
        with self.database.read() as connection:
            return read_checkpoints(connection, name)

    def reset_checkpoint(
        self, name: str, sink: str, segment: int, *, ordinal: int = -1, complete: bool = True
    ) -> CheckpointRow:
        """Set a sink's checkpoint by hand, backwards or forwards, and forget its failures.

        Going back delivers again what comes after; ranges once published stay so. Going forward
        skips: the ranges passed over are never published for this sink.

        Args:
            name: The pipeline.
            sink: The sink's id.
            segment: The last segment to take as delivered; 0 or any number before the journal's
                first segment is refused unless the journal begins right after it.
            ordinal: With `complete=False`: the last row of `segment` to take as delivered, -1
                for none.
            complete: Whether all of `segment` counts as delivered.

        Raises:
            NotAllowed: A run holds the lease, there is no such sink, or delivery would have to go
                on with a segment that is not in the journal.
        """
        with self.database.write() as connection:
            return registration.reset_checkpoint(
                connection, name, sink, segment, ordinal=ordinal, complete=complete
            )

    def attach_sink(self, name: str, sink: str, *, tail: bool) -> CheckpointRow:
        """Attach a detached sink again, also while a run is working on the pipeline.

        Args:
            name: The pipeline.
            sink: The sink's id.
            tail: Go on with what is captured next, skipping everything before, instead of with
                what follows the sink's checkpoint.

        Raises:
            NotAllowed: There is no such sink, it is attached, or what follows its checkpoint is
                no longer in the journal.
        """
        with self.database.write() as connection:
            return registration.attach_sink(connection, name, sink, tail=tail)

    def rebuild_journal(self, name: str, *, accept_loss: bool) -> Rebuilt:
        """Start the journal afresh at the confirmed position, after files of it were lost.

        The pipeline gets a new uid, its segments and ranges are dropped, and what lies beyond the
        confirmed position is captured once more, under new numbers. Sinks skip what they have of
        it. The files of the old uid are of no use afterwards.

        Args:
            name: The pipeline.
            accept_loss: Go on although sinks lack changes from before the confirmed position,
                which the source may have forgotten; they never get them.

        Raises:
            NotAllowed: A run holds the lease, there is no such pipeline, nothing was captured
                yet, or changes would be lost.
        """
        with self.database.write() as connection:
            return rebuild.rebuild_journal(connection, name, accept_loss=accept_loss)

    # Holds

    def holds(self, name: str) -> list[HoldRow]:
        """Return what is held of a pipeline, the oldest first; see `state.holds`."""
        with self.database.read() as connection:
            return holds.read_holds(connection, name)

    def held_parts(
        self, name: str, kind: str | None = None, subject: str | None = None
    ) -> list[HoldPartRow]:
        """Return the files of one hold, or of all, in the order of their events."""
        with self.database.read() as connection:
            return holds.read_parts(connection, name, kind, subject)

    def release_hold(self, name: str, kind: str, subject: str, mend: str) -> HoldRow:
        """Let the next run put into the journal what is held; `mend` tells the source how, as JSON.

        Raises:
            NotAllowed: There is no such hold, or its events are in the journal already.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            return holds.release(connection, name, kind, subject, mend)

    # Publication and retention

    def published(self, name: str, first: int, last: int) -> set[tuple[int, str]]:
        """Return the published (range, asset) pairs of ranges `first` to `last`."""
        query = select(published.c.range, published.c.asset).where(
            published.c.pipeline == name, *between(published.c.range, first, last)
        )
        with self.database.read() as connection:
            return set(connection.execute(query))

    def mark_published(self, name: str, range: int, asset: str) -> bool:  # noqa: A002
        """Remember that a materialization was written; False when it already was."""
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

        Those are the closed ranges, each with `changes` and with every sink that has the whole
        range (`progress`), as far as they are not marked as published.
        """
        with self.database.read() as connection:
            return progress.unpublished(connection, name)

    def expirable_segments(self, name: str, before: float) -> list[SegmentRow]:
        """Return the segments that nobody needs any more, oldest first: always a prefix.

        Their ranges were closed before `before` (store's clock), every sink has passed them, and
        all their assets are published.
        """
        with self.database.read() as connection:
            return progress.expirable(connection, name, before)

    def expire_segments(self, name: str, numbers: Sequence[int]) -> list[SegmentRow]:
        """Forget segments, as far as nobody needs them now, and return those forgotten.

        Delete the files of the returned rows afterwards: a crash in between leaves files without
        a row, which the journal sweeps, never a row without its file.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            return progress.expire_segments(connection, name, set(numbers))

    def expire_ranges(self, name: str, numbers: Sequence[int]) -> list[int]:
        """Forget ranges whose segments are all gone, and their publication; return their numbers."""
        with self.database.write() as connection:
            lock_lease(connection, name)
            return progress.expire_ranges(connection, name, set(numbers))

    def _update_pipeline(self, name: str, **values: Any) -> None:
        with self.database.write() as connection:
            changed = connection.execute(
                update(pipelines).where(pipelines.c.name == name).values(**values)
            )
            if changed.rowcount == 0:
                raise NotAllowed(f"no pipeline {name!r} in the state store")
