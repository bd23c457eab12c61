"""What differs between the formats of lake tables, as SQL text and settings of a Spark session.

Both formats are written by the same statements (`statements`), but they make a commit exact in different ways, as
`pipeline.lake.writer` describes: a format has either a fence of its own, set by `stamp`, or `Branches`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from deltaforge_dagster.sinks.lake.config import (
    LakeMaintenanceConfig,
    LakeSinkConfig,
    PartitionField,
    TableLayout,
)
from deltaforge_dagster.sinks.lake.sql import literal, quoted

OWNER = "deltaforge.owner"
"""Property of a table: whose it is, JSON (`pipeline.lake.writer.Ownership`)."""

SOURCE = "deltaforge.source"
"""Property of a table: the source's table that its rows are from."""

PENDING = "deltaforge.pending"
"""Property of a table, and of the table with its pending changes: a random text, which shows that they belong together."""

KEY = "deltaforge.key"
"""Property of a table of pending changes: the key columns, JSON."""

COLUMNS = "deltaforge.columns"
"""Property of a table: by name of a column what identifies it, JSON (`StagedTable.identities`)."""
UNFILLED = f"{COLUMNS}.unfilled"
"""Property of a table: columns that are added, whose rows are not filled yet, with the value (`StagedTable.fills`); JSON."""

CLUSTERED = "deltaforge.clustered"
"""Property of a table whose format does not know it itself: the columns by which compaction clusters it, JSON."""

INT64_TIMESTAMPS = "deltaforge.int64-timestamps"
"""Property of a table: `true` if no file has timestamps as INT96, of which readers other than Spark make others (1816 of 9999)."""

COMMITTED = "deltaforge.committed"
"""Property of a table: a copy of its last commit's stamp, JSON (`pipeline.lake.stamps.CommitCopy`)."""

SMALL_FILE_BYTES = 32 << 20
"""A file with fewer bytes is small."""

