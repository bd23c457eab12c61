"""The state store: the authoritative record of every pipeline's progress.

A run writes only through `StateStore.fenced`, which checks that it holds the pipeline's lease
(`fenced`). Everybody may read. Writes of users and the sensor (the desired state, when to probe, what
was published) do not need the lease; resetting a checkpoint and dropping old segments lock the lease
row as well.

Every method raises `StoreUnavailable` if the database cannot be reached or stays locked (the next call
tries again). Messages never contain a password.

This module holds pipelines and leases; journal, sinks, dead letters, snapshots, schemas, sensing and
stored pipeline files are in modules of their own.
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
        """Connect, and create or upgrade the tables; several processes may do so at the same time.

        Args:
            url: `sqlite:///path` (directories are created), `postgresql://user:password@host/db`,
                or `memory` for a new store of this process alone, which is lost when it is closed.

        Raises:
            SettingsError: The URL has another form, or a newer release has upgraded the tables.
            AuthFailed: PostgreSQL refused the credentials.
            StoreUnavailable: The database cannot be reached or written.
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
        """Return the time of the store's clock in seconds since 1970."""
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
        """Make the store agree with a pipeline's file; change nothing if it already does.

        The first registration gives the pipeline its uid, and every sink starts with segment 1. A sink
        added later starts where the sink that is furthest behind will resume (or at the start of the
        journal if there was no sink); the checkpoint's `began` describes where. The checkpoint of a
        sink that is no longer listed is deleted. While a run holds the lease, its deliverer may still
        be active, so a later call deletes the checkpoint. A renamed sink counts as a new one.

        Args:
            name: Name of the pipeline.
            spec_hash: Hash of the file.
            sinks: Ids of its sinks.
            starts: Where sinks that are added now start instead.
            stored: Whether the store itself keeps the pipeline's document.

        Raises:
            NotAllowed: A sink is called `changes`, the name of another asset; or the document and with
                it the pipeline have been deleted.
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
        """Return a pipeline, or None if it was never registered."""
        with self.database.read() as connection:
            return find_pipeline(connection, name)

    def pipelines(self) -> list[PipelineRow]:
        """Return all pipelines, sorted by name."""
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
        """Set the pipeline's start position, if it has none yet, and return the pipeline.

        If several processes call this, one of them wins, and all get its position. The start position
        also becomes the source position of checkpoints without one, and the table definitions at this
        position are stored with it (`defined`).

        Args:
            name: Name of the pipeline.
            position: The start position, JSON text.
            definitions: Table definitions at this position.
            has: Sinks that already have everything up to a later position, JSON text, by id.
            source_id: Id of the source whose imported checkpoints (`legacy`) are now used up.
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
        """Return the table definitions at `position`, in the format of the source that stored them."""
        with self.database.read() as connection:
            return table_notes.defined(connection, name, position)

    def set_desired_state(self, name: str, want: DesiredState) -> None:
        """Set the pipeline's desired state; a run sees it when it next renews its lease."""
        with self.database.write() as connection:
            lock_lease(connection, name)
            before = known_pipeline(connection, name).want
            connection.execute(update(pipelines).where(pipelines.c.name == name).values(want=want))
            metrics.count(connection, name, metrics.of_desired_state(before, want))

    def set_probe(self, name: str, after: float, wait: float) -> None:
        """Set when the sensor may next query the source (`after`), and the wait until then (`wait`)."""
        self._update_pipeline(name, probe_after=after, probe_wait=wait)

    def set_failure(self, name: str, failure: Failure | None) -> None:
        """Record why nothing is captured now, or None once capture works again."""
        text = None if failure is None else json.dumps(asdict(failure))
        self._update_pipeline(name, failure=text)

    def note_file(self, name: str, file: str | None) -> None:
        """Record the path of the pipeline's file; None if the store keeps the document."""
        self._update_pipeline(name, file=file)

    def note_tick(self, name: str, outdated_since: float | None = None) -> None:
        """Record that a sensor or schedule has just ticked, and since when its definitions are outdated."""
        self._update_pipeline(name, ticked_at=self.now(), outdated_since=outdated_since)

    def note_source_seen(self, name: str, findings: Sequence[NotedFinding]) -> None:
        """Record that the source has just answered, and the findings about its configuration."""
        text = json.dumps([asdict(one) for one in findings])
        self._update_pipeline(name, findings=text, source_seen_at=self.now())

    # Metrics

    def metrics(self) -> list[Stored]:
        """Return all stored metrics (`metrics`)."""
        with self.database.read() as connection:
            return metrics.stored(connection)

    def lacking_rows(self) -> dict[tuple[str, str], int]:
        """Return, by pipeline and attached sink, how many captured changes are not delivered yet."""
        with self.database.read() as connection:
            return metrics.lacking_rows(connection)

    def count(self, name: str, tally: Tally) -> None:
        """Add a tally that is not part of another write; needs no lease."""
        with self.database.write() as connection:
            metrics.count(connection, name, tally)

    # The lease

    def acquire_lease(self, name: str, run_id: str, seconds: float) -> Lease | None:
        """Take the lease for `seconds` with the next epoch; return None while any run holds it.

        A lease that was released or has expired, by the database's clock, is available at once.

        Raises:
            NotAllowed: There is no such pipeline.
        """
        with self.database.write() as connection:
            return take_lease(connection, name, run_id, seconds)

    def lease(self, name: str) -> LeaseRow | None:
        """Return the lease of a pipeline, or None if there is no such pipeline."""
        with self.database.read() as connection:
            found = read_rows(connection, LeaseRow, leases.c.pipeline == name)
        return found[0] if found else None

    @contextmanager
    def fenced(self, lease: Lease) -> Iterator[FencedWriter]:
        """Yield a writer for the lease holder; its writes are committed when the block ends.

        The block is one transaction. Keep it short and call no other method of the store inside. It may
        be repeated after `StoreUnavailable` (`fenced`).

        Raises:
            LeaseLost: The lease was released, has expired (even if no other run took it), or
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
