"""The replication slot: the server's promise to keep the log from a position on.

Created when missing, never dropped and never moved by hand: only confirmed positions move it. A
slot that has moved past the position to read from has let go of changes that nobody captured, and
reading on would lose them in silence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from deltaforge_dagster.errors import (
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.refusals import may_not_replicate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.messages import HEARTBEAT, MESSAGES_VERSION

MAX_UNCONFIRMED_BYTES = 64 << 20
"""Log behind a slot that is worth a run, so that its idle progress frees it."""

_PLUGIN = "pgoutput"
_SKIPS_EMPTY_VERSION = 150000
_FAILOVER_VERSION = 170000
_WAIT_SECONDS = 5.0
_END_SECONDS = 15.0
_AGAIN_SECONDS = 1.0
_POLL_SECONDS = 0.2


def create(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    name: str,
    *,
    failover: bool,
    version: int,
) -> None:
    """Create the slot; the server first waits for the transactions that are open now.

    With `failover` its replicas keep a copy (manual: "Logical Replication Failover").

    Raises:
        SourceUnavailable: They did not end in time; the message names the oldest.
        SourceMisconfigured: The server has no free slot, or is too old for failover slots.
        PermissionMissing: The role may not replicate.
    """
    if failover:
        check_failover(server, version)
    more = ", failover => true" if failover else ""
    try:
        connection.execute(
            f"SELECT pg_create_logical_replication_slot(%s, %s{more})",
            (name, _PLUGIN),
        )
    except psycopg.errors.DuplicateObject:
        return
    except psycopg.errors.QueryCanceled as error:
        raise SourceUnavailable(
            f"{server.where}: replication slot {name!r} waits for transactions that are open"
            f"{oldest_transaction(connection)}; it will be tried again"
        ) from error
    except psycopg.errors.ConfigurationLimitExceeded as error:
        raise SourceMisconfigured(
            f"{server.where}: all replication slots are in use; drop one, or raise "
            "max_replication_slots and restart the server"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise may_not_replicate(server.where, server.user) from error


def check_failover(server: PostgresSourceServer, version: int) -> None:
    """Check that the server knows failover slots.

    Raises:
        SourceMisconfigured: It is too old.
    """
    if version < _FAILOVER_VERSION:
        raise SourceMisconfigured(
            f"{server.where}: engine.postgres.failover_slot needs PostgreSQL 17 or later"
        )


def check(
    found: catalog.ReplicationSlot | None, server: PostgresSourceServer, name: str
) -> catalog.ReplicationSlot:
    """Return the slot if it exists, is intact, and belongs to this pipeline's database and plugin.

    Raises:
        PositionLost: It is gone, or the server has removed log that it needed.
        SourceMisconfigured: It belongs to something else.
    """
    if found is None:
        raise lost(server, name, "is gone")
    if found.lost:
        raise lost(server, name, f"was invalidated ({found.lost})")
    if found.two_phase:
        raise SourceMisconfigured(
            f"{server.where}: replication slot {name!r} was made with two_phase: it would send "
            "prepared transactions before it is known whether they are committed; use another name"
        )
    if found.plugin != _PLUGIN or found.database != server.database:
        raise SourceMisconfigured(
            f"{server.where}: replication slot {name!r} is of plugin {found.plugin!r} in database "
            f"{found.database!r}; use another name"
        )
    return found


def useless(
    connection: psycopg.Connection, server: PostgresSourceServer, name: str, publication: str
) -> str | None:
    """Return why nothing can be read from a slot any more; None when it can, or when there is none.

    Raises:
        SourceMisconfigured: It is of another plugin or database.
    """
    found = catalog.slot(connection, name)
    if found is None:
        return None
    if found.lost:
        return f"was invalidated ({found.lost})"
    check(found, server, name)
    if catalog.published(connection, publication) is None:
        return (
            f"holds log that cannot be decoded without publication {publication!r}, which is gone"
        )
    try:
        connection.execute(
            "SELECT count(*) FROM (SELECT FROM pg_logical_slot_peek_binary_changes("
            "%s, NULL, 1, 'proto_version', '1', 'publication_names', quote_ident(%s)) LIMIT 1) AS one",
            (name, publication),
        )
    except psycopg.errors.UndefinedObject:
        return (
            f"holds log from before publication {publication!r} was made, which cannot be decoded"
        )
    except (psycopg.errors.QueryCanceled, psycopg.errors.ObjectInUse):
        return None  # it is being decoded
    return None


def drop(connection: psycopg.Connection, server: PostgresSourceServer, name: str) -> None:
    """Drop a slot.

    Raises:
        SourceUnavailable: Somebody reads it.
    """
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    except psycopg.errors.UndefinedObject:
        return
    except psycopg.errors.ObjectInUse as error:
        raise in_use(server, name, "another process") from error


def short_of_log(name: str) -> Finding:
    """Return what it means that a slot is `unreserved`."""
    return Finding(
        "slot",
        "warning",
        f"replication slot {name!r} needs log that the server removes at its next checkpoint "
        "(max_slot_wal_keep_size): let the sinks catch up, or raise that",
        "ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf()",
    )


def lost(server: PostgresSourceServer, name: str, what: str) -> PositionLost:
    """Return the error for a slot that no longer keeps what we need."""
    return PositionLost(
        f"{server.where}: replication slot {name!r} {what}: changes since the last captured "
        "position cannot be read any more. Re-snapshot required."
    )


def check_start(
    found: catalog.ReplicationSlot,
    server: PostgresSourceServer,
    name: str,
    start: int,
    flushed: int,
) -> None:
    """Check that reading from `start` finds every change after it.

    Raises:
        PositionLost: The slot has been confirmed beyond `start`, or the log, of which `flushed` is
            the end, does not reach there.
    """
    if start > flushed:
        raise lost(
            server,
            name,
            f"belongs to a log that ends at {format_lsn(flushed)}, before {format_lsn(start)} (was "
            "the server restored from an older copy?)",
        )
    confirmed = found.confirmed_lsn
    if confirmed is not None and confirmed > start:
        raise lost(
            server,
            name,
            f"has moved to {format_lsn(confirmed)}, beyond {format_lsn(start)} (was it recreated, "
            "or read by somebody else?)",
        )


def claim(connection: psycopg.Connection, server: PostgresSourceServer, name: str) -> None:
    """Wait until nobody reads the slot.

    After a killed run the server may not have noticed yet. A reader of the same pipeline that is
    still there after five seconds is ended: whoever calls this holds the pipeline now.

    One request to end is not enough for a reader whose process is stopped while the connection is
    full. Its walsender begins to tell the reader why it ends, and waits for room to do so, without a
    limit: `wal_sender_timeout` no longer counts. Only the next request makes it end without a word.

    Raises:
        SourceUnavailable: Somebody else reads the slot, or our role may not end the reader.
    """
    pid = _wait(connection, name, _WAIT_SECONDS)
    deadline = time.monotonic() + _END_SECONDS
    while pid is not None:
        if time.monotonic() > deadline:
            raise in_use(server, name, f"process {pid}, which does not end")
        _end(connection, server, name, pid)
        pid = _wait(connection, name, _AGAIN_SECONDS)


def in_use(server: PostgresSourceServer, name: str, by: str) -> SourceUnavailable:
    """Return the error for a slot that somebody else reads."""
    return SourceUnavailable(f"{server.where}: replication slot {name!r} is in use by {by}")


def has_changes(
    connection: psycopg.Connection,
    *,
    found: catalog.ReplicationSlot,
    publication: str,
    name: str,
    after: int,
    foreign: Sequence[int],
    version: int,
) -> bool:
    """Say whether the slot holds a change of a table that is not in `foreign`, after `after`.

    Peeks (manual: "Logical Decoding Functions"), which decodes from the slot's own position on.
    A transaction counts by its commit, and only if it holds more than Begin and Commit (servers
    before 15 send empty ones), Relation, Type or Origin messages, rows of a foreign table, or our
    own heartbeats. A message outside of transactions (flags 0) counts by itself.
    """
    # One transaction decides if the first that is sent can only be one that counts.
    first_decides = (
        version >= _SKIPS_EMPTY_VERSION and not foreign and (found.confirmed_lsn or 0) >= after
    )
    # A heartbeat at the slot's beginning is worth the run that passes it: it would hide all else.
    heartbeat = b"" if first_decides else HEARTBEAT.encode() + b"\0"
    options = ", 'messages', 'true'" if version >= MESSAGES_VERSION else ""
    row = connection.execute(
        f"""
        SELECT count(*) FROM (
            SELECT xid FROM pg_logical_slot_peek_binary_changes(
                %(slot)s, NULL, %(most)s,
                'proto_version', '1', 'publication_names', quote_ident(%(publication)s){options})
             GROUP BY xid
            HAVING bool_or(lsn > %(after)s::pg_lsn AND substr(data, 1, 2) = 'M\\000'
                           AND substr(data, 11, %(heartbeat_size)s) <> %(heartbeat)s)
                OR max(lsn) > %(after)s::pg_lsn AND bool_or(CASE
                   WHEN get_byte(data, 0) IN (66, 67, 79, 82, 89) THEN false  -- B C O R Y
                   WHEN get_byte(data, 0) IN (68, 73, 85)                     -- D I U: an OID follows
                   THEN NOT ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::int8 = ANY (%(foreign)s)
                   WHEN get_byte(data, 0) = 77                                -- M: flags, LSN, prefix
                   THEN get_byte(data, 1) = 1
                        AND substr(data, 11, %(heartbeat_size)s) <> %(heartbeat)s
                   ELSE true END)
             LIMIT 1) AS counting
        """,  # noqa: S608 - of two constants
        {
            "slot": name,
            "most": 1 if first_decides else None,
            "publication": publication,
            "after": format_lsn(after),
            "foreign": list(foreign),
            "heartbeat": heartbeat,
            "heartbeat_size": len(HEARTBEAT) + 1,
        },
    ).fetchone()
    assert row is not None
    return bool(row[0])


def _end(connection: psycopg.Connection, server: PostgresSourceServer, name: str, pid: int) -> None:
    """Ask a reader of the same pipeline to end; one that is gone by now is fine.

    Raises:
        SourceUnavailable: It is not ours to end.
    """
    try:
        row = connection.execute(
            """
            SELECT CASE WHEN backend_type = 'walsender'
                         AND application_name = current_setting('application_name')
                        THEN pg_terminate_backend(pid) IS NOT NULL ELSE false END,
                   application_name
              FROM pg_stat_activity WHERE pid = %s
            """,
            (pid,),
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege as error:
        by = f"process {pid} of this pipeline, which role {server.user!r} may not end"
        raise in_use(server, name, by) from error
    if row is not None and not row[0]:
        raise in_use(server, name, f"process {pid} ({row[1] or 'unnamed'})")


def _wait(connection: psycopg.Connection, name: str, seconds: float) -> int | None:
    """Return the process that still reads the slot after `seconds`, None once there is none."""
    deadline = time.monotonic() + seconds
    while True:
        found = catalog.slot(connection, name)
        if found is None or found.active_pid is None:
            return None
        if time.monotonic() > deadline:
            return found.active_pid
        time.sleep(_POLL_SECONDS)


def oldest_transaction(connection: psycopg.Connection) -> str:
    """Return, in brackets, which process has been in a transaction for longest; empty without one."""
    row = connection.execute(
        """
        SELECT pid, extract(epoch FROM now() - xact_start)::int8 FROM pg_stat_activity
         WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1
        """
    ).fetchone()
    return "" if row is None else f" (the oldest: process {row[0]}, for {row[1]} s)"
