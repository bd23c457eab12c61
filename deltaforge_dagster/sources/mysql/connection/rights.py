"""Test whether the user may read the binary log by requesting it, instead of parsing its grants.

A service may grant by roles, or through a procedure, and MariaDB shows a grant only to its holder.
So `check_rights` requests the log as a replica does, from a file that no server has: the server
checks the privilege first, and then has nothing to send. (A registration as a replica,
COM_REGISTER_SLAVE, would stay in the server's list of replicas until the server restarts.)
"""

from __future__ import annotations

import struct

import pymysql

from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.refusals import DUMP_ENDED
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer

COM_BINLOG_DUMP = 0x12
NON_BLOCK = 1
_NO_FILE = b"deltaforge-asks-whether-it-may.000000"


def check_rights(server: MysqlSourceServer, reader_id: int, seconds: float) -> None:
    """Check that the user may list the log's files and request the log as a replica does.

    Args:
        server: The server.
        reader_id: A server id that no replica of the server has.
        seconds: Time limit for both.

    Raises:
        PermissionMissing: The server refuses; the remedy grants both rights.
        DeltaforgeError: As `refusals` translates the server's error.
    """
    with server.query(seconds) as session:
        server_log.log_files(session)
        body = struct.pack("<IHI", server_log.FILE_START, NON_BLOCK, reader_id) + _NO_FILE
        try:
            session.send(COM_BINLOG_DUMP, body)
        except pymysql.MySQLError as error:
            # The server checks the privilege before it finds that the file is missing.
            if error.args[0] != DUMP_ENDED:
                raise
