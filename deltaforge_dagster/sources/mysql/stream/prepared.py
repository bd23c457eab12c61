"""XA transactions: their rows are delivered at the commit, perhaps long after they were logged.

XA PREPARE logs the rows, as a separate transaction. A later XA COMMIT or XA ROLLBACK decides about
them; both name the XA transaction by its xid. `PreparedRows` keeps the events of prepared
transactions in memory, up to a limit. Rows that are not in memory, because they are too large or
were logged before this reader started, are read from the log again by `PreparedLog`. So a position
may move past a prepared transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

from deltaforge_dagster.errors import CorruptLog, PositionLost
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import FILE_START, log_files
from deltaforge_dagster.sources.mysql.events import binlog
from deltaforge_dagster.sources.mysql.events.nested_events import (
    events,
    payload_blocks,
    without_checksum,
)
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.stream.log_scan import LogScan, Seen
from deltaforge_dagster.sources.stream import BUFFER_BYTES

MAX_KEPT_BYTES = 64 << 20
"""Limit for the events of all prepared transactions in memory."""

_SECONDS = 30.0
_ABOUT_ROWS = {
    binlog.TABLE_MAP,
    binlog.WRITE_ROWS_1, binlog.UPDATE_ROWS_1, binlog.DELETE_ROWS_1,
    binlog.WRITE_ROWS_2, binlog.UPDATE_ROWS_2, binlog.DELETE_ROWS_2,
    binlog.PARTIAL_UPDATE_ROWS,
    *range(binlog.WRITE_ROWS_COMPRESSED_1, binlog.DELETE_ROWS_COMPRESSED_2 + 1),
}  # fmt: skip
_BEGINS = {binlog.GTID, binlog.ANONYMOUS_GTID, binlog.GTID_TAGGED, binlog.MARIADB_GTID}
_INSIDE = _ABOUT_ROWS | {binlog.XA_PREPARE}


class FindsPrepared(Protocol):
    """Finds the rows of prepared transactions that are not in memory."""

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Yield TABLE_MAP and rows events of the last transaction prepared as `xid` before `until`.

        Raises:
            PositionLost: The transaction is no longer in the log.
        """
        ...


def parse_xa_prepare(body: bytes) -> tuple[Xid, bool]:
    """Parse the body of an XA_PREPARE event: the xid, and whether it commits at once (ONE PHASE).

    Raises:
        CorruptLog: The body does not follow the format.
    """
    try:
        one_phase, format_id, gtrid, bqual = struct.unpack_from("<Biii", body)
    except struct.error:
        raise CorruptLog("an XA_PREPARE event that is too short") from None
    data = body[13:]
    if gtrid < 0 or bqual < 0 or len(data) != gtrid + bqual:
        raise CorruptLog("an XA_PREPARE event that differs from its sizes")
    return Xid(format_id, data[:gtrid], data[gtrid:]), bool(one_phase)


class PreparedRows:
    """The TABLE_MAP and rows events of prepared XA transactions, in memory."""

    def __init__(self) -> None:
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._prepared: dict[Xid, list[bytes]] = {}
        self._bytes = 0

    def begin(self) -> None:
        """Start collecting the events of another transaction."""
        self._open, self._open_bytes = [], 0

    def keep(self, event: bytes) -> None:
        """Add an event of the transaction that is being read, if there is room."""
        self._open_bytes += len(event)
        if self._bytes + self._open_bytes <= MAX_KEPT_BYTES:
            self._open.append(without_checksum(event))
        else:  # the sum only grows, so nothing more of this transaction is kept
            self._open = []

    def prepare(self, xid: Xid) -> None:
        """Store the events of the transaction that was read as `xid`, if there is room for all."""
        self.forget(xid)
        if self._bytes + self._open_bytes <= MAX_KEPT_BYTES:
            self._prepared[xid] = self._open
            self._bytes += self._open_bytes
        self.begin()

    def pop(self, xid: Xid) -> list[bytes] | None:
        """Remove and return the events of a transaction; None if they are not in memory."""
        kept = self._prepared.get(xid)
        self.forget(xid)
        return kept

    def forget(self, xid: Xid) -> None:
        """Remove the events of a transaction."""
        self._bytes -= sum(map(len, self._prepared.pop(xid, ())))


class PreparedLog:
    """Finds prepared transactions in the server's log, over a separate connection.

    Args:
        server: The server.
        reader_id: The replication server id for that connection.
    """

    def __init__(self, server: MysqlSourceServer, reader_id: int) -> None:
        self._server = server
        self._reader_id = reader_id

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Yield TABLE_MAP and rows events of the last transaction prepared as `xid` before `until`.

        Searches one log file after the other, the newest first. Events are yielded in blocks of
        about 4 MiB.

        Raises:
            PositionLost: The transaction is no longer in the log.
        """
        with self._server.query(_SECONDS) as session:
            files = log_files(session)
        names = [name for name in files if BinlogPosition(name, FILE_START) < until]
        for name in reversed(names):
            begin = self._find(xid, BinlogPosition(name, FILE_START), until)
            if begin is not None:
                yield from _blocks(self._events(begin))
                return
        raise PositionLost(
            f"{self._server.where}: the log no longer has the rows of the XA transaction {xid},"
            f" which was committed before {until.file}:{until.pos}. Re-snapshot required"
        )

    def _find(
        self, xid: Xid, start: BinlogPosition, until: BinlogPosition
    ) -> BinlogPosition | None:
        """Return where in the file of `start` the transaction begins; None if it is not there."""
        latest: BinlogPosition | None = None
        before = begin = start
        for seen in self._scan(start):
            if seen.end.pos and (seen.end.file != start.file or seen.end > until):
                break
            if seen.type in _BEGINS:
                begin = before
            for event in _nested(seen, {binlog.XA_PREPARE}):
                if parse_xa_prepare(event[binlog.HEADER :])[0] == xid:
                    latest = begin
            if seen.end.pos:
                before = seen.end
        return latest

    def _events(self, begin: BinlogPosition) -> Iterator[bytes]:
        """Yield the TABLE_MAP and rows events of the transaction that begins at `begin`."""
        for seen in self._scan(begin):
            if seen.end <= begin:
                continue
            for event in _nested(seen, _INSIDE):
                if event[4] == binlog.XA_PREPARE:
                    return
                yield event

    def _scan(self, start: BinlogPosition) -> Iterator[Seen]:
        # The command has only 32 bits for the offset.
        near = BinlogPosition(start.file, FILE_START if start.pos >> 32 else start.pos)
        wanted = _INSIDE | {binlog.TRANSACTION_PAYLOAD}
        with LogScan(self._server, near, self._reader_id, _SECONDS, wanted) as scan:
            for seen in scan:
                if seen is not None:
                    yield seen


def _nested(seen: Seen, kinds: set[int]) -> Iterator[bytes]:
    """Yield the events of these types: the event itself, or those inside a TRANSACTION_PAYLOAD."""
    if seen.type in kinds:
        yield seen.event
    elif seen.type == binlog.TRANSACTION_PAYLOAD:
        for event in events(payload_blocks(seen.body)):
            if event[4] in kinds:
                yield event


def _blocks(single: Iterator[bytes]) -> Iterator[bytes]:
    """Join events into blocks of about 4 MiB."""
    parts: list[bytes] = []
    size = 0
    for event in single:
        parts.append(event)
        size += len(event)
        if size >= BUFFER_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)
