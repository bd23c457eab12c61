"""The server that has the tables: connections, names in SQL, and errors.

Errors of PostgreSQL become errors of this package. The SQLSTATE decides (manual: appendix
"PostgreSQL Error Codes"). The server's text is repeated only if it cannot contain a value of a row;
the names of columns and constraints are fields of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import conninfo

from deltaforge_dagster.config.postgres_dsn import DSN_DEFAULTS
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    SinkRejected,
    SinkUnavailable,
    TableRejected,
)
from deltaforge_dagster.sinks.postgres.sink_type import DEFAULT_SCHEMA
from deltaforge_dagster.sources.findings import one_line

NOT_PERMITTED = "42501"

_COMMITS = ("deltaforge", "commits")

_TRANSIENT: dict[str, str] = {
    "57014": "the statement was cancelled, or took longer than the server allows",
    "55P03": (
        "somebody else holds a lock on the table for too long; end what holds it (pg_locks), "
        "or wait"
    ),
    "25006": "the server takes no changes: it is a standby, or default_transaction_read_only is on",
}
_TRANSIENT_CLASSES = {"08", "40", "53", "57", "58", "XX"}
"""Classes of errors that may resolve by themselves."""

_CONSTRAINTS = {
    "23502": "its column {column} must not be null, and the source's rows have no value for it",
    "23503": (
        "its foreign key {constraint} refuses a change: tables are committed one after the other"
    ),
    "23505": (
        "its unique index {constraint} refuses a row that the source has; drop the index, "
        "or make it a constraint that is DEFERRABLE INITIALLY DEFERRED"
    ),
}
_CONSTRAINT_REMEDIES = {
    "23502": "ALTER TABLE {table} ALTER COLUMN {column} DROP NOT NULL",
    "23503": "ALTER TABLE {table} DROP CONSTRAINT {constraint}",
}
_VALUES = {
    "22001": "a value is longer than its column allows",
    "22003": "a number is out of range",
    "22007": "a text is no date or time",
    "22008": "a date or time is out of range",
    "22021": "a text has a character that the server cannot store",
    "22P02": "a text is no value of its column's type",
    "22P05": (
        "a text has a character that the database's encoding lacks (use a database with the "
        "encoding UTF8), or a document has \\u0000, which jsonb cannot have"
    ),
}
"""What is wrong with a value; the server's own text would quote it."""

MIN_VERSION = 150_000
"""The first version with MERGE."""

NAME_BYTES = 63
"""The server cuts longer names, also of applications (NAMEDATALEN - 1)."""

_CONNECT_SECONDS = 10
_ENDING_SECONDS = 1.0  # a former transaction that is about to end may do so by itself
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

_SYSTEM = {"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"}


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


