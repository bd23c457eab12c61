"""Delta Lake as a dialect.

A commit of Delta's log can contain a transaction's application and version; a later one of the same application
whose version is not newer is skipped without an error. So each step of a commit has a version of its own.
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
from deltaforge_dagster.sinks.lake.sql import is_ordered, literal, quoted

_TRANSACTION = "spark.databricks.delta.write.txn"
_STEPS = 1 << 20
_MAPPED = set(" ,;{}()\n\t=")
"""Characters that a column's name can have only with column mapping."""
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
            # Our own options have a limit.
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
        properties: Mapping[str, str],  # noqa: ARG002 - OPTIMIZE knows itself how a table is clustered
        *,
        small: bool,
        deleted: bool,
    ) -> Sequence[str]:
        """Return the statements; OPTIMIZE alone keeps the deleted rows of a file that it cannot put together with others."""
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
        """Return the statement; Delta itself cleans its log."""
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
            # With the default of 50 partitions, reading the log of a small table takes longer than all else.
            "spark.databricks.delta.snapshotPartitions": "2",
            # MERGE reads its source twice, and copies it before unless it is a Delta table. Staged files do not change.
            "spark.databricks.delta.merge.materializeSource": "none",
        }

    def location(self, destination: Sequence[str]) -> str:
        """Return a query for the folder of a table, which has its log."""
        if self.config.path is None:
            return f"DESCRIBE DETAIL {self.table(destination)}"
        return f"SELECT {literal(self._folder(destination))} AS location"

    def figures(self, table: str, version: int, location: str | None) -> str:  # noqa: ARG002
        """Return a query for what the checksum of a version says, in which Delta counts as it commits.

        It counts no rows, but lists the files of a table that has at most 50, with those of each.
        """
        files, size, deleted = (
            f"CAST(get_json_object(value, '$.{name}') AS BIGINT)"
            for name in ("numFiles", "tableSizeBytes", "numDeletedRecordsOpt")
        )
        return (
            f"SELECT {files} AS files, {size} AS bytes, {deleted} AS deleted,"
            f" {_ROWS} AS rows FROM {_checksum(version, location)}"
        )

    def stamp(self, owner: str, version: int, step: int) -> Mapping[str, str]:
        """Return the settings that fence a statement."""
        return {
            f"{_TRANSACTION}AppId": f"deltaforge/{owner}",
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
        own = dict(properties)
        if self.config.mode != "changelog":  # to which rows are only added
            vectors = self.config.write_mode == "merge_on_read"
            own["delta.enableDeletionVectors"] = str(vectors).lower()
        own["delta.dataSkippingStatsColumns"] = _with_statistics(columns, layout)
        if any(_MAPPED & set(column.name) for column in columns):
            own |= _MAPPING
        if self.config.type_widening:
            own["delta.enableTypeWidening"] = "true"
        definitions = ", ".join(column.definition for column in columns)
        by = ", ".join(quoted(one) for one in layout.cluster_by)
        clustered = f" CLUSTER BY ({by})" if by else ""
        return (
            f"{create_text(replace=replace)} {self.table(destination)} ({definitions}) USING delta"
            f"{partition_text(layout.partition_by)}{clustered}"
            f" TBLPROPERTIES ({properties_text(own | dict(self.config.properties))})"
        )

    def add_columns(self, table: str, columns: Sequence[LakeColumn]) -> Sequence[str]:
        """Return the statements that add columns, after those that let the table have them."""
        needed: dict[str, str] = {}
        if any("timestamp_ntz" in column.type for column in columns):
            needed["delta.feature.timestampNtz"] = "supported"
        if any(_MAPPED & set(column.name) for column in columns):
            needed |= _MAPPING
        added = f"ALTER TABLE {table} ADD COLUMNS ({', '.join(one.definition for one in columns)})"
        return (*self._set(table, needed), added)

    def widen(self, table: str, column: str, old: str, new: str) -> Sequence[str] | None:  # noqa: ARG002
        """Return the statements that widen a column, None without the option."""
        if not self.config.type_widening:
            return None
        return (
            *self._set(table, {"delta.enableTypeWidening": "true"}),
            f"ALTER TABLE {table} ALTER COLUMN {quoted(column)} TYPE {new}",
        )

    def rename(
        self, table: str, column: str, new: str, properties: Mapping[str, str]
    ) -> Sequence[str]:
        """Return the statements, the first of which lets columns have other names than in the files."""
        mapped = properties.keys() >= _MAPPING.keys()
        return (
            *self._set(table, {} if mapped else _MAPPING),
            rename_text(table, column, new),
        )

    def bad_name(self, column: str) -> str | None:
        """Return why there can be no such column."""
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
    """Return the columns of which Delta keeps the smallest and largest value of each file, as a property says it.

    To find the smallest and largest text takes almost as long as to write it, so of texts they are only those by which the
    sink or its user looks for rows.
    """
    looked_for = {one.lower() for one in layout.cluster_by}
    parts = {one.column.lower() for one in layout.partition_by}
    return ",".join(
        quoted(one.name)
        for one in columns
        if one.name.lower() not in parts  # which have no others
        and (
            is_ordered(one.type)
            or one.type in _FLOATS
            or (one.type == "string" and (one.is_key or one.name.lower() in looked_for))
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
"""The number of rows by a checksum: NULL if it lists no files, or one without statistics."""


def _checksum(version: int, location: str | None) -> str:
    """Return the file in SQL in which the log has the figures of a version, one line of JSON."""
    return quoted("text", f"{location}/_delta_log/{version:020d}.crc")
