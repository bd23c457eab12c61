"""The dialect for Delta Lake.

A commit in Delta's log can contain an application id and a transaction version; a later commit of
the same application whose version is not newer is skipped without an error. So each step of our
commits has a version of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from deltaforge_dagster.sinks.lake.config import (
    DeltaSinkConfig,
    LakeMaintenanceConfig,
    TableLayout,
)
from deltaforge_dagster.sinks.lake.dialect import (
    SESSION_SETTINGS,
    SMALL_FILE_BYTES,
    LakeColumn,
    create_text,
    partition_text,
    properties_text,
    rename_text,
)
from deltaforge_dagster.sinks.lake.statements import is_ordered, literal, quoted

_TRANSACTION = "spark.databricks.delta.write.txn"
_APPLICATION = "deltaforge/"
# A statement's transaction version is the number of its commit times `_STEPS`, plus its own number.
# Statements that repair rows take the upper half (`pipeline.lake.comparer`).
_STEPS = 1 << 20
_MAPPED = set(" ,;{}()\n\t=")
"""Characters that are possible in a column's name only with column mapping."""
_MAPPING: Mapping[str, str] = {"delta.columnMapping.mode": "name"}
_FLOATS = {"float", "double"}
_RESERVED = {"_metadata", "_change_type", "_commit_version", "_commit_timestamp"}


@dataclass(frozen=True, slots=True)
class DeltaMaintenance:
    """Statements for maintenance; implements `dialect.TableMaintenance`.

    Args:
        dialect: The dialect.
    """

    dialect: DeltaDialect
    settings: Mapping[str, str] = field(
        default_factory=lambda: {
            # With the default of 10,000 tasks, VACUUM of a small table takes a minute.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16",
            # Not needed: `retention_hours` has a minimum of its own.
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
        },
        init=False,
    )

    def newest(self, table: str) -> str:
        """Return a query for the newest version."""
        return f"DESCRIBE HISTORY {table} LIMIT 1"

    def small_files(self, table: str, version: int, location: str | None) -> str:  # noqa: ARG002
        """Return a query for the number of small files, from the log's histogram."""
        bins = "sortedBinBoundaries ARRAY<BIGINT>, fileCounts ARRAY<BIGINT>"
        histogram = f"from_json(get_json_object(value, '$.fileSizeHistogram'), '{bins}')"
        return (
            "SELECT aggregate(arrays_zip(h.sortedBinBoundaries, h.fileCounts), 0L, (n, b) ->"
            f" n + IF(b.sortedBinBoundaries < {SMALL_FILE_BYTES}, b.fileCounts, 0L)) AS small"
            f" FROM (SELECT {histogram} AS h FROM {_checksum(version, location)})"
        )

    def compact(
        self,
        destination: Sequence[str],
        options: LakeMaintenanceConfig,  # noqa: ARG002
        properties: Mapping[str, str],  # noqa: ARG002 - OPTIMIZE itself knows the clustering
        *,
        small: bool,
        deleted: bool,
    ) -> Sequence[str]:
        """Return the statements.

        OPTIMIZE alone keeps the deleted rows of a file that it cannot combine with others.
        """
        table = self.dialect.table(destination)
        return (
            *([f"OPTIMIZE {table}"] if small else []),
            *([f"REORG TABLE {table} APPLY (PURGE)"] if deleted else []),
        )

    def clean(
        self,
        destination: Sequence[str],
        now: datetime,  # noqa: ARG002
        retention_hours: int,
    ) -> Sequence[str]:
        """Return the statement that deletes files no version needs; Delta prunes its own log."""
        return (f"VACUUM {self.dialect.table(destination)} RETAIN {retention_hours} HOURS",)


