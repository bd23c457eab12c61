"""The dialect for Apache Iceberg.

Snapshots can be stamped with properties, but these fence nothing: if two writers add the same rows,
both succeed. However, a branch can become the main one only if it contains the newest snapshot of
main. So the statements of a commit write to a branch of their own, made at the snapshot at which
the table was seen to lack the commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import orjson

from deltaforge_dagster.sinks.lake.config import (
    IcebergSinkConfig,
    LakeMaintenanceConfig,
    TableLayout,
)
from deltaforge_dagster.sinks.lake.dialect import (
    CLUSTERED,
    SESSION_SETTINGS,
    SMALL_FILE_BYTES,
    LakeColumn,
    create_text,
    partition_text,
    properties_text,
    rename_text,
)
from deltaforge_dagster.sinks.lake.statements import literal, quoted

_STAMP = "spark.sql.iceberg.snapshot-property."
_OWNER, _VERSION = "deltaforge.writer", "deltaforge.version"
_ORPHAN_AGE = timedelta(days=3)
"""Age from which a file that is in no snapshot does not belong to a commit in progress."""

_WIDER = {("int", "bigint"), ("float", "double")}
_RESERVED = {
    "_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id",
    "_last_updated_sequence_number", "_change_type", "_change_ordinal", "_commit_snapshot_id",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class IcebergBranches:
    """Statements for branches; implements `dialect.Branches`.

    Args:
        catalog: The catalog.
    """

    catalog: str

    def snapshots(self, table: str) -> str:
        """Return a query for the snapshots."""
        return (
            "SELECT snapshot_id AS id, parent_id AS parent, unix_micros(committed_at) AS at,"
            f" summary[{literal(_OWNER)}] AS owner, summary[{literal(_VERSION)}] AS version"
            f" FROM {table}.snapshots"
        )

    def references(self, table: str) -> str:
        """Return a query for the branches."""
        return f"SELECT name, snapshot_id AS id FROM {table}.refs WHERE type = 'BRANCH'"

    def create(self, table: str, branch: str, snapshot: int | None) -> str:
        """Return the statement that makes a branch."""
        as_of = "" if snapshot is None else f" AS OF VERSION {snapshot}"
        return f"ALTER TABLE {table} CREATE BRANCH {quoted(branch)}{as_of}"

    def drop(self, table: str, branch: str) -> str:
        """Return the statement that drops a branch."""
        return f"ALTER TABLE {table} DROP BRANCH IF EXISTS {quoted(branch)}"

    def part(self, table: str, branch: str) -> str:
        """Return the name of a branch."""
        return f"{table}.{quoted(f'branch_{branch}')}"

    def publish(self, destination: Sequence[str], branch: str) -> str:
        """Return the statement that makes main equal to the branch."""
        return (
            f"CALL {quoted(self.catalog)}.system.fast_forward("
            f"table => {literal(quoted(*destination))},"
            f" branch => 'main', to => {literal(branch)})"
        )


@dataclass(frozen=True, slots=True)
class IcebergMaintenance:
    """Statements for maintenance; implements `dialect.TableMaintenance`.

    Args:
        catalog: The catalog.
    """

    catalog: str
    settings: Mapping[str, str] = field(default_factory=dict, init=False)

    def newest(self, table: str) -> str:
        """Return a query for the newest snapshot."""
        return f"SELECT snapshot_id AS version FROM {table}.refs WHERE name = 'main'"

    def small_files(self, table: str, version: int, location: str | None) -> str:  # noqa: ARG002
        """Return a query for the number of small files.

        Delete files count as small, except for deletion vectors.
        """
        return (
            f"SELECT count_if(IF(content = 0, file_size_in_bytes < {SMALL_FILE_BYTES},"
            f" file_format <> 'PUFFIN')) AS small FROM {table}.files"
        )

    def compact(
        self,
        destination: Sequence[str],
        options: LakeMaintenanceConfig,
        properties: Mapping[str, str],
        *,
        small: bool,  # noqa: ARG002 - one statement does both
        deleted: bool,  # noqa: ARG002
    ) -> Sequence[str]:
        """Return the statement, which also removes delete files that no longer apply to any row.

        In tables without deletion vectors, such files would remain otherwise.
        """
        rewrite_options = (
            f"'delete-ratio-threshold', '{options.deleted_ratio}',"
            f" 'remove-dangling-deletes', 'true'"
        )
        arguments = [f"options => map({rewrite_options})"]
        columns = [quoted(column) for column in orjson.loads(properties.get(CLUSTERED, "[]"))]
        if columns:
            order = columns[0] if len(columns) == 1 else f"zorder({', '.join(columns)})"
            arguments += ["strategy => 'sort'", f"sort_order => {literal(order)}"]
        return (self._call("rewrite_data_files", destination, *arguments),)

    def clean(
        self, destination: Sequence[str], now: datetime, retention_hours: int
    ) -> Sequence[str]:
        """Return the statements."""
        retention = timedelta(hours=retention_hours)
        expired, orphaned = _moment(now - retention), _moment(now - max(retention, _ORPHAN_AGE))
        return (
            self._call("expire_snapshots", destination, f"older_than => {expired}"),
            self._call("remove_orphan_files", destination, f"older_than => {orphaned}"),
        )

    def _call(self, procedure: str, destination: Sequence[str], *arguments: str) -> str:
        table = f"table => {literal(quoted(*destination))}"
        return f"CALL {quoted(self.catalog)}.system.{procedure}({', '.join((table, *arguments))})"


@dataclass(frozen=True, slots=True)
class IcebergDialect:
    """Tables of Apache Iceberg; implements `dialect.LakeDialect`.

    Args:
        config: Options of the sink.
    """

    config: IcebergSinkConfig
    name: Final = "Iceberg"
    branches: IcebergBranches = field(init=False)
    maintenance: IcebergMaintenance = field(init=False)
    last_version: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "branches", IcebergBranches(self.config.catalog))
        object.__setattr__(self, "maintenance", IcebergMaintenance(self.config.catalog))

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session, above all of the catalog."""
        catalog = f"spark.sql.catalog.{self.config.catalog}"
        properties = self.config.catalog_properties
        return {
            **SESSION_SETTINGS,
            **({catalog: "org.apache.iceberg.spark.SparkCatalog"} if properties else {}),
            **{f"{catalog}.{name}": value.get_secret_value() for name, value in properties.items()},
            # Otherwise one task would write all that a statement has changed, up to 384 MB.
            "spark.sql.iceberg.advisory-partition-size": str(32 << 20),
            # Otherwise a session does not see commits of other sessions.
            f"{catalog}.cache-enabled": "false",
        }

    def location(self, destination: Sequence[str]) -> None:
        """Return None: the figures are in the table's snapshots."""

    def figures(self, table: str, version: int, location: str | None) -> str:  # noqa: ARG002
        """Return a query for the figures in a snapshot's summary."""
        files, size, records, deleted, by_value = (
            f"CAST(summary[{literal(f'total-{name}')}] AS BIGINT)"
            for name in (
                "data-files", "files-size", "records", "position-deletes", "equality-deletes",
            )
        )  # fmt: skip
        return (
            f"SELECT {files} AS files, {size} AS bytes, {deleted} AS deleted,"
            f" IF({by_value} = 0, {records} - {deleted}, NULL) AS rows"
            f" FROM {table}.snapshots WHERE snapshot_id = {version}"
        )

    def stamps(self, version: int, location: str | None) -> None:
        """Return None: snapshots have their stamps (`IcebergBranches.snapshots`)."""

    def stamp(
        self,
        owner: str,
        version: int,
        step: int,  # noqa: ARG002 - all steps are one commit
    ) -> Mapping[str, str]:
        """Return the settings that stamp a statement's snapshot."""
        return {f"{_STAMP}{_OWNER}": owner, f"{_STAMP}{_VERSION}": str(version)}

    def table(self, destination: Sequence[str]) -> str:
        """Return the table's name."""
        return quoted(self.config.catalog, *destination)

    def prepare(self, destination: Sequence[str]) -> Sequence[str]:
        """Return the statement that makes the namespace."""
        if len(destination) < 2:
            return ()
        return (f"CREATE NAMESPACE IF NOT EXISTS {self.table(destination[:-1])}",)

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
        # A table that is replaced keeps the properties that the statement does not set.
        if layout.cluster_by or replace:
            all_properties[CLUSTERED] = orjson.dumps(layout.cluster_by).decode()
        if self.config.mode != "changelog":  # changelogs only get new rows
            write_mode = self.config.write_mode.replace("_", "-")
            all_properties |= {
                f"write.{action}.mode": write_mode for action in ("delete", "update", "merge")
            }
            if write_mode == "merge-on-read":
                all_properties["format-version"] = "3"  # only version 3 has deletion vectors
        definitions = ", ".join(column.definition for column in columns)
        return (
            f"{create_text(replace=replace)} {self.table(destination)} ({definitions})"
            " USING iceberg"
            f"{partition_text(layout.partition_by)}"
            f" TBLPROPERTIES ({properties_text(all_properties | dict(self.config.properties))})"
        )

    def add_columns(self, table: str, columns: Sequence[LakeColumn]) -> Sequence[str]:
        """Return the statement that adds columns."""
        return (
            (
                f"ALTER TABLE {table} ADD COLUMNS"
                f" ({', '.join(column.definition for column in columns)})"
            ),
        )

    def widen(self, table: str, column: str, old: str, new: str) -> Sequence[str] | None:
        """Return the statement that widens a column; None if Iceberg cannot."""
        if (old, new) not in _WIDER and not _same_scale(old, new):
            return None
        return (f"ALTER TABLE {table} ALTER COLUMN {quoted(column)} TYPE {new}",)

    def rename(
        self, table: str, column: str, new: str, properties: Mapping[str, str]
    ) -> Sequence[str]:
        """Return the statement, and one for `CLUSTERED`; everything else uses the column's id."""
        statements = [rename_text(table, column, new)]
        clustered: list[str] = orjson.loads(properties.get(CLUSTERED, "[]"))
        renamed = [new if name.lower() == column.lower() else name for name in clustered]
        if renamed != clustered:
            changed = properties_text({CLUSTERED: orjson.dumps(renamed).decode()})
            statements.append(f"ALTER TABLE {table} SET TBLPROPERTIES ({changed})")
        return statements

    def bad_name(self, column: str) -> str | None:
        """Return why the table cannot have a column of this name."""
        return "Iceberg reserves the name" if column.lower() in _RESERVED else None

    def stored(self, type_: str) -> str:
        """Return the type with `int` in place of small integers, which Iceberg does not have."""
        return re.sub(r"\b(tinyint|smallint)\b", "int", type_)


def _moment(time: datetime) -> str:
    return f"TIMESTAMP {literal(time.isoformat(sep=' '))}"


def _same_scale(old: str, new: str) -> bool:
    """Return whether both are decimals of the same scale."""
    scale = re.fullmatch(r"decimal\(\d+,(\d+)\)", old)
    return scale is not None and re.fullmatch(rf"decimal\(\d+,{scale[1]}\)", new) is not None
