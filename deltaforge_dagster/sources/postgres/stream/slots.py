"""The replication slot, by which the server retains its log from a position on.

It is created if missing (`slot_setup`). `deltaforge recover` and `deltaforge checkpoint reset
--all` drop it if nothing can be read from it any more, `deltaforge remove` in any case, and only
confirmed positions move it. A slot that has moved past the position to read from no longer has the
changes between, and reading on would silently lose them.

A reader of the slot, or a peek into it, waits until the server has decoded everything from the
slot's `restart_lsn` on, but only gets what lies after the confirmed position. `restart_lsn` moves
no further than to the newest confirmed record that lists the running transactions (manual:
`pg_log_standby_snapshot`). A server writes such a record every 15 seconds and at each checkpoint,
so a run would decode up to 15 seconds of log again that the run before it has confirmed: half a
second for 100 MB. Therefore each run has one written when it begins to read, and the next run
restarts there.

All databases of a server share one log. While others write much and ours writes nothing, the slot
moves only with the server's keepalives, which may come late. So `Heartbeat` writes small messages
to the log: each is a transaction in our database that the slot decodes, so its commit can be
confirmed as soon as it has arrived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
    StartDelayed,
)
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.refusals import may_not_replicate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.connection.service import more_log, no_room, recognized
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT, MESSAGES_VERSION

logger = logging.getLogger(__name__)

LIMIT = "max_slot_wal_keep_size"
"""The server's setting for how much log a slot may retain (PostgreSQL 13)."""
MAX_UNCONFIRMED_BYTES = 64 << 20
"""If a slot retains more log than this, a run is worthwhile, to confirm it by idle progress."""
_PLUGIN = "pgoutput"
_HEARTBEAT = HEARTBEAT.encode() + b"\0"
_SKIPS_EMPTY_VERSION = 150000  # from 15 on pgoutput sends no transaction without changes
_FAILOVER_VERSION = 170000  # slots that standbys take over exist from 17 on
_RECORD_VERSION = 160000  # the function exists from 16 on
_RECORD = "pg_catalog.pg_log_standby_snapshot()"
_WAIT_SECONDS = 5.0
_BEAT_SECONDS = 5.0
_END_SECONDS = 15.0
_RETRY_SECONDS = 1.0
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

    With `failover`, the server's replicas keep a copy of it (manual: "Logical Replication
    Failover").

    Raises:
        StartDelayed: Open transactions did not end in time; the message names the oldest.
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
        raise StartDelayed(
            f"{server.where}: {waiting(connection, name)}{oldest_transaction(connection)}; "
            "it will be tried again"
        ) from error
    except psycopg.errors.ConfigurationLimitExceeded as error:
        text, remedy = no_room(connection, "replication slots", "max_replication_slots")
        raise SourceMisconfigured(f"{server.where}: {text}", remedy=remedy) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise may_not_replicate(server.where, server.user, recognized(connection)) from error


def make_failover(server: PostgresSourceServer, name: str) -> None:
    """Make a slot that nobody reads now a failover slot (manual: `ALTER_REPLICATION_SLOT`).

    Raises:
        DeltaforgeError: As `refusals` translates the server's error.
    """
    with server.query(_WAIT_SECONDS, replication=True) as connection:
        slot = sql.Identifier(name)
        connection.execute(sql.SQL("ALTER_REPLICATION_SLOT {} (FAILOVER true)").format(slot))
    logger.info("%s: replication slot %s is a failover slot now", server.where, name)


def check_failover(server: PostgresSourceServer, version: int) -> None:
    """Check that the server has failover slots.

    Raises:
        SourceMisconfigured: The server is older than PostgreSQL 17.
    """
    if version < _FAILOVER_VERSION:
        raise SourceMisconfigured(
            f"{server.where}: engine.postgres.failover_slot needs PostgreSQL 17 or later"
        )


