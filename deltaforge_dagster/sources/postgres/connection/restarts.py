"""How to change a setting of the server, and whether a change already waits for a restart.

A managed service has its own way to change settings (see `service`). Elsewhere `ALTER SYSTEM`
writes a value into the server's configuration. After a reload, `pg_settings.pending_restart` says
that the value waits for a restart; before that, only superusers can see it, in the configuration
files (manual: "pg_settings", "pg_file_settings").
"""

from __future__ import annotations

import psycopg

from deltaforge_dagster.errors import Commands
from deltaforge_dagster.sources.postgres.connection.service import recognized

_RELOAD = "SELECT pg_reload_conf()"
_SPARE = 10
"""How many slots or senders to add on a server that has no free one."""

_FILES = "pg_show_all_file_settings()"
_MIB = 1 << 20
_GIB = 1 << 30


def after_restart(connection: psycopg.Connection, name: str, value: str) -> tuple[str, Commands]:
    """Return how to set a setting: a sentence for people, and the statements to execute first.

    Args:
        connection: A connection to the server.
        name: The setting, which a running server cannot change.
        value: The value, as it is written in a statement and in the configuration.
    """
    service = recognized(connection)
    if service.managed:
        return service.change(name, value, restarts=True), ()
    row = connection.execute(
        "SELECT source, pending_restart, has_function_privilege(%s, 'EXECUTE')"
        " FROM pg_settings WHERE name = %s",
        (_FILES, name),
    ).fetchone()
    assert row is not None
    source, waits, may_read = row
    if source == "command line":
        return (
            (
                f"{name} is set on the server's command line, "
                f"so change it there ({name}={value}) and restart the server"
            ),
            (),
        )
    if waits or (may_read and _is_written(connection, name, value)):
        return f"{name} is changed in its configuration, for which the server must be restarted", ()
    statements = (f"ALTER SYSTEM SET {name} = {value}", _RELOAD)
    return "the server must be restarted after the change", statements


def no_room(connection: psycopg.Connection, what: str, setting: str) -> tuple[str, Commands]:
    """Return what to do if all slots or senders are in use, in the form of `after_restart`.

    Args:
        connection: A connection to the server.
        what: `replication slots` or `WAL senders`, for people.
        setting: The setting that limits their number.
    """
    row = connection.execute("SELECT current_setting(%s)::int", (setting,)).fetchone()
    assert row is not None
    restart, statements = after_restart(connection, setting, str(row[0] + _SPARE))
    return f"all {what} are in use; drop or end one, or have more: {restart}", statements


def more_log(connection: psycopg.Connection, wanted: int) -> tuple[str, Commands]:
    """Return how to let slots keep more log than now, in the form of `after_restart`.

    The limit stays finite, because a slot without one fills the server's disk.

    Args:
        connection: A connection to the server.
        wanted: The bytes of log that are expected to be kept.
    """
    row = connection.execute(
        "SELECT setting::int8 * 1048576, source FROM pg_settings"
        " WHERE name = 'max_slot_wal_keep_size'"
    ).fetchone()
    assert row is not None  # servers before 13 have no limit, so none is too small
    limit, source = row
    size = -(-2 * max(wanted, limit) // _GIB) * _GIB // _MIB
    text = f"if the server's disk has room for {size:,} MB of log beside the data, "
    service = recognized(connection)
    if service.managed:
        return text + service.change("max_slot_wal_keep_size", str(size), restarts=False), ()
    if source == "command line":
        text += "change the limit on the server's command line"
        return f"{text} (max_slot_wal_keep_size={size}) and restart the server", ()
    statements = (f"ALTER SYSTEM SET max_slot_wal_keep_size = '{size}MB'", _RELOAD)
    return f"{text}raise the limit", statements


def _is_written(connection: psycopg.Connection, name: str, value: str) -> bool:
    """Return whether the configuration files have a value of a setting."""
    row = connection.execute(
        f"SELECT setting = %s FROM {_FILES}"  # noqa: S608 - a constant
        " WHERE name = %s ORDER BY seqno DESC LIMIT 1",
        (value, name),
    ).fetchone()
    return row is not None and bool(row[0])
