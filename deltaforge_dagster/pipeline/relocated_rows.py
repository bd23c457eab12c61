"""Find rows that move between chunks while these are read, and read them once more (`state.relocated_rows`).

Any update that leaves columns out and may take its row from one chunk to another is of interest, if
one of the table's chunks has been spliced already, or is just being spliced and did not see it: that
may be the chunk which the row has moved into. What was captured before a chunk was spliced and is
seen by its reading cannot have been missed there.

Which keys such rows got is noted before the segment that brings them is in the journal, so that no
crash comes between. Some of these rows will have been read all the same; then they are delivered
once more, as they are. When every chunk of the table is spliced, one more is planned, which reads the
rows of these keys in one transaction: no row moves past that, except for those that get another key
between the planning and the reading. These are noted again, and are fewer each time.
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
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.splice_rows import COLUMNS
from deltaforge_dagster.pipeline.waiting import full_names
from deltaforge_dagster.processors.expansion import changed_keys
from deltaforge_dagster.sources.images import is_partial
from deltaforge_dagster.sources.snapshot import Chunk
from deltaforge_dagster.state.snapshot_records import ChunkRow, PlannedChunk, SnapshotRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import TableSchema

MAX_ROUNDS = 10
"""How often rows of a table may be looked for without success before its snapshot is cancelled."""

Move = tuple[str, str]
"""A row's key before and after an update."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A table that is being read.

    Attributes:
        columns: Names of its columns.
        by_block: Whether its chunks are ranges of blocks: any update may move a row then.
    """

    columns: Sequence[str]
    by_block: bool

    @classmethod
    def of(cls, chunk: ChunkRow) -> _Watched:
        """Return what a chunk that was read says of its table."""
        table = TableSchema.from_json(chunk.described or "")
        names = [column.name for column in table.columns]
        return cls(names, Chunk.from_json(chunk.plan).kind == "ctid")

    def moves(self, updates: pa.RecordBatch) -> Iterator[Move]:
        """Yield the moves of rows among updates that leave columns out."""
        rows, old_keys = changed_keys(updates)
        old = dict(zip(rows.tolist(), old_keys.to_pylist(), strict=True))
        some = np.arange(updates.num_rows) if self.by_block else rows
        chosen = updates.select(["after", "key"]).take(pa.array(some, pa.int64()))
        for index, row in zip(some.tolist(), chosen.to_pylist(), strict=True):
            if row["key"] is not None and is_partial(row["after"], self.columns):
                yield cast("str", old.get(index, row["key"])), row["key"]


class RelocatedRows:
    """Records the relocated rows that one run sees; used by its capture thread, as `splice.Splicer` is.

    Args:
        store: Where they are noted.
        journal: Where segments lie.
        lease: The run's lease.
    """

    def __init__(self, store: StateStore, journal: Journal, lease: HeldLease) -> None:
        self._store = store
        self._journal = journal
        self._lease = lease
        self._snapshot = 0
        self._tables: dict[str, _Watched | None] = {}

    def look(self, snapshot: SnapshotRow | None) -> None:
        """Take note of which tables are being read by which snapshot, and have chunks spliced."""
        if snapshot is None:
            self._tables = {}
            return
        self._snapshot = snapshot.snapshot
        # In this order: what is planned meanwhile is in the one, or the other.
        relocated = self._store.relocated_tables(self._lease.pipeline, self._snapshot)
        progress = self._store.snapshot_progress(self._lease.pipeline, self._snapshot)
        self._tables = {
            table: self._tables.get(table)
            for table, one in progress.items()
            if one.chunks > 1 and one.spliced and (one.spliced < one.chunks or table in relocated)
        }

    def watch(self, segment: WrittenSegment) -> None:
        """Record the relocated rows of a segment that is about to be in the journal."""
        tables = [table for table in self._tables if "u" in segment.counts.get(table, {})]
        if not tables:
            return
        for batch in self._journal.share(segment.path, COLUMNS, ordinals=None, part=0, of=1):
            for table in tables:
                watched = self._tables[table] = self._tables[table] or self._watched(table)
                if watched is not None:
                    self._note(self._snapshot, table, watched.moves(_updates(batch, table)))

    def splice(self, chunk: ChunkRow, not_visible: Iterable[pa.RecordBatch]) -> None:
        """Record the rows that may have moved into a chunk after it was read.

        Args:
            chunk: It is about to be spliced.
            not_visible: Changes of its table that the read could not see, in log order.
        """
        if Chunk.from_json(chunk.plan).kind == "whole":
            return  # there is no other chunk that a row could come from
        watched = _Watched.of(chunk)
        for batch in not_visible:
            moves = watched.moves(_updates(batch, chunk.table_name))
            self._note(chunk.snapshot, chunk.table_name, moves)
        self._tables.setdefault(chunk.table_name, watched)

    def _note(self, snapshot: int, table: str, moves: Iterable[Move]) -> None:
        found = list(moves)
        if not found:
            return
        pipeline = self._lease.pipeline
        # In this order: what is planned meanwhile is in the one, or the other.
        relocated = set(self._store.relocated_rows(pipeline, snapshot, table))
        open_ = [
            Chunk.from_json(chunk.plan)
            for state in ("planned", "read")
            for chunk in self._store.chunks(pipeline, snapshot, table=table, state=state, limit=2)
        ]
        keys = {new for _, new in found}
        if not any(chunk.keys is None for chunk in open_) and len(open_) < 2:
            wanted = relocated.union(*(chunk.keys or () for chunk in open_))
            keys = set(_followed(found, wanted))
        if keys - relocated:
            self._lease.write(lambda writing: writing.note_relocated_rows(snapshot, table, keys))

    def _watched(self, table: str) -> _Watched | None:
        """Return what is known of a table; None when all its chunks are to be read once more by now."""
        spliced = self._store.chunks(
            self._lease.pipeline, self._snapshot, table=table, state="spliced", limit=1
        )
        return _Watched.of(spliced[0]) if spliced else None


def plan_relocated_rows(store: StateStore, pipeline: str, snapshot: SnapshotRow) -> None:
    """Plan chunks for the relocated rows of tables whose other chunks are done; any run that reads chunks may do so.

    Where that was of no use too often, the snapshot is cancelled.
    """
    for table in store.relocated_tables(pipeline, snapshot.snapshot):
        keys = store.relocated_rows(pipeline, snapshot.snapshot, table)
        last = store.chunks(pipeline, snapshot.snapshot, table=table)[-1]
        again = Chunk.from_json(last.plan).keys is not None
        rounds = last.attempts + 1 if again else 0
        if rounds >= MAX_ROUNDS:
            problem = (
                f"rows of {table} get other keys all the time, with updates that leave columns out: "
                f"{len(keys)} of them were looked for {MAX_ROUNDS} times in vain"
            )
            store.cancel_snapshot(pipeline, snapshot.snapshot, problem)
            return
        number = last.number + 1
        chunk = Chunk(
            table, number, "whole", where=snapshot.condition, rows=len(keys), keys=tuple(keys)
        )
        planned = PlannedChunk(table, number, chunk.to_json())
        store.plan_relocated_rows(pipeline, snapshot.snapshot, planned, keys=keys, attempts=rounds)


def _followed(moves: Iterable[Move], wanted: set[str]) -> Iterator[str]:
    """Yield the new keys of rows that are wanted."""
    for old, new in moves:
        if old in wanted:
            wanted.add(new)
            yield new


def _updates(rows: pa.RecordBatch, table: str) -> pa.RecordBatch:
    ours = pc.equal(full_names(rows), pa.scalar(table))
    return rows.filter(pc.and_(ours, pc.equal(rows.column("op").cast(pa.string()), pa.scalar("u"))))
