"""What belongs to one run or one pipeline alone: the lease of a pipeline, and owned resources.

A lease is taken, locked, checked, renewed and released. Its row also serves as the lock of
everything else that belongs to the pipeline: transactions that change its ranges, segments or
checkpoints lock this row first, so they are serialized. A holder whose transaction began before its
lease expired therefore commits before another run can take the lease.

If the holder is frozen (a paused virtual machine, a half-open connection, SIGSTOP), PostgreSQL
would keep its lock. So the transactions of a holder have its epoch in `application_name`, and once
the lease is over, whoever needs the row terminates those that do not end by themselves. Nothing of
them is committed.

A resource that only one pipeline may use (`config.owned`) is owned by the first pipeline that named
it, until its file no longer does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    case,
    cast,
    delete,
    func,
    select,
    text,
    update,
)

from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state import metrics
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import kv, leases, read_rows
from deltaforge_dagster.state.records import Lease, LeaseRow

_RESOURCES = "resources"
_OWNED = "owned/"

_ENDING_SECONDS = 1.0
"""How long a transaction of a holder whose lease is over may take to end by itself."""

_NAME_BYTES = 63
"""PostgreSQL truncates longer application names (NAMEDATALEN - 1)."""

_TRANSACTION_TIMEOUT_VERSION = 170000  # transaction_timeout exists from PostgreSQL 17 on
_TRANSACTION_TIMEOUT = "60s"


@dataclass(frozen=True, slots=True)
class LockedLease:
    """A pipeline's lease row, locked until the transaction ends; `now` was read after that."""

    epoch: int
    run_id: str | None
    expires_at: float
    now: float

    @property
    def live(self) -> bool:
        """Whether somebody holds the lease."""
        return self.run_id is not None and self.expires_at > self.now


class LeaseRepository:
    """The leases of all pipelines: `StateStore.leases`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, name: str, run_id: str, seconds: float) -> Lease | None:
        """Take the lease for `seconds` with the next epoch; return None while any run holds it.

        A lease that was released or has expired, by the database's clock, is available at once. If
        the previous holder never released it, that run is counted here as lost.

        Raises:
            NotAllowed: There is no such pipeline.
        """
        with self._database.write() as connection:
            # A holder that is frozen amid a write has the row locked: do not wait for it while its
            # lease lasts.
            if _read_lease(connection, name).live:
                return None
            locked = lock_lease(connection, name)
            if locked.live:
                return None
            if locked.run_id is not None:
                metrics.count(connection, name, metrics.run_failure("lost"))
            epoch = locked.epoch + 1
            expires_at = locked.now + seconds
            connection.execute(
                update(leases)
                .where(leases.c.pipeline == name)
                .values(epoch=epoch, run_id=run_id, expires_at=expires_at)
            )
            return Lease(name, run_id, epoch, expires_at)

    def get(self, name: str) -> LeaseRow | None:
        """Return the lease of a pipeline, or None if there is no such pipeline."""
        with self._database.read() as connection:
            rows = read_rows(connection, LeaseRow, leases.c.pipeline == name)
        return rows[0] if rows else None


class LeaseWrites:
    """Extends and releases the lease of its holder: `FencedWriter.lease`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def renew(self, seconds: float) -> float:
        """Extend the lease to `seconds` from now; return its expiry by the database's clock.

        To compute a local deadline, read the monotonic clock *before* this call.
        """
        self._update({"expires_at": clock() + seconds})
        query = select(leases.c.expires_at).where(leases.c.pipeline == self._pipeline)
        expires_at: float = self._connection.execute(query).scalar_one()
        return expires_at

    def release(self) -> None:
        """Release the lease; another run may acquire it as soon as the transaction is committed."""
        self._update({"run_id": None, "expires_at": clock()})

    def set_session(self, session_id: str | None) -> None:
        """Store the id of the Spark session for this run and the next ones."""
        self._update({"session_id": session_id})

    def _update(self, values: Mapping[str, Any]) -> None:
        this = leases.c.pipeline == self._pipeline
        self._connection.execute(update(leases).where(this).values(**values))


def lock_lease(connection: Connection, pipeline: str, holder: Lease | None = None) -> LockedLease:
    """Wait for the lease row of `pipeline`, lock and read it.

    Args:
        connection: A connection in a transaction.
        pipeline: Name of the pipeline.
        holder: The lease of the caller, if it has one. Other callers terminate the transactions of
            a holder whose lease is over.

    Raises:
        NotAllowed: There is no such pipeline.
    """
    if connection.dialect.name == "postgresql":
        named: list[ColumnElement[Any]] = []
        if holder is None:
            _end_former_holder(connection, pipeline)
        else:
            named = _settings(holder)
        # A separate statement, because a clock in its select list may be read before the row is
        # locked.
        this = leases.c.pipeline == pipeline
        connection.execute(select(leases.c.epoch, *named).where(this).with_for_update())
    return _read_lease(connection, pipeline)


