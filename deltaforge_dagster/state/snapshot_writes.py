"""Writes of a run that concern snapshots: chunks that it adds to the journal or cannot use."""

from __future__ import annotations

from collections.abc import Collection

from deltaforge_dagster.state import relocated_rows, snapshots
from deltaforge_dagster.state.snapshot_records import ChunkRow
from deltaforge_dagster.state.writing import Writing


class SnapshotWrites(Writing):
    """The part of a `FencedWriter` for chunks of snapshots (see `snapshots`)."""

    def complete_chunk(self, chunk: ChunkRow, *, segment: int | None, rows: int) -> None:
        """Record that a chunk's rows are in the journal, and in which segment, if any remained.

        Raises:
            NotAllowed: The snapshot was cancelled, or the chunk is being read again.
        """
        snapshots.complete_chunk(
            self._connection, self._lease.pipeline, chunk, segment=segment, rows=rows
        )

    def plan_chunk_again(self, chunk: ChunkRow) -> None:
        """Let a chunk be read again, because the rows that were read cannot be used."""
        snapshots.plan_again(self._connection, self._lease.pipeline, chunk)

    def note_relocated_rows(self, snapshot: int, table: str, keys: Collection[str]) -> None:
        """Store the keys of rows that may be in no chunk of their table (`state.relocated_rows`)."""
        relocated_rows.note(self._connection, self._lease.pipeline, snapshot, table, keys)
