"""Delta Lake as a dialect.

A commit of Delta's log can contain a transaction's application and version; a later one of the same application
whose version is not newer is skipped without an error. So each step of a commit has a version of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deltaforge_dagster.sinks.lake.config import DeltaSinkConfig, PartitionField
from deltaforge_dagster.sinks.lake.dialect import (
    SESSION_SETTINGS,
    LakeColumn,
    create_text,
    partition_text,
    properties_text,
)
from deltaforge_dagster.sinks.lake.sql import quoted

_TRANSACTION = "spark.databricks.delta.write.txn"
_STEPS = 1 << 20
_MAPPED = set(" ,;{}()\n\t=")
"""Characters that a column's name can have only with column mapping."""
_MAPPING: Mapping[str, str] = {"delta.columnMapping.mode": "name"}
_RESERVED = {"_metadata", "_change_type", "_commit_version", "_commit_timestamp"}


@dataclass(frozen=True, slots=True)
class DeltaDialect:
    """Tables of Delta Lake; implements `dialect.LakeDialect`.

    Args:
        config: Options of the sink.
    """

    config: DeltaSinkConfig
    name: Final = "Delta"
    branches: None = field(default=None, init=False)

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of a session."""
        # With the default of 50 partitions, reading the log of a small table takes longer than all else.
        return {**SESSION_SETTINGS, "spark.databricks.delta.snapshotPartitions": "2"}

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
        return quoted("delta", "/".join((self.config.path.rstrip("/"), *destination)))

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
        partition_by: Sequence[PartitionField],
        properties: Mapping[str, str],
        *,
        anew: bool,
    ) -> str:
        """Return the statement that makes a table unless it exists, or replaces it."""
        own = dict(properties)
        if self.config.mode != "changelog":  # to which rows are only added
            vectors = self.config.write_mode == "merge_on_read"
            own["delta.enableDeletionVectors"] = str(vectors).lower()
        if any(_MAPPED & set(column.name) for column in columns):
            own |= _MAPPING
        if self.config.type_widening:
            own["delta.enableTypeWidening"] = "true"
        definitions = ", ".join(column.definition for column in columns)
        return (
            f"{create_text(anew=anew)} {self.table(destination)} ({definitions}) USING delta"
            f"{partition_text(partition_by)}"
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

    def bad_name(self, column: str) -> str | None:
        """Return why there can be no such column."""
        return "Delta reserves the name" if column.lower() in _RESERVED else None

    def stored(self, type_: str) -> str:
        """Return the type itself."""
        return type_

    def _set(self, table: str, properties: Mapping[str, str]) -> Sequence[str]:
        if not properties:
            return ()
        return (f"ALTER TABLE {table} SET TBLPROPERTIES ({properties_text(properties)})",)
