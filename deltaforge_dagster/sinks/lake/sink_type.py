"""The sink types for Delta and Iceberg tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from deltaforge_dagster.sinks.lake.config import (
    DeltaSinkConfig,
    IcebergSinkConfig,
    LakeSinkConfig,
    local_folder,
)
from deltaforge_dagster.sinks.registry import (
    KEYS_CHANGED,
    LATER_CHANGES,
    NEEDS_RESYNC,
    TABLES_MOVED,
    TYPES_CHANGED,
    LakeSinkType,
    SinkContext,
    folder_finding,
)
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # it needs Arrow
    from deltaforge_dagster.sinks.lake.dialect import LakeDialect
    from deltaforge_dagster.typed_rows.schema import TargetTypes

_Config = TypeVar("_Config", bound=LakeSinkConfig)

_NEW_TABLES = "applies to tables that are created from now on"


class LakeTablesSinkType(LakeSinkType[_Config]):
    """Tables of a lakehouse, in one format."""

    destinations = "tables"
    timing = frozenset({"commit_seconds", "commit_changes", "pending", "maintenance"})
    consequences: Mapping[str, str] = {
        **dict.fromkeys(["table", "path", "catalog"], TABLES_MOVED),
        **dict.fromkeys(["mode", "soft_deletes"], NEEDS_RESYNC),
        "pending": (
            "decides where later commits go; "
            "without it, pending changes are folded into their tables"
        ),
        "keys": KEYS_CHANGED,
        "types": TYPES_CHANGED,
        **dict.fromkeys(["partition_by", "cluster_by", "write_mode", "properties"], _NEW_TABLES),
        "maintenance": "applies to later maintenance",
        **dict.fromkeys(["filter", "skipped_operations"], LATER_CHANGES),
    }

    def column_types(self) -> TargetTypes:
        """Return the types that Delta and Iceberg tables can have and Spark can read and write."""
        from deltaforge_dagster.typed_rows.schema import TargetTypes  # noqa: PLC0415 - needs Arrow

        return TargetTypes(unsigned=False, time=False, uuid=False)

    @abstractmethod
    def place(self, config: _Config) -> Mapping[str, str]:
        """Return where the tables are: the path or the catalog, by what it is."""

    @abstractmethod
    def folder(self, config: _Config) -> str | None:
        """Return the path or URL of the tables' folder; None if only a catalog knows it."""

    def owned_place(self, config: _Config) -> tuple[str, ...]:
        """Return the folder, or else the catalog."""
        folder = self.folder(config)
        if folder is None:
            return tuple(self.place(config).values())
        local = local_folder(folder)
        return (folder.rstrip("/") if local is None else str(local.absolute()),)

    def names(self, config: _Config, pipeline: str) -> Mapping[str, str]:  # noqa: ARG002
        """Return the mode of the tables, and where they are."""
        return {"mode": config.mode, **self.place(config)}

    def metadata(self, config: _Config) -> Mapping[str, str]:
        """Return the mode of the tables, and where they are."""
        return {"mode": config.mode, **self.place(config)}

    def preflight(
        self,
        config: _Config,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> list[Finding]:
        """Check that a local folder can be written; for other places, only a run shows that."""
        subject, folder = f"sink {config.id}", self.folder(config)
        local = None if folder is None else local_folder(folder)
        if local is not None:
            return [folder_finding(subject, local, "tables", "correct the sink's path")]
        where = ", ".join(f"{kind} {name}" for kind, name in self.place(config).items())
        return [Finding(subject, "note", f"only a run shows whether Spark can write to {where}")]


class DeltaSinkType(LakeTablesSinkType[DeltaSinkConfig]):
    """Tables of Delta Lake."""

    name = "delta"
    sample: Mapping[str, Any] = {"path": "{{ env.LAKE }}/NAME"}
    summary = "A Delta Lake sink: it keeps tables for analytics."
    config = DeltaSinkConfig
    had_int96 = True

    def dialect(self, config: DeltaSinkConfig) -> LakeDialect:
        """Return what writes the SQL of a sink."""
        from deltaforge_dagster.sinks.lake.delta import DeltaDialect  # noqa: PLC0415 - needs Arrow

        return DeltaDialect(config)

    def place(self, config: DeltaSinkConfig) -> Mapping[str, str]:
        """Return path or catalog."""
        return {"path": config.path} if config.path else {"catalog": str(config.catalog)}

    def folder(self, config: DeltaSinkConfig) -> str | None:
        """Return the path, if there is one."""
        return config.path

    def duckdb_scan(self, config: DeltaSinkConfig, destination: Sequence[str]) -> str | None:
        """Return the scan of the table's folder."""
        if config.path is None:
            return None
        location = "/".join((config.path.rstrip("/"), *destination)).replace("'", "''")
        return f"delta_scan('{location}')"


class IcebergSinkType(LakeTablesSinkType[IcebergSinkConfig]):
    """Tables of Apache Iceberg."""

    name = "iceberg"
    sample: Mapping[str, Any] = {
        "catalog": "lake",
        "catalog_properties": {"type": "hadoop", "warehouse": "{{ env.LAKE }}"},
    }
    summary = "An Apache Iceberg sink: it keeps tables for analytics."
    config = IcebergSinkConfig

    def dialect(self, config: IcebergSinkConfig) -> LakeDialect:
        """Return what writes the SQL of a sink."""
        from deltaforge_dagster.sinks.lake.iceberg import (  # noqa: PLC0415 - needs Arrow
            IcebergDialect,
        )

        return IcebergDialect(config)

    def place(self, config: IcebergSinkConfig) -> Mapping[str, str]:
        """Return the catalog, and its folder if it is one."""
        folder = config.warehouse
        return {"catalog": config.catalog, **({} if folder is None else {"warehouse": folder})}

    def folder(self, config: IcebergSinkConfig) -> str | None:
        """Return the warehouse of a catalog that is a folder."""
        return config.warehouse


DELTA = DeltaSinkType()
ICEBERG = IcebergSinkType()
