"""Where the reader registers the table versions it meets: the store, under the run's lease."""

from __future__ import annotations

from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.positions import Position
from deltaforge_dagster.tables import SchemaStamp, TableSchema


class FencedRegistry:
    """A `sources.base.SchemaRegistry` whose versions are durable before a row carries them."""

    def __init__(self, lease: HeldLease, tenant: str) -> None:
        self._lease = lease
        self._tenant = tenant

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register `table` as it holds from `position` on, and return its stamp."""
        return self._lease.write(
            lambda writer: writer.register_schema(self._tenant, table, position.to_json())
        )
