"""Find rows that move between chunks while a snapshot is read, and read them again.

`state.relocated_rows` stores them.

An update matters if it has missing columns (such as unchanged TOAST values) and may move its row
from one chunk to another, and if a chunk that the row may have moved into is merged already, or is
being merged and its read did not see the update. A chunk that is merged later, and whose read saw
the update, cannot have missed the row.

The new keys of such rows are recorded before their segment is added to the journal, so that a crash
loses none. Some of these rows were read after all; they are then delivered again, as they are. When
all chunks of the table are merged, one more chunk is planned that reads these keys in one
transaction. Rows that get a new key between planning and reading are recorded again; there are
fewer of them in each round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline.held_rows import full_names
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.snapshots.deduplicated_rows import COLUMNS
from deltaforge_dagster.processors.messages.expansion import changed_keys
from deltaforge_dagster.sources.rows.images import is_partial
from deltaforge_dagster.sources.snapshot import Chunk
from deltaforge_dagster.state.snapshot_records import ChunkRow, PlannedChunk, SnapshotRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import TableSchema

MAX_ROUNDS = 10
"""Rounds of reading relocated rows of a table before its snapshot is cancelled."""

Move = tuple[str, str]
"""Key of a row before and after an update."""


@dataclass(frozen=True, slots=True)
class _WatchedTable:
    """A table that is being read by a snapshot.

    Attributes:
        columns: Names of its columns.
        by_block: Whether its chunks are ranges of blocks, so that any update may move a row.
    """

    columns: Sequence[str]
    by_block: bool

    @classmethod
    def of(cls, chunk: ChunkRow) -> _WatchedTable:
        """Return the description of the table of a chunk that was read."""
        table = TableSchema.from_json(chunk.described or "")
        names = [column.name for column in table.columns]
        return cls(names, Chunk.from_json(chunk.plan).kind == "ctid")

    def moves(self, updates: pa.RecordBatch) -> Iterator[Move]:
        """Yield the possible moves among updates with missing columns."""
        rows, old_keys = changed_keys(updates)
        old = dict(zip(rows.tolist(), old_keys.to_pylist(), strict=True))
        indexes = np.arange(updates.num_rows) if self.by_block else rows
        chosen = updates.select(["after", "key"]).take(pa.array(indexes, pa.int64()))
        for index, row in zip(indexes.tolist(), chosen.to_pylist(), strict=True):
            if row["key"] is not None and is_partial(row["after"], self.columns):
                yield cast("str", old.get(index, row["key"])), row["key"]


class RelocatedRows:
    """Records the relocated rows that one run sees.

    Like `ChunkDeduplicator`, it is used by the run's capture thread.

    Args:
        store: Where they are recorded.
        journal: Holds the segments.
        lease: The run's lease.
    """

    def __init__(self, store: StateStore, journal: Journal, lease: HeldLease) -> None:
        self._store = store
        self._journal = journal
        self._lease = lease
        self._snapshot = 0
        self._tables: dict[str, _WatchedTable | None] = {}

    def poll(self, snapshot: SnapshotRow | None) -> None:
        """Update the tables to watch.

        These are the tables with merged chunks, until all their chunks are merged and no relocated
        rows are left.
        """
        if snapshot is None:
            self._tables = {}
            return
        self._snapshot = snapshot.snapshot
        # In this order: rows that are planned in between are in one of the two answers.
        relocated = self._store.relocated_rows.ready_tables(self._lease.pipeline, self._snapshot)
        progress = self._store.snapshots.progress(self._lease.pipeline, self._snapshot)
        self._tables = {
            table: self._tables.get(table)
            for table, counts in progress.items()
            if counts.chunks > 1
            and counts.spliced
            and (counts.spliced < counts.chunks or table in relocated)
        }

    def watch(self, segment: WrittenSegment) -> None:
        """Record the relocated rows of a segment that is about to be added to the journal."""
        tables = [table for table in self._tables if "u" in segment.counts.get(table, {})]
        if not tables:
            return
        for batch in self._journal.share(segment.path, COLUMNS, ordinals=None, part=0, of=1):
            for table in tables:
                watched = self._tables[table] = self._tables[table] or self._watched(table)
                if watched is not None:
                    self._note(self._snapshot, table, watched.moves(_updates(batch, table)))

    def take_over(self, chunk: ChunkRow, not_visible: Iterable[pa.RecordBatch]) -> None:
        """Record the rows that may have moved into a chunk after it was read.

        Args:
            chunk: The chunk that is about to be merged.
            not_visible: Changes of its table that the read could not see, in log order.
        """
        if Chunk.from_json(chunk.plan).kind == "whole":
            return  # the chunk is the whole table, so no row can come from another one
        watched = _WatchedTable.of(chunk)
        for batch in not_visible:
            moves = watched.moves(_updates(batch, chunk.table_name))
            self._note(chunk.snapshot, chunk.table_name, moves)
        self._tables.setdefault(chunk.table_name, watched)

    def _note(self, snapshot: int, table: str, moves: Iterable[Move]) -> None:
        new_moves = list(moves)
        if not new_moves:
            return
        pipeline = self._lease.pipeline
        # In this order: rows that are planned in between are in one of the two answers.
        relocated = set(self._store.relocated_rows.read(pipeline, snapshot, table))
        open_ = [
            Chunk.from_json(chunk.plan)
            for state in ("planned", "read")
            for chunk in self._store.snapshots.chunks(
                pipeline, snapshot, table=table, state=state, limit=2
            )
        ]
        keys = {new for _, new in new_moves}
        if not any(chunk.keys is None for chunk in open_) and len(open_) < 2:
            wanted = relocated.union(*(chunk.keys or () for chunk in open_))
            keys = set(_followed(new_moves, wanted))
        if keys - relocated:
            self._lease.write(lambda writing: writing.relocated_rows.note(snapshot, table, keys))

    def _watched(self, table: str) -> _WatchedTable | None:
        """Return the description of a table; None if all its chunks will be read again."""
        merged = self._store.snapshots.chunks(
            self._lease.pipeline, self._snapshot, table=table, state="spliced", limit=1
        )
        return _WatchedTable.of(merged[0]) if merged else None


def plan_relocated_rows(store: StateStore, pipeline: str, snapshot: SnapshotRow) -> None:
    """Plan chunks that read the relocated rows of tables whose other chunks are all merged.

    Any run that reads a snapshot may call it. After `MAX_ROUNDS` rounds for a table the snapshot is
    cancelled.
    """
    for table in store.relocated_rows.ready_tables(pipeline, snapshot.snapshot):
        keys = store.relocated_rows.read(pipeline, snapshot.snapshot, table)
        last = store.snapshots.chunks(pipeline, snapshot.snapshot, table=table)[-1]
        again = Chunk.from_json(last.plan).keys is not None
        rounds = last.attempts + 1 if again else 0
        if rounds >= MAX_ROUNDS:
            problem = (
                f"rows of {table} get other keys all the time, with updates that leave columns "
                f"out: {len(keys)} of them were searched for {MAX_ROUNDS} times without success"
            )
            store.snapshots.cancel(pipeline, snapshot.snapshot, problem)
            return
        number = last.number + 1
        chunk = Chunk(
            table, number, "whole", where=snapshot.condition, rows=len(keys), keys=tuple(keys)
        )
        planned = PlannedChunk(table, number, chunk.to_json())
        store.snapshots.plan_relocated_rows(
            pipeline, snapshot.snapshot, planned, keys=keys, attempts=rounds
        )


def _followed(moves: Iterable[Move], wanted: set[str]) -> Iterator[str]:
    """Yield the new keys of rows whose old key is in `wanted`; follow further changes of them."""
    for old, new in moves:
        if old in wanted:
            wanted.add(new)
            yield new


def _updates(rows: pa.RecordBatch, table: str) -> pa.RecordBatch:
    of_table = pc.equal(full_names(rows), pa.scalar(table))
    return rows.filter(
        pc.and_(of_table, pc.equal(rows.column("op").cast(pa.string()), pa.scalar("u")))
    )
