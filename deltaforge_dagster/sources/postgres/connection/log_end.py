"""Find the end of the log, even if no role may call the functions that return it, as on Aurora."""

from __future__ import annotations

import psycopg

from deltaforge_dagster.sources.postgres.connection.refusals import FUNCTION_REFUSED
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT
from deltaforge_dagster.sources.postgres.position import parse_lsn


def insert_lsn(connection: psycopg.Connection) -> int:
    """Return where the next log record will begin: what is visible now was logged before it.

    If the server refuses `pg_current_wal_insert_lsn`, write a heartbeat and return the LSN at its
    end.
    """
    try:
        with connection.transaction():
            row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    except psycopg.Error as error:
        if error.sqlstate not in FUNCTION_REFUSED:
            raise
        row = connection.execute(
            "SELECT pg_logical_emit_message(false, %s, '')::text", (HEARTBEAT,)
        ).fetchone()
    assert row is not None
    return parse_lsn(row[0])
