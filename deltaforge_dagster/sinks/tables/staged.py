"""What Spark's tasks have made of the segments of a commit: files of typed rows, by table, ready to be added to it.

A table's rows are in Parquet files with one column for each column of the table, and the columns of `META`. A file of a
changelog may lack columns that are null in all of its rows; others lack the columns of `META` that only a changelog has
(`LOGGED`). The files of a step contain these rows, where `df_absent` names the columns whose values the change does not
have (unchanged TOAST, columns that other table versions have):

``changelog``  every change, `df_op` being its operation: `c`, `u`, `d`, `r`, or `t` for a truncate, which has no values.
               There is one step.
``current``    one row per key, the last: `df_op` is `u` (insert or update) or `d` (delete; only the key is sure to be
               there, and `df_absent` is null). An update that changes its key is a delete of the old and an update of
               the new key.
``history``    the versions of each key, with the columns of `VALIDITY` too. `df_op` is `u` for a version that begins,
               or `d` for the end of the version that the table has: it is then the first row of its key in the step.
               For a key's first row in a step, columns in `df_absent` are those of the version that the table has;
               other rows lack none unless the first does.

Keys of which a step has nothing but a snapshot's row are a step of their own (`StagedStep.reads`), before the one
with the other keys, so that this part can be added without a look at each row of the table.

A step of a sink of object files (`ObjectForm`) is the content of one object: a file in the form that the object has
(`StagedStep.part` is then not null).

A step of kind `rekey` has updates that change the key and lack values: its rows are those of the new key, with the old
one in the columns of `old_key`; what is absent is in the table's row of the old key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

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
"""Columns of staged files beside those of the table.

`df_segment` and `df_ordinal` are the change's place in the journal. `df_source_position` is its position in the
source's log as text, `df_schema_version` the fingerprint of its table version. `df_absent` is null if nothing is absent.
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
"""Columns of Parquet objects beside those of the row images, which are named `BEFORE` or `AFTER` and the column's name.

`sequence` is the change's place in the journal as text that sorts as the changes do, in whichever objects they are.
`absent` names those whose values the images of a change do not have, although it has the image; null if there are none.
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
"""Further columns of a history's files: when the row begins to be valid, and when the next row of its key does."""

OLD_KEY = "df_old_"
"""What the names of columns with an old key begin with, before the name of the key column."""


@dataclass(frozen=True, slots=True, order=True)
class ChangePlace:
    """A place in the journal, which is ordered as the changes are."""

    segment: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The form of object files.

    Attributes:
        format: `parquet` has typed columns of both row images; `jsonl` has a native event per line.
        compression: How it is compressed.
        period: Changes of different such periods (UTC, by event time) are in different objects; None if time does not matter.
    """

    format: Literal["parquet", "jsonl"]
    compression: Literal["snappy", "gzip", "zstd", "none"]
    period: Literal["year", "month", "day", "hour"] | None


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """What the changes of an object have in common, beside the table and the commit.

    Attributes:
        began: When the period of their event times began, seconds since 1970 UTC; None if time does not matter.
        version: Fingerprint of their table version; None if they have none, or in JSON lines.
        run: If the table's changes in the commit are of several versions, the number of the stretch of changes of one
            version, in their order; otherwise None.
    """

    began: int | None
    version: str | None
    run: int | None = None


@dataclass(frozen=True, slots=True)
class StagedStep:
    """Consecutive changes of a table that are applied at once; the steps of a commit follow one another.

    Attributes:
        kind: `rows`, `rekey` (see the module) or `truncate`, which has no files.
        files: Parquet files, as Spark names them.
        rows: Number of rows in them.
        inserts_only: Whether all changes are inserts (snapshots' rows are none), of keys that differ; changelog: always
            true.
        last: Place of the last change.
        event_time_us: Of a truncate: when it was committed, microseconds since 1970 UTC.
        reads: Whether all rows are those of snapshots, of keys that nothing else changes between the steps around this
            one; in a changelog never.
        part: Of an object file: what its changes have in common; otherwise None.
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
    """Where a segment of a commit is in the source's log, for destinations that remember that of each row.

    Attributes:
        start, end: The positions at which it starts and ends, JSON text.
        created_at: When it was added to the journal, in seconds since 1970; orders those that end at the same position.
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
        columns: The columns of the newest table version, then those of older ones, then added fields.
        key: Names of the key columns; empty in a changelog of a table without a key.
        absent: Columns that are in a row's `df_absent`.
        steps: The changes, in order.
        changes: Number of changes of the source that the steps contain.
        segments: The segments of the commit, by number.
        identities: By name of a column what identifies it; it stays the same when the source renames the column. Fields that
            a processor has added have none.
        fills: By name of a column that was added, what rows have in it that were there: a value that is not null, as text that
            a cast to the column's type reads.
        unfilled: Columns that were added within the commit, or got another type, and rows that were there have values in them
            that are not known.
        left: The types of the table's columns after the commit before, by name; empty if that is not known.
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
        """Name of the source's table with its database, as tables are marked with it."""
        return ".".join(part for part in self.source if part is not None)


@dataclass(frozen=True, slots=True)
class StagedCommit:
    """What the segments of a commit contain, by table.

    Attributes:
        tables: The tables, in the order of their first changes.
        failed: Tables whose changes could not be staged, by destination, and why.
        discard: Deletes the files.
    """

    tables: Sequence[StagedTable]
    failed: dict[tuple[str, ...], Exception]
    discard: Callable[[], None]
