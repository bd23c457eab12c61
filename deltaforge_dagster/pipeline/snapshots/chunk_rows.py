"""Which rows of a snapshot's chunks to leave out, and which to read again.

A row of a chunk is left out if a transaction that the read could not see changed it
(`Deduplication`): the journal has its newer state already, before the place where the chunk is
merged. There is one exception. If all that the journal has of a row are updates with missing
columns (unchanged TOAST values, MySQL's `binlog_row_image`), only the chunk has the other columns.
Then these updates are applied to the chunk's row, in log order, and the result is kept. Keys are
compared as JSON text, which is the same for snapshot rows and log rows. Memory grows with the
number of rows in the chunk, not with the number of changes.

Rows that move between chunks while a snapshot is read are read again (`RelocatedRows`); the state
store has them (`state.relocated_rows`). An update matters if it has missing columns and may move
its row from one chunk to another, and if a chunk that the row may have moved into is merged
already, or is being merged and its read did not see the update. A chunk that is merged later, and
whose read saw the update, cannot have missed the row.

The new keys of such rows are recorded before their segment is added to the journal, so that a crash
loses none. Some of these rows were read after all; they are then delivered again, as they are. When
all chunks of the table are merged, one more chunk is planned that reads these keys in one
transaction. Rows that get a new key between planning and reading are recorded again; there are
fewer of them in each round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline.blocked_keys import full_names
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.processors.messages.expansion import changed_keys
from deltaforge_dagster.sources.rows.images import is_partial, overlay
from deltaforge_dagster.sources.snapshot import Chunk
from deltaforge_dagster.state.snapshot_records import ChunkRow, PlannedChunk, SnapshotRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import TableSchema

COLUMNS = ["op", "db", "schema", "table", "before", "after", "key", "file", "pos", "tx_id"]
"""Columns of the change frame that decide what a change does to the rows of a chunk."""


MAX_ROUNDS = 10
"""Rounds of reading relocated rows of a table before its snapshot is cancelled."""

Move = tuple[str, str]
"""Key of a row before and after an update."""


class Deduplication:
    """Applies changes of one table to rows of a chunk.

    Args:
        rows: Rows of a chunk, with the columns of `frame.CAPTURED` and unique values of `key`.
        columns: Names of the table's columns.
    """

    def __init__(self, rows: pa.RecordBatch, columns: Sequence[str]) -> None:
        self._rows = rows
        self._columns = columns
        self._keys = cast("pa.StringArray", rows.column("key"))
        self._alive = np.ones(rows.num_rows, np.bool_)
        self._newer: dict[int, list[str]] = {}
        self._moved: dict[str, int] = {}  # rows by their new key
        self._away: set[int] = set()  # rows whose first key is free or belongs to another row now

    def accept(self, changes: pa.RecordBatch) -> None:
        """Apply changes of the table that the read could not see; call in log order."""
        if _has_op(changes, "t").any():
            self._alive[:] = False
            return
        start: int | None = 0
        while start is not None:
            changes = changes.slice(start)
            start = self._take_until_moved(changes)

    def _take_until_moved(self, changes: pa.RecordBatch) -> int | None:
        """Apply changes up to the first one that gives a kept row a new key.

        Returns:
            The index after that change; None if there is none.
        """
        row = self._find(cast("pa.StringArray", changes.column("key")))
        moves, old_keys = changed_keys(changes)
        before = row.copy()
        before[moves] = self._find(old_keys)
        touching = (row >= 0) | (before >= 0)
        if self._moved:
            touching |= self._are_moved(changes, moves, old_keys)
        return self._deduplicate(changes, np.flatnonzero(touching), before, moves, old_keys)

    def rows(self) -> pa.RecordBatch:
        """Return the remaining rows as they must be delivered."""
        rows = self._rows
        if self._newer:
            rows = self._overlaid(rows)
        return rows.filter(pa.array(self._alive))

    def _deduplicate(
        self,
        changes: pa.RecordBatch,
        touched: np.ndarray[Any, Any],
        before: np.ndarray[Any, Any],
        moves: np.ndarray[Any, Any],
        old_keys: pa.StringArray,
    ) -> int | None:
        chosen = changes.select(["op", "after", "key"]).take(pa.array(touched, pa.int64()))
        old = dict(zip(moves.tolist(), old_keys.to_pylist(), strict=True)) if len(moves) else {}
        for index, change in zip(touched.tolist(), chosen.to_pylist(), strict=True):
            key, old_key = change["key"], old.get(index)
            row = self._moved.pop(old_key or key, -1)
            if row < 0:
                row = int(before[index])
                if row in self._away:
                    continue
            if row < 0 or not self._alive[row]:
                continue
            self._away.discard(row)
            after = change["after"]
            if change["op"] == "u" and is_partial(after, self._columns):
                self._newer.setdefault(row, []).append(after)
                if key != self._keys[row].as_py():
                    self._moved[key] = row
                    self._away.add(row)
                    return int(index) + 1
            else:
                self._alive[row] = False
        return None

    def _find(self, keys: pa.StringArray) -> np.ndarray[Any, Any]:
        """Return which row has each key, -1 for none."""
        indexes = pc.index_in(keys, value_set=self._keys, skip_nulls=True)
        return cast(
            "np.ndarray[Any, Any]", indexes.fill_null(-1).to_numpy(zero_copy_only=False)
        ).copy()

    def _are_moved(
        self, changes: pa.RecordBatch, moves: np.ndarray[Any, Any], old_keys: pa.StringArray
    ) -> np.ndarray[Any, Any]:
        """Return a mask of changes to rows that no longer have the key they were read with."""
        mask = np.zeros(changes.num_rows, np.bool_)
        old = dict(zip(moves.tolist(), old_keys.to_pylist(), strict=True))
        for index, key in enumerate(changes.column("key").to_pylist()):
            mask[index] = old.get(index, key) in self._moved
        return mask

    def _overlaid(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        after: list[Any] = rows.column("after").to_pylist()  # a row that was read has an image
        keys = rows.column("key").to_pylist()
        for row, newer in self._newer.items():
            after[row] = overlay(after[row], newer)
        for key, row in self._moved.items():
            keys[row] = key
        columns = {name: rows.column(name) for name in CAPTURED.names}
        columns |= {"after": pa.array(after, pa.string()), "key": pa.array(keys, pa.string())}
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=CAPTURED)


def deduplicated(
    rows: pa.RecordBatch, columns: Sequence[str], changes: Iterable[pa.RecordBatch]
) -> pa.RecordBatch:
    """Return the rows that remain after all changes were applied; see `Deduplication`."""
    deduplication = Deduplication(rows, columns)
    for batch in changes:
        deduplication.accept(batch)
    return deduplication.rows()


class RelocatedRows:
    """Records the relocated rows that one run sees.

    Like `ChunkDeduplicator`, it is used by the run's capture thread.

    Args:
        store: Where they are recorded.
        journal: Holds the segments.
        lease: The run's lease.
    """

    def __init__(self, store: StateStore, journal: Journal, lease: ActiveLease) -> None:
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
            and counts.complete
            and (counts.complete < counts.chunks or table in relocated)
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
            self._lease.pipeline, self._snapshot, table=table, state="complete", limit=1
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


def _has_op(rows: pa.RecordBatch, op: str) -> np.ndarray[Any, Any]:
    mask = pc.equal(rows.column("op"), pa.scalar(op))
    return cast("np.ndarray[Any, Any]", mask.to_numpy(zero_copy_only=False))
