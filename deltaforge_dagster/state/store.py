"""The state store: the truth about how far every pipeline has come.

A run writes only through `StateStore.fenced`, which proves that it holds the pipeline's lease
(`fenced`). Everybody may read. What people and the sensor write (what is wanted, when to probe,
what was published) does not need the lease; a checkpoint is reset, and old segments are
forgotten, under the same lock.

Every method raises `StoreUnavailable` when the database cannot be reached or stays locked (the
next call tries again), and never puts a password into a message.

Pipelines and leases are here; the journal, the sinks, the dead letters and the snapshots have a module
each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Self

from sqlalchemy import update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state import definitions as table_notes
from deltaforge_dagster.state import legacy, metrics, progress, registration, stored_specs
from deltaforge_dagster.state.database import Database
from deltaforge_dagster.state.fenced import FencedWriter
from deltaforge_dagster.state.leases import check_lease, lock_lease, take_lease
from deltaforge_dagster.state.metrics import Stored, Tally
from deltaforge_dagster.state.migrate import migrate
from deltaforge_dagster.state.records import (
    DesiredState,
    Failure,
    Lease,
    LeaseRow,
    NotedFinding,
    PipelineRow,
    SinkStart,
)
from deltaforge_dagster.state.rows import (
    find_pipeline,
    known_pipeline,
    read_checkpoints,
    read_rows,
)
from deltaforge_dagster.state.store_dead_letters import StoreDeadLetters
from deltaforge_dagster.state.store_journal import StoreJournal
from deltaforge_dagster.state.store_schemas import StoreSchemas
from deltaforge_dagster.state.store_sensing import StoreSensing
from deltaforge_dagster.state.store_sinks import StoreSinks
from deltaforge_dagster.state.store_snapshots import StoreSnapshots
from deltaforge_dagster.state.store_specs import StoreSpecs
from deltaforge_dagster.state.tables import (
    checkpoints,
    leases,
    pipelines,
)


class StateStore(
    StoreJournal,
    StoreSinks,
    StoreDeadLetters,
    StoreSnapshots,
    StoreSchemas,
    StoreSensing,
    StoreSpecs,
):
    """One open state store. Thread-safe; belongs to the process that opened it.

    Attributes:
        database: For the primitives: `Kv(store.database, namespace)`.
    """

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

    def register_pipeline(
        self,
        name: str,
        spec_hash: str,
        sinks: Sequence[str],
        starts: Mapping[str, SinkStart] | None = None,
        *,
        stored: bool = False,
    ) -> PipelineRow:
        """Make the store agree with a pipeline's file; changes nothing when it already does.

        The first time, the pipeline gets its uid and every sink starts with segment 1. A sink
        added later starts where the sink that is furthest behind will go on (the journal's
        minimum resume point; the start of the journal when there was no sink), not at the
        beginning of time. A sink no longer listed loses its checkpoint, but not while a run holds
        the lease: its deliverer may still be at work, so that waits for the next call. A renamed
        sink is a new one. Where one that was added began is said in its `began`.

        Args:
            name: The pipeline.
            spec_hash: Of the file.
            sinks: The ids of its sinks.
            starts: Where sinks begin instead if they are added now.
            stored: The store itself keeps the pipeline's document.

        Raises:
            NotAllowed: A sink is called `changes`, the name of another asset; or the document is gone,
                and the pipeline with it.
        """
        if progress.CHANGES in sinks:
            raise NotAllowed(f"pipeline {name!r}: a sink cannot be called {progress.CHANGES!r}")
        with self.database.read() as connection:
            row = find_pipeline(connection, name)
            known = set(read_checkpoints(connection, name))
        if row is not None and (row.spec_hash, known) == (spec_hash, set(sinks)):
            return row
        with self.database.write() as connection:
            if stored:
                stored_specs.check_kept(connection, name)
            return registration.register_pipeline(connection, name, spec_hash, sinks, starts or {})

    def pipeline(self, name: str) -> PipelineRow | None:
        """Return a pipeline, None when it was never registered."""
        with self.database.read() as connection:
            return find_pipeline(connection, name)

    def pipelines(self) -> list[PipelineRow]:
        """Return every pipeline, by name."""
        with self.database.read() as connection:
            return sorted(read_rows(connection, PipelineRow), key=lambda row: row.name)

    def set_start(
        self,
        name: str,
        position: str,
        definitions: Mapping[str, str] | None = None,
        *,
        has: Mapping[str, str] | None = None,
        source_id: str | None = None,
    ) -> PipelineRow:
        """Fix where the pipeline starts, if nothing has fixed it yet, and return it as it now is.

        Of several callers one wins, and all see its position. It is also the source position of
        the checkpoints that have none yet. With it is kept how tables looked there (`defined`).

        Args:
            name: The pipeline.
            position: The position.
            definitions: How tables looked there.
            has: Sinks that have more already: everything up to a position, JSON text.
            source_id: Of the source whose imported checkpoints (`legacy`) have served now.
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
                for sink, up_to in (has or {}).items():
                    connection.execute(
                        update(checkpoints)
                        .where(checkpoints.c.pipeline == name, checkpoints.c.sink == sink)
                        .values(skip=up_to)
                    )
                if source_id is not None:
                    legacy.forget(connection, source_id)
                table_notes.define(connection, name, definitions or {}, position)
            return known_pipeline(connection, name)

    def defined(self, name: str, position: Position) -> dict[str, str]:
        """Return how tables looked at `position`, in the words of the source that noted it."""
        with self.database.read() as connection:
            return table_notes.defined(connection, name, position)

    def set_desired_state(self, name: str, want: DesiredState) -> None:
        """Say what the pipeline shall do; a run sees it when it next renews its lease."""
        with self.database.write() as connection:
            lock_lease(connection, name)
            before = known_pipeline(connection, name).want
            connection.execute(update(pipelines).where(pipelines.c.name == name).values(want=want))
            metrics.count(connection, name, metrics.of_desired_state(before, want))

    def set_probe(self, name: str, after: float, wait: float) -> None:
        """Let the sensor ask the source again at `after` (store's clock), `wait` s after the last."""
        self._update_pipeline(name, probe_after=after, probe_wait=wait)

    def set_failure(self, name: str, failure: Failure | None) -> None:
        """Note why nothing is captured now; None when capture works again."""
        text = None if failure is None else json.dumps(asdict(failure))
        self._update_pipeline(name, failure=text)

    def note_file(self, name: str, file: str | None) -> None:
        """Note where the pipeline's file is; None for one that the store keeps."""
        self._update_pipeline(name, file=file)

    def note_tick(self, name: str) -> None:
        """Note that a sensor or schedule has just ticked."""
        self._update_pipeline(name, ticked_at=self.now())

    def note_source_seen(self, name: str, findings: Sequence[NotedFinding]) -> None:
        """Note that the source has just answered, and in which points it is not as needed."""
        text = json.dumps([asdict(one) for one in findings])
        self._update_pipeline(name, findings=text, source_seen_at=self.now())

    # Metrics

    def metrics(self) -> list[Stored]:
        """Return every number that is counted (`metrics`)."""
        with self.database.read() as connection:
            return metrics.stored(connection)

    def lacking_rows(self) -> dict[tuple[str, str], int]:
        """Return, by pipeline and sink, how many captured changes attached sinks lack, if any."""
        with self.database.read() as connection:
            return metrics.lacking_rows(connection)

    def count(self, name: str, tally: Tally) -> None:
        """Count what belongs to no other write, without a lease."""
        with self.database.write() as connection:
            metrics.count(connection, name, tally)

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

    def _update_pipeline(self, name: str, **values: Any) -> None:
        with self.database.write() as connection:
            changed = connection.execute(
                update(pipelines).where(pipelines.c.name == name).values(**values)
            )
            if changed.rowcount == 0:
                raise NotAllowed(f"no pipeline {name!r} in the state store")