def quoted(*names: str) -> str:
    """Return a name of these parts, quoted."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def literal(value: str) -> str:
    """Return a string literal."""
    escaped = value.replace("'", "''")
    return f"E'{escaped.replace(chr(92), chr(92) * 2)}'" if "\\" in value else f"'{escaped}'"


def schema_and_table(destination: Sequence[str]) -> tuple[str, str]:
    """Return the schema and the name of a table; a name without a schema is in `public`."""
    *schema, table = destination
    return (schema[0] if schema else DEFAULT_SCHEMA), table


def bad_name(name: str) -> str | None:
    """Return why the name of a column, table or schema is impossible, None if it is possible."""
    size = len(name.encode())
    if size > NAME_BYTES:
        return f"it has {size} bytes, and PostgreSQL's names have at most {NAME_BYTES}"
    return None


def bad_column(name: str) -> str | None:
    """Return why a table cannot have a column of that name, None if it can."""
    if name in _SYSTEM:
        return "PostgreSQL has a system column of that name in every table"
    return bad_name(name)


def connection_error(error: psycopg.Error, where: str, user: str) -> DeltaforgeError:
    """Return the error for a connection that could not be opened; libpq has only a text about it.

    Args:
        error: The error.
        where: The server's address.
        user: The role as which we log in.
    """
    reason = one_line(str(error))
    fatal = reason.partition("FATAL:")[2].strip()
    if "password authentication failed" in reason or "no password supplied" in reason:
        return AuthFailed(
            f"{where}: wrong password for role {user!r}, or there is no such role; correct the "
            "sink's dsn"
        )
    if re.match(r'role ".*" does not exist|.*pg_hba\.conf', fatal):
        return AuthFailed(
            f"{where}: login of role {user!r} refused: {fatal}; correct the sink's dsn"
        )
    if re.match(r'database ".*" does not exist', fatal):
        return SinkRejected(f"{where}: the database does not exist; create it, or correct the dsn")
    if any(word in reason for word in ("SSL", "TLS", "certificate")):
        return SinkRejected(f"{where}: {reason}; see sslmode and sslrootcert of the dsn")
    return SinkUnavailable(f"{where}: {reason}")


def translated(
    error: psycopg.Error, where: str, user: str, label: str, name: tuple[str, str]
) -> DeltaforgeError:
    """Return our error for an error of the server about a table.

    Args:
        error: The error.
        where: The server's address.
        user: The role as which we log in.
        label: What messages call the table.
        name: Schema and name of the table.
    """
    state = error.sqlstate
    if not state:
        return SinkUnavailable(f"{where}: connection lost ({one_line(str(error))})")
    code = f" (SQLSTATE {state})"
    if state in _TRANSIENT or state[:2] in _TRANSIENT_CLASSES:
        why = _TRANSIENT.get(state) or one_line(str(error))
        return SinkUnavailable(f"{where}, {label}: {why}{code}")
    return TableRejected(
        f"{label}: {_reason(error, state)}{code}", remedy=_remedy(error, state, user, name)
    )


def _remedy(error: psycopg.Error, state: str, user: str, name: tuple[str, str]) -> str | None:
    table = quoted(*name)
    if state == NOT_PERMITTED:
        return _grant(one_line(str(error)), quoted(user), name)
    if state not in _CONSTRAINT_REMEDIES:
        return None
    diagnosis = error.diag
    column, constraint = (
        quoted(diagnosis.column_name or ""),
        quoted(diagnosis.constraint_name or ""),
    )
    return _CONSTRAINT_REMEDIES[state].format(table=table, column=column, constraint=constraint)


def _grant(text: str, role: str, name: tuple[str, str]) -> str | None:
    """Return the statement that gives a role the right that it lacks.

    Return None for a right on something else.
    """
    schema, _ = name
    for table in (name, _COMMITS):
        if text == f"permission denied for table {table[1]}":
            return f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {quoted(*table)} TO {role}"
        if text == f"must be owner of table {table[1]}":
            return f"ALTER TABLE {quoted(*table)} OWNER TO {role}"
    for its_schema in (schema, _COMMITS[0]):
        if text == f"permission denied for schema {its_schema}":
            return f"GRANT USAGE, CREATE ON SCHEMA {quoted(its_schema)} TO {role}"
    return None


def _reason(error: psycopg.Error, state: str) -> str:
    diagnosis = error.diag
    if state == NOT_PERMITTED:
        return (
            f"{one_line(str(error))}; let the dsn's role own the table, or grant it SELECT, "
            "INSERT, UPDATE, DELETE and TRUNCATE on it, and USAGE on its schema"
        )
    if state in _CONSTRAINTS:
        named = {"column": diagnosis.column_name, "constraint": diagnosis.constraint_name}
        return _CONSTRAINTS[state].format(**named)
    if state.startswith("22"):
        problem = _VALUES.get(state, "the server refuses a value")
        return (
            f"{problem}, and the server's log says which; declare the column as text under `types`"
        )
    if state.startswith("23"):
        return (
            f"its constraint {diagnosis.constraint_name} refuses a row that the source has; drop it"
        )
    if state.startswith("P0"):
        return "a trigger or function of the table refuses the change"
    # Texts of the other classes name objects, not values.
    return one_line(str(error))
