"""Request a stream of the binary log, as a replica does, and test whether the user may do so.

MySQL protocol, "COM_BINLOG_DUMP" and "COM_BINLOG_DUMP_GTID"; numbers are little-endian::

    0x12  Int32 position | Int16 flags | Int32 server id | file name
    0x1e  Int16 flags | Int32 server id | Int32 size of name | name | Int64 position
          | Int32 size of set | GTID set (see `position`)

The first command starts at an offset of a file; the second sends every transaction that is not in
the set. MariaDB has only the first, and takes GTIDs from a session variable. If two readers have
the same server id, the server ends the older one: so the connection of a reader that died is
replaced by its successor.

The user's grants are not parsed: a service may grant by roles, or through a procedure, and MariaDB
shows a grant only to its holder. Instead, `check_rights` requests the log from a file that no
server has: the server checks the privilege first, and then has nothing to send. (A registration as
a replica, COM_REGISTER_SLAVE, would stay in the server's list of replicas until the server
restarts.)
"""

from __future__ import annotations

import struct

import pymysql

from deltaforge_dagster.errors import DeltaforgeError, SourceUnavailable, UnsupportedEvent
from deltaforge_dagster.sources.mysql.connection.identity import check_same
from deltaforge_dagster.sources.mysql.connection.refusals import DUMP_ENDED, translate
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import FILE_START, log_files
from deltaforge_dagster.sources.mysql.position import (
    BinlogPosition,
    DomainGtids,
    GtidSet,
    is_of_mariadb,
)
from deltaforge_dagster.sources.stream import StreamSocket

HEARTBEAT_SECONDS = 15  # four are missed before the server counts as dead
PACKET_HEADER = 4
"""Bytes of a packet before its content: size and sequence number."""
SILENCE_SECONDS = 60.0
"""A server that sends nothing for this long, not even a heartbeat, is considered dead."""

_COM_BINLOG_DUMP, _COM_BINLOG_DUMP_GTID = 0x12, 0x1E
_NON_BLOCK = 1  # BINLOG_DUMP_NON_BLOCK: the stream ends at the end of the log
_BLOCKED_SECONDS = 3600
"""How long the server tolerates that we read nothing, as while capture is paused."""

SETTINGS = (
    # Have the server send checksums, so that damage in the file or on the network is detected.
    "SET @source_binlog_checksum = 'CRC32', @master_binlog_checksum = 'CRC32'",
    "SET @source_heartbeat_period = {0}, @master_heartbeat_period = {0}".format(
        HEARTBEAT_SECONDS * 1_000_000_000
    ),
    f"SET SESSION net_write_timeout = {_BLOCKED_SECONDS}",
    "SET @mariadb_slave_capability = 4",  # MariaDB then sends its own event types unchanged
)
"""Statements to run before the command.

Variables have two names because MySQL 8.0.26 renamed them.
"""


def open_dump(
    server: MysqlSourceServer,
    start: BinlogPosition,
    reader_id: int,
    seconds: float,
    *,
    follow: bool = True,
    expected: str | None = None,
) -> StreamSocket:
    """Return a stream of everything in the log after `start`.

    Args:
        server: The server.
        start: Where to start: after its GTID set if it has one, else at file and offset.
        reader_id: A server id that no replica of the server has.
        seconds: Time limit for connecting.
        follow: Whether to wait for more at the log's end; otherwise the server ends the stream
            there.
        expected: The identity of the server on which `start` was checked; None for any.

    Raises:
        DeltaforgeError: As `refusals` translates the server's error.
    """
    flags = 0 if follow else _NON_BLOCK
    settings: tuple[str, ...] = SETTINGS
    if start.gtid_set is not None and _is_mariadb(server, start.gtid_set, seconds):
        last = DomainGtids.parse(start.gtid_set)
        # Strict mode: the log must contain exactly these GTIDs, not only later ones.
        settings += (f"SET @slave_connect_state = '{last}', @slave_gtid_strict_mode = 1",)
        command, body = _COM_BINLOG_DUMP, struct.pack("<IHI", FILE_START, flags, reader_id)
    elif start.gtid_set is None:
        if start.pos >> 32:
            raise UnsupportedEvent(
                f"{server.where}: reading cannot begin beyond 4 GiB of a file ({start.file},"
                f" {start.pos}) without GTIDs; set gtid_mode = ON"
            )
        command = _COM_BINLOG_DUMP
        body = struct.pack("<IHI", start.pos, flags, reader_id) + start.file.encode()
    else:
        command = _COM_BINLOG_DUMP_GTID
        seen = GtidSet.parse(start.gtid_set).to_bytes()
        body = struct.pack("<HIIQI", flags, reader_id, 0, FILE_START, len(seen)) + seen
    sock = server.dump(
        settings,
        command,
        body,
        seconds,
        lambda session: check_same(session, server.where, expected),
    )
    stream = StreamSocket(sock, server.where)
    stream.begin()
    return stream


def _is_mariadb(server: MysqlSourceServer, gtids: str, seconds: float) -> bool:
    """Return whether the server is MariaDB, by the notation of the GTIDs.

    Without GTIDs, the server is asked.
    """
    if gtids:
        return is_of_mariadb(gtids)
    with server.query(seconds) as session:
        return session.is_mariadb


def refusal(server: MysqlSourceServer, packet: bytes) -> DeltaforgeError:
    """Return the error for a packet that is no event: the end of the stream, or an error packet.

    ERR packet: `0xFF | Int16 number | '#' | Byte5 state | text`.
    """
    if packet[:1] != b"\xff" or len(packet) < 9:
        return SourceUnavailable(
            f"{server.where}: the server ended the stream; is it shutting down?"
        )
    (number,) = struct.unpack_from("<H", packet, 1)
    return translate(
        number, packet[9:].decode(errors="replace"), server.where, server.user, server.account
    )


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
        log_files(session)
        body = struct.pack("<IHI", FILE_START, _NON_BLOCK, reader_id) + _NO_FILE
        try:
            session.send(_COM_BINLOG_DUMP, body)
        except pymysql.MySQLError as error:
            # The server checks the privilege before it finds that the file is missing.
            if error.args[0] != DUMP_ENDED:
                raise
