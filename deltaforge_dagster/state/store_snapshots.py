"""Snapshots in the state store, for the runs that read chunks, commands and the sensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from deltaforge_dagster.state import relocated_rows, snapshots
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.rows import known_pipeline
from deltaforge_dagster.state.snapshot_records import (
    UNFINISHED,
    ChunkRow,
    ChunkState,
    PlannedChunk,
    SnapshotProgress,
    SnapshotRow,
    StagedChunk,
)
from deltaforge_dagster.state.store_base import StoreBase


class StoreSnapshots(StoreBase):
    """The part of a `StateStore` about snapshots (see `snapshots`)."""

    def request_snapshot(
        self,
        name: str,
        *,
        tables: Sequence[str] = (),
        condition: str | None = None,
        cause: str,
        sinks: Sequence[str] = (),
    ) -> SnapshotRow:
        """Request a snapshot of these tables for these sinks; by default of all tables, for all sinks.

        Raises:
            NotAllowed: Another snapshot is not finished, there is no such sink, or the pipeline was
                never registered.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            pipeline = known_pipeline(connection, name)
            return snapshots.create(
                connection,
                name,
                tables=tables,
                condition=condition,
                cause=cause,
                spec_hash=pipeline.spec_hash,
                sinks=sinks,
            )

    def snapshots(self, name: str, *, newest: int | None = None) -> list[SnapshotRow]:
        """Return a pipeline's snapshots, newest first."""
        with self.database.read() as connection:
            return snapshots.read_snapshots(connection, name, newest=newest)

    def unfinished_snapshot(self, name: str) -> SnapshotRow | None:
        """Return the snapshot that is `wanted` or `reading`, or None; there is at most one."""
        newest = self.snapshots(name, newest=1)
        return newest[0] if newest and newest[0].state in UNFINISHED else None

    def chunks(
        self,
        name: str,
        snapshot: int,
        *,
        table: str | None = None,
        state: ChunkState | None = None,
        limit: int | None = None,
    ) -> list[ChunkRow]:
        """Return chunks of a snapshot by table and number, or with `state="read"` by time of reading."""
        with self.database.read() as connection:
            return snapshots.read_chunks(
                connection, name, snapshot, table=table, state=state, limit=limit
            )

    def snapshot_progress(self, name: str, snapshot: int) -> dict[str, SnapshotProgress]:
        """Return the progress of each table of a snapshot."""
        with self.database.read() as connection:
            return snapshots.progress(connection, name, snapshot)

    def staged_paths(self, name: str) -> set[str]:
        """Return the staging files that are still needed."""
        with self.database.read() as connection:
            return snapshots.staged_paths(connection, name)

    def plan_snapshot(self, name: str, snapshot: int, planned: Iterable[PlannedChunk]) -> bool:
        """Store the chunks of a requested snapshot; return False if it has chunks or was cancelled."""
        with self.database.write() as connection:
            return snapshots.plan(connection, name, snapshot, planned)

    def stage_chunk(
        self, name: str, snapshot: int, chunk: PlannedChunk, staged: StagedChunk
    ) -> bool:
        """Record a chunk that was read; return False if another run was faster or it was cancelled."""
        with self.database.write() as connection:
            return snapshots.stage(connection, name, snapshot, chunk, staged)

    def relocated_rows(self, name: str, snapshot: int, table: str) -> list[str]:
        """Return the keys of a table's relocated rows (see `state.relocated_rows`)."""
        with self.database.read() as connection:
            return relocated_rows.read(connection, name, snapshot, table)

    def relocated_tables(self, name: str, snapshot: int) -> list[str]:
        """Return the tables whose relocated rows can be looked for: all their chunks are `spliced`."""
        with self.database.read() as connection:
            return relocated_rows.ready(connection, name, snapshot)

    def plan_relocated_rows(
        self, name: str, snapshot: int, chunk: PlannedChunk, *, keys: Collection[str], attempts: int
    ) -> None:
        """Add a chunk that looks for relocated rows of a table."""
        with self.database.write() as connection:
            snapshots.plan_relocated_rows(
                connection, name, snapshot, chunk, keys=keys, attempts=attempts
            )

    def reopen_chunks(self, name: str, snapshot: int, names: Iterable[tuple[str, int]]) -> None:
        """Let `spliced` chunks of a snapshot, given by table and number, be read again."""
        with self.database.write() as connection:
            snapshots.reopen(connection, name, snapshot, names)

    def cancel_snapshot(self, name: str, snapshot: int, problem: str) -> bool:
        """Cancel a snapshot for good; return False if it is already finished."""
        with self.database.write() as connection:
            return snapshots.cancel(connection, name, snapshot, problem)

    def expire_chunks(self, name: str, *, before: float) -> int:
        """Delete chunks of snapshots that ended before a time, except the newest; return how many."""
        with self.database.write() as connection:
            return snapshots.expire_chunks(connection, name, before=before)
