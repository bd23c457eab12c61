"""Locks, checks and takes the lease of a pipeline inside a transaction.

The lease row also serves as the lock of everything else that belongs to the pipeline: transactions that
change its ranges, segments or checkpoints lock this row first, so they are serialized. A holder whose
transaction began before its lease expired therefore commits before another run can take the lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state import metrics
from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.tables import leases


@dataclass(frozen=True, slots=True)
class LockedLease:
    """A pipeline's lease row, locked until the transaction ends; `now` was read after locking it."""

    epoch: int
    run_id: str | None
    expires_at: float
    now: float

    @property
    def live(self) -> bool:
        """Whether somebody holds the lease."""
        return self.run_id is not None and self.expires_at > self.now


def lock_lease(connection: Connection, pipeline: str) -> LockedLease:
    """Wait for the lease row of `pipeline`, lock and read it.

    Raises:
        NotAllowed: There is no such pipeline.
    """
    this = leases.c.pipeline == pipeline
    if connection.dialect.name == "postgresql":
        # A separate statement, because a clock in its select list may be read before the row is locked.
        connection.execute(select(leases.c.epoch).where(this).with_for_update())
    row = connection.execute(
        select(leases.c.epoch, leases.c.run_id, leases.c.expires_at, clock()).where(this)
    ).first()
    if row is None:
        raise NotAllowed(f"no pipeline {pipeline!r} in the state store")
    return LockedLease(*row)


def take_lease(connection: Connection, pipeline: str, run_id: str, seconds: float) -> Lease | None:
    """Give the lease to `run_id` with the next epoch, or return None while another run holds it.

    If the previous holder never released it, that run is counted here as lost.
    """
    held = lock_lease(connection, pipeline)
    if held.live:
        return None
    if held.run_id is not None:
        metrics.count(connection, pipeline, metrics.run_failure("lost"))
    epoch = held.epoch + 1
    expires_at = held.now + seconds
    connection.execute(
        update(leases)
        .where(leases.c.pipeline == pipeline)
        .values(epoch=epoch, run_id=run_id, expires_at=expires_at)
    )
    return Lease(pipeline, run_id, epoch, expires_at)


def check_lease(connection: Connection, lease: Lease) -> None:
    """Lock the lease row and check that `lease` is still valid.

    Raises:
        LeaseLost: It was released, has expired (even if no other run took it), or another run holds it.
    """
    held = lock_lease(connection, lease.pipeline)
    mine = f"pipeline {lease.pipeline!r}: run {lease.run_id} (epoch {lease.epoch})"
    if held.epoch != lease.epoch:
        raise LeaseLost(f"{mine} lost its lease to run {held.run_id} (epoch {held.epoch})")
    if held.run_id is None:
        raise LeaseLost(f"{mine} has released its lease")
    if not held.live:
        late = held.now - held.expires_at
        raise LeaseLost(f"{mine} lost its lease, which expired {late:.1f} s ago without renewal")
