"""The interface between a snapshot and a database.

Tables are read in chunks, while the log is streamed. Nothing is written to the source and nothing
is stopped, so rows may change between the reading of a chunk and its place in the journal. What
counts is which transactions a read could *see*, not the log position at that time: the log may
already contain a commit that no SELECT sees yet. The caller does this:

1. It calls `Snapshots.watermark` once the stream's start position is fixed, and again now and then.
2. It calls `Snapshots.plan` for the chunks. Any process may read a chunk at any time, and
   repeatedly.
3. `Snapshots.reader` and `ChunkReader.read` return a chunk's rows and the read view (`ReadView`).
4. It writes the rows to the journal after everything captured up to `ChunkRead.position`, or later.
   So they come after all changes that the read saw. It drops each row whose key is in `before` or
   `after` of a change that `ReadView.not_visible` marks, in any earlier segment that the read view
   does not cover (`ReadView.covers`): the stream has the newer version of that row.
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
"""The most chunks of one table; if more were needed, the chunks are made larger than requested."""

ChunkKind = Literal["key", "ctid", "whole"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one table. The chunks of a plan contain every row exactly once.

    Attributes:
        table: Full name of the table.
        number: 1, 2, 3 ... within the table.
        kind: What the bounds are: `key`, values of the primary key; `ctid`, block numbers of
            PostgreSQL; `whole`, none.
        after: The lower bound: a JSON array of the key columns' values as the database writes them
            (exclusive), or a block number (inclusive). None means from the first row.
        upto: The upper bound: a key (inclusive) or a block number (exclusive). None means to the
            last row.
        where: A condition in the database's SQL that rows must also satisfy.
        rows: Estimated number of rows; 0 if unknown.
        keys: Read only the rows with these keys (`key` of the change frame), wherever in the table
            they are; None for all rows. The process that reads the chunk sets it.
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
    """Which transactions of the log a read of a table could see.

    `registry.parse_read_view` parses its text. Each kind of source has its own class, in the terms
    of its database. If it is uncertain whether a transaction was visible, it counts as not visible,
    because the stream delivers its changes anyway.
    """

    def to_json(self) -> str:
        """Return the text that `registry.parse_read_view` reads back."""
        ...

    def covers(self, position: Position) -> bool:
        """Return whether the read certainly saw every transaction that had ended at `position`.

        `position` is a captured one. If it is true for a position, it is true for all earlier ones.
        Segments that end at such a position need not be searched for changes that the read did not
        see.
        """
        ...

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Return for each captured change whether the read did not see it, or may not have seen it.

        Args:
            rows: Columns `tx_id`, `file` and `pos` of changes after a position that is covered.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that is being read.

    Attributes:
        table: The table's current schema, which the rows have. The rows have no stamp of it
            (`schema_version` and `schema_sequence` are null): the run that holds the lease
            registers it. Without a primary key the rows have a null `key`; otherwise it equals that
            of streamed changes.
        read_view: Which transactions the read sees.
        position: A position before which the log contains every transaction that the read sees.
        batches: The rows, with the columns of `frame.CAPTURED`, op `r`, without log position or
            transaction. Consume it once, before the reader reads anything else.
    """

    table: TableSchema
    read_view: ReadView
    position: Position
    batches: Iterator[pa.RecordBatch]


class ChunkReader(Protocol):
    """A connection that reads chunks, one after another; not thread-safe."""

    def read(self, chunk: Chunk, watermark: str) -> ChunkRead:
        """Begin to read a chunk.

        Args:
            chunk: A chunk that `Snapshots.plan` yielded.
            watermark: From `Snapshots.watermark`, not older than the stream's start.

        Raises:
            SourceUnavailable: Try again: the connection broke, the table was altered meanwhile, or
                (PostgreSQL) a transaction that was open at the watermark still is.
            PermissionMissing: The message names the grant.
            SourceMisconfigured: The table does not exist any more.
        """
        ...


class Snapshots(Protocol):
    """Plans and reads snapshots of a source's tables; connects for each call; thread-safe."""

    def watermark(self) -> str:
        """Return a watermark for later reads: JSON text that says which transactions are open now.

        The newer it is, the less of the journal has to be searched for changes that a read did not
        see.
        """
        ...

    def plan(
        self, tables: Sequence[str] | None, chunk_rows: int, where: str | None = None
    ) -> Iterator[Chunk]:
        """Yield the chunks of captured tables, table after table.

        Args:
            tables: Full names; None for all captured tables except outboxes.
            chunk_rows: How many rows a chunk should have.
            where: As in `Chunk`.

        Raises:
            SourceMisconfigured: There is no such table, or the stream does not capture it.
            PermissionMissing: The message names the grant.
        """
        ...

    def reader(self) -> AbstractContextManager[ChunkReader]:
        """Return a context manager that connects and provides a reader of chunks."""
        ...

    def preflight(self, tables: Sequence[str] | None, parallel: int) -> list[Finding]:
        """Check whether the server retains its log for as long as a snapshot may take.

        Also check what else prevents a snapshot.

        Args:
            tables: As for `plan`.
            parallel: How many chunks are read at the same time.
        """
        ...

    def guard(self, start: Position) -> list[Finding]:
        """Check that the source still has its log after `start`.

        If not, return a finding with level `error`, which ends the snapshot. The result is empty if
        the source cannot be reached now.
        """
        ...


@runtime_checkable
class SnapshotSource(Source, Protocol):
    """A source whose tables can be read in snapshots; picklable."""

    def snapshots(self) -> Snapshots:
        """Return the object that plans and reads snapshots, without connecting."""
        ...


Mask = npt.NDArray[np.bool_]


def by_transaction(
    rows: pa.RecordBatch | pa.Table, not_visible: Callable[[Sequence[str]], Mask]
) -> pa.BooleanArray:
    """Return for each row whether its transaction was not visible, asking once per transaction.

    Args:
        rows: Captured rows, with `tx_id`. Rows without a transaction count as visible.
        not_visible: Returns for each transaction id whether a read did not see the transaction.
    """
    ids = column_of(rows, "tx_id")
    assert isinstance(ids, pa.DictionaryArray)
    texts = [str(text) for text in ids.dictionary.to_pylist()]
    hidden = not_visible(texts) if texts else np.zeros(0, np.bool_)
    mask: pa.BooleanArray = pa.array(np.append(hidden, False)[codes(ids)])
    return mask


def column_of(rows: pa.RecordBatch | pa.Table, name: str) -> pa.Array[Any]:
    """Return a column as one array, without chunks."""
    column = rows.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    return column


def codes(column: pa.DictionaryArray[Any, Any]) -> npt.NDArray[np.int64]:
    """Return each row's index in the dictionary; for null, the dictionary's length."""
    indices = column.indices.fill_null(len(column.dictionary))
    return indices.to_numpy(zero_copy_only=False).astype(np.int64)
