"""Capture closed ranges again, to verify that the journal agrees with the source's log.

The log is read again from where a range begins, with the table versions that were recorded then,
and the content hash of each segment's changes is compared with the stored one. If two hashes
differ, the rows are compared one by one; the result names their ordinals and columns, never their
values. Nothing is written, registered or confirmed, and a live run is not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.pipeline.control.closed_ranges import closed_range
from deltaforge_dagster.pipeline.replay.replay import check_contiguous
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ReadLimits, Source
from deltaforge_dagster.sources.registry import identify_position, parse_position
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import ColumnChanges, SchemaStamp, TableFate, TableSchema

_NAMED = 10
"""Maximum number of ordinals that are named for a segment."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of a segment with the log.

    Attributes:
        segment: Number of the segment.
        rows: Number of rows in the journal.
        again: Number of rows that were captured again.
        ordinals: Ordinals of the first rows that differ.
        columns: The columns that differ.
    """

    segment: int
    rows: int
    again: int
    ordinals: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both have the same content."""
        return self.rows == self.again and not self.ordinals


class StoredVersions:
    """A read-only registry: capturing again registers nothing."""

    def __init__(self, store: StateStore, pipeline: str, tenant: str) -> None:
        self._store = store
        self._pipeline = pipeline
        self._tenant = tenant

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return the stamp of a known version; an empty one if the version was never captured."""
        return self._store.schemas.stamp(
            self._pipeline, self._tenant, table, position
        ) or SchemaStamp("", 0, 0)

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Do nothing."""

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Do nothing."""

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Do nothing."""

    def defined(self, position: Position) -> dict[str, str]:
        """Return the table definitions that were in force at `position`."""
        return self._store.definitions.at(self._pipeline, position)

    def holds(self) -> Mapping[str, str]:
        """Return no table: events that were held then may be decodable now."""
        return {}


def recapture(
    store: StateStore,
    journal: Journal,
    source: Source,
    *,
    pipeline: str,
    tenant: str,
    ranges: Sequence[int],
) -> Iterator[Compared]:
    """Capture consecutive closed ranges again, and yield the comparison of each segment.

    Raises:
        NotAllowed: A range is open or does not exist, or the source cannot read its log again.
        PositionLost: The source has discarded its log of that time.
        JournalDamaged: Segments are missing.
    """
    segments: list[SegmentRow] = []
    for number in ranges:
        row = closed_range(store, pipeline, number)
        stored = store.segments.read(pipeline, first=row.first_segment, last=row.last_segment)
        check_contiguous(row, stored)
        # Segments of released holds or snapshot chunks end where they start: they cover no part of
        # the log.
        segments += [
            segment for segment in stored if segment.start_position != segment.end_position
        ]
    if not segments:
        return
    start: Position = parse_position(segments[0].start_position)
    registry = StoredVersions(store, pipeline, tenant)
    waiting = list(segments)
    rows: list[pa.RecordBatch] = []
    for batch in source.read_again(start, ReadLimits(), registry):
        if batch.rows is not None:
            rows.append(batch.rows)
        if batch.end is None:
            continue
        while waiting and _reached(waiting[0], batch.end):
            segment = waiting.pop(0)
            recaptured, rows = _split(rows, segment.end_position)
            yield _compare(journal, segment, recaptured)
        if not waiting:
            return


def _reached(segment: SegmentRow, end: Position) -> bool:
    last: Position = parse_position(segment.end_position)
    return last <= end


def _split(
    batches: Sequence[pa.RecordBatch], end_position: str
) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Return the rows before a position in the log, and the rows after it."""
    kind, end = identify_position(end_position)
    before: list[pa.RecordBatch] = []
    after: list[pa.RecordBatch] = []
    for batch in batches:
        count = 0 if after else kind.rows_until(batch, end)
        if count:
            before.append(batch.slice(0, count))
        if count < batch.num_rows:
            after.append(batch.slice(count))
    return before, after


def _compare(journal: Journal, segment: SegmentRow, batches: Sequence[pa.RecordBatch]) -> Compared:
    again = pa.Table.from_batches(list(batches), CAPTURED).unify_dictionaries()
    content = ContentHash(CAPTURED)
    content.update(again)
    if content.hexdigest() == segment.content_hash:
        return Compared(segment.segment, segment.rows, again.num_rows)
    kept = pa.Table.from_batches(list(journal.batches(segment)))
    both = min(kept.num_rows, again.num_rows)
    differs = np.zeros(both, np.bool_)
    columns = []
    for name in CAPTURED.names:
        recorded, recaptured = _plain(kept, name, both), _plain(again, name, both)
        same = pc.fill_null(pc.equal(recorded, recaptured), False)
        nulls = pc.and_(pc.is_null(recorded), pc.is_null(recaptured))
        wrong = ~np.asarray(pc.or_(same, nulls), np.bool_)
        if wrong.any():
            columns.append(name)
            differs |= wrong
    ordinals = [int(ordinal) for ordinal in np.flatnonzero(differs)[:_NAMED]] or [both]
    return Compared(segment.segment, segment.rows, again.num_rows, tuple(ordinals), tuple(columns))


def _plain(rows: pa.Table, name: str, count: int) -> Any:
    column = rows.column(name).slice(0, count)
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