def check(
    slot: catalog.ReplicationSlot | None, server: PostgresSourceServer, name: str
) -> catalog.ReplicationSlot:
    """Check that the slot exists, is valid, and has our plugin and database; return it.

    The server shows a slot while it is being created: it has a `restart_lsn` already, but nothing
    can be read from there.

    Raises:
        StartDelayed: It is being created.
        PositionLost: The slot does not exist, or was invalidated.
        SourceMisconfigured: It was created with two_phase, or has another plugin or database.
    """
    if slot is None:
        raise lost(
            server,
            name,
            "is gone (was it dropped, or did a failover leave it behind? From PostgreSQL 17 on "
            "engine.postgres.failover_slot keeps it)",
        )
    if slot.lost:
        raise lost(server, name, f"was invalidated ({slot.lost})")
    if slot.two_phase:
        raise SourceMisconfigured(
            f"{server.where}: replication slot {name!r} was made with two_phase: it would send "
            "prepared transactions before it is known whether they are committed; use another name"
        )
    check_owner(slot, server, name)
    if slot.confirmed_lsn is None:
        raise StartDelayed(
            f"{server.where}: replication slot {name!r} is being made "
            f"by process {slot.active_pid}, and the server waits for transactions "
            "that are open; it will be tried again"
        )
    return slot


def check_owner(slot: catalog.ReplicationSlot, server: PostgresSourceServer, name: str) -> None:
    """Check that a slot may be ours: that it has our plugin and database.

    Raises:
        SourceMisconfigured: It has others.
    """
    if slot.plugin != _PLUGIN or slot.database != server.database:
        raise SourceMisconfigured(
            f"{server.where}: replication slot {name!r} is of plugin {slot.plugin!r} in database "
            f"{slot.database!r}; use another name"
        )


def useless(
    connection: psycopg.Connection, server: PostgresSourceServer, name: str, publication: str
) -> str | None:
    """Return why a slot can no longer be read; None if it can, or if it does not exist.

    Raises:
        SourceMisconfigured: The slot has another plugin or database.
    """
    slot = catalog.slot(connection, name)
    if slot is None:
        return None
    if slot.lost:
        return f"was invalidated ({slot.lost})"
    check(slot, server, name)
    if catalog.published(connection, publication) is None:
        return (
            f"holds log that cannot be decoded without publication {publication!r}, which is gone"
        )
    try:
        connection.execute(
            "SELECT count(*) FROM (SELECT FROM pg_logical_slot_peek_binary_changes("
            "%s, NULL, 1, 'proto_version', '1', 'publication_names', quote_ident(%s))"
            " LIMIT 1) AS one",
            (name, publication),
        )
    except psycopg.errors.UndefinedObject:
        return (
            f"holds log from before publication {publication!r} was made, which cannot be decoded"
        )
    except (psycopg.errors.QueryCanceled, psycopg.errors.ObjectInUse):
        return None  # decoding has begun, or another process decodes, so it can be read
    return None


def retention_limit(connection: psycopg.Connection) -> int | None:
    """Return how many bytes of log a slot may retain (`LIMIT`); None if any amount."""
    row = connection.execute(
        "SELECT setting::int8 * 1048576 FROM pg_settings WHERE name = %s AND setting::int8 >= 0",
        (LIMIT,),
    ).fetchone()
    return None if row is None else int(row[0])


def drop(connection: psycopg.Connection, server: PostgresSourceServer, name: str) -> None:
    """Drop a slot, if it exists.

    Raises:
        SourceUnavailable: Another process reads it.
    """
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    except psycopg.errors.UndefinedObject:
        return
    except psycopg.errors.ObjectInUse as error:
        raise in_use(server, name, "another process") from error


def short_of_log(connection: psycopg.Connection, name: str) -> Finding:
    """Return the finding for a slot with the WAL status `unreserved`."""
    more, remedy = more_log(connection, 0)
    return Finding(
        "slot",
        "warning",
        f"replication slot {name!r} needs log that the server removes at its next checkpoint "
        f"(max_slot_wal_keep_size): let the sinks catch up; {more}",
        remedy,
    )


def lost(server: PostgresSourceServer, name: str, what: str) -> PositionLost:
    """Return the error for a slot that no longer retains the log that we need."""
    return PositionLost(
        f"{server.where}: replication slot {name!r} {what}: changes since the last captured "
        "position cannot be read any more. Re-snapshot required."
    )


