"""The files of typed rows that Spark's tasks write from a commit's segments, by table.

Staged rows are ready to be added to the tables of a sink.

A table's rows are in Parquet files with one column for each column of the table, and the columns of
`META`. A file of a changelog may lack columns that are null in all of its rows; others lack the
columns of `META` that only a changelog has (`LOGGED`). The files of a step contain these rows, in
which `df_absent` names the columns whose values the change does not have (unchanged TOAST values,
columns that only other table versions have):

``changelog``  every change, `df_op` being its operation: `c`, `u`, `d`, `r`, or `t` for a truncate,
               which has no values. There is one step.
``current``    one row per key, the last: `df_op` is `u` (insert or update) or `d` (delete; only the
               key is sure to be there, and `df_absent` is null). An update that changes its key is
               a delete of the old and an update of the new key.
``history``    the versions of each key, with the columns of `VALIDITY` too. `df_op` is `u` for a
               version that begins, or `d` for the end of the version that the table has: it is then
               the first row of its key in the step. For a key's first row in a step, columns in
               `df_absent` are those of the version that the table has; other rows lack none unless
               the first does.

Keys that have only a snapshot's row in a step form a step of their own (`StagedStep.reads`), before
the step with the other keys, so that this part can be added without comparing it with each row of
the table.

A step of a sink of object files (`ObjectForm`) is the content of one object: a file in the form
that the object has (`StagedStep.part` is then not null).

A step of kind `rekey` has updates that change the key and lack values: its rows have the new key,
and the old key in columns whose names begin with `OLD_KEY`; absent values are in the table's row of
the old key.

`staged_batches` reads the files of a step, for writers that send the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.journal.storage import open_located
from deltaforge_dagster.typed_rows.schema import TypedSchema

TableMode = Literal["changelog", "current", "history"]
"""What a table holds: every change, one row per key, or every version of each row."""

_META: list[pa.Field[Any]] = [
    pa.field("df_op", pa.string(), nullable=False),
    pa.field("df_segment", pa.int64(), nullable=False),
    pa.field("df_ordinal", pa.int64(), nullable=False),
    pa.field("df_event_time", pa.timestamp("us", "UTC"), nullable=False),
    pa.field("df_source_position", pa.string()),
    pa.field("df_tx_id", pa.string()),
    pa.field("df_event_id", pa.string(), nullable=False),
    pa.field("df_schema_version", pa.string()),
    pa.field("df_absent", pa.list_(pa.string())),
]

META = pa.schema(_META)
"""Columns of staged files besides those of the table.

`df_segment` and `df_ordinal` are the change's place in the journal. `df_source_position` is its
position in the source's log as text, `df_schema_version` the fingerprint of its table version.
`df_absent` is null if nothing is absent.
"""

_IMAGE_META: list[pa.Field[Any]] = [
    pa.field("op", pa.string(), nullable=False),
    pa.field("op_ts", pa.timestamp("us", "UTC"), nullable=False),
    pa.field("source_db", pa.string(), nullable=False),
    pa.field("source_schema", pa.string()),
    pa.field("source_table", pa.string(), nullable=False),
    pa.field("source_position", pa.string()),
    pa.field("source_snapshot", pa.bool_(), nullable=False),
    pa.field("event_id", pa.string(), nullable=False),
    pa.field("schema_version", pa.string()),
    pa.field("tx_id", pa.string()),
    pa.field("sequence", pa.string(), nullable=False),
    pa.field("absent", pa.list_(pa.string())),
]

IMAGE_META = pa.schema(_IMAGE_META)
"""Columns of Parquet objects besides those of the row images.

The names of the latter are `BEFORE` or `AFTER` and the column's name.

`sequence` is the change's place in the journal as text that sorts as the changes do, in whichever
objects they are. `absent` names the columns whose values the images of a change lack, although the
change has the image; null if there are none.
"""

BEFORE, AFTER = "before_", "after_"

LOGGED = frozenset({"df_source_position", "df_tx_id", "df_event_id", "df_schema_version"})
"""The columns of `META` that only a changelog has."""

VALIDITY = pa.schema(
    [
        pa.field("df_valid_from", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("df_valid_to", pa.timestamp("us", "UTC")),
    ]
)
"""Further columns of a history's files: from when and until when a row is valid."""

OLD_KEY = "df_old_"
"""Prefix of the names of columns with an old key, before the name of the key column."""

BATCH_ROWS = 16_384
"""Maximum number of rows of a batch."""


