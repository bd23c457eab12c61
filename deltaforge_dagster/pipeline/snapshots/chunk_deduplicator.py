"""Snapshot window deduplication: merge the chunks that a snapshot has read into the journal.

The rows of a chunk are appended to the journal at its end S, between two transactions, once S has
passed everything that the read could see (`ChunkRow.position`). Changes that the read saw are then
before these rows in the journal, and later changes after them. Changes committed before S that the
read could not see are in the journal already, so the chunk's rows that they touched are left out
(`chunk_rows`). In a table without a key nothing identifies these rows: if such a table was
changed since, its chunk is read again.

A segment of chunk rows starts and ends at S. It covers no part of the log, like a released hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.errors import JournalDamaged, NotAllowed
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import SegmentWriter, WrittenSegment
from deltaforge_dagster.pipeline.blocked_keys import full_names
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.pipeline.schemas.approval import FencedRegistry, SchemaApproval
from deltaforge_dagster.pipeline.snapshots.chunk_rows import COLUMNS, RelocatedRows, deduplicated
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position, parse_read_view
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.records import HoldPart, SegmentRow
from deltaforge_dagster.state.snapshot_records import ChunkRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import SchemaStamp, TableSchema

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 10
"""How often a chunk may be read without success before its snapshot is cancelled."""

_LOOK_SECONDS = 1.0
_MOST = 200

Seal = Callable[[SegmentWriter, Sequence[tuple[ChunkRow, int]]], None]


class ChunkDeduplicator:
    """Merges the chunks of a snapshot into the journal during a run.

    Only the capture thread uses it.

    Args:
        store: Lists the chunks.
        journal: Holds their staged files.
        lease: The run's lease.
        registry: Registers schema versions, and knows which tables are on hold.
        limits: `engine.segment`: approximate size of one segment of chunk rows.
        approval: Holds tables whose new schema waits for approval; their chunks wait, too.
    """

    def __init__(
        self,
        store: StateStore,
        journal: Journal,
        lease: ActiveLease,
        registry: FencedRegistry,
        limits: SegmentLimits,
        *,
        approval: SchemaApproval | None = None,
    ) -> None:
        self._store = store
        self._journal = journal
        self._lease = lease
        self._registry = registry
        self._limits = limits
        self._approval = approval or SchemaApproval()
        self._relocated_rows = RelocatedRows(store, journal, lease)
        self._looked_at = float("-inf")
        self._waiting: list[ChunkRow] = []

    @property
    def waits(self) -> bool:
        """Whether chunks wait to be merged; True until the store has been queried once."""
        return bool(self._waiting) or self._looked_at == float("-inf")

    def due(self, reached: Position) -> bool:
        """Return whether a chunk can be merged at the position that was reached.

        It queries the store at most once a second.
        """
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._load_chunks()
        return any(_fits(chunk, reached) for chunk in self._waiting)

    def watch(self, segment: WrittenSegment) -> None:
        """Record the relocated rows of a segment that is about to be added to the journal."""
        if self._looked_at == float("-inf"):
            self._load_chunks()
        self._relocated_rows.watch(segment)

    def take_over(
        self, reached: Position, *, open_writer: Callable[[], SegmentWriter], seal: Seal
    ) -> None:
        """Merge the chunks that can be merged here, up to the size of one segment.

        Args:
            reached: End of the journal, between two transactions.
            open_writer: Opens the writer of the next segment.
            seal: Makes the segment durable, and records how many rows it has of each chunk.
        """
        writer, taken = self._written(reached, open_writer)
        if writer is None:
            return
        try:
            self._seal(writer, taken, seal)
        except NotAllowed:
            self._load_chunks()
            if {chunk for chunk, _ in taken} <= set(self._waiting):
                raise
            return  # somebody has cancelled the snapshot
        for chunk, _ in taken:
            self._waiting.remove(chunk)
            # Only now, with its rows durable in a segment: a crash before this leaves an orphan.
            if chunk.path is not None:
                self._journal.delete(chunk.path)

    def _written(
        self, reached: Position, open_writer: Callable[[], SegmentWriter]
    ) -> tuple[SegmentWriter | None, list[tuple[ChunkRow, int]]]:
        """Write the rows of the usable chunks, up to the size of one segment.

        Returns:
            The writer (None if no chunk is usable), and the number of rows of each chunk.
        """
        writer: SegmentWriter | None = None
        taken: list[tuple[ChunkRow, int]] = []
        try:
            for chunk, changed in self._usable(reached):
                self._relocated_rows.take_over(chunk, self._not_visible(chunk, changed))
                writer = writer or open_writer()
                before = writer.rows
                self._write(chunk, changed, writer)
                taken.append((chunk, writer.rows - before))
                if writer.rows >= self._limits.max_events or writer.bytes >= self._limits.max_bytes:
                    break
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        return writer, taken

    def _seal(
        self, writer: SegmentWriter, taken: Sequence[tuple[ChunkRow, int]], seal: Seal
    ) -> None:
        if writer.rows:
            seal(writer, taken)
            return
        writer.abort()
        for chunk, _ in taken:
            self._lease.write(
                lambda writing, chunk=chunk: writing.snapshots.complete(  # type: ignore[misc]
                    chunk, segment=None, rows=0
                )
            )

    def lose_positions(self) -> None:
        """Plan all waiting chunks again: after a failover their positions mean nothing."""
        self._load_chunks()
        for chunk in self._waiting:
            self._lease.write(
                lambda writing, chunk=chunk: writing.snapshots.plan_again(  # type: ignore[misc]
                    chunk
                )
            )
        self._waiting = []

    def _load_chunks(self) -> None:
        """Load the chunks that were read, except those of tables on hold.

        These wait until the hold ends.
        """
        chunks: list[ChunkRow] = []
        snapshot = self._store.snapshots.unfinished(self._lease.pipeline)
        self._relocated_rows.poll(snapshot)
        if snapshot is not None:
            chunks = self._store.snapshots.chunks(
                self._lease.pipeline, snapshot.snapshot, state="read", limit=_MOST
            )
        holds = {**self._registry.holds(), **self._approval.kept} if chunks else {}
        # Set last, and in this order: another thread may read `waits` at any time, and end the run
        # if it is False.
        self._waiting = [chunk for chunk in chunks if chunk.table_name not in holds]
        self._looked_at = time.monotonic()

    def _usable(self, reached: Position) -> Iterator[tuple[ChunkRow, list[SegmentRow]]]:
        """Yield the chunks that can be merged here, each with the segments that changed its table.

        These segments may contain changes that the read of the chunk could not see.

        Chunks that cannot be used are planned again.
        """
        chunks = [chunk for chunk in self._waiting if _fits(chunk, reached)]
        first = min((chunk.first_segment or 0 for chunk in chunks), default=0)
        segments = self._store.segments.read(self._lease.pipeline, first=first) if chunks else []
        pipeline = self._store.pipelines.get(self._lease.pipeline)
        assert pipeline is not None
        for chunk in chunks:
            since = [row for row in segments if row.segment >= (chunk.first_segment or 0)]
            oldest = since[0].segment if since else pipeline.next_segment
            changed = [row for row in since if _has_changes(row, chunk.table_name)]
            if self._waits_for_approval(chunk, reached):
                self._waiting.remove(chunk)
            elif oldest != chunk.first_segment:
                self._give_up(chunk, "segments that it has to be compared with are gone")
            elif not self._is_whole(chunk):
                self._give_up(chunk, "its staging file is damaged")
            elif not _table(chunk).primary_key and any(self._not_visible(chunk, changed)):
                self._give_up(
                    chunk,
                    "the table has no key, so that nobody can tell what changed of it meanwhile: "
                    "give it one, or let nobody write while it is read",
                )
            else:
                yield chunk, changed

    def _waits_for_approval(self, chunk: ChunkRow, reached: Position) -> bool:
        """Return whether a chunk's table is on hold for approval.

        If the schema with which the chunk was read requires approval, the hold begins here.
        """
        if chunk.table_name in self._approval.kept:
            return True
        stamp = self._registry.register_read(_table(chunk), _read_at(chunk))
        reason = self._approval.pending.get(stamp.sequence)
        if reason is None:
            return False
        nothing = HoldPart(SCHEMA, chunk.table_name, reason, reached.to_json(), "", "", 0, 0)
        self._lease.write(lambda writer: writer.holds.begin(nothing))
        self._approval.kept[chunk.table_name] = reason
        return True

    def _is_whole(self, chunk: ChunkRow) -> bool:
        if chunk.path is None:
            return True
        try:
            self._journal.check_staged(chunk.path, chunk.checksum or "")
        except JournalDamaged:
            return False
        return True

    def _give_up(self, chunk: ChunkRow, why: str) -> None:
        """Plan a chunk again, or cancel its snapshot after `MAX_ATTEMPTS` attempts."""
        self._waiting.remove(chunk)
        logger.warning("chunk %s is read again: %s", chunk.partition, why)
        if chunk.attempts + 1 < MAX_ATTEMPTS:
            self._lease.write(lambda writing: writing.snapshots.plan_again(chunk))
            return
        problem = f"chunk {chunk.partition} was read {MAX_ATTEMPTS} times without success: {why}"
        self._store.snapshots.cancel(self._lease.pipeline, chunk.snapshot, problem)

    def _write(
        self,
        chunk: ChunkRow,
        changed: Sequence[SegmentRow],
        writer: SegmentWriter,
    ) -> None:
        """Append the deduplicated rows of a chunk."""
        if chunk.path is None:
            return
        table = _table(chunk)
        stamp = self._registry.register_read(table, _read_at(chunk))
        columns = [column.name for column in table.columns]
        for rows in self._journal.staged(chunk.path):
            if table.primary_key:
                rows = deduplicated(  # noqa: PLW2901
                    rows, columns, self._not_visible(chunk, changed)
                )
            if rows.num_rows:
                writer.write(stamped(rows, stamp))

    def _not_visible(
        self, chunk: ChunkRow, segments: Sequence[SegmentRow]
    ) -> Iterator[pa.RecordBatch]:
        """Yield, in log order, the changes of a chunk's table that its read could not see."""
        read_view = parse_read_view(chunk.read_view or "")
        for segment in segments:
            for batch in self._journal.batches(segment, COLUMNS):
                of_table = pc.equal(full_names(batch), pa.scalar(chunk.table_name))
                streamed = pc.not_equal(batch.column("op").cast(pa.string()), pa.scalar("r"))
                rows = batch.filter(pc.and_(of_table, streamed))
                rows = rows.filter(read_view.not_visible(rows))
                if rows.num_rows:
                    yield rows


def _fits(chunk: ChunkRow, reached: Position) -> bool:
    """Return whether everything that the read of a chunk saw is before a position."""
    return not reached < _read_at(chunk)


def _has_changes(segment: SegmentRow, table: str) -> bool:
    return any(op != "r" for op in segment.counts.get(table, {}))


def _table(chunk: ChunkRow) -> TableSchema:
    return TableSchema.from_json(chunk.described or "")


def _read_at(chunk: ChunkRow) -> Position:
    """Return the position before which the log has everything that the read of a chunk saw."""
    position: Position = parse_position(chunk.position or "")
    return position


def stamped(rows: pa.RecordBatch, stamp: SchemaStamp) -> pa.RecordBatch:
    """Return rows with the version of their table."""
    columns = {name: rows.column(name) for name in CAPTURED.names}
    version = CAPTURED.field("schema_version").type
    same = pa.array([0] * rows.num_rows, pa.int32())
    columns["schema_version"] = pa.DictionaryArray.from_arrays(
        same, pa.array([stamp.fingerprint], version.value_type)
    )
    columns["schema_sequence"] = pa.array([stamp.sequence] * rows.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=CAPTURED)
