"""The server's identity, and whether its log continues the one that was read before.

A MySQL server has a `server_uuid`. GTIDs mean the same on every server that has the transactions; a
file and an offset are meaningful only on the server that wrote the file.
"""

from __future__ import annotations

from deltaforge_dagster.errors import (
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.columns import described_type, labels, labels_text
from deltaforge_dagster.tables import Column, TableSchema


def identity(session: MysqlSession) -> str:
    """Return `server_uuid`; on MariaDB, which has none, `server_uid` or `server_id`."""
    rows = session.rows(
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uuid', 'server_uid', 'server_id')"
    )
    variables = {row["Variable_name"]: str(row["Value"]) for row in rows}
    return variables.get("server_uuid") or variables.get("server_uid") or variables["server_id"]


def check_same(session: MysqlSession, where: str, expected: str | None) -> None:
    """Check that a connection leads to the same server as an earlier one.

    A failover may happen between two connections.

    Args:
        session: The connection.
        where: The server's address, as in `MysqlSourceServer.where`.
        expected: The identity of the server of the earlier connection; None if any server is right.

    Raises:
        SourceUnavailable: It leads to another server, on which the position has to be checked
            again.
    """
    if expected is not None and identity(session) != expected:
        raise SourceUnavailable(f"{where}: another server has taken its place")


def relocate(session: MysqlSession, where: str, position: BinlogPosition) -> BinlogPosition:
    """Return where reading continues on a new server: after the same GTIDs.

    Raises:
        SourceUnavailable: Reading cannot continue on this server, but it is not a primary, or not
            yet: in the middle of a failover the name may lead to the former server again, or to
            another one.
        PositionLost: The position has no GTIDs, or the server has not executed all of them, or it
            has purged the log after them.
    """
    try:
        _check_continues(session, where, position)
    except PositionLost as lost:
        if not server_log.may_catch_up(session):
            raise
        raise SourceUnavailable(
            f"{where}: another server answers, which is read-only or a replica: either a failover"
            " is not over yet, or the DSN names another server than before, where reading cannot"
            f" continue ({lost.text})"
        ) from lost
    return position


def _check_continues(session: MysqlSession, where: str, position: BinlogPosition) -> None:
    if position.gtid_set is None:
        raise PositionLost(
            f"{where}: position lost after failover: {position.file}:{position.pos} means nothing "
            "on another server, and the log has no GTIDs. Re-snapshot required."
        )
    server_log.check_log_kept(session, where, position, server_log.facts(session, where))


def sent_schema(session: MysqlSession, where: str, table: str) -> TableSchema:
    """Return the table version that rows of `database.table` would have now.

    The type of a column that cannot be decoded is empty.

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
    column_labels = labels(column_type)
    try:
        return described_type(column_type, charset, column_labels).name + labels_text(column_labels)
    except UnsupportedEvent:
        return ""