@dataclass(frozen=True, slots=True, order=True)
class ChangePlace:
    """A place in the journal; places are ordered as the changes are."""

    segment: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The form of object files.

    Attributes:
        format: `parquet` has typed columns of both row images; `jsonl` has an event per line, in
            the native form.
        compression: How the files are compressed.
        period: Changes whose event times (UTC) are in different periods are in different objects;
            None if time does not matter.
    """

    format: Literal["parquet", "jsonl"]
    compression: Literal["snappy", "gzip", "zstd", "none"]
    period: Literal["year", "month", "day", "hour"] | None


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """What the changes of an object have in common, besides the table and the commit.

    Attributes:
        began: When the period of their event times began, in seconds since 1970 UTC; None if time
            does not matter.
        version: Fingerprint of their table version; None if they have none, or in JSON lines.
        run: If the table's changes in the commit have several versions, the number of the run: of
            consecutive changes of one version, in order. Otherwise None.
    """

    began: int | None
    version: str | None
    run: int | None = None


@dataclass(frozen=True, slots=True)
class StagedStep:
    """Consecutive changes of a table that are applied at once; steps are applied in order.

    Attributes:
        kind: `rows`, `rekey` (see the module) or `truncate`, which has no files.
        files: Paths of Parquet files, as Spark reads them.
        rows: Number of rows in them.
        inserts_only: Whether all changes are inserts (snapshot rows are not), each of another key;
            always true in a changelog.
        last: Place of the last change.
        event_time_us: For a truncate, when it was committed, in microseconds since 1970 UTC.
        reads: Whether all rows are snapshot rows, of keys that no other change between the
            surrounding steps has; never in a changelog.
        part: For an object file, what its changes have in common; otherwise None.
    """

    kind: Literal["rows", "rekey", "truncate"]
    files: Sequence[str]
    rows: int
    inserts_only: bool
    last: ChangePlace
    event_time_us: int = 0
    reads: bool = False
    part: ObjectPart | None = None


@dataclass(frozen=True, slots=True)
class StagedSegment:
    """Where a segment of a commit is in the source's log.

    Some destinations remember this for each row.

    Attributes:
        start, end: The positions at which it starts and ends, JSON text.
        created_at: When it was added to the journal, in seconds since 1970; orders segments that
            end at the same position.
    """

    start: str
    end: str
    created_at: float


@dataclass(frozen=True, slots=True)
class StagedTable:
    """The changes of one table in a commit.

    Attributes:
        destination: Name of the table at the sink, outermost part first: `("public", "orders")`.
        source: Name of the source's table: database, schema (None without schemas), table.
        columns: The columns of the newest table version, then those of older ones, then added
            fields.
        key: Names of the key columns; empty in a changelog of a table without a key.
        absent: Columns that are in the `df_absent` of some row.
        steps: The changes, in order.
        changes: Number of changes of the source that the steps contain.
        segments: The segments of the commit, by number.
        identities: What identifies each column, by name; it stays the same when the source renames
            the column. Fields that a processor has added have no identity.
        fills: For added columns, by name, the value that rows from before have in them: never null,
            as text that a cast to the column's type reads.
        unfilled: Columns that were added or changed their type within the commit, and whose values
            in rows from before are not known.
        left: The types of the table's columns after the previous commit, by name; empty if not
            known.
    """

    destination: tuple[str, ...]
    source: tuple[str, str | None, str]
    columns: TypedSchema
    key: tuple[str, ...]
    absent: frozenset[str]
    steps: Sequence[StagedStep]
    changes: int
    segments: Mapping[int, StagedSegment] = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)
    fills: Mapping[str, str] = field(default_factory=dict)
    unfilled: frozenset[str] = frozenset()
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def source_name(self) -> str:
        """Name of the source's table with its database, with which tables are marked."""
        return ".".join(part for part in self.source if part is not None)


@dataclass(frozen=True, slots=True)
class StagedCommit:
    """What the segments of a commit contain, by table.

    Attributes:
        tables: The tables, in the order of their first changes.
        failed: Why the changes of other tables could not be staged, by destination.
        discard: Deletes the files.
    """

    tables: Sequence[StagedTable]
    failed: dict[tuple[str, ...], Exception]
    discard: Callable[[], None]


def staged_batches(step: StagedStep, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a step in batches with these columns; columns a file lacks are null.

    Args:
        step: The step.
        schema: The columns, with their types.

    Raises:
        StoreUnavailable: A file is gone or cannot be read; the commit must be staged again.
    """
    for name in step.files:
        try:
            with open_located(name) as file, pq.ParquetFile(cast("pa.NativeFile", file)) as parquet:
                names = [column for column in schema.names if column in parquet.schema_arrow.names]
                for batch in parquet.iter_batches(BATCH_ROWS, columns=names):
                    yield _completed(batch, schema)
        except (OSError, pa.ArrowException, JournalDamaged) as error:
            raise StoreUnavailable(f"the staged file {name} cannot be read") from error


def lacking(absent: pa.Array[Any], name: str) -> npt.NDArray[np.bool_]:
    """Return which rows lack a column, given their `df_absent`."""
    mask = np.zeros(len(absent), np.bool_)
    if absent.null_count < len(absent):
        rows = pc.list_parent_indices(absent).to_numpy()
        names = cast("pa.Array[Any]", pc.list_flatten(absent))
        mask[rows[pc.equal(names, pa.scalar(name)).to_numpy(zero_copy_only=False)]] = True
    return mask


def _completed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with all columns of a schema, in its order and with its types."""
    columns: list[pa.Array[Any]] = []
    for wanted in schema:
        if wanted.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, wanted.type))
            continue
        column = batch.column(wanted.name)
        columns.append(column if column.type == wanted.type else column.cast(wanted.type))
    return pa.RecordBatch.from_arrays(columns, names=schema.names)
