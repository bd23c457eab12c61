"""The server's identity, the end of its log, and whether that continues the one read before.

initdb gives a cluster a `system_identifier`, which its replicas share; each promotion begins a new
timeline, whose history file says where it branched off (manual: "Timelines"). So two numbers
identify a log: `7301234567890123456/2`. Up to a promotion both timelines have the same log, and a
position means the same on both. After it, the same LSNs stand for different log.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import psycopg

from deltaforge_dagster.errors import CorruptLog, PositionLost
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.refusals import FUNCTION_REFUSED
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT
from deltaforge_dagster.sources.postgres.decode.types import modified_name
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.tables import Column, TableSchema

logger = logging.getLogger(__name__)
_COLUMN_LISTS_VERSION = 150000  # publications have column lists from 15 on
_GENERATED_VERSION = 180000  # generated columns can be published from 18 on
_BRANCH = re.compile(r"^\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)", re.MULTILINE)


def relocate(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    slot: str,
    *,
    position: LsnPosition,
    previous: str,
    seconds: float,
) -> LsnPosition:
    """Return where reading continues on this server after a failover from `previous`.

    On a promoted server of the same cluster that is `position`, if it is before the promotion. On
    another cluster, positions mean something else. Reading then starts where the slot starts, which
    must have been created or migrated for this purpose. Whether a change was missed cannot be
    verified, so a warning is logged.

    Args:
        connection: A connection to the server.
        server: The server.
        slot: Name of the replication slot.
        position: The captured position.
        previous: The `SystemIdentity.log` of the previous server.
        seconds: Time limit for asking who the server is, and for its timeline's history.

    Raises:
        PositionLost: The log that was read is not part of this server's history, or the slot is
            missing or behind.
    """
    current = server.identify(seconds)
    old_system, _, old_timeline = previous.partition("/")
    if current.system == old_system:
        promoted_at = _branches(server, current.timeline, seconds).get(int(old_timeline))
        if promoted_at is not None and position.lsn <= promoted_at:
            return position
        part = "no part of" if promoted_at is None else f"until {format_lsn(promoted_at)} part of"
        raise _position_lost(
            server,
            f"timeline {old_timeline} was read up to {format_lsn(position.lsn)}, "
            f"and is {part} this server's history, which is on timeline {current.timeline}",
        )
    existing = catalog.slot(connection, slot)
    if existing is None or existing.confirmed_lsn is None:
        raise _position_lost(server, f"it is another cluster, and has no replication slot {slot!r}")
    if existing.confirmed_lsn < position.lsn:
        raise _position_lost(
            server,
            f"it is another cluster, whose log is at {format_lsn(existing.confirmed_lsn)} while "
            f"{format_lsn(position.lsn)} was captured; "
            "positions must not go back: use a new pipeline",
        )
    logger.warning(
        "%s is another cluster than before: "
        "reading goes on where its slot %s begins, at %s; "
        "whether changes were committed between %s of the former and that cannot be told",
        server.where,
        slot,
        format_lsn(existing.confirmed_lsn),
        format_lsn(position.lsn),
    )
    return LsnPosition(existing.confirmed_lsn)


def sent_schema(
    connection: psycopg.Connection, table: catalog.PublishableTable, publication: str, version: int
) -> TableSchema:
    """Return a table with the columns, types and key that the log has for it now.

    Its key is that of the replica identity's index, else the primary key. Generated columns (unless
    a column list of the publication has them, from PostgreSQL 18 on), and columns that a column
    list omits, are not sent.
    """
    listed = (
        "(SELECT attnames FROM pg_publication_tables WHERE pubname = %(publication)s"
        " AND schemaname = %(schema)s AND tablename = %(table)s)"
        if version >= _COLUMN_LISTS_VERSION
        else "NULL::name[]"
    )
    rows = connection.execute(
        f"""
        SELECT attname, format_type(atttypid, NULL), atttypid::int8, NOT attnotnull, atttypmod,
               attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]), attnum
          FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
          LEFT JOIN pg_index i ON i.indrelid = c.oid
               AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
         WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped
           AND coalesce(attname = ANY ({listed}::name[]), true)
           AND (attgenerated = '' OR {version >= _GENERATED_VERSION} AND {listed} IS NOT NULL)
         ORDER BY attnum
        """,  # noqa: S608 - of constants
        {
            "oid": table.oid,
            "publication": publication,
            "schema": table.schema,
            "table": table.name,
        },
    ).fetchall()
    return TableSchema(
        connection.info.dbname,
        table.schema,
        table.name,
        tuple(
            Column(
                row[0],
                modified_name(row[1], row[2], row[4]),
                row[2],
                row[3],
                ordinal,
                number=row[6],
            )
            for ordinal, row in enumerate(rows, start=1)
        ),
        tuple(row[0] for row in rows if row[5]),
        table.oid,
    )


def logged_schema(sent: TableSchema) -> TableSchema:
    """Return a table from `sent_schema` in the form in which versions from the log are registered.

    The log does not say whether columns are NOT NULL; only key columns count as such.
    """
    columns = (
        replace(column, nullable=column.name not in sent.primary_key) for column in sent.columns
    )
    return replace(sent, columns=tuple(columns))


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


def _branches(server: PostgresSourceServer, timeline: int, seconds: float) -> dict[int, int]:
    """Return the LSN at which each older timeline was left, from this one's history file."""
    if timeline == 1:
        return {}
    text = server.timeline_history(timeline, seconds)
    try:
        return {int(match[1]): parse_lsn(match[2]) for match in _BRANCH.finditer(text)}
    except ValueError as error:
        raise CorruptLog(
            f"{server.where}: the history of timeline {timeline} is no such"
        ) from error


def _position_lost(server: PostgresSourceServer, why: str) -> PositionLost:
    return PositionLost(
        f"{server.where}: position lost after failover: {why}. Re-snapshot required."
    )
