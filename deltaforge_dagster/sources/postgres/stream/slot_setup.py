"""Create publication and slot, and determine the LSN to start reading at (`start_position`).

A new slot begins where every transaction that was open meanwhile, in any database of the server,
has ended. An attempt that was cancelled has to start again. So `create_patiently` creates it in a
thread until it is done, while the caller is told what it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionLost,
    SourceMisconfigured,
    StartDelayed,
)
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.refusals import translate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.tables import TablePatterns

LIMIT_SECONDS = 600.0
"""How long a slot may take."""

_POLL_SECONDS = 0.5
_QUERY_SECONDS = 5.0


def ensure_start(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    patterns: TablePatterns,
    *,
    facts: catalog.ServerSettings,
    failover: bool,
    at: int | None,
) -> LsnPosition:
    """Create publication and slot if they are missing; return where reading starts.

    Args:
        connection: A connection to the server.
        server: The server, for messages.
        config: The source's configuration, with slot, publication and `start_position`.
        patterns: The tables to capture.
        facts: The server's settings.
        failover: Whether to create the slot as a failover slot.
        at: An LSN that replaces `start_position`.

    Raises:
        SourceMisconfigured: A table or the publication is not as required.
        PermissionMissing: A grant is missing; the message has the statement.
        PositionLost: The slot does not retain the requested LSN, or the log ends before it.
        StartDelayed: Open transactions delay the slot; try again.
    """
    existing = prepare(connection, server, config, patterns, facts=facts, at=at)
    if existing is None:
        # After the publication (`prepare`): the log from the slot's start on must know it already.
        slots.create(connection, server, config.slot, failover=failover, version=facts.version)
        existing = catalog.slot(connection, config.slot)
    slot = slots.check(existing, server, config.slot)
    return _start_position(
        server, config, slot, _wanted_lsn(config) if at is None else at, facts.flushed_lsn
    )


def prepare(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    patterns: TablePatterns,
    *,
    facts: catalog.ServerSettings,
    at: int | None,
) -> catalog.ReplicationSlot | None:
    """Check that reading can start, and return the slot if there is one.

    The publication is created if it is missing. Args and errors are those of `ensure_start`.
    """
    slot = catalog.slot(connection, config.slot)
    if slot is None:
        _refuse_position(server, config, _wanted_lsn(config) if at is None else at)
    elif at is not None:
        slots.check_start(slot, server, config.slot, at, facts.flushed_lsn)
    if catalog.published(connection, config.publication) is not None:
        publications.extend(connection, server, config.publication, patterns)
        publications.check(connection, server, config.publication, patterns)
    elif slot is None:
        # Before the slot: the server looks a publication up as of the log that it decodes.
        publications.create(connection, server, config.publication, patterns, facts.version)
    else:
        raise SourceMisconfigured(
            f"{server.where}: replication slot {config.slot!r} exists, publication "
            f"{config.publication!r} does not, and the log written without it cannot be "
            "decoded; drop the slot, then both are recreated",
            remedy=_drop_slot(connection, config),
        )
    return slot


def create_patiently(
    server: PostgresSourceServer,
    name: str,
    *,
    failover: bool,
    version: int,
    waits: Callable[[str], None],
) -> None:
    """Create the slot, or wait until the process that is creating it is done.

    Args:
        server: The server.
        name: Name of the slot.
        failover: Whether to create it as a failover slot.
        version: The server's `server_version_num`.
        waits: Called every half second with what the server waits for; may raise an error to give
            up.

    Raises:
        StartDelayed: It took longer than ten minutes.
        DeltaforgeError: What `slots.create` raises.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    with _Creation(server, name, failover=failover, version=version) as creation:
        while not creation.over(_POLL_SECONDS):
            obstacles = _obstacles(server, name)
            if time.monotonic() > deadline:
                raise StartDelayed(f"{obstacles} for {LIMIT_SECONDS:.0f} s; it will be tried again")
            waits(obstacles)


def _wanted_lsn(config: PostgresSourceConfig) -> int | None:
    wanted = config.start_position
    return None if isinstance(wanted, str) else parse_lsn(wanted.lsn)


