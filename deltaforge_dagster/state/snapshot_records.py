"""Records of snapshots, which read the current rows of tables in chunks, and of their progress.

Snapshots are numbered within a pipeline. Separate runs, any number of them at a time and without
the pipeline's lease, read the chunks; the pipeline's live run adds them to the journal. States of a
chunk:

===========  ======================================================================================
`planned`    the chunk has not been read, or its rows can no longer be used
`read`       its rows are in a staging file of the journal's folder
`complete`   its rows are in the journal, except those that changed meanwhile (deduplicated)
===========  ======================================================================================

A snapshot is `wanted` until its chunks are planned, and `reading` until all of them are `complete`
and no `relocated_rows` are left; then it is `complete`. A snapshot that was stopped stays
`cancelled`, and its remaining chunks never reach the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

SnapshotState = Literal["wanted", "reading", "complete", "cancelled"]
ChunkState = Literal["planned", "read", "complete"]

RECOVERY = "recovery"
"""The cause of a snapshot that a recovered pipeline needs (`JournalRepository.recover`)."""

UNFINISHED: tuple[SnapshotState, ...] = ("wanted", "reading")


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot.

    Attributes:
        snapshot: Number of the snapshot.
        tables: Full names of the tables; empty for all that the pipeline captures.
        condition: An SQL condition on the rows; None for all rows.
        cause: What requested it: `command`, the file's `mode` (`initial`, `always`), a `sink` that
            was added with `start: snapshot`, the `resync` of tables of a sink, or a `RECOVERY`.
        spec_hash: Hash of the pipeline's file at that time.
        state: See the module's docstring.
        problem: Why it was cancelled, or None.
        created_at: When it was requested.
        ended_at: When it was finished or cancelled.
        sinks: The sinks that receive its rows; empty for all.
        since_segment: The largest first segment of the sinks that must receive all rows. Changes
            that are not in the read view of a chunk must be in this segment or a later one.
    """

    snapshot: int
    tables: Sequence[str]
    condition: str | None
    cause: str
    spec_hash: str
    state: SnapshotState
    problem: str | None
    created_at: float
    ended_at: float | None
    sinks: Sequence[str]
    since_segment: int

    @property
    def state_text(self) -> str:
        """The state as text for users."""
        return _STATE_TEXTS[self.state]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `--json` prints them, where a complete snapshot is spliced."""
        return {**asdict(self), "state": {"complete": "spliced"}.get(self.state, self.state)}


_STATE_TEXTS: dict[SnapshotState, str] = {
    "wanted": "asked for",
    "reading": "being read",
    "complete": "complete",
    "cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A part of a table; `plan` describes it in a format of the source.

    `table_name` is the table's full name; `number` counts from 1 within the table.
    """

    table_name: str
    number: int
    plan: str


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """The rows that were read for a chunk.

    Attributes:
        path: Path of the staging file, relative to the journal's root; None if there were no rows.
        checksum: SHA-256 of the file; empty if there is none.
        rows: Number of rows.
        bytes: Size of the file.
        read_view: The read view: which changes the read could see, in a format of the source.
        position: A position of the log after all changes in the read view, JSON text.
        described: The table's definition at that time (`tables.TableSchema`), JSON text.
        first_segment: Number of the first segment that may contain a change outside the read view.
        seconds: Duration of the read.
    """

    path: str | None
    checksum: str
    rows: int
    bytes: int
    read_view: str
    position: str
    described: str
    first_segment: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkRow(PlannedChunk):
    """A chunk; the fields of `StagedChunk` are set once it has been read.

    Attributes:
        snapshot: Number of its snapshot.
        state: See the module's docstring.
        attempts: How often its rows were read and could not be used.
        read_at: When it was read.
        segment: The segment that contains its rows; None if no rows remained.
        journaled_rows: Number of its rows that were merged: those that had not changed since they
            were read.
    """

    snapshot: int
    state: ChunkState
    attempts: int
    path: str | None
    checksum: str | None
    rows: int | None
    bytes: int | None
    read_view: str | None
    position: str | None
    described: str | None
    first_segment: int | None
    read_at: float | None
    seconds: float | None
    segment: int | None
    journaled_rows: int | None

    @property
    def partition(self) -> str:
        """Name of the chunk's Dagster partition: `shop.orders/000012`."""
        return f"{self.table_name}/{self.number:06d}"


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """The progress of a snapshot, or of one of its tables.

    Attributes:
        planned: Number of chunks that must still be read.
        read: Number of chunks that wait for the pipeline's live run.
        complete: Number of chunks that were merged into the journal, without rows that have changed
            since.
        rows: Number of rows read so far.
        staged_bytes: Size of the staging files that wait for the live run.
    """

    planned: int = 0
    read: int = 0
    complete: int = 0
    rows: int = 0
    staged_bytes: int = 0

    @property
    def chunks(self) -> int:
        """Total number of chunks."""
        return self.planned + self.read + self.complete

    def to_json(self) -> dict[str, int]:
        """Return the numbers as `--json` prints them, where complete chunks are spliced."""
        names = {"complete": "spliced"}
        return {names.get(name, name): number for name, number in asdict(self).items()}