def check_start(
    slot: catalog.ReplicationSlot,
    server: PostgresSourceServer,
    name: str,
    start: int,
    flushed: int,
) -> None:
    """Check that reading from `start` yields every change after it.

    Raises:
        PositionLost: The slot was confirmed beyond `start`, or the log ends (at `flushed`) before
            `start`.
    """
    if start > flushed:
        raise lost(
            server,
            name,
            f"belongs to a log that ends at {format_lsn(flushed)}, before {format_lsn(start)} (was "
            "the server restored from an older copy?)",
        )
    confirmed = slot.confirmed_lsn
    if confirmed is not None and confirmed > start:
        raise lost(
            server,
            name,
            f"has moved to {format_lsn(confirmed)}, beyond {format_lsn(start)} (was it recreated, "
            "or read by somebody else?)",
        )


def claim(connection: psycopg.Connection, server: PostgresSourceServer, name: str) -> None:
    """Wait until no other process reads the slot; end a reader of the same pipeline if necessary.

    After a killed run, the server may not have noticed yet that the reader is gone. A reader of the
    same pipeline that still exists after five seconds is terminated: the caller holds the
    pipeline's lease.

    One `pg_terminate_backend` is not enough if the reader's process is frozen and the connection's
    buffers are full. Its walsender then tries to send the reason, and waits without a limit for
    room to do so: `wal_sender_timeout` no longer applies. Only a second request makes it end at
    once.

    Raises:
        SourceUnavailable: Another pipeline or program reads the slot, or our role may not end the
            reader.
    """
    pid = _wait_until_free(connection, name, _WAIT_SECONDS)
    deadline = time.monotonic() + _END_SECONDS
    while pid is not None:
        if time.monotonic() > deadline:
            raise in_use(server, name, f"process {pid}, which does not end")
        _terminate(connection, server, name, pid)
        pid = _wait_until_free(connection, name, _RETRY_SECONDS)


def in_use(server: PostgresSourceServer, name: str, by: str) -> SourceUnavailable:
    """Return the error for a slot that another process reads."""
    return SourceUnavailable(f"{server.where}: replication slot {name!r} is in use by {by}")