def _refuse_position(
    server: PostgresSourceServer, config: PostgresSourceConfig, wanted: int | None
) -> None:
    """Refuse a position without a slot: a slot created now begins later, even on an idle server."""
    if wanted is not None:
        raise PositionLost(
            f"{server.where}: start position {format_lsn(wanted)}: "
            f"there is no replication slot {config.slot!r} "
            "that holds the log from there, and a new one begins later; "
            "use start_position earliest or latest, without a seed or imported checkpoint"
        )


def _start_position(
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    slot: catalog.ReplicationSlot,
    wanted: int | None,
    flushed_lsn: int,
) -> LsnPosition:
    confirmed = slot.confirmed_lsn
    assert confirmed is not None  # `slots.check`
    if wanted is not None:
        if wanted < confirmed:
            raise PositionLost(
                f"{server.where}: start_position {format_lsn(wanted)} is before "
                f"{format_lsn(confirmed)}, the oldest that replication slot {slot.name!r} holds; "
                "use earliest or latest"
            )
        return LsnPosition(wanted)
    if config.start_position == "latest":
        return LsnPosition(max(confirmed, flushed_lsn))
    return LsnPosition(confirmed)


def _drop_slot(connection: psycopg.Connection, config: PostgresSourceConfig) -> str:
    statement = sql.SQL("SELECT pg_drop_replication_slot({})").format(config.slot)
    return statement.as_string(connection)


class _Creation:
    """Creates the slot in a thread; a context manager, which gives up when it is left early."""

    def __init__(
        self, server: PostgresSourceServer, name: str, *, failover: bool, version: int
    ) -> None:
        self._server = server
        self._name = name
        self._failover = failover
        self._version = version
        self._error: DeltaforgeError | None = None
        self._cancelled = threading.Event()
        self._connection = server.connect(LIMIT_SECONDS)
        self._thread = threading.Thread(target=self._create, name=f"slot {name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled.set()
        if self._thread.is_alive():
            with suppress(psycopg.Error):
                # The server then drops the slot that is half created.
                self._connection.cancel_safe(timeout=_QUERY_SECONDS)
            self._thread.join(_QUERY_SECONDS)

    def over(self, seconds: float) -> bool:
        """Wait at most `seconds` for the thread; return whether it has ended: the slot exists.

        Raises:
            DeltaforgeError: It cannot be created.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _create(self) -> None:
        try:
            slots.create(
                self._connection,
                self._server,
                self._name,
                failover=self._failover,
                version=self._version,
            )
            self._wait_for_other()
        except DeltaforgeError as error:
            self._error = error
        except psycopg.Error as error:
            server = self._server
            self._error = translate(error.sqlstate, str(error), server.where, server.user)
        finally:
            self._connection.close()

    def _wait_for_other(self) -> None:
        """Wait until a slot that another process was creating already is ready, or gone."""
        while not self._cancelled.wait(_POLL_SECONDS):
            slot = catalog.slot(self._connection, self._name)
            if slot is None or slot.confirmed_lsn is not None:
                return


def _obstacles(server: PostgresSourceServer, name: str) -> str:
    """Return a sentence that names the transactions for which a slot waits now."""
    with server.query(_QUERY_SECONDS) as connection:
        rows = connection.execute(
            """
            SELECT b.pid, a.datname::text, a.usename::text, date_trunc('second', a.xact_start)::text
              FROM pg_replication_slots s, unnest(pg_blocking_pids(s.active_pid)) AS b(pid)
              LEFT JOIN pg_stat_activity a ON a.pid = b.pid
             WHERE s.slot_name = %s
            """,
            (name,),
        ).fetchall()
        sentence = f"{server.where}: {slots.waiting(connection, name)}"
    named = "; ".join(_transaction(*row) for row in rows)
    return f"{sentence}: {named}" if named else sentence


def _transaction(pid: int, database: str | None, role: str | None, since: str | None) -> str:
    if pid == 0:
        return "a prepared one (see pg_prepared_xacts)"
    began = f", since {since}" if since else ""  # hidden without the rights of pg_read_all_stats
    return f"process {pid} (database {database}, role {role}){began}"
