"""The table versions that rows refer to, read from the state store when a new one occurs."""

from __future__ import annotations

import threading
from collections.abc import Collection

from deltaforge_dagster.state.schemas import SchemaRepository
from deltaforge_dagster.tables import TableSchema
from deltaforge_dagster.typed_rows.tables import VersionName


class RegisteredVersions:
    """The registered table versions of a pipeline; thread-safe.

    Args:
        schemas: The repository of table versions.
        pipeline: Name of the pipeline.
    """

    def __init__(self, schemas: SchemaRepository, pipeline: str) -> None:
        self._schemas = schemas
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, str], tuple[VersionName, TableSchema]] = {}
        self._looked_up: set[tuple[str, str]] = set()

    def of(self, wanted: Collection[tuple[str, str]]) -> list[tuple[VersionName, TableSchema]]:
        """Return table versions; those that were never registered are left out.

        Args:
            wanted: Pairs of a table's full name and the fingerprint of a version.

        Raises:
            StoreUnavailable: The state store cannot be read now.
        """
        with self._lock:
            # Read again for new names only: a version is registered before its rows are captured.
            if not self._looked_up >= set(wanted):
                self._versions = self._read()
                self._looked_up |= set(wanted)
            return [
                self._versions[version] for version in sorted(wanted) if version in self._versions
            ]

    def _read(self) -> dict[tuple[str, str], tuple[VersionName, TableSchema]]:
        return {
            (table.full_name, name): (VersionName(table.db, table.schema, table.table, name), table)
            for history in self._schemas.histories(self._pipeline)
            for table, name in (
                (version.table, version.stamp.fingerprint) for version in history.versions
            )
        }
