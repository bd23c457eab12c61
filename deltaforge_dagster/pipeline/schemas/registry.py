"""The schema registry of a run: table versions are stored under the run's lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltaforge_dagster.pipeline.run_context import HeldLease
from deltaforge_dagster.pipeline.schemas.views import changes_of
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.schemas import TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import ColumnChanges, SchemaStamp, TableFate, TableSchema


class FencedRegistry:
    """A `sources.base.SourceNotes` that makes a version durable before any row refers to it.

    Args:
        store: The state store.
        lease: The run's lease.
        tenant: Tenant of the pipeline.
        pauses: Whether new versions of known tables wait for approval (`engine.schemas`).

    Attributes:
        pending: Sequence numbers of the versions that wait for approval, each with the reason of
            the hold.
    """

    def __init__(
        self, store: StateStore, lease: HeldLease, tenant: str, *, pauses: bool = False
    ) -> None:
        self.pending: dict[int, str] = {}
        self._store = store
        self._lease = lease
        self._tenant = tenant
        self._pauses = pauses
        self._noted_sequences: set[int] = set()
        if pauses:
            for history in store.schemas.histories(lease.pipeline):
                self._note(history)

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register the version of a table that is in force from `position`; return its stamp."""
        return self._register(table, position, streamed=True)

    def register_read(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register the version with which a snapshot read a table.

        Args:
            table: The version.
            position: Where the log has everything that the read saw.
        """
        return self._register(table, position, streamed=False)

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Record the table definitions that are in force from `position`."""
        self._lease.write(lambda writer: writer.definitions.define(definitions, position.to_json()))

    def defined(self, position: Position) -> dict[str, str]:
        """Return the table definitions that are in force at `position`."""
        return self._store.definitions.at(self._lease.pipeline, position)

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Record what a statement at `position` does to the columns of a table."""
        self._lease.write(
            lambda writer: writer.schemas.alter(self._tenant, table, changes, position.to_json())
        )

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what a statement does to tables, as far as the pipeline has rows of them."""
        pipeline = self._lease.pipeline
        captured = [history.name for history in self._store.schemas.histories(pipeline)]
        noted = [
            (table, fate)
            for name, fate in fates
            for table in captured
            if table == name or (name.endswith(".*") and table.startswith(name[:-1]))
        ]
        if noted:
            self._lease.guard()
            self._store.gaps.note_fates(pipeline, noted)

    def held(self) -> Mapping[str, str]:
        """Return the tables whose undecoded events are held, each with the reason."""
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
        if self._pauses and stamp.sequence not in self._noted_sequences:
            self._note(self._store.schemas.history(self._lease.pipeline, table.full_name))
        return stamp

    def _note(self, history: TableHistory) -> None:
        """Update the versions of a table that wait for approval."""
        pipeline = self._lease.pipeline
        for version in history.versions:
            sequence = version.stamp.sequence
            self._noted_sequences.add(sequence)
            if sequence in history.pending:
                changes = ", ".join(map(str, changes_of(history, version)))
                self.pending[sequence] = (
                    f"version {version.stamp.version} of the table ({changes}) waits for approval:"
                    f" deltaforge hold approve {pipeline} {history.name}"
                )
