"""Four primitives: small durable data structures next to the state store's other tables.

=======  =========================================================================
`Kv`     last write wins; a key with a time to live is absent after that time
`Log`    append-only; sequence numbers increase over all logs, in the order of commits
`Slot`   one value with a version from 1; compare-and-swap has exactly one winner
`Queue`  first in, first out; `ack` removes everything up to an id
=======  =========================================================================

Values are bytes. A structure is identified by a (namespace, key) pair; an object of these classes
stands for one namespace of one database, has no other state, and can be shared by threads. Use the
functions that take a connection for writes that must be committed together with others.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from deltaforge_dagster.state.database.database import Database, clock, upsert
from deltaforge_dagster.state.database.tables import kv, log, queue, slot


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of a log; `ts` is the time when it was appended, in seconds since 1970."""

    seq: int
    key: str
    value: bytes
    ts: float


@dataclass(frozen=True, slots=True)
class Versioned:
    """The content of a slot; each write increments the version."""

    version: int
    value: bytes


@dataclass(frozen=True, slots=True)
class QueueItem:
    """An item of a queue; ids increase and are never reused."""

    id: int
    value: bytes
    ts: float


class Kv:
    """Keys and values of one namespace."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._ns = namespace

    def get(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if it is absent or expired."""
        with self._database.read() as connection:
            return get_value(connection, self._ns, key)

    def put(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """Set `key`; with `ttl`, it expires after that many seconds."""
        with self._database.write() as connection:
            put_value(connection, self._ns, key, value, ttl)

    def delete(self, key: str) -> bool:
        """Remove `key`; return False if it was absent or expired."""
        with self._database.write() as connection:
            gone = connection.execute(
                delete(kv).where(kv.c.ns == self._ns, kv.c.key == key, _alive())
            )
        return gone.rowcount == 1

    def items(self, prefix: str = "") -> dict[str, bytes]:
        """Return every key that starts with `prefix`, with its value, in code point order."""
        query = select(kv.c.key, kv.c.val).where(
            # Not LIKE, which ignores case in SQLite.
            kv.c.ns == self._ns,
            func.substr(kv.c.key, 1, len(prefix)) == prefix,
            _alive(),
        )
        with self._database.read() as connection:
            return dict(sorted(connection.execute(query)))

    def sweep(self) -> int:
        """Delete expired keys, which reads ignore anyway, and return how many there were."""
        with self._database.write() as connection:
            gone = connection.execute(
                delete(kv).where(kv.c.ns == self._ns, kv.c.expires_at <= clock())
            )
        return gone.rowcount


class Log:
    """Append-only logs of one namespace, one per key."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._ns = namespace

    def append(self, key: str, value: bytes) -> int:
        """Append `value` and return its sequence number."""
        with self._database.write() as connection:
            return append_to_log(connection, self._ns, key, value)

    def entries(self, key: str | None = None, *, after: int = 0) -> list[LogEntry]:
        """Return the entries of `key`, or of all keys, with a sequence number above `after`."""
        with self._database.read() as connection:
            return log_entries(connection, self._ns, key, after)


class Slot:
    """Versioned values of one namespace, one per key."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._ns = namespace

    def get(self, key: str) -> Versioned | None:
        """Return value and version, or None if nothing was ever written."""
        query = select(slot.c.version, slot.c.state).where(slot.c.ns == self._ns, slot.c.key == key)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else Versioned(row.version, row.state)

    def upsert(self, key: str, value: bytes) -> int:
        """Write `value` unconditionally and return its version."""
        with self._database.write() as connection:
            version: int = connection.execute(
                upsert(connection, slot)
                .values(ns=self._ns, key=key, version=1, state=value, updated_at=clock())
                .on_conflict_do_update(
                    index_elements=["ns", "key"],
                    set_={"version": slot.c.version + 1, "state": value, "updated_at": clock()},
                )
                .returning(slot.c.version)
            ).scalar_one()
            return version

    def compare_and_swap(self, key: str, expected: int, value: bytes) -> bool:
        """Write `value` if the version is still `expected`; 0 means that the slot must be empty.

        Of several callers that expect the same version, exactly one gets True.
        """
        with self._database.write() as connection:
            if expected == 0:
                swapped = connection.execute(
                    upsert(connection, slot)
                    .values(ns=self._ns, key=key, version=1, state=value, updated_at=clock())
                    .on_conflict_do_nothing()
                    .returning(slot.c.version)
                )
            else:
                swapped = connection.execute(
                    update(slot)
                    .where(slot.c.ns == self._ns, slot.c.key == key, slot.c.version == expected)
                    .values(version=expected + 1, state=value, updated_at=clock())
                    .returning(slot.c.version)
                )
            return swapped.first() is not None


class Queue:
    """First-in-first-out queues of one namespace, one per key."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._ns = namespace

    def push(self, key: str, value: bytes) -> int:
        """Add `value` at the end and return its id."""
        with self._database.write() as connection:
            _one_at_a_time(connection, queue)
            item_id: int = connection.execute(
                insert(queue)
                .values(ns=self._ns, key=key, val=value, ts=clock())
                .returning(queue.c.id)
            ).scalar_one()
            return item_id

    def peek(self, key: str, n: int) -> list[QueueItem]:
        """Return the `n` oldest items, oldest first, without removing them."""
        query = (
            select(queue.c.id, queue.c.val, queue.c.ts)
            .where(queue.c.ns == self._ns, queue.c.key == key)
            .order_by(queue.c.id)
            .limit(n)
        )
        with self._database.read() as connection:
            return [QueueItem(*row) for row in connection.execute(query)]

    def ack(self, key: str, item_id: int) -> int:
        """Remove the items of `key` with an id of at most `item`; return how many there were."""
        with self._database.write() as connection:
            return connection.execute(
                delete(queue).where(
                    queue.c.ns == self._ns, queue.c.key == key, queue.c.id <= item_id
                )
            ).rowcount

    def drop_oldest(self, key: str, n: int) -> int:
        """Remove up to `n` of the oldest items; return how many there were."""
        oldest = (
            select(queue.c.id)
            .where(queue.c.ns == self._ns, queue.c.key == key)
            .order_by(queue.c.id)
            .limit(n)
        )
        with self._database.write() as connection:
            _one_at_a_time(connection, queue)
            return connection.execute(delete(queue).where(queue.c.id.in_(oldest))).rowcount

    def length(self, key: str) -> int:
        """Return the number of items in the queue of `key`."""
        query = select(func.count()).where(queue.c.ns == self._ns, queue.c.key == key)
        with self._database.read() as connection:
            return connection.execute(query).scalar_one()


def get_value(connection: Connection, namespace: str, key: str) -> bytes | None:
    """Return the value of a key, or None if it is absent or expired."""
    query = select(kv.c.val).where(kv.c.ns == namespace, kv.c.key == key, _alive())
    return connection.execute(query).scalar()


def put_value(
    connection: Connection, namespace: str, key: str, value: bytes, ttl: float | None = None
) -> None:
    """Set a key within the caller's transaction; with `ttl`, it expires after that many seconds."""
    fields = {
        "val": value,
        "updated_at": clock(),
        "expires_at": None if ttl is None else clock() + ttl,
    }
    connection.execute(
        upsert(connection, kv)
        .values(ns=namespace, key=key, **fields)
        .on_conflict_do_update(index_elements=["ns", "key"], set_=fields)
    )


def append_to_log(connection: Connection, namespace: str, key: str, value: bytes) -> int:
    """Append to a log within the caller's transaction and return the sequence number."""
    _one_at_a_time(connection, log)
    seq: int = connection.execute(
        insert(log).values(ns=namespace, key=key, val=value, ts=clock()).returning(log.c.seq)
    ).scalar_one()
    return seq


def log_entries(
    connection: Connection, namespace: str, key: str | None = None, after: int = 0
) -> list[LogEntry]:
    """Return the entries after sequence number `after`, of one key or all keys, oldest first."""
    query = select(log.c.seq, log.c.key, log.c.val, log.c.ts).where(
        log.c.ns == namespace, log.c.seq > after
    )
    if key is not None:
        query = query.where(log.c.key == key)
    return [LogEntry(*row) for row in connection.execute(query.order_by(log.c.seq))]


def last_log_entry(connection: Connection, namespace: str) -> LogEntry | None:
    """Return the newest entry of a namespace, or None if it has none."""
    query = (
        select(log.c.seq, log.c.key, log.c.val, log.c.ts)
        .where(log.c.ns == namespace)
        .order_by(log.c.seq.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else LogEntry(*row)


def _one_at_a_time(connection: Connection, table: Table) -> None:
    # PostgreSQL assigns numbers before the commit, so of two transactions the one with the higher
    # number may become visible first, and a reader that remembers the last number would miss the
    # other. In SQLite there is only one writer anyway.
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))


def _alive() -> ColumnElement[bool]:
    return or_(kv.c.expires_at.is_(None), kv.c.expires_at > clock())
