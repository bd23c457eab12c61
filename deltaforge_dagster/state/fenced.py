"""What a run may write: everything goes through one `FencedWriter`, inside one transaction.

`StateStore.fenced` opens the transaction, locks the lease row and compares the epoch; only then
does a writer exist. A process that lost its lease, even one that slept through its expiry, gets
`LeaseLost` and nothing of the block is written.

After `StoreUnavailable` nobody knows whether the block was committed (the server's answer may be
what got lost). Running the same block again is safe: a segment, range, close or checkpoint that
is already there is recognised and not written twice.
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
    """Writes of one lease holder in one transaction; lives as long as the `fenced` block.

    The journal's, the sinks', the dead letters' and the snapshots' have a module each; here are those of the lease and
    the source.
    """

    def renew(self, seconds: float) -> float:
        """Extend the lease to `seconds` from now; return when it expires, by the database's clock.

        Take the local deadline from a monotonic clock read *before* this call.
        """
        self._update_lease({"expires_at": clock() + seconds})
        query = select(leases.c.expires_at).where(leases.c.pipeline == self._lease.pipeline)
        expires_at: float = self._connection.execute(query).scalar_one()
        return expires_at

    def release(self) -> None:
        """Give the lease back with this block: another run may take it at once."""
        self._update_lease({"run_id": None, "expires_at": clock()})

    def set_session(self, session_id: str | None) -> None:
        """Remember the Spark session, for this run and the ones after it."""
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
        """Return the stamp of a table version: an earlier one's, or a new one (see `schemas`)."""
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
        """Note what tables look like from `position` on (see `definitions`)."""
        table_notes.define(self._connection, self._lease.pipeline, definitions, position)

    def server(self, source_id: str) -> str | None:
        """Return the identity of the server that the source was read from last (`failovers`)."""
        return failovers.server(self._connection, self._lease.pipeline, source_id)

    def set_server(self, source_id: str, identity: str) -> None:
        """Remember the server that the source is read from."""
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
        """Record that the source is another server now (see `failovers`)."""
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
        """Store what sensing found out in some segments (see `sensing`)."""
        sensing.note(self._connection, self._lease.pipeline, findings)

    def sensing_failed(self, problem: str) -> None:
        """Remember why sensing does not go on."""
        sensing.fail(self._connection, self._lease.pipeline, problem)

    def count(self, tally: Tally) -> None:
        """Count what belongs to no other write (see `metrics`)."""
        metrics.count(self._connection, self._lease.pipeline, tally)

    def _update_lease(self, values: Mapping[str, Any]) -> None:
        this = leases.c.pipeline == self._lease.pipeline
        self._connection.execute(update(leases).where(this).values(**values))
