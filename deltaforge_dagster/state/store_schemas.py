"""Table versions in the state store: the history of tables, and schema approval."""

from __future__ import annotations

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import holds, schemas
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
from deltaforge_dagster.state.store_base import StoreBase
from deltaforge_dagster.tables import SchemaStamp, TableSchema


class StoreSchemas(StoreBase):
    """The part of a `StateStore` about table versions (see `schemas`)."""

    def schema_stamp(self, name: str, tenant: str, table: TableSchema) -> SchemaStamp | None:
        """Return the stamp of a table version, or None if it was never registered."""
        with self.database.read() as connection:
            return schemas.find(connection, name, tenant, table)

    def table_versions(self, name: str) -> list[list[TableSchema]]:
        """Return every version of every table that the pipeline has captured, oldest first."""
        histories = self.table_histories(name)
        return [[version.table for version in history.versions] for history in histories]

    def table_histories(self, name: str) -> list[TableHistory]:
        """Return the version history of every table that the pipeline has captured."""
        with self.database.read() as connection:
            return schemas.histories(connection, name)

    def table_history(self, name: str, table: str) -> TableHistory:
        """Return the version history of one table, given by its full name.

        Raises:
            NotAllowed: The pipeline has never captured this table.
        """
        for history in self.table_histories(name):
            if history.name == table:
                return history
        raise NotAllowed(f"pipeline {name!r} has captured no table {table!r}")

    def unpublished_versions(self, name: str) -> list[tuple[TableHistory, SchemaVersion]]:
        """Return the versions that are not published in Dagster yet, by sequence, with histories."""
        with self.database.read() as connection:
            return schemas.unpublished(connection, name)

    def mark_version_published(self, name: str, version: SchemaVersion) -> None:
        """Record that a version, and every one before it, is published in Dagster."""
        with self.database.write() as connection:
            schemas.mark_published(connection, name, version.stamp.sequence)

    def approve_table(self, name: str, table: str) -> int:
        """Approve all pending versions of a table; the next run delivers the held changes.

        Returns:
            The number of changes that were held.

        Raises:
            NotAllowed: No version of the table waits for approval.
        """
        with self.database.write() as connection:
            lock_lease(connection, name)
            approved = schemas.approve(connection, name, table)
            waiting = [
                hold
                for hold in holds.read_holds(connection, name)
                if (hold.kind, hold.subject) == (holds.SCHEMA, table) and hold.state == "held"
            ]
            if not approved and not waiting:
                raise NotAllowed(
                    f"pipeline {name!r}: no form of table {table!r} waits for approval"
                )
            for hold in waiting:
                holds.release(connection, name, hold.kind, hold.subject, "{}")
            return sum(hold.events for hold in waiting)
