"""Stages the rows that a sink's table should have, as commits are staged.

The rows of a window, and the changes that its read did not see, are written to files in the form of
segments. The code that stages commits types and folds them, in this process: so columns have the
sink's types, names and keys, and a row that changed several times is as its last change left it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import JournalDamaged, SourceUnavailable
from deltaforge_dagster.frame import PROCESSED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline.blocked_keys import full_names
from deltaforge_dagster.pipeline.snapshots.chunk_deduplicator import stamped
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sinks.tables.staged import StagedCommit, StagedTable
from deltaforge_dagster.sources.snapshot import ChunkRead, ReadView
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import SchemaStamp, TableSchema
from deltaforge_dagster.typed_rows.schema import TargetTypes


@dataclass(frozen=True, slots=True)
class SourceWindow:
    """The rows of a part of the source's table, as one read saw them.

    Attributes:
        staged: The rows; without a table if there are none.
        read_view: Which transactions the read saw.
        position: The log has everything that the read saw before this position.
        read_at: When the read had begun, by the store's clock.
        first: The first segment that may have a change that the read did not see.
    """

    staged: StagedCommit
    read_view: ReadView
    position: Position
    read_at: float
    first: int


class ExpectedRows:
    """Stages what one table of a sink should have.

    Args:
        spec: The pipeline.
        config: The sink.
        types: What types a column can have at the sink.
        store: Has table versions and segments.
        journal: Has the segments' files; the staged files go there as well.
        table: Full name of the source's table.
        destination: Name of the sink's table.
    """

    def __init__(  # noqa: PLR0917 - what a commit is made of
        self,
        spec: PipelineSpec,
        config: TableSinkConfig,
        types: TargetTypes,
        store: StateStore,
        journal: Journal,
        table: str,
        destination: tuple[str, ...],
    ) -> None:
        self._pipeline = spec.metadata.name
        self._sink = config.id
        self._store = store
        self._journal = journal
        self._table = table
        self._destination = destination
        holder = f"reconcile-{uuid.uuid4().hex}"
        self._stager = TableStager(spec, config, types, journal, None, store, holder)

    def rows(self, read: ChunkRead, number: int) -> StagedCommit:
        """Return the rows of a chunk that is being read; discard them after use.

        Raises:
            SourceUnavailable: The table has a form of which nothing was captured yet.
        """
        stamp = self._stamp(read.table)
        batches = (stamped(batch, stamp) for batch in read.batches)
        return self._staged(batches, number, read.position.to_json())

    @contextmanager
    def changes(
        self, first: int, last: int, read_view: ReadView | None = None
    ) -> Iterator[StagedTable | None]:
        """Provide the changes of segments, folded; None if there are none.

        Args:
            first: The first segment.
            last: The last one.
            read_view: Leave out the changes that a read saw; None to leave out none.

        Raises:
            JournalDamaged: The journal no longer has the segments.
        """
        segments = self._store.segments.read(self._pipeline, first=first, last=last)
        if len(segments) != max(0, last - first + 1):
            raise JournalDamaged(f"{self._pipeline}: segments {first} to {last} are gone")
        changed = [segment for segment in segments if self._has_changes(segment)]
        if not changed:
            yield None
            return
        if read_view is None:
            delivered = [segment.delivered for segment in changed]
            staged = self._stager.stage(delivered, only=frozenset({self._destination}))
        else:
            start = changed[0].start_position
            staged = self._staged(self._not_visible(changed, read_view), changed[0].segment, start)
        try:
            yield table_of(staged)
        finally:
            staged.discard()

    def _has_changes(self, segment: SegmentRow) -> bool:
        # Snapshot rows are no changes: the source's own rows have everything that they have.
        return any(op != "r" for op in segment.counts.get(self._table, {}))

    def _not_visible(
        self, segments: Sequence[SegmentRow], read_view: ReadView
    ) -> Iterator[pa.RecordBatch]:
        for segment in segments:
            for batch in self._journal.batches(segment.delivered, PROCESSED.names):
                of_table = pc.equal(full_names(batch), pa.scalar(self._table))
                streamed = pc.not_equal(batch.column("op").cast(pa.string()), pa.scalar("r"))
                rows = batch.filter(pc.and_(of_table, streamed))
                rows = rows.filter(read_view.not_visible(rows))
                yield rows.select(PROCESSED.names).cast(PROCESSED)

    def _staged(
        self, batches: Iterable[pa.RecordBatch], number: int, position: str
    ) -> StagedCommit:
        """Stage rows by way of a file in the form of a segment, which is deleted again."""
        writer = self._journal.stager(self._pipeline, 0, number)
        try:
            for batch in batches:
                writer.write(batch)
        except BaseException:
            writer.abort()
            raise
        if not writer.rows:
            writer.abort()
            return StagedCommit((), {}, lambda: None)
        written = writer.close()
        try:
            segment = _segment(written, number, position)
            return self._stager.stage([segment], only=frozenset({self._destination}))
        finally:
            self._journal.delete(written.path)

    def _stamp(self, table: TableSchema) -> SchemaStamp:
        """Return the stamp of the version that a read has found."""
        history = self._store.schemas.history(self._pipeline, table.full_name)
        for version in reversed(history.versions):
            if version.table == table:
                return version.stamp
        raise SourceUnavailable(
            "its columns at the source are others than those of any change that was captured; "
            "compare it after its next change"
        )


def table_of(staged: StagedCommit) -> StagedTable | None:
    """Return the only table of a commit; None if it has none.

    Raises:
        TableRejected: The table cannot be staged.
    """
    for error in staged.failed.values():
        raise error
    return next(iter(staged.tables), None)


def _segment(written: WrittenSegment, number: int, position: str) -> SegmentRow:
    return SegmentRow(
        segment=number,
        start_position=position,
        end_position=position,
        **written.recorded,
        range=0,
        epoch=0,
        created_at=0.0,
    )
