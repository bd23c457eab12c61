"""Where the reader registers the table versions it meets: the store, under the run's lease."""

from __future__ import annotations

from collections.abc import Mapping

from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import SchemaStamp, TableSchema


class FencedRegistry:
    """A `sources.base.SourceNotes` whose versions are durable before a row carries them."""

    def __init__(self, store: StateStore, lease: HeldLease, tenant: str) -> None:
        self._store = store
        self._lease = lease
        self._tenant = tenant

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register `table` as it holds from `position` on, and return its stamp."""
        return self._lease.write(
            lambda writer: writer.register_schema(self._tenant, table, position.to_json())
        )

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Note how tables look from `position` on."""
        self._lease.write(lambda writer: writer.define(definitions, position.to_json()))

    def defined(self, position: Position) -> dict[str, str]:
        """Return how tables looked at `position`."""
        return self._store.defined(self._lease.pipeline, position)

    def held(self) -> Mapping[str, str]:
        """Return the tables whose events are kept back, and why."""
        return {
            hold.subject: hold.reason
            for hold in self._store.holds(self._lease.pipeline)
            if hold.kind == "table" and hold.state != "journaled"
        }
