"""What a MariaDB server says about its binary log, where it is not what MySQL says.

MariaDB's manual: "Global Transaction ID", "BINLOG_GTID_POS". Every transaction has a GTID; the last
one of each domain (`mariadb_gtid`) is the position, in `gtid_binlog_pos`.
"""

from __future__ import annotations

from deltaforge_dagster.sources.mysql.connection.refusals import lost
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession
from deltaforge_dagster.sources.mysql.mariadb_gtid import DomainGtids
from deltaforge_dagster.sources.mysql.position import BinlogPosition

_FILE_START = 4


def executed(session: MysqlSession) -> DomainGtids:
    """Return the last GTID of each domain that stands in the server's log."""
    return DomainGtids.parse(_text(session, "SELECT @@GLOBAL.gtid_binlog_pos AS value") or "")


def purged(session: MysqlSession) -> DomainGtids:
    """Return the last GTID of each domain that the log no longer has."""
    files = session.rows("SHOW BINARY LOGS")
    return _at(session, str(files[0]["Log_name"]), _FILE_START) or DomainGtids()


def gtids_at(session: MysqlSession, where: str, position: BinlogPosition) -> DomainGtids:
    """Return the last GTID of each domain before an offset of a file.

    Raises:
        PositionLost: The log does not have the file.
    """
    found = _at(session, position.file, position.pos)
    if found is None:
        raise lost(where, f"the binary log file {position.file} was purged")
    return found


def connect_state(gtids: str) -> tuple[str, ...]:
    """Return what to run before COM_BINLOG_DUMP, so that it begins behind these GTIDs.

    Strict: the very transactions must be in the log, not only later ones.
    """
    last = DomainGtids.parse(gtids)
    return (f"SET @slave_connect_state = '{last}', @slave_gtid_strict_mode = 1",)


def _at(session: MysqlSession, file: str, pos: int) -> DomainGtids | None:
    rows = session.rows("SELECT BINLOG_GTID_POS(%s, %s) AS value", file, pos)
    value = rows[0]["value"]
    return None if value is None else DomainGtids.parse(str(value))


def _text(session: MysqlSession, statement: str) -> str | None:
    value = session.rows(statement)[0]["value"]
    return None if value is None else str(value)
