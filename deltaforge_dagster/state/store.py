"""The state store: the authoritative record of every pipeline's progress.

It has one repository per noun: `store.checkpoints.reset(...)`, `store.ranges.read(...)`. Everybody
may read. A run writes only through `StateStore.fenced`, whose writer has the same nouns:
`writer.checkpoints.advance(...)`. It checks in its own transaction that the run holds the
pipeline's lease. Writes of users and the sensor do not need the lease; those that touch what a run
writes lock the lease row as well.

Every method raises `StoreUnavailable` if the database cannot be reached or stays locked (the next
call tries again). Messages never contain a password.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from sqlalchemy import Connection

from deltaforge_dagster.state.checkpoints import CheckpointRepository, CheckpointWrites
from deltaforge_dagster.state.database.database import Database
from deltaforge_dagster.state.database.migrate import migrate
from deltaforge_dagster.state.dead_letters import (
    DeadLetterRepository,
    DeadLetterWrites,
    UndeliveredRepository,
    UndeliveredWrites,
)
from deltaforge_dagster.state.holds import HoldRepository, HoldWrites
from deltaforge_dagster.state.journals import JournalRepository
from deltaforge_dagster.state.leases import (
    LeaseRepository,
    LeaseWrites,
    OwnerRepository,
    check_lease,
)
from deltaforge_dagster.state.metrics import MetricRepository, MetricWrites
from deltaforge_dagster.state.pipelines import PipelineRepository, PipelineWrites
from deltaforge_dagster.state.ranges import RangeRepository, RangeWrites
from deltaforge_dagster.state.reconciliations import ReconciliationRepository
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.relocated_rows import RelocatedRowRepository, RelocatedRowWrites
from deltaforge_dagster.state.schemas import SchemaRepository, SchemaWrites
from deltaforge_dagster.state.segments import SegmentRepository, SegmentWrites
from deltaforge_dagster.state.sensing import SensingRepository, SensingWrites
from deltaforge_dagster.state.snapshots import SnapshotRepository, SnapshotWrites
from deltaforge_dagster.state.source_state import (
    DefinitionRepository,
    DefinitionWrites,
    FailoverWrites,
    GapRepository,
)
from deltaforge_dagster.state.table_commits import TableCommitRepository, TableCommitWrites


class StateStore:
    """One open state store. Thread-safe; belongs to the process that opened it.

    Attributes:
        database: For the primitives: `Kv(store.database, namespace)`.
        pipelines: Registration, start, desired state, and documents of pipelines without a file.
        owners: Which pipeline has what cannot be shared.
        leases: The right of a run to work on a pipeline.
        ranges: The partitions of the journal, and which of them are published.
        segments: The segments of the journal.
        journals: Rebuilding and resetting a whole journal.
        checkpoints: How far each sink has acknowledged.
        table_commits: How far the tables of sinks that write tables have come.
        dead_letters: Changes that a sink cannot receive as they are.
        undelivered: Changes that left the dead letter queue without being delivered.
        holds: Events that are kept back until they are released or approved.
        snapshots: Snapshots and their chunks.
        relocated_rows: Rows that may be in no chunk of a snapshot.
        schemas: The versions of tables.
        gaps: Tables with changes that the source's log lacks.
        definitions: Table definitions by position, for sources whose log lacks them.
        sensing: The results of schema sensing.
        reconciliations: What was proven about tables of sinks.
        metrics: Stored metrics.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.pipelines = PipelineRepository(database)
        self.owners = OwnerRepository(database)
        self.leases = LeaseRepository(database)
        self.ranges = RangeRepository(database)
        self.segments = SegmentRepository(database)
        self.journals = JournalRepository(database)
        self.checkpoints = CheckpointRepository(database)
        self.table_commits = TableCommitRepository(database)
        self.dead_letters = DeadLetterRepository(database)
        self.undelivered = UndeliveredRepository(database)
        self.gaps = GapRepository(database)
        self.holds = HoldRepository(database)
        self.snapshots = SnapshotRepository(database)
        self.relocated_rows = RelocatedRowRepository(database)
        self.schemas = SchemaRepository(database)
        self.definitions = DefinitionRepository(database)
        self.sensing = SensingRepository(database)
        self.reconciliations = ReconciliationRepository(database)
        self.metrics = MetricRepository(database)

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, and create or upgrade the tables; several processes may do so at the same time.

        Args:
            url: `sqlite:///path` (directories are created), `postgresql://user:password@host/db`,
                or `memory` for a new store of this process alone, which is lost when it is closed.

        Raises:
            SettingsError: The URL has another form, or a newer release has upgraded the tables.
            AuthFailed: PostgreSQL refused the credentials.
            StoreUnavailable: The database cannot be reached or written.
        """
        database = Database(url)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    def now(self) -> float:
        """Return the time of the store's clock in seconds since 1970."""
        return self.database.now()

    @contextmanager
    def fenced(self, lease: Lease) -> Iterator[FencedWriter]:
        """Yield a writer for the lease holder; its writes are committed when the block ends.

        The block is one transaction. Keep it short and call no other method of the store inside. It
        may be repeated after `StoreUnavailable` (see `FencedWriter`).

        Raises:
            LeaseLost: The lease was released, has expired (even if no other run took it), or
                another run holds it. Nothing was written.
        """
        with self.database.write() as connection:
            check_lease(connection, lease)
            yield FencedWriter(connection, lease)


class FencedWriter:
    """Writes of one lease holder in one transaction; valid inside the `fenced` block only.

    `StateStore.fenced` opens the transaction, locks the lease row, compares the epoch, and only
    then creates a writer. A process that has lost its lease, even one that slept through its
    expiry, gets `LeaseLost`, and nothing is written.

    After `StoreUnavailable` it is unknown whether the block was committed (the server's answer may
    have been lost). It is safe to run the same block again: a segment, range, close or checkpoint
    that already exists is recognized and not written twice.

    The nouns of `StateStore` have their writes here, for the pipeline of the lease. In addition
    there are:

    Attributes:
        lease: Renews and releases the lease.
        pipeline: The positions of the pipeline.
        failovers: The server from which the source is read.
    """

    def __init__(self, connection: Connection, lease: Lease) -> None:
        name = lease.pipeline
        self.lease = LeaseWrites(connection, name)
        self.pipeline = PipelineWrites(connection, name)
        self.holds = HoldWrites(connection, name)
        self.ranges = RangeWrites(connection, lease)
        self.segments = SegmentWrites(connection, lease, self.holds)
        self.undelivered = UndeliveredWrites(connection, name)
        self.checkpoints = CheckpointWrites(connection, name, self.undelivered)
        self.table_commits = TableCommitWrites(connection, name)
        self.dead_letters = DeadLetterWrites(connection, name)
        self.snapshots = SnapshotWrites(connection, name)
        self.relocated_rows = RelocatedRowWrites(connection, name)
        self.schemas = SchemaWrites(connection, name)
        self.definitions = DefinitionWrites(connection, name)
        self.failovers = FailoverWrites(connection, name)
        self.sensing = SensingWrites(connection, name)
        self.metrics = MetricWrites(connection, name)
