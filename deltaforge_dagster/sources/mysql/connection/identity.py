"""Which server this is, and whether its log continues the one that was read.

A MySQL server has a `server_uuid`. GTIDs mean the same on every server that has the transactions; a
file and an offset mean something on the server that wrote the file.
"""

from __future__ import annotations

from deltaforge_dagster.errors import PositionLost, SourceMisconfigured, UnsupportedEvent
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.column_types import described_type, labels, labels_text
from deltaforge_dagster.tables import Column, TableSchema


def identity(session: MysqlSession) -> str:
    """Return `server_uuid`, or what comes nearest to it on a server that has none (MariaDB)."""
    rows = session.rows(
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uuid', 'server_uid', 'server_id')"
    )
    found = {row["Variable_name"]: str(row["Value"]) for row in rows}
    return found.get("server_uuid") or found.get("server_uid") or found["server_id"]


def relocate(session: MysqlSession, where: str, position: BinlogPosition) -> BinlogPosition:
    """Return where reading goes on, on another server than before: behind the same GTIDs.

    Raises:
        PositionLost: The position has no GTIDs, or the server lacks some of them, or has purged the
            log after them.
    """
    if position.gtid_set is None:
        raise PositionLost(
            f"{where}: position lost after failover: {position.file}:{position.pos} means nothing on "
            "another server, and the log has no GTIDs. Re-snapshot required."
        )
    server_log.check_held(session, where, position, server_log.facts(session, where))
    return position


def sent_schema(session: MysqlSession, where: str, table: str) -> TableSchema:
    """Return `database.table` as its rows would be registered now.

    The type of a column that is not decoded is left empty.

    Raises:
        SourceMisconfigured: There is no such table.
    """
    db, _, name = table.partition(".")
    rows = session.rows(
        "SELECT COLUMN_NAME AS name, IS_NULLABLE AS nullable, COLUMN_KEY AS in_key,"
        " COLUMN_TYPE AS type, CHARACTER_SET_NAME AS charset"
        " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
        " ORDER BY ORDINAL_POSITION",
        db,
        name,
    )
    if not rows:
        raise SourceMisconfigured(f"{where}: there is no table {table}")
    columns = tuple(
        Column(
            row["name"],
            _type_name(row["type"], row["charset"]),
            None,
            row["nullable"] == "YES",
            ordinal,
        )
        for ordinal, row in enumerate(rows, start=1)
    )
    key = tuple(row["name"] for row in rows if row["in_key"] == "PRI")
    return TableSchema(db, None, name, columns, key)


def _type_name(column_type: str, charset: str | None) -> str:
    found = labels(column_type)
    try:
        return described_type(column_type, charset, found).name + labels_text(found)
    except UnsupportedEvent:
        return ""
