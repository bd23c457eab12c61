"""A kind of sink that keeps tables, in a package of its own: current rows in a DuckDB file.

Spark's tasks type the changes of the journal and fold them to one row per key. What is left to a
kind of tables is to say what it is (`DuckdbSinkType`), and to apply the staged changes exactly once
(`duckdb_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from deltaforge_dagster.config.blocks import Text
from deltaforge_dagster.sinks.registry import (
    KEYS_CHANGED,
    LATER_CHANGES,
    TABLES_MOVED,
    TYPES_CHANGED,
    DatabaseSinkType,
    SinkContext,
    folder_finding,
)
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # Dagster's code servers load this module, and do without Arrow and clients
    from duckdb_writer import DuckdbWriter

    from deltaforge_dagster.sinks.tables.writer import TableOwner
    from deltaforge_dagster.typed_rows.schema import TargetTypes


class DuckdbSinkConfig(TableSinkConfig):
    """Which DuckDB file has the tables."""

    path: Text
    """The file. Its folder must exist. Nobody else can open the file while a commit is written."""
    mode: Literal["current"] = "current"
    """What a table has: the source's rows as they are now."""

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if self.name_parts > 2:
            raise ValueError(
                f"table has {self.name_parts} parts, and DuckDB's names have a schema and a table "
                "(write ${source.schema}.${source.table})"
            )
        return self


class DuckdbSinkType(DatabaseSinkType[DuckdbSinkConfig]):
    """Tables in a DuckDB file."""

    name = "duckdb"
    summary = "A DuckDB sink: it keeps tables in a file as they are in the source."
    config = DuckdbSinkConfig
    destinations = "tables"
    timing = frozenset({"commit_seconds", "commit_changes"})
    consequences: Mapping[str, str] = {
        **dict.fromkeys(["path", "table"], TABLES_MOVED),
        "keys": KEYS_CHANGED,
        "types": TYPES_CHANGED,
        **dict.fromkeys(["filter", "skipped_operations"], LATER_CHANGES),
    }

    def column_types(self) -> TargetTypes:
        """Return what DuckDB's columns can be: everything."""
        from deltaforge_dagster.typed_rows.schema import EVERY_TYPE  # noqa: PLC0415 - needs Arrow

        return EVERY_TYPE

    def owned_place(self, config: DuckdbSinkConfig) -> tuple[str, ...]:
        """Return the file: two pipelines cannot write one table of it."""
        return (str(Path(config.path).resolve()),)

    def build_writer(self, config: DuckdbSinkConfig, owner: TableOwner) -> DuckdbWriter:
        """Return what writes the tables, not connected yet."""
        from duckdb_writer import DuckdbWriter  # noqa: PLC0415 - Arrow and the client library

        return DuckdbWriter(config.path, owner)

    def preflight(
        self,
        config: DuckdbSinkConfig,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> list[Finding]:
        """Say whether the user may write in the file's folder."""
        folder = Path(config.path).resolve().parent
        return [
            folder_finding(f"sink {config.id}", folder, "the DuckDB file", f"mkdir -p {folder}")
        ]

    def metadata(self, config: DuckdbSinkConfig) -> Mapping[str, str]:
        """Return the file, for the sink's asset in Dagster."""
        return {"database": config.path}


DUCKDB = DuckdbSinkType()
