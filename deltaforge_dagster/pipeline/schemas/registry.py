"""Where the reader registers the table versions it meets: the store, under the run's lease."""

from __future__ import annotations

from collections.abc import Mapping

from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.schemas.diff import changes_of
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.schemas import TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import SchemaStamp, TableSchema


class FencedRegistry:
    """A `sources.base.SourceNotes` whose versions are durable before a row carries them.

    Args:
        store: The state store.
        lease: The run's lease.
        tenant: Of the pipeline.
        pauses: Whether new forms of known tables wait for approval (`engine.schemas`).

    Attributes:
        pending: Sequences of the versions that wait for approval, and why their rows are kept back.
    """

    def __init__(
        self, store: StateStore, lease: HeldLease, tenant: str, *, pauses: bool = False
    ) -> None:
        self.pending: dict[int, str] = {}
        self._store = store
        self._lease = lease
        self._tenant = tenant
        self._pauses = pauses
        self._known: set[int] = set()
        if pauses:
            for history in store.schemas.histories(lease.pipeline):
                self._note(history)

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register `table` as it holds from `position` on, and return its stamp."""
        return self._register(table, position, streamed=True)

    def register_read(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register `table` as a snapshot has read it, which is taken over at `position`."""
        return self._register(table, position, streamed=False)

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Note how tables look from `position` on."""
        self._lease.write(lambda writer: writer.definitions.define(definitions, position.to_json()))

    def defined(self, position: Position) -> dict[str, str]:
        """Return how tables looked at `position`."""
        return self._store.definitions.at(self._lease.pipeline, position)

    def held(self) -> Mapping[str, str]:
        """Return the tables whose events are kept back as they are, and why."""
        return {
            hold.subject: hold.reason
            for hold in self._store.holds.read(self._lease.pipeline)
            if hold.kind == "table" and hold.state != "journaled"
        }

    def _register(self, table: TableSchema, position: Position, *, streamed: bool) -> SchemaStamp:
        stamp = self._lease.write(
            lambda writer: writer.schemas.register(
                self._tenant, table, position.to_json(), streamed=streamed, pause=self._pauses
            )
        )
        if self._pauses and stamp.sequence not in self._known:
            self._note(self._store.schemas.history(self._lease.pipeline, table.full_name))
        return stamp

    def _note(self, history: TableHistory) -> None:
        """Note which versions of a table wait for approval."""
        pipeline = self._lease.pipeline
        for version in history.versions:
            sequence = version.stamp.sequence
            self._known.add(sequence)
            if sequence in history.pending:
                made = ", ".join(map(str, changes_of(history, version)))
                self.pending[sequence] = (
                    f"version {version.stamp.version} of the table ({made}) waits for approval:"
                    f" deltaforge hold approve {pipeline} {history.name}"
                )
