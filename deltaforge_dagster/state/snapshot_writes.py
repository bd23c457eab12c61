"""What a run writes of snapshots: chunks that it takes over, or cannot use."""

from __future__ import annotations

from collections.abc import Collection

from deltaforge_dagster.state import relocated_rows, snapshots
from deltaforge_dagster.state.snapshot_records import ChunkRow
from deltaforge_dagster.state.writing import Writing


class SnapshotWrites(Writing):
    """The part of a `FencedWriter` that takes chunks over (see `snapshots`)."""

    def complete_chunk(self, chunk: ChunkRow, *, segment: int | None, rows: int) -> None:
        """Note that what was read of a chunk is in the journal; with the segment that has its rows.

        Raises:
            NotAllowed: It was cancelled, or is read once more.
        """
        snapshots.complete_chunk(
            self._connection, self._lease.pipeline, chunk, segment=segment, rows=rows
        )

    def plan_chunk_again(self, chunk: ChunkRow) -> None:
        """Let a chunk be read once more, since what was read of it cannot be used."""
        snapshots.plan_again(self._connection, self._lease.pipeline, chunk)

    def note_relocated_rows(self, snapshot: int, table: str, keys: Collection[str]) -> None:
        """Note rows that no chunk of their table may have (see `state.relocated_rows`)."""
        relocated_rows.note(self._connection, self._lease.pipeline, snapshot, table, keys)
