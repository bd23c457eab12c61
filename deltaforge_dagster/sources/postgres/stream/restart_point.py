"""Where the server begins to decode its log when a slot is read: the slot's `restart_lsn`.

A reader of the slot, or a peek into it, waits until the server has decoded everything from there
on, but only gets what lies after the confirmed position. `restart_lsn` moves no further than to the
newest confirmed record that lists the running transactions (manual: `pg_log_standby_snapshot`). A
server writes such a record every 15 seconds and at each checkpoint, so a run would decode up to 15
seconds of log again that the run before it has confirmed: half a second for 100 MB. Therefore each
run has one written when it begins to read, and the next run restarts there.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

_SINCE_VERSION = 160000
_FUNCTION = "pg_catalog.pg_log_standby_snapshot()"


def log_running_transactions(connection: psycopg.Connection) -> None:
    """Have the server write the record, if it can and the role may."""
    if _is_supported(connection) and _is_permitted(connection):
        connection.execute(f"SELECT {_FUNCTION}")


def missing_grant(connection: psycopg.Connection, role: str) -> str | None:
    """Return the statement that lets the connection's role have the record written.

    None if the role may do that already, or no role can.
    """
    if not _is_supported(connection) or _is_permitted(connection):
        return None
    return f"GRANT EXECUTE ON FUNCTION {_FUNCTION} TO {sql.Identifier(role).as_string(connection)}"


def _is_supported(connection: psycopg.Connection) -> bool:
    return connection.info.server_version >= _SINCE_VERSION


def _is_permitted(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT has_function_privilege(%s, 'EXECUTE')", (_FUNCTION,)
    ).fetchone()
    assert row is not None
    return bool(row[0])
