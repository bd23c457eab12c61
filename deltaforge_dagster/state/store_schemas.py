"""The table versions in the state store: who had which form when, and what waits for approval."""

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
        """Return the stamp of a table version, None when it was never registered."""
        with self.database.read() as connection:
            return schemas.find(connection, name, tenant, table)

    def table_versions(self, name: str) -> list[list[TableSchema]]:
        """Return every version of every table that the pipeline has captured, oldest first."""
        histories = self.table_histories(name)
        return [[version.table for version in history.versions] for history in histories]

    def table_histories(self, name: str) -> list[TableHistory]:
        """Return everything that is known of every table that the pipeline has captured."""
        with self.database.read() as connection:
            return schemas.histories(connection, name)

    def table_history(self, name: str, table: str) -> TableHistory:
        """Return the same of one table, given by its full name.

        Raises:
            NotAllowed: Nothing of it was ever captured.
        """
        for history in self.table_histories(name):
            if history.name == table:
                return history
        raise NotAllowed(f"pipeline {name!r} has captured no table {table!r}")

    def unpublished_versions(self, name: str) -> list[tuple[TableHistory, SchemaVersion]]:
        """Return the versions that Dagster does not show yet, by sequence, with their tables."""
        with self.database.read() as connection:
            return schemas.unpublished(connection, name)

    def mark_version_published(self, name: str, version: SchemaVersion) -> None:
        """Remember that Dagster shows a version, and every one before it."""
        with self.database.write() as connection:
            schemas.mark_published(connection, name, version.stamp.sequence)

    def approve_table(self, name: str, table: str) -> int:
        """Approve every form of a table that it has had so far; the next run delivers what waited.

        Returns:
            How many changes were held for it.

        Raises:
            NotAllowed: Nothing of the table waits for approval.
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
