"""Where the server begins to decode its log when a slot is read: the slot's `restart_lsn`.

Whoever reads or peeks into the slot waits until the server has decoded everything from there on, and only gets what lies
behind the confirmed position. `restart_lsn` moves no further than to the newest confirmed record that lists the
running transactions (manual: `pg_log_standby_snapshot`). A server writes one every 15 seconds and at each
checkpoint, so a run would decode up to 15 seconds of log again that the run before it has confirmed: half a second for
100 MB. Therefore each run has one written when it begins to read, and the next run restarts there.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

_SINCE_VERSION = 160000
_FUNCTION = "pg_catalog.pg_log_standby_snapshot()"


def log_running_transactions(connection: psycopg.Connection, version: int) -> None:
    """Write the record of running transactions, if the server can and the role may.

    Args:
        connection: A connection to the server.
        version: The server's `server_version_num`.
    """
    if may_log(connection, version):
        connection.execute(f"SELECT {_FUNCTION}")


def may_log(connection: psycopg.Connection, version: int) -> bool | None:
    """Return whether the role may have the record written; None if servers of this version cannot (before 16)."""
    if version < _SINCE_VERSION:
        return None
    row = connection.execute(
        "SELECT has_function_privilege(%s, 'EXECUTE')", (_FUNCTION,)
    ).fetchone()
    assert row is not None
    return bool(row[0])


def grant(connection: psycopg.Connection, role: str) -> str:
    """Return the statement that lets a role have the record written."""
    return f"GRANT EXECUTE ON FUNCTION {_FUNCTION} TO {sql.Identifier(role).as_string(connection)}"
