"""The differences between the formats of lake tables: SQL text, and settings of Spark sessions.

Both formats are written by the same statements (`statements`), but they make a commit apply exactly
once in different ways, which `pipeline.lake.writer` describes: a format has either a fence of its
own, set by `stamp`, or `Branches`.
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
from deltaforge_dagster.sinks.lake.statements import literal, quoted

OWNER = "deltaforge.owner"
"""Property of a table: its owner, JSON (`pipeline.lake.target.Ownership`)."""

SOURCE = "deltaforge.source"
"""Property of a table: the source's table that its rows are from."""

PENDING = "deltaforge.pending"
"""Property of a table and of that with its pending changes: the same random text in both.

It shows that the two tables belong together.
"""

KEY = "deltaforge.key"
"""Property of a table of pending changes: the key columns, JSON."""

COLUMNS = "deltaforge.columns"
"""Property of a table: what identifies its columns, by name, JSON (`StagedTable.identities`)."""
UNFILLED = f"{COLUMNS}.unfilled"
"""Property of a table: values (`StagedTable.fills`) of added columns not filled yet, JSON."""

CLUSTERED = "deltaforge.clustered"
"""Property of a table: the columns by which compaction clusters it, JSON.

It is set only if the format does not store them itself.
"""

INT64_TIMESTAMPS = "deltaforge.int64-timestamps"
"""Property of a table: `true` if no file has timestamps as INT96.

Readers other than Spark take such timestamps for others: the year 9999 becomes 1816.
"""

COMMITTED = "deltaforge.committed"
"""Property of a table: its last commit's stamp, JSON (`recorded_commits.CommitCopy`)."""

SMALL_FILE_BYTES = 32 << 20
"""A file with fewer bytes is small."""

