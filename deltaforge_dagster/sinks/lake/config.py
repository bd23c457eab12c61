"""`config` of a Delta or Iceberg sink in a pipeline file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import (
    AlsoAccepts,
    Block,
    Count,
    Text,
    setting_text,
)
from deltaforge_dagster.config.engine import cron_problem
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.sinks.tables.config import (
    Columns,
    PendingChanges,
    SourceTable,
    TableSinkConfig,
    full_name,
)

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_TRANSFORM = re.compile(r"(years?|months?|days?|hours?)\s*\(([^()]+)\)", re.IGNORECASE)
_SIZED = re.compile(r"(bucket|truncate)\s*\(\s*(\d{1,9})\s*,([^()]+)\)", re.IGNORECASE)

_FIXED_SETTINGS = (
    "spark.databricks.delta.write.txn",
    "spark.sql.iceberg.snapshot-property.deltaforge.",
    "spark.sql.ansi.enabled",
    "spark.sql.caseSensitive",
    "spark.sql.parquet.datetimeRebaseModeInWrite",
    "spark.sql.parquet.inferTimestampNTZ.enabled",
    "spark.sql.parquet.outputTimestampType",
    "spark.sql.session.timeZone",
)
"""Prefixes of settings that make commits apply exactly once, or decide how values are written."""


@dataclass(frozen=True, slots=True)
class PartitionField:
    """What a table is partitioned by.

    Attributes:
        column: Name of the column.
        transform: `identity`, or Iceberg's `years`, `months`, `days`, `hours`, `bucket` or
            `truncate`.
        argument: Number of buckets, or the width to which values are truncated.
    """

    column: str
    transform: str = "identity"
    argument: int | None = None


@dataclass(frozen=True, slots=True)
class TableLayout:
    """How a table is partitioned and clustered.

    Attributes:
        partition_by: What the table is partitioned by.
        cluster_by: The columns by which compaction clusters it.
    """

    partition_by: tuple[PartitionField, ...] = ()
    cluster_by: tuple[str, ...] = ()


def partition_field(text: str) -> PartitionField:
    """Parse an entry of `partition_by`: a column, or a transform such as `bucket(16, id)`."""
    text = text.strip()
    if parsed := _TRANSFORM.fullmatch(text):
        return PartitionField(parsed[2].strip(), parsed[1].lower().removesuffix("s") + "s")
    if parsed := _SIZED.fullmatch(text):
        return PartitionField(parsed[3].strip(), parsed[1].lower(), int(parsed[2]))
    return PartitionField(text)


def _identifier(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ValueError("is not the name of a catalog (letters, digits and `_`)")
    return name


def _cron(text: str) -> str:
    problem = cron_problem(text)
    if problem:
        raise ValueError(problem)
    return text


def _accept_off(value: object) -> object:
    """Accept `off` in place of a block; YAML parses it as `false`."""
    return {"enabled": False} if value is False or value == "off" else value


def _location(text: str) -> str:
    try:
        url = urlsplit(text)
        password = url.password
    except ValueError:
        raise ValueError("is not a URL") from None
    if password is not None:
        raise ValueError("holds a password, which others would see (put it under `spark`)")
    if not url.scheme and not text.startswith("/"):
        raise ValueError(
            "is not absolute (write the whole path, or a URL: Spark may run in another directory)"
        )
    return text


def local_folder(location: str) -> Path | None:
    """Return the folder on this machine that a path or URL names; None if it is elsewhere."""
    url = urlsplit(location)
    if url.scheme == "file" and url.netloc in {"", "localhost"}:
        return Path(unquote(url.path))
    return None if url.scheme else Path(location)


_Catalog = Annotated[Text, AfterValidator(_identifier)]
_NUMBERS = AlsoAccepts({"type": ["number", "boolean"]})
_Setting = Annotated[str, BeforeValidator(setting_text), _NUMBERS]
_SecretSetting = Annotated[SecretStr, BeforeValidator(setting_text), _NUMBERS]


def _pending(value: object) -> object:
    """Accept true for the defaults, and false for none."""
    if isinstance(value, bool):
        return {} if value else None
    return value


class LakeMaintenanceConfig(Block):
    """When a sink's tables are maintained, and what is done."""

    enabled: bool = True
    """Whether they are maintained at all."""
    schedule: Annotated[str, AfterValidator(_cron)] = "17 3 * * *"
    """A cron schedule of five fields, in UTC: when the tables are looked at."""
    small_files: Count = 32
    """A table's files are compacted when so many of them have less than 32 MiB."""
    deleted_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Files are also compacted when this part of the rows in a table's files is deleted."""
    retention_hours: Annotated[int, Field(ge=24)] = 168
    """For how long what a table had before can still be read: older snapshots (Iceberg) are
    deleted, and files that the table has not used for so long.
    """


