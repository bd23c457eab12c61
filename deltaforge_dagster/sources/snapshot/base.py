"""The seam between a snapshot and a database: tables read in chunks, beside the stream.

A snapshot reads what is in tables already, while the log goes on being read. Nothing is written to the
source and nothing is stopped, so rows change between the reading of a chunk and its place in the
journal. What decides is what a read could *see*, not where the log stood: a log may already hold a
commit that no SELECT sees yet. The caller does this:

1. `Snapshots.watermark`, once the stream's start position is fixed, and again now and then;
2. `Snapshots.plan`: the chunks, each of which anybody may read at any time, again, and elsewhere;
3. `Snapshots.reader` and `ChunkReader.read`: rows, and what the read saw (`ReadView`);
4. the rows are put into the journal behind everything captured up to `ChunkRead.position` or
   later. All changes that the read saw stand before them then. Of its rows are dropped those whose key
   is in `before` or `after` of a change that `ReadView.not_visible` marks, in any segment up to there that is not
   `covered`: the stream has those rows as they became since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.tables import TableSchema

MAX_CHUNKS = 10_000
"""Chunks of a table are made larger than asked for, rather than more than these."""

ChunkKind = Literal["key", "ctid", "whole"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one table. The chunks of a plan hold every row, and none twice.

    Attributes:
        table: Full name of the table.
        number: From 1 on, per table.
        kind: What the bounds are: values of the primary key, PostgreSQL's block numbers, or none.
        after: Where it begins: JSON array of the key columns' values as the database writes them,
            exclusive, or a block number, inclusive. None begins with the first row.
        upto: Where it ends: a key, inclusive, or a block number, exclusive. None ends with the last row.
        where: A condition in the database's SQL that rows must fulfil, too.
        rows: How many rows it may have, roughly; 0 is unknown.
        keys: Rows of these keys only (`key` of the change frame), wherever in the table they are; None
            for all. Who stages the chunk chooses them.
    """

    table: str
    number: int
    kind: ChunkKind
    after: str | None = None
    upto: str | None = None
    where: str | None = None
    rows: int = 0
    keys: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """Return the text that `from_json` reads back."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the chunk that `to_json` wrote."""
        fields = json.loads(text)
        keys = fields.pop("keys", None)
        return cls(**fields, keys=None if keys is None else tuple(keys))


class ReadView(Protocol):
    """What a read could see, as transactions of the log; `registry.parse_read_view` reads its text.

    Each database says it in its own words, so each kind of source has its own class. All of them err on
    one side: a transaction that may not have been visible counts as not visible, because the stream
    delivers its changes.
    """

    def to_json(self) -> str:
        """Return the text."""
        ...

    def covers(self, position: Position) -> bool:
        """Say whether every transaction that ended up to a captured position was seen for certain.

        If so for one position, then also for all before it. Segments that end there need not be
        looked through.
        """
        ...

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say of captured changes whether the read did not see them, or perhaps not.

        Args:
            rows: Columns `tx_id`, `file` and `pos` of the change frame, from after a position that
                is covered.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that is being read.

    Attributes:
        table: The table as it is now: what its rows are written with. They are not stamped with a
            version (`schema_version`, `schema_sequence` are null): whoever holds the lease registers it.
            Without a primary key the rows have no `key`, either; else their `key` is that of the
            stream.
        read_view: What it sees.
        position: The log up to here has everything that it sees.
        batches: The rows, in columns of `frame.CAPTURED`, op `r`, without a place in the log or a
            transaction. To be taken once, before the reader reads anything else.
    """

    table: TableSchema
    read_view: ReadView
    position: Position
    batches: Iterator[pa.RecordBatch]


class ChunkReader(Protocol):
    """A connection that reads chunks, one after another; for one thread."""

    def read(self, chunk: Chunk, watermark: str) -> ChunkRead:
        """Begin to read a chunk.

        Args:
            chunk: One of a plan.
            watermark: From `Snapshots.watermark`, not older than the stream's start.

        Raises:
            SourceUnavailable: Try again: the connection broke, the table was changed meanwhile, or
                (PostgreSQL) a transaction that was open at the watermark still is.
            PermissionMissing: The message has the grant.
            SourceMisconfigured: The table is gone.
        """
        ...


class Snapshots(Protocol):
    """What a source knows of snapshots of its tables; connects for each call, any thread may call."""

    def watermark(self) -> str:
        """Return a watermark, JSON text: which transactions are open now, for reads that begin later.

        The newer it is, the less of the journal has to be searched for changes that a read did not see.
        """
        ...

    def plan(
        self, tables: Sequence[str] | None, chunk_rows: int, where: str | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks of tables that the stream captures, table after table.

        Args:
            tables: Full names; None for all but outboxes.
            chunk_rows: How many rows a chunk should have.
            where: As in `Chunk`.

        Raises:
            SourceMisconfigured: There is no such table, or the stream does not capture it.
            PermissionMissing: The message has the grant.
        """
        ...

    def reader(self) -> AbstractContextManager[ChunkReader]:
        """Connect, to read chunks."""
        ...

    def preflight(self, tables: Sequence[str] | None, parallel: int) -> list[Finding]:
        """Return whether the log is kept for as long as a snapshot may take, and what else hinders it.

        Args:
            tables: As for `plan`.
            parallel: How many chunks are read at the same time.
        """
        ...

    def guard(self, start: Position) -> list[Finding]:
        """Check that the source still has its log after `start`; return an error if it does not.

        An error ends the snapshot. Nothing is returned if the source cannot be asked now.
        """
        ...


@runtime_checkable
class SnapshotSource(Source, Protocol):
    """A source whose tables can be read beside its log; may be pickled."""

    def snapshots(self) -> Snapshots:
        """Return what reads them; connects to nothing yet."""
        ...


Mask = npt.NDArray[np.bool_]


def by_transaction(
    rows: pa.RecordBatch | pa.Table, not_visible: Callable[[Sequence[str]], Mask]
) -> pa.BooleanArray:
    """Ask of each transaction among the rows once; rows of none are no changes."""
    ids = column_of(rows, "tx_id")
    assert isinstance(ids, pa.DictionaryArray)
    texts = [str(text) for text in ids.dictionary.to_pylist()]
    found = not_visible(texts) if texts else np.zeros(0, np.bool_)
    mask: pa.BooleanArray = pa.array(np.append(found, False)[codes(ids)])
    return mask


def column_of(rows: pa.RecordBatch | pa.Table, name: str) -> pa.Array[Any]:
    """Return a column as one array."""
    column = rows.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    return column


def codes(column: pa.DictionaryArray[Any, Any]) -> npt.NDArray[np.int64]:
    """Return each row's place in the dictionary, that behind its end for null."""
    found = column.indices.fill_null(len(column.dictionary))
    return found.to_numpy(zero_copy_only=False).astype(np.int64)