SESSION_SETTINGS: Mapping[str, str] = {
    # Statements join and sort. With adaptive planning, small statements use few tasks and write few
    # files.
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.caseSensitive": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # Staged rows have timestamps with and without a time zone.
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    # Spark's default for timestamps with a time zone is INT96, which many readers convert to
    # nanoseconds since 1970, whose range ends in 2262. In LEGACY mode, dates before 1582 would be
    # those of another calendar.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}


_WRITER_SETTINGS: Mapping[str, str] = {
    # A Bloom filter of the keys of changes skips most rows of a table when they are read. Spark
    # makes none for a side that it might broadcast, even in joins that cannot broadcast it, so
    # broadcasts by estimated size are off. The filter is made of the changes, not of a table,
    # because only the changes are few.
    "spark.sql.optimizer.runtime.bloomFilter.applicationSideScanSizeThreshold": "10MB",
    "spark.sql.optimizer.runtime.bloomFilter.creationSideThreshold": "100MB",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # By the size that was read, not the estimated one.
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "10MB",
}
_TASK_BYTES = (
    "spark.sql.adaptive.advisoryPartitionSizeInBytes",
    "spark.sql.iceberg.advisory-partition-size",  # of Iceberg's writes; by default up to 384 MB
)
"""The settings that have the value of `task_bytes` in a session that writes."""


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """A column of a new table, or one that is added.

    Attributes:
        name: Its name.
        type: Its type, as `sql_type` writes it.
        comment: The column's type at the source, if known.
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
    """Statements for branches of a table.

    A branch commits several statements at once, and only onto the snapshot that was read.
    """

    def snapshots(self, table: str) -> str:
        """Return a query for the snapshots: `id`, `parent`, and `at`.

        `at` is when the snapshot was made, in microseconds since 1970 UTC.

        A snapshot with a stamp also has the stamp's `owner` and `version`.
        """
        ...

    def references(self, table: str) -> str:
        """Return a query for the branches: `name`, and the `id` of the branch's newest snapshot."""
        ...

    def create(self, table: str, branch: str, snapshot: int | None) -> str:
        """Return the statement that makes a branch at a snapshot; None for an empty table."""
        ...

    def drop(self, table: str, branch: str) -> str:
        """Return the statement that drops a branch."""
        ...

    def part(self, table: str, branch: str) -> str:
        """Return the name by which statements read and write a branch."""
        ...

    def publish(self, destination: Sequence[str], branch: str) -> str:
        """Return the statement that makes main equal to the branch, if that contains main.

        Otherwise the statement fails.

        The result of the statement has `updated_ref`, the newest snapshot.
        """
        ...


class TableMaintenance(Protocol):
    """Statements that keep tables small and quick to read."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session that maintains tables, besides those of every session."""
        ...

    def newest(self, table: str) -> str:
        """Return a query for the newest `version` of a table; without a row if it has none."""
        ...

    def small_files(self, table: str, version: int, location: str | None) -> str:
        """Return a query for the number of `small` files.

        Arguments are those of `LakeDialect.figures`.
        """
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
        """Return the statements that combine `small` files, and rewrite those with `deleted` rows.

        If the table is clustered, the statements cluster it.
        """
        ...

    def clean(
        self, destination: Sequence[str], now: datetime, retention_hours: int
    ) -> Sequence[str]:
        """Return the statements that delete what only versions older than the retention need.

        The retention is a number of hours before `now`.

        They also delete files which never became part of the table, but none that a commit may
        still be writing.
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
        """Statements for branches, if branches are what makes a commit apply exactly once."""
        ...

    @property
    def maintenance(self) -> TableMaintenance:
        """Statements for the maintenance of tables."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session, to be set before its first statement."""
        ...

    @property
    def last_version(self) -> str | None:
        """The setting with the version of the session's last commit, or None.

        None if `Branches.publish` returns the version.
        """
        ...

    def location(self, destination: Sequence[str]) -> str | None:
        """Return the query for a table's `location`; None if `figures` does not need it."""
        ...

    def figures(self, table: str, version: int, location: str | None) -> str:
        """Return a query for what the format itself counts.

        The columns are `files`, their `bytes`, `rows`, and `deleted` rows in the files.

        An unknown number is null. The query may return no row, or fail because there is nothing to
        query.

        Args:
            table: Name of the table.
            version: A version of the table.
            location: The location that the query of `location` has returned.
        """
        ...

    def stamps(self, version: int, location: str | None) -> str | None:
        """Return a query for the newest stamps that a version has; None if `branches` tells them.

        The column `stamps` is an array of their `writer`, its `number` of a commit, and the `step`;
        null if they are not known. Arguments are those of `figures`.
        """
        ...

    def stamp(self, owner: str, version: int, step: int) -> Mapping[str, str]:
        """Return settings with which a statement's commit is stamped.

        Args:
            owner: The writer (`TableCommit.stamp`).
            version: Number of the commit.
            step: Number of the statement in the commit.
        """
        ...

    def table(self, destination: Sequence[str]) -> str:
        """Return the table's name in SQL."""
        ...

    def prepare(self, destination: Sequence[str]) -> Sequence[str]:
        """Return the statements that make the namespace of the table."""
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
        """Return the statement that makes a table unless it exists, or with `replace` replaces it.

        A table that is replaced has no rows afterwards.
        """
        ...

    def add_columns(self, table: str, columns: Sequence[LakeColumn]) -> Sequence[str]:
        """Return the statements that add columns."""
        ...

    def widen(self, table: str, column: str, old: str, new: str) -> Sequence[str] | None:
        """Return the statements that widen a column; None if format or options do not allow it."""
        ...

    def rename(
        self, table: str, column: str, new: str, properties: Mapping[str, str]
    ) -> Sequence[str]:
        """Return the statements that rename a column and keep its values.

        `properties` are those of the table.
        """
        ...

    def bad_name(self, column: str) -> str | None:
        """Return why the format cannot have a column of this name; None if it can."""
        ...

    def stored(self, type_: str) -> str:
        """Return the type with which the format stores a column of this type."""
        ...


def task_bytes(config: LakeSinkConfig) -> int:
    """Return how many shuffled bytes one task of a statement joins or writes.

    A commit that marks replaced rows writes only what has changed, which is often less than Spark's
    default of 64 MiB: one task, on one processor, would write all of it. For a commit that rewrites
    files, larger tasks write larger files.
    """
    marks = config.write_mode == "merge_on_read"
    return (16 if marks else 64) << 20


def session_settings(dialect: LakeDialect, config: LakeSinkConfig) -> Mapping[str, str]:
    """Return the settings of a session that reads or writes a sink's tables.

    They are those of the format, overridden by the sink's own.
    """
    return {**dialect.settings, **_spark_settings(config)}


def writer_settings(dialect: LakeDialect, config: LakeSinkConfig) -> Mapping[str, str]:
    """Return the settings of a session that writes a sink's tables.

    They are those of the format, and those for joins and writes, overridden by the sink's own.

    Settings that depend on how a sink writes are only here, because one session may read the tables
    of several sinks.
    """
    size = str(task_bytes(config))
    return {
        **dialect.settings,
        **_WRITER_SETTINGS,
        **dict.fromkeys(_TASK_BYTES, size),
        **_spark_settings(config),
    }


def _spark_settings(config: LakeSinkConfig) -> Mapping[str, str]:
    return {name: secret.get_secret_value() for name, secret in config.spark.items()}


def create_text(*, replace: bool) -> str:
    """Return the beginning of a statement that makes or replaces a table.

    It is not `CREATE OR REPLACE`: with Delta, that replaces nothing if the table is given by its
    path, and succeeds if the definitions are the same.
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
    for partition in partition_by:
        column = quoted(partition.column)
        arguments = column if partition.argument is None else f"{partition.argument}, {column}"
        fields.append(
            column if partition.transform == "identity" else f"{partition.transform}({arguments})"
        )
    return f" PARTITIONED BY ({', '.join(fields)})"