@dataclass(frozen=True, slots=True)
class DeltaDialect:
    """Tables of Delta Lake; implements `dialect.LakeDialect`.

    Args:
        config: Options of the sink.
    """

    config: DeltaSinkConfig
    name: Final = "Delta"
    branches: None = field(default=None, init=False)
    last_version: str = field(
        default="spark.databricks.delta.lastCommitVersionInSession", init=False
    )

    @property
    def maintenance(self) -> DeltaMaintenance:
        """Statements for maintenance."""
        return DeltaMaintenance(self)

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session."""
        return {
            **SESSION_SETTINGS,
            # With the default of 50 partitions, reading the log of a small table takes longer than
            # all else.
            "spark.databricks.delta.snapshotPartitions": "2",
            # MERGE reads its source twice, and copies it before unless it is a Delta table. Staged
            # files do not change.
            "spark.databricks.delta.merge.materializeSource": "none",
        }

    def location(self, destination: Sequence[str]) -> str:
        """Return a query for the folder of a table, which has its log."""
        if self.config.path is None:
            return f"DESCRIBE DETAIL {self.table(destination)}"
        return f"SELECT {literal(self._folder(destination))} AS location"

    def figures(self, table: str, version: int, location: str | None) -> str:  # noqa: ARG002
        """Return a query for the checksum of a version, which Delta writes with each commit.

        The checksum has no number of rows. But for a table of at most 50 files it lists these, each
        with its number of rows.
        """
        files, size, deleted = (
            f"CAST(get_json_object(value, '$.{name}') AS BIGINT)"
            for name in ("numFiles", "tableSizeBytes", "numDeletedRecordsOpt")
        )
        return (
            f"SELECT {files} AS files, {size} AS bytes, {deleted} AS deleted,"
            f" {_ROWS} AS rows FROM {_checksum(version, location)}"
        )

    def stamps(self, version: int, location: str | None) -> str:
        """Return a query for the transactions in the checksum of a version."""
        transactions = "get_json_object(value, '$.setTransactions')"
        return (
            f"SELECT transform(filter(from_json({transactions},"
            " 'array<struct<appId: string, version: bigint>>'),"
            f" x -> startswith(x.appId, {literal(_APPLICATION)})), x -> struct("
            f"substring(x.appId, {len(_APPLICATION) + 1}) AS writer,"
            f" x.version DIV {_STEPS} AS number, x.version % {_STEPS} AS step)) AS stamps"
            f" FROM {_checksum(version, location)}"
        )

    def stamp(self, owner: str, version: int, step: int) -> Mapping[str, str]:
        """Return the settings that fence a statement."""
        return {
            f"{_TRANSACTION}AppId": f"{_APPLICATION}{owner}",
            f"{_TRANSACTION}Version": str(version * _STEPS + step),
        }

    def table(self, destination: Sequence[str]) -> str:
        """Return the table's name."""
        if self.config.path is None:
            assert self.config.catalog is not None
            return quoted(self.config.catalog, *destination)
        return quoted("delta", self._folder(destination))

    def prepare(self, destination: Sequence[str]) -> Sequence[str]:
        """Return the statement that makes the namespace in a catalog."""
        if self.config.catalog is None or len(destination) < 2:
            return ()
        space = quoted(self.config.catalog, *destination[:-1])
        return (f"CREATE NAMESPACE IF NOT EXISTS {space}",)

    def create(
        self,
        destination: Sequence[str],
        columns: Sequence[LakeColumn],
        layout: TableLayout,
        properties: Mapping[str, str],
        *,
        replace: bool,
    ) -> str:
        """Return the statement that makes a table unless it exists, or replaces it."""
        all_properties = dict(properties)
        if self.config.mode != "changelog":  # changelogs only get new rows
            vectors = self.config.write_mode == "merge_on_read"
            all_properties["delta.enableDeletionVectors"] = str(vectors).lower()
        all_properties["delta.dataSkippingStatsColumns"] = _with_statistics(columns, layout)
        if any(_MAPPED & set(column.name) for column in columns):
            all_properties |= _MAPPING
        if self.config.type_widening:
            all_properties["delta.enableTypeWidening"] = "true"
        definitions = ", ".join(column.definition for column in columns)
        clustered_by = ", ".join(quoted(column) for column in layout.cluster_by)
        clustered = f" CLUSTER BY ({clustered_by})" if clustered_by else ""
        return (
            f"{create_text(replace=replace)} {self.table(destination)} ({definitions}) USING delta"
            f"{partition_text(layout.partition_by)}{clustered}"
            f" TBLPROPERTIES ({properties_text(all_properties | dict(self.config.properties))})"
        )

    def add_columns(self, table: str, columns: Sequence[LakeColumn]) -> Sequence[str]:
        """Return the statements that add columns, after those that enable what these need."""
        needed: dict[str, str] = {}
        if any("timestamp_ntz" in column.type for column in columns):
            needed["delta.feature.timestampNtz"] = "supported"
        if any(_MAPPED & set(column.name) for column in columns):
            needed |= _MAPPING
        added = (
            f"ALTER TABLE {table} ADD COLUMNS"
            f" ({', '.join(column.definition for column in columns)})"
        )
        return (*self._set(table, needed), added)

    def widen(
        self,
        table: str,
        column: str,
        old: str,  # noqa: ARG002
        new: str,
    ) -> Sequence[str] | None:
        """Return the statements that widen a column; None without the option `type_widening`."""
        if not self.config.type_widening:
            return None
        return (
            *self._set(table, {"delta.enableTypeWidening": "true"}),
            f"ALTER TABLE {table} ALTER COLUMN {quoted(column)} TYPE {new}",
        )

    def rename(
        self, table: str, column: str, new: str, properties: Mapping[str, str]
    ) -> Sequence[str]:
        """Return the statements, after one that enables column mapping if it is not enabled yet."""
        mapped = properties.keys() >= _MAPPING.keys()
        return (
            *self._set(table, {} if mapped else _MAPPING),
            rename_text(table, column, new),
        )

    def bad_name(self, column: str) -> str | None:
        """Return why the table cannot have a column of this name."""
        return "Delta reserves the name" if column.lower() in _RESERVED else None

    def stored(self, type_: str) -> str:
        """Return the type itself."""
        return type_

    def _folder(self, destination: Sequence[str]) -> str:
        assert self.config.path is not None
        return "/".join((self.config.path.rstrip("/"), *destination))

    def _set(self, table: str, properties: Mapping[str, str]) -> Sequence[str]:
        if not properties:
            return ()
        return (f"ALTER TABLE {table} SET TBLPROPERTIES ({properties_text(properties)})",)