SESSION_SETTINGS: Mapping[str, str] = {
    # Statements join and sort; with adaptive planning, small ones do so in few tasks and write few files.
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.caseSensitive": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # Staged rows have timestamps with and without a time zone.
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    # Spark's default for timestamps with a time zone is INT96, which many readers take for nanoseconds since 1970: these
    # end in 2262. Before 1582, LEGACY files would have days of another calendar.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}


_WRITER_SETTINGS: Mapping[str, str] = {
    # A Bloom filter of the keys of changes leaves out most rows of a table where they are read. Spark makes none for what it
    # might broadcast, even in joins that cannot; and of changes, not of a table, because only these are few.
    "spark.sql.optimizer.runtime.bloomFilter.applicationSideScanSizeThreshold": "10MB",
    "spark.sql.optimizer.runtime.bloomFilter.creationSideThreshold": "100MB",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "10MB",  # by what was read, not estimated
}
_TASK_BYTES = (
    "spark.sql.adaptive.advisoryPartitionSizeInBytes",
    "spark.sql.iceberg.advisory-partition-size",  # of what Iceberg writes; by default up to 384 MB
)
"""The settings with which a session that writes gets `task_bytes`."""


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """A column of a new table, or one that is added.

    Attributes:
        name: Its name.
        type: Its type, as `sql` writes it.
        comment: What it was in the source, if known.
        is_key: Whether it is part of the key.
    """

    name: str
    type: str
    comment: str | None = None
    is_key: bool = False

    @property
    def definition(self) -> str:
        """The column in a CREATE or ALTER statement."""
        comment = "" if self.comment is None else f" COMMENT {literal(self.comment)}"
        return f"{quoted(self.name)} {self.type}{comment}"


class Branches(Protocol):
    """Statements for branches of a table, which commit several statements at once and only onto what was read."""

    def snapshots(self, table: str) -> str:
        """Return a query for the snapshots: `id`, `parent`, and when it was made, `at`, in microseconds since 1970.

        If it is ours, it also has its stamp's `owner` and `version`.
        """
        ...

    def references(self, table: str) -> str:
        """Return a query for the branches: `name` and the `id` of its newest snapshot."""
        ...

    def create(self, table: str, branch: str, snapshot: int | None) -> str:
        """Return the statement that makes a branch at a snapshot; None: of a table that is empty."""
        ...

    def drop(self, table: str, branch: str) -> str:
        """Return the statement that drops a branch."""
        ...

    def part(self, table: str, branch: str) -> str:
        """Return the name by which statements read and write a branch."""
        ...

    def publish(self, destination: Sequence[str], branch: str) -> str:
        """Return the statement that makes main equal to the branch, which fails unless the branch contains main.

        Its answer has `updated_ref`, the newest snapshot.
        """
        ...


class TableMaintenance(Protocol):
    """Statements that keep tables small and quick to read."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session that maintains tables, besides those of every session."""
        ...

    def newest(self, table: str) -> str:
        """Return a query for the newest `version` of a table; no row if it has none."""
        ...

    def small_files(self, table: str, version: int, location: str | None) -> str:
        """Return a query for the number of `small` files; arguments are those of `LakeDialect.figures`."""
        ...

    def compact(
        self,
        destination: Sequence[str],
        options: LakeMaintenanceConfig,
        properties: Mapping[str, str],
        *,
        small: bool,
        deleted: bool,
    ) -> Sequence[str]:
        """Return the statements that make large files of `small` ones, and files without the `deleted` rows.

        If the table is clustered, they cluster it.
        """
        ...

    def clean(
        self, destination: Sequence[str], now: datetime, retention_hours: int
    ) -> Sequence[str]:
        """Return the statements that delete what no reader of a version since so many hours before `now` needs.

        Among that are files which never became part of the table, but none that a commit may still be writing.
        """
        ...


class LakeDialect(Protocol):
    """A format of lake tables."""

    @property
    def name(self) -> str:
        """Name of the format for users."""
        ...

    @property
    def branches(self) -> Branches | None:
        """Statements for branches, if they are what makes a commit exact."""
        ...

    @property
    def maintenance(self) -> TableMaintenance:
        """Statements for the maintenance of tables."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session, made before its first statement."""
        ...

    @property
    def last_version(self) -> str | None:
        """The setting that has the version of the session's last commit; None if `Branches.publish` returns it."""
        ...

    def location(self, destination: Sequence[str]) -> str | None:
        """Return the query for a table's `location`, None if `figures` does not need it."""
        ...

    def figures(self, table: str, version: int, location: str | None) -> str:
        """Return a query for what the format itself counts: `files`, their `bytes`, `rows`, and `deleted` rows in them.

        What is not known is null. There may be no row, or nothing to query.

        Args:
            table: Name of the table.
            version: A version of the table.
            location: What `location` has found.
        """
        ...

    def stamp(self, owner: str, version: int, step: int) -> Mapping[str, str]:
        """Return settings with which a statement's commit is stamped.

        Args:
            owner: Who writes.
            version: Number of the commit.
            step: Number of the statement in the commit.
        """
        ...

    def table(self, destination: Sequence[str]) -> str:
        """Return the table's name in SQL."""
        ...

    def prepare(self, destination: Sequence[str]) -> Sequence[str]:
        """Return the statements that make what contains the table."""
        ...

    def create(
        self,
        destination: Sequence[str],
        columns: Sequence[LakeColumn],
        layout: TableLayout,
        properties: Mapping[str, str],
        *,
        replace: bool,
    ) -> str:
        """Return the statement that makes a table unless it exists; if `replace`, that replaces one by one without rows."""
        ...

    def add_columns(self, table: str, columns: Sequence[LakeColumn]) -> Sequence[str]:
        """Return the statements that add columns."""
        ...

    def widen(self, table: str, column: str, old: str, new: str) -> Sequence[str] | None:
        """Return the statements that widen a column, None if the format or the options do not allow that."""
        ...

    def rename(
        self, table: str, column: str, new: str, properties: Mapping[str, str]
    ) -> Sequence[str]:
        """Return the statements that rename a column, which keeps its values; `properties` are the table's."""
        ...

    def bad_name(self, column: str) -> str | None:
        """Return why the format cannot have a column of that name, None if it can."""
        ...

    def stored(self, type_: str) -> str:
        """Return the type that a column gets whose values are of this type."""
        ...


def task_bytes(config: LakeSinkConfig) -> int:
    """Return how many shuffled bytes one task of a statement joins or writes.

    Where a commit marks replaced rows, it writes only what has changed, which is often less than Spark's 64 MiB: in one task,
    as slow as one processor. Where it rewrites files, larger tasks write larger files.
    """
    marks = config.write_mode == "merge_on_read"
    return (16 if marks else 64) << 20


def session_settings(dialect: LakeDialect, config: LakeSinkConfig) -> Mapping[str, str]:
    """Return the settings of a session that reads or writes a sink's tables: the format's, then the sink's own."""
    return {**dialect.settings, **_own(config)}


def writer_settings(dialect: LakeDialect, config: LakeSinkConfig) -> Mapping[str, str]:
    """Return the settings of a session that writes a sink's tables: the format's, those of joins and writes, then the sink's own.

    What depends on how a sink writes is only here: one session may read the tables of several sinks.
    """
    size = str(task_bytes(config))
    return {
        **dialect.settings,
        **_WRITER_SETTINGS,
        **dict.fromkeys(_TASK_BYTES, size),
        **_own(config),
    }


def _own(config: LakeSinkConfig) -> Mapping[str, str]:
    return {name: one.get_secret_value() for name, one in config.spark.items()}


def create_text(*, replace: bool) -> str:
    """Return the words with which a statement begins that makes a table, or replaces it.

    Not `CREATE OR REPLACE`: with Delta, it replaces nothing if the table is a path, and succeeds if the table is alike.
    """
    return "REPLACE TABLE" if replace else "CREATE TABLE IF NOT EXISTS"


def rename_text(table: str, column: str, new: str) -> str:
    """Return the statement that renames a column."""
    return f"ALTER TABLE {table} RENAME COLUMN {quoted(column)} TO {quoted(new)}"


def properties_text(properties: Mapping[str, str]) -> str:
    """Return properties in the form of SQL's TBLPROPERTIES."""
    return ", ".join(f"{literal(name)} = {literal(value)}" for name, value in properties.items())


def partition_text(partition_by: Sequence[PartitionField]) -> str:
    """Return the clause that partitions a table."""
    if not partition_by:
        return ""
    fields = []
    for one in partition_by:
        column = quoted(one.column)
        arguments = column if one.argument is None else f"{one.argument}, {column}"
        fields.append(column if one.transform == "identity" else f"{one.transform}({arguments})")
    return f" PARTITIONED BY ({', '.join(fields)})"
