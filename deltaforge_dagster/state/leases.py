"""The lease of a pipeline inside a transaction: lock it, see who holds it, take it.

The lease row is also the lock of everything else a pipeline owns: whoever changes a pipeline's
ranges, segments or checkpoints locks that row first, so such transactions follow one another. A
holder that began before its lease expired therefore commits before anybody else can take it.
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
    """The lease row of a pipeline, locked until the transaction ends; `now` is after the lock."""

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
        # A statement of its own: the clock in a select list may be read before the lock is won.
        connection.execute(select(leases.c.epoch).where(this).with_for_update())
    row = connection.execute(
        select(leases.c.epoch, leases.c.run_id, leases.c.expires_at, clock()).where(this)
    ).first()
    if row is None:
        raise NotAllowed(f"no pipeline {pipeline!r} in the state store")
    return LockedLease(*row)


def take_lease(connection: Connection, pipeline: str, run_id: str, seconds: float) -> Lease | None:
    """Give the lease to `run_id` with the next epoch, or return None while anybody holds it.

    A holder that never released it is lost: nobody else is there to count that.
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
    """Lock the lease row and prove that `lease` is still the one that counts.

    Raises:
        LeaseLost: It was released, has expired (even if nobody took it), or another run holds it.
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