def has_changes(
    connection: psycopg.Connection,
    *,
    slot: catalog.ReplicationSlot,
    publication: str,
    name: str,
    after: int,
    foreign: Sequence[int],
    version: int,
) -> bool:
    """Return whether the slot has a change committed after `after`, of a table not in `foreign`.

    This peeks into the slot (manual: "Logical Decoding Functions"), which decodes from the slot's
    position on. A transaction counts if it has anything besides Begin and Commit (servers before 15
    send empty transactions), Relation, Type or Origin messages, rows of a foreign table, and our
    own heartbeats. A non-transactional logical message (flags 0) counts by itself.

    Args:
        connection: A connection to the server.
        slot: The slot.
        publication: Name of the publication.
        name: Name of the slot.
        after: An LSN.
        foreign: OIDs of tables that the publication sends but the pipeline does not capture.
        version: The server's `server_version_num`.
    """
    # If every transaction that is sent counts, except heartbeats, it is enough to peek at the first
    # one.
    first_decides = (
        version >= _SKIPS_EMPTY_VERSION and not foreign and (slot.confirmed_lsn or 0) >= after
    )
    options = ", 'messages', 'true'" if version >= MESSAGES_VERSION else ""

    def peek(most: int | None) -> tuple[bool, bool]:
        """Return whether one of the first transactions counts, and whether there is any."""
        row = connection.execute(
            f"""
            SELECT coalesce(bool_or(counts), false), count(*) > 0 FROM (
                SELECT bool_or(lsn > %(after)s::pg_lsn AND substr(data, 1, 2) = 'M\\000'
                               AND substr(data, 11, %(heartbeat_size)s) <> %(heartbeat)s)
                    OR max(lsn) > %(after)s::pg_lsn AND bool_or(CASE
                       WHEN get_byte(data, 0) IN (66, 67, 79, 82, 89) THEN false  -- B C O R Y
                       WHEN get_byte(data, 0) IN (68, 73, 85)  -- D I U: an OID follows
                       THEN NOT ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::int8
                            = ANY (%(foreign)s)
                       WHEN get_byte(data, 0) = 77  -- M: flags, LSN, prefix
                       THEN get_byte(data, 1) = 1
                            AND substr(data, 11, %(heartbeat_size)s) <> %(heartbeat)s
                       ELSE true END) AS counts
                  FROM pg_logical_slot_peek_binary_changes(
                    %(slot)s, NULL, %(most)s,
                    'proto_version', '1',
                    'publication_names', quote_ident(%(publication)s){options})
                 GROUP BY xid) AS transactions
            """,  # noqa: S608 - of two constants
            {
                "slot": name,
                "most": most,
                "publication": publication,
                "after": format_lsn(after),
                "foreign": list(foreign),
                "heartbeat": _HEARTBEAT,
                "heartbeat_size": len(_HEARTBEAT),
            },
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    counts, found_any = peek(1 if first_decides else None)
    if first_decides and found_any and not counts:
        # The first transaction is a heartbeat that the last run left unread.
        counts, _ = peek(None)
    return counts


def log_running_transactions(connection: psycopg.Connection) -> None:
    """Have the server write the record, if it can and the role may."""
    if _writes_records(connection) and _may_write_records(connection):
        connection.execute(f"SELECT {_RECORD}")


def missing_grant(connection: psycopg.Connection, role: str) -> str | None:
    """Return the statement that lets the connection's role have the record written.

    None if the role may do that already, or no role can.
    """
    if not _writes_records(connection) or _may_write_records(connection):
        return None
    return f"GRANT EXECUTE ON FUNCTION {_RECORD} TO {sql.Identifier(role).as_string(connection)}"


class Heartbeat:
    """Writes a heartbeat every `seconds`, from a separate thread, until it is stopped.

    A failed heartbeat is only logged, because capture works without it.
    """

    def __init__(self, server: PostgresSourceServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for a heartbeat that is being written."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                # Transactional, because a commit flushes the log, which a message alone does not.
                with self._server.query(_BEAT_SECONDS) as connection:
                    connection.execute("SELECT pg_logical_emit_message(true, %s, '')", (HEARTBEAT,))
            except DeltaforgeError as error:
                logger.warning("a heartbeat failed: %s", error)


def _terminate(
    connection: psycopg.Connection, server: PostgresSourceServer, name: str, pid: int
) -> None:
    """Terminate a reader of the same pipeline; it may already have ended.

    Raises:
        SourceUnavailable: The reader is not of this pipeline, or our role may not end it.
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


def _wait_until_free(connection: psycopg.Connection, name: str, seconds: float) -> int | None:
    """Wait at most `seconds` until no process reads the slot; return the one that still does."""
    deadline = time.monotonic() + seconds
    while True:
        slot = catalog.slot(connection, name)
        if slot is None or slot.active_pid is None:
            return None
        if time.monotonic() > deadline:
            return slot.active_pid
        time.sleep(_POLL_SECONDS)


def waiting(connection: psycopg.Connection, name: str) -> str:
    """Return what a slot that is being created waits for, as the beginning of a sentence."""
    checkpoint = (
        "a checkpoint, if it is the first logical slot, and for "
        if connection.info.server_version >= catalog.LEVEL_RISES_VERSION
        else ""
    )
    return f"replication slot {name!r} waits for {checkpoint}transactions that are open"


def oldest_transaction(connection: psycopg.Connection) -> str:
    """Return a text in parentheses that names the process with the oldest transaction.

    Empty if there is none.
    """
    row = connection.execute(
        """
        SELECT pid, extract(epoch FROM now() - xact_start)::int8 FROM pg_stat_activity
         WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1
        """
    ).fetchone()
    return "" if row is None else f" (the oldest: process {row[0]}, for {row[1]} s)"


def _writes_records(connection: psycopg.Connection) -> bool:
    return connection.info.server_version >= _RECORD_VERSION


def _may_write_records(connection: psycopg.Connection) -> bool:
    row = connection.execute("SELECT has_function_privilege(%s, 'EXECUTE')", (_RECORD,)).fetchone()
    assert row is not None
    return bool(row[0])
