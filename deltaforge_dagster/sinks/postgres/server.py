"""Connections to the server that has the tables."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import conninfo

from deltaforge_dagster.config.postgres_dsn import DSN_DEFAULTS
from deltaforge_dagster.errors import DeltaforgeError, SinkRejected
from deltaforge_dagster.sinks.postgres.server import connection_error

MIN_VERSION = 150_000
"""The first version with MERGE."""

NAME_BYTES = 63
"""The server truncates longer application names (NAMEDATALEN - 1)."""

_CONNECT_SECONDS = 10
_ENDING_SECONDS = 1.0
_SETTINGS = {
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "search_path": "pg_catalog",
    "default_transaction_isolation": "read\\ committed",
    "default_transaction_deferrable": "off",
    "statement_timeout": "0",
    "lock_timeout": "60s",
    # A run that was stopped within a transaction gives up its locks.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "jit": "off",
    # Rows are merged in the order of the key, so lookups in the index read neighbouring pages. With
    # the default, 4, the planner takes them for scattered reads: to merge 100,000 rows, it would
    # rather read a table of five million whole.
    "random_page_cost": "1.1",
}
"""Settings of our sessions, which win over those of role and database.

See the manual, "Client Connection Defaults".
"""

_WORK_MEMORY = "64MB"
"""Minimum of `work_mem`: what a join of a commit's rows may take before it uses temporary files."""

_SESSION = (
    "SELECT CASE WHEN current_setting('synchronous_commit') = 'off'"
    " THEN set_config('synchronous_commit', 'on', false) END,"
    " CASE WHEN pg_size_bytes(current_setting('work_mem')) < pg_size_bytes(%(memory)s)"
    " THEN set_config('work_mem', %(memory)s, false) END"
)
"""Statement that raises settings of the role or database that are too low for us.

A commit must be durable (`synchronous_commit`), because its changes are not delivered again.
"""


@dataclass(frozen=True, slots=True)
class TargetServer:
    """The server, database and role of a sink.

    Attributes:
        sink_id: The sink, for messages.
    """

    sink_id: str
    _parameters: dict[str, Any] = field(repr=False)

    @classmethod
    def from_dsn(cls, dsn: str, sink_id: str, application_name: str) -> TargetServer:
        """Return the server for the connection string of a sink."""
        parameters = {**DSN_DEFAULTS, **conninfo.conninfo_to_dict(dsn)}
        return cls(sink_id, {**parameters, "application_name": application_name})

    @property
    def where(self) -> str:
        """The sink and `PostgreSQL host:port/database`, for messages."""
        return f"sink {self.sink_id}: {self.address}"

    @property
    def address(self) -> str:
        """`PostgreSQL host:port/database`."""
        parameters = self._parameters
        return f"PostgreSQL {parameters['host']}:{parameters['port']}/{parameters['dbname']}"

    @property
    def user(self) -> str:
        """The role as which we log in."""
        return str(self._parameters["user"])

    @property
    def database(self) -> str:
        """The database."""
        return str(self._parameters["dbname"])

    def connect(self, seconds: int = _CONNECT_SECONDS) -> psycopg.Connection:
        """Open a connection with our settings, in autocommit mode.

        Raises:
            AuthFailed: The server refuses the login.
            SinkRejected: There is no such database, the server is too old, or TLS cannot be used as
                configured.
            SinkUnavailable: The server cannot be reached now.
        """
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        options = f"{self._parameters.get('options') or ''} {settings}".strip()
        problem: DeltaforgeError
        try:
            connection = psycopg.connect(
                **{**self._parameters, "options": options, "connect_timeout": seconds},
                autocommit=True,
                prepare_threshold=None,
            )
        except psycopg.Error as error:
            problem = connection_error(error, self.where, self.user)
        else:
            version = connection.info.server_version
            if version >= MIN_VERSION:
                connection.execute(_SESSION, {"memory": _WORK_MEMORY})
                return connection
            connection.close()
            problem = SinkRejected(
                f"{self.where}: the server has version {version // 10_000}, and the sink needs 15 "
                "or newer, which have MERGE; upgrade it"
            )
        raise problem


def end_former(connection: psycopg.Connection) -> None:
    """End transactions of other sessions with the name of this one, unless they have just begun.

    Such sessions belong to a process that was frozen or cut off, perhaps amid a COPY: the server
    waits for the rest of the data without a limit, and keeps the locks. Only the holder of the
    lease calls this; a process that has lost the lease cannot commit anything anyway.
    """
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = current_setting('application_name') AND usename = current_user"
        " AND datname = current_database() AND pid <> pg_backend_pid()"
        " AND xact_start < clock_timestamp() - make_interval(secs => %s)",
        [_ENDING_SECONDS],
    )


def cut(connection: psycopg.Connection) -> None:
    """End what a connection is doing, from any thread.

    The thread that uses it gets an error and closes it.
    """
    with contextlib.suppress(OSError, psycopg.Error):
        descriptor = os.dup(connection.fileno())
        with socket.socket(fileno=descriptor) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