def check_lease(connection: Connection, lease: Lease) -> None:
    """Lock the lease row and check that `lease` is still valid.

    Raises:
        LeaseLost: It was released, has expired (even if no other run took it), or another run holds
            it.
    """
    locked = lock_lease(connection, lease.pipeline, lease)
    subject = f"pipeline {lease.pipeline!r}: run {lease.run_id} (epoch {lease.epoch})"
    if locked.epoch != lease.epoch:
        raise LeaseLost(f"{subject} lost its lease to run {locked.run_id} (epoch {locked.epoch})")
    if locked.run_id is None:
        raise LeaseLost(f"{subject} has released its lease")
    if not locked.live:
        late = locked.now - locked.expires_at
        raise LeaseLost(f"{subject} lost its lease, which expired {late:.1f} s ago without renewal")


class OwnerRepository:
    """What pipelines own: `StateStore.owners`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, pipeline: str) -> list[OwnedResource]:
        """Return what a pipeline owns."""
        with self._database.read() as connection:
            text = get_value(connection, f"{_OWNED}{pipeline}", _RESOURCES)
        return [] if text is None else _parsed(text)

    def others(self, pipeline: str) -> dict[str, list[OwnedResource]]:
        """Return what the other pipelines own, by name."""
        with self._database.read() as connection:
            return _others(connection, pipeline)

    def claim(
        self, pipeline: str, resources: Sequence[OwnedResource], successor_of: Collection[str]
    ) -> bool:
        """Make a pipeline the owner of exactly these resources.

        If another pipeline owns any of them, change nothing and return False.

        Args:
            pipeline: The pipeline.
            resources: All resources that it names.
            successor_of: Pipelines that no longer exist, and lose what they own.
        """
        with self._database.write() as connection:
            # Serializes claims of several processes: each first writes this value.
            put_value(connection, _RESOURCES, _RESOURCES, b"")
            others = _others(connection, pipeline)
            taken = [
                resource
                for name, owned in others.items()
                if name not in successor_of
                for resource in owned
            ]
            if any(resource.is_same(other) for resource in resources for other in taken):
                return False
            for name in successor_of:
                connection.execute(delete(kv).where(kv.c.ns == f"{_OWNED}{name}"))
            text = orjson.dumps([resource.to_fields() for resource in resources])
            put_value(connection, f"{_OWNED}{pipeline}", _RESOURCES, text)
            return True


def _session_name(pipeline: str, epoch: int) -> str:
    """Return the `application_name` of the transactions of a lease's holder."""
    digest = hashlib.sha256(pipeline.encode()).hexdigest()[:8]  # of a long name, the end is cut off
    return f"deltaforge#{epoch}-{digest} {pipeline}"[:_NAME_BYTES]


def _read_lease(connection: Connection, pipeline: str) -> LockedLease:
    row = connection.execute(
        select(leases.c.epoch, leases.c.run_id, leases.c.expires_at, clock()).where(
            leases.c.pipeline == pipeline
        )
    ).first()
    if row is None:
        raise NotAllowed(f"no pipeline {pipeline!r} in the state store")
    return LockedLease(*row)


def _settings(holder: Lease) -> list[ColumnElement[Any]]:
    """Return the SQL expressions that name a holder's transaction, and limit its duration.

    Only PostgreSQL 17 and later can limit it (`transaction_timeout`).
    """
    version = cast(func.current_setting("server_version_num"), Integer)
    limit = func.set_config("transaction_timeout", _TRANSACTION_TIMEOUT, True)
    return [
        func.set_config("application_name", _session_name(holder.pipeline, holder.epoch), True),
        case((version >= _TRANSACTION_TIMEOUT_VERSION, limit)),
    ]


def _end_former_holder(connection: Connection, pipeline: str) -> None:
    """Terminate the transactions of a holder whose lease has expired without being released."""
    former = _read_lease(connection, pipeline)
    if former.run_id is None or former.live:
        return
    connection.execute(
        text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = :name AND usename = current_user"
            " AND datname = current_database() AND pid <> pg_backend_pid()"
            " AND xact_start < clock_timestamp() - make_interval(secs => :seconds)"
        ),
        {"name": _session_name(pipeline, former.epoch), "seconds": _ENDING_SECONDS},
    )


def _others(connection: Connection, pipeline: str) -> dict[str, list[OwnedResource]]:
    query = select(kv.c.ns, kv.c.val).where(
        kv.c.ns.startswith(_OWNED, autoescape=True), kv.c.key == _RESOURCES
    )
    resources = {ns.removeprefix(_OWNED): _parsed(text) for ns, text in connection.execute(query)}
    return {name: owned for name, owned in resources.items() if name != pipeline}


def _parsed(text: bytes) -> list[OwnedResource]:
    return [OwnedResource.from_fields(fields) for fields in orjson.loads(text)]