class LakeSinkConfig(TableSinkConfig):
    """The options of every sink that writes tables of a lakehouse."""

    partition_by: Mapping[SourceTable, Columns] = {}
    """What new tables are partitioned by: `schema.table` to a list of columns.

    Iceberg also takes transforms: `days(created_at)`, `bucket(16, id)`, `truncate(4, code)`.
    """
    cluster_by: Mapping[SourceTable, Columns] = {}
    """By which columns [maintenance](lakehouse.md#maintenance) clusters new tables: rows with near
    values come into the same files, so that a query for some of them reads few. `schema.table` to a
    list of columns. A Delta table has either this or partitions.
    """
    pending: Annotated[
        PendingChanges | None, BeforeValidator(_pending), AlsoAccepts({"type": "boolean"})
    ] = None
    """With `mode: current`: keep the changes of small commits beside the table, where they cost
    what they weigh and not what the table weighs, and fold them into it later. Readers use [a
    view](lakehouse.md#pending-changes) of both. `true` takes the defaults.
    """
    soft_deletes: bool = False
    """With `mode: current`: a deleted row stays, with `df_deleted` set to true."""
    write_mode: Literal["merge_on_read", "copy_on_write"] = "merge_on_read"
    """How rows are replaced: by marking the old ones (`merge_on_read`), which makes small commits
    cheap, or by rewriting the affected files (`copy_on_write`), which every reader understands.
    """
    maintenance: Annotated[
        LakeMaintenanceConfig, BeforeValidator(_accept_off), AlsoAccepts({"enum": ["off", False]})
    ] = LakeMaintenanceConfig()
    """When the tables are [maintained](lakehouse.md#maintenance), and what is done.

    `maintenance: off` is accepted in place of the block.
    """
    properties: Mapping[str, _Setting] = {}
    """Table properties that new tables get."""
    spark: Mapping[str, _SecretSetting] = {}
    """Settings of the sink's Spark session, such as credentials of a storage."""

    @property
    def pending_changes(self) -> PendingChanges | None:
        """See `TableSinkConfig`."""
        return self.pending

    def layout_of(self, database: str, schema: str | None, table: str) -> TableLayout:
        """Return the layout of the lake's table for a table of the source."""
        name = full_name(database, schema, table)
        return TableLayout(
            tuple(map(partition_field, self.partition_by.get(name, ()))),
            tuple(self.cluster_by.get(name, ())),
        )

    @model_validator(mode="after")
    def _check_deletes(self) -> LakeSinkConfig:
        if self.soft_deletes and self.mode != "current":
            raise ValueError(
                f"soft_deletes needs mode: current (mode {self.mode} keeps deleted rows anyway)"
            )
        return self

    @model_validator(mode="after")
    def _check_pending(self) -> LakeSinkConfig:
        if self.pending is None:
            return self
        if self.mode != "current":
            raise ValueError(
                f"pending needs mode: current (it has no use in mode {self.mode})"
                if self.mode == "changelog"
                else "pending needs mode: current (a history cannot be folded when it is read)"
            )
        if self.soft_deletes:
            raise ValueError(
                "pending and soft_deletes exclude each other (a deleted row would not keep its "
                "last values)"
            )
        return self

    @field_validator("spark")
    @classmethod
    def _check_spark(cls, settings: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
        for name in settings:
            if name.startswith(_FIXED_SETTINGS) or name.endswith(".cache-enabled"):
                raise ValueError(
                    f"sets {name}, which the sink sets itself, because tables would become wrong"
                )
        return settings

    @field_validator("properties")
    @classmethod
    def _check_properties(cls, properties: Mapping[str, str]) -> Mapping[str, str]:
        for name in properties:
            if name.startswith("deltaforge."):
                raise ValueError(
                    f"sets {name}, but names that begin with deltaforge. are the sink's"
                )
        return properties

    @field_serializer("spark")
    def _mask_spark(self, settings: Mapping[str, SecretStr]) -> dict[str, str]:
        return _masked(settings)


class DeltaSinkConfig(LakeSinkConfig):
    """How to write Delta tables."""

    path: Annotated[Text, AfterValidator(_location)] | None = None
    """The folder or URL (`s3a://bucket/lake`) that has the tables; each part of a table's name is a
    folder below it. Either this or `catalog` is required.
    """
    catalog: _Catalog | None = None
    """The catalog that has the tables, such as `spark_catalog`; a table's name is `schema.table` in
    it. The Spark server must know the catalog.
    """
    type_widening: bool = False
    """Let columns get a larger type when those of the source do.

    Not every reader understands such tables.
    """

    @model_validator(mode="after")
    def _check_place(self) -> DeltaSinkConfig:
        if (self.path is None) == (self.catalog is None):
            raise ValueError("needs either `path` or `catalog`: where the tables are")
        if self.catalog is not None and self.name_parts != 2:
            raise ValueError(
                f"table {self.table} is not schema.table, as names of Delta tables in a catalog are"
            )
        for fields in self.partition_by.values():
            for partition in fields:
                if partition_field(partition).transform != "identity":
                    raise ValueError(
                        f"partition_by {partition}: Delta tables are partitioned by columns only "
                        "(a transform needs an Iceberg table)"
                    )
        for table in self.partition_by.keys() & self.cluster_by.keys():
            raise ValueError(
                f"cluster_by {table}: Delta tables that are partitioned cannot be clustered (leave "
                "one of them out)"
            )
        return self


class IcebergSinkConfig(LakeSinkConfig):
    """How to write Iceberg tables."""

    catalog: _Catalog = "lake"
    """Name of the catalog that has the tables."""
    catalog_properties: Mapping[str, _SecretSetting] = {}
    """[Properties of the
    catalog](https://iceberg.apache.org/docs/latest/spark-configuration/#catalog-configuration):
    `type: hadoop` and `warehouse` (a folder or URL) need no server. Without them, `catalog` must be
    one that the Spark server knows.
    """

    @model_validator(mode="after")
    def _check_catalog(self) -> IcebergSinkConfig:
        properties = {
            name: secret.get_secret_value() for name, secret in self.catalog_properties.items()
        }
        if not properties and "catalog" not in self.model_fields_set:
            raise ValueError(
                "needs `catalog_properties` (without a server: type: hadoop, and a folder as "
                "warehouse), or `catalog`, the name of a catalog that the Spark server knows"
            )
        if properties and not properties.keys() & {"type", "catalog-impl"}:
            raise ValueError("catalog_properties has no `type`: hadoop, hive, rest, jdbc or glue")
        if properties.get("type") == "hadoop":
            if "warehouse" not in properties:
                raise ValueError("catalog_properties has no `warehouse`: the folder of the tables")
            try:
                _location(properties["warehouse"])
            except ValueError as error:
                raise ValueError(f"catalog_properties: warehouse {error}") from None
        if "cache-enabled" in properties:
            raise ValueError(
                "catalog_properties sets cache-enabled, which is always false: a cache would hide "
                "the commits of other runs"
            )
        if self.name_parts < 2:
            raise ValueError(
                f"table {self.table} has no namespace (write schema.table: an Iceberg catalog has "
                "tables in namespaces only)"
            )
        return self

    @property
    def warehouse(self) -> str | None:
        """The folder or URL of the tables, if the catalog is only a folder (`type: hadoop`)."""
        properties = self.catalog_properties
        kind = properties.get("type")
        if kind is None or kind.get_secret_value() != "hadoop":
            return None
        return properties["warehouse"].get_secret_value()

    @field_serializer("catalog_properties")
    def _mask_catalog_properties(self, properties: Mapping[str, SecretStr]) -> dict[str, str]:
        return _masked(properties)


def _masked(settings: Mapping[str, SecretStr]) -> dict[str, str]:
    return {
        name: "***" if SECRET_NAME.search(name) else mask(value.get_secret_value())
        for name, value in settings.items()
    }
