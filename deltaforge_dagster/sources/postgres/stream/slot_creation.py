"""Create the replication slot, however long the server waits for open transactions.

A new slot begins where every transaction that was open meanwhile, in any database of the server,
has ended. An attempt that was cancelled has to start again. So the creation runs in a thread until
it is done, while the caller is told what it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psycopg

from deltaforge_dagster.errors import DeltaforgeError, StartDelayed
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.refusals import translate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.stream import slots

LIMIT_SECONDS = 600.0
"""How long a slot may take."""

_POLL_SECONDS = 0.5
_QUERY_SECONDS = 5.0


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
