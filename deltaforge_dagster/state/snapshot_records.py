"""Snapshots: tables read as they are, in chunks, and how far each chunk has come.

A snapshot is numbered within its pipeline. Its chunks are read by runs of their own, any number of
them at a time and without the pipeline's lease, and taken over by the pipeline's run:

===========  ======================================================================================
`planned`    nobody has read it, or what was read can no longer be used
`read`       its rows are in a staging file of the journal's folder
`spliced`    its rows are in the journal, those excepted that changed meanwhile
===========  ======================================================================================

A snapshot is `wanted` until its chunks are planned, `reading` until all of them are spliced and no
`relocated_rows` are left, and `cancelled` for ever when somebody or something has stopped it; then what is
not spliced yet never will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SnapshotState = Literal["wanted", "reading", "spliced", "cancelled"]
ChunkState = Literal["planned", "read", "spliced"]

UNFINISHED: tuple[SnapshotState, ...] = ("wanted", "reading")


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot.

    Attributes:
        snapshot: Its number.
        tables: Full names of the tables; empty for all that the pipeline captures.
        condition: An SQL condition that rows must fulfil; None for all rows.
        cause: Who asked for it: `command`, the file by its `mode` (`initial`, `always`), or a `sink`
            that was added with `start: snapshot`.
        spec_hash: Of the pipeline's file then.
        state: See the module.
        problem: Why it was cancelled, None when it was not.
        created_at: When it was asked for.
        ended_at: When it was spliced or cancelled.
        sinks: The sinks that get its rows; empty for all.
        since_segment: With which segment the last of the sinks begins that it is to bring everything
            to. What a reading does not see has to come in that segment or behind it.
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
        """The state in a person's words."""
        return _STATE_TEXTS[self.state]


_STATE_TEXTS: dict[SnapshotState, str] = {
    "wanted": "asked for",
    "reading": "being read",
    "spliced": "complete",
    "cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A part of a table; `plan` is the source's own text that says which.

    Tables are by full name, numbers count from 1 within the table.
    """

    table_name: str
    number: int
    plan: str


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """What was read of a chunk.

    Attributes:
        path: The staging file, relative to the journal's root; None when there was no row.
        checksum: SHA-256 of the file; empty without one.
        rows: How many rows there are.
        bytes: Size of the file.
        sight: What the reader could see, the source's own text.
        position: A position of the log behind everything that was seen, JSON text.
        described: The table as it was then (`tables.TableSchema`), JSON text.
        first_segment: Number of the first segment that may hold a change which was not seen.
        seconds: How long it took.
    """

    path: str | None
    checksum: str
    rows: int
    bytes: int
    sight: str
    position: str
    described: str
    first_segment: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkRow(PlannedChunk):
    """A chunk; the fields of `StagedChunk` are there once it was read.

    Attributes:
        snapshot: Number of its snapshot.
        state: See the module.
        attempts: How often its reading could not be used.
        read_at: When it was read.
        segment: The segment that its rows are in; None when none was left.
        spliced_rows: How many rows were left.
    """

    snapshot: int
    state: ChunkState
    attempts: int
    path: str | None
    checksum: str | None
    rows: int | None
    bytes: int | None
    sight: str | None
    position: str | None
    described: str | None
    first_segment: int | None
    read_at: float | None
    seconds: float | None
    segment: int | None
    spliced_rows: int | None

    @property
    def partition(self) -> str:
        """The name that people know it by: `shop.orders/000012`."""
        return f"{self.table_name}/{self.number:06d}"


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far the chunks of a snapshot, or of one table of it, have come.

    Attributes:
        planned: Chunks still to be read.
        read: Chunks that wait for the pipeline's run.
        spliced: Chunks that are done.
        rows: Rows read so far.
        staged_bytes: Size of the files that wait.
    """

    planned: int = 0
    read: int = 0
    spliced: int = 0
    rows: int = 0
    staged_bytes: int = 0

    @property
    def chunks(self) -> int:
        """All of them."""
        return self.planned + self.read + self.spliced