def _with_statistics(columns: Sequence[LakeColumn], layout: TableLayout) -> str:
    """Return the property with the columns of which Delta keeps the bounds of each file.

    The bounds are the smallest and the largest value.

    Finding the bounds of texts takes almost as long as writing them, so text columns are included
    only if the sink or its users look for rows by them: key columns, and columns that cluster the
    table.
    """
    looked_for = {name.lower() for name in layout.cluster_by}
    parts = {partition.column.lower() for partition in layout.partition_by}
    return ",".join(
        quoted(column.name)
        for column in columns
        if column.name.lower() not in parts  # a file has only one value of these
        and (
            is_ordered(column.type)
            or column.type in _FLOATS
            or (column.type == "string" and (column.is_key or column.name.lower() in looked_for))
        )
    )


_ROWS = """aggregate(
    from_json(
        get_json_object(value, '$.allFiles'),
        'array<struct<stats: string, deletionVector: struct<cardinality: bigint>>>'
    ),
    0L,
    (rows, file) -> rows + CAST(get_json_object(file.stats, '$.numRecords') AS BIGINT)
        - coalesce(file.deletionVector.cardinality, 0L)
)"""
"""Number of rows by a checksum: NULL if it lists no files, or a file without statistics."""


def _checksum(version: int, location: str | None) -> str:
    """Return the name in SQL of the log's file with the figures of a version: one line of JSON."""
    return quoted("text", f"{location}/_delta_log/{version:020d}.crc")
