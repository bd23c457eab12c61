"""The writes of a run: all of them go through a `FencedWriter`, inside one transaction.

`StateStore.fenced` opens the transaction, locks the lease row, compares the epoch, and only then creates
a writer. A process that has lost its lease, even one that slept through its expiry, gets `LeaseLost`,
and nothing is written.

After `StoreUnavailable` it is unknown whether the block was committed (the server's answer may have been
lost). It is safe to run the same block again: a segment, range, close or checkpoint that already
exists is recognized and not written twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update

from deltaforge_dagster.state import definitions as table_notes
from deltaforge_dagster.state import failovers, metrics, schemas, sensing
from deltaforge_dagster.state.checkpoint_writes import CheckpointWrites
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.dead_letter_writes import DeadLetterWrites
from deltaforge_dagster.state.journal_writes import JournalWrites
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.snapshot_writes import SnapshotWrites
from deltaforge_dagster.state.tables import leases
from deltaforge_dagster.tables import SchemaStamp, TableSchema


class FencedWriter(JournalWrites, CheckpointWrites, DeadLetterWrites, SnapshotWrites):
    """Writes of one lease holder in one transaction; valid inside the `fenced` block only.

    Writes that concern the journal, sinks, dead letters and snapshots are in modules of their own; this
    class adds those for the lease and the source.
    """

    def renew(self, seconds: float) -> float:
        """Extend the lease to `seconds` from now; return its expiry by the database's clock.

        To compute a local deadline, read the monotonic clock *before* this call.
        """
        self._update_lease({"expires_at": clock() + seconds})
        query = select(leases.c.expires_at).where(leases.c.pipeline == self._lease.pipeline)
        expires_at: float = self._connection.execute(query).scalar_one()
        return expires_at

    def release(self) -> None:
        """Release the lease at the end of this block; another run may acquire it at once."""
        self._update_lease({"run_id": None, "expires_at": clock()})

    def set_session(self, session_id: str | None) -> None:
        """Store the id of the Spark session for this run and the next ones."""
        self._update_lease({"session_id": session_id})

    def register_schema(
        self,
        tenant: str,
        table: TableSchema,
        position_json: str,
        *,
        streamed: bool = True,
        pause: bool = False,
    ) -> SchemaStamp:
        """Return the stamp of a table version, an existing or a new one (see `schemas`)."""
        return schemas.register(
            self._connection,
            self._lease.pipeline,
            tenant,
            table,
            position_json,
            streamed=streamed,
            pause=pause,
        )

    def define(self, definitions: Mapping[str, str | None], position: str) -> None:
        """Store the definitions of tables from `position` on (see `definitions`)."""
        table_notes.define(self._connection, self._lease.pipeline, definitions, position)

    def server(self, source_id: str) -> str | None:
        """Return the identity of the server from which the source was last read (`failovers`)."""
        return failovers.server(self._connection, self._lease.pipeline, source_id)

    def set_server(self, source_id: str, identity: str) -> None:
        """Store the identity of the server from which the source is read."""
        failovers.set_server(self._connection, self._lease.pipeline, source_id, identity)

    def reconciled(
        self,
        source_id: str,
        *,
        previous: str,
        identity: str,
        position: str,
        deltas: Mapping[tuple[str, str], Sequence[str]],
    ) -> None:
        """Record that the source is now another server (see `failovers`)."""
        failovers.reconciled(
            self._connection,
            self._lease.pipeline,
            source_id,
            previous=previous,
            identity=identity,
            position=position,
            deltas=deltas,
        )

    def note_sensed(self, findings: sensing.Findings) -> None:
        """Store the findings of sensing in some segments (see `sensing`)."""
        sensing.note(self._connection, self._lease.pipeline, findings)

    def sensing_failed(self, problem: str) -> None:
        """Store why sensing has stopped."""
        sensing.fail(self._connection, self._lease.pipeline, problem)

    def count(self, tally: Tally) -> None:
        """Add a tally that is not part of another write (see `metrics`)."""
        metrics.count(self._connection, self._lease.pipeline, tally)

    def _update_lease(self, values: Mapping[str, Any]) -> None:
        this = leases.c.pipeline == self._lease.pipeline
        self._connection.execute(update(leases).where(this).values(**values))
