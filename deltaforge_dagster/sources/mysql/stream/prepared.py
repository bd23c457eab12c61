"""XA transactions: their rows count when they are committed, which may be long after they were logged.

XA PREPARE writes the rows, as a transaction of its own. XA COMMIT or XA ROLLBACK, in another
transaction, decides about them; both name the XA transaction by its xid. `PreparedRows` keeps the
events of undecided ones, as they came, so far as they are small. What is not kept, because it is
large or was logged before this reader began, `PreparedLog` finds in the log again: the
server keeps it there, and a position may pass it.
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
from deltaforge_dagster.sources.stream.read_buffer import BUFFER_BYTES

MAX_KEPT_BYTES = 64 << 20
"""Events of undecided transactions kept in memory, all together."""

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
    """Finds rows in the log that no memory holds."""

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Yield the events about rows of the last transaction prepared as `xid` before `until`.

        Raises:
            PositionLost: The log has it no longer.
        """
        ...


def parse_xa_prepare(body: bytes) -> tuple[Xid, bool]:
    """Return the xid of an XA_PREPARE event, and whether it commits at once (ONE PHASE).

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
    """The events about rows of XA transactions that nobody has decided about yet."""

    def __init__(self) -> None:
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._known: dict[Xid, list[bytes]] = {}
        self._bytes = 0

    def begin(self) -> None:
        """Begin with the events of another transaction."""
        self._open, self._open_bytes = [], 0

    def keep(self, event: bytes) -> None:
        """Keep an event of the transaction that is read."""
        self._open_bytes += len(event)
        if self._bytes + self._open_bytes <= MAX_KEPT_BYTES:
            self._open.append(without_checksum(event))
        else:  # never again in this transaction: the sum only grows
            self._open = []

    def prepare(self, xid: Xid) -> None:
        """Keep the transaction that was read, if there is room for all of it."""
        self.forget(xid)
        if self._bytes + self._open_bytes <= MAX_KEPT_BYTES:
            self._known[xid] = self._open
            self._bytes += self._open_bytes
        self.begin()

    def pop(self, xid: Xid) -> list[bytes] | None:
        """Return the events of a transaction, and keep them no longer; None if they were not."""
        found = self._known.get(xid)
        self.forget(xid)
        return found

    def forget(self, xid: Xid) -> None:
        """Keep a transaction no longer."""
        self._bytes -= sum(map(len, self._known.pop(xid, ())))


class PreparedLog:
    """Finds prepared transactions in the server's log, by a connection of its own.

    Args:
        server: Where.
        reader_id: A server id for looking through the log.
    """

    def __init__(self, server: MysqlSourceServer, reader_id: int) -> None:
        self._server = server
        self._reader_id = reader_id

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Yield the events about rows of the last transaction prepared as `xid` before `until`.

        Looks through one file after the other, the newest first.

        Raises:
            PositionLost: The log has it no longer.
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
            f"{self._server.where}: the log no longer has the rows of the XA transaction {xid}, which"
            f" was committed before {until.file}:{until.pos}. Re-snapshot required"
        )

    def _find(
        self, xid: Xid, start: BinlogPosition, until: BinlogPosition
    ) -> BinlogPosition | None:
        """Return where in the file of `start` the transaction begins."""
        found: BinlogPosition | None = None
        before = begin = start
        for seen in self._scan(start):
            if seen.end.pos and (seen.end.file != start.file or seen.end > until):
                break
            if seen.type in _BEGINS:
                begin = before
            for event in _nested(seen, {binlog.XA_PREPARE}):
                if parse_xa_prepare(event[binlog.HEADER :])[0] == xid:
                    found = begin
            if seen.end.pos:
                before = seen.end
        return found

    def _events(self, begin: BinlogPosition) -> Iterator[bytes]:
        """Yield the events about rows of the transaction that begins there."""
        for seen in self._scan(begin):
            if seen.end <= begin:
                continue
            for event in _nested(seen, _INSIDE):
                if event[4] == binlog.XA_PREPARE:
                    return
                yield event

    def _scan(self, start: BinlogPosition) -> Iterator[Seen]:
        # The command has 32 bits for the offset.
        near = BinlogPosition(start.file, FILE_START if start.pos >> 32 else start.pos)
        wanted = _INSIDE | {binlog.TRANSACTION_PAYLOAD}
        with LogScan(self._server, near, self._reader_id, _SECONDS, wanted) as scan:
            for seen in scan:
                if seen is not None:
                    yield seen


def _nested(seen: Seen, kinds: set[int]) -> Iterator[bytes]:
    """Yield the events of these kinds: the one that was seen, or those in it."""
    if seen.type in kinds:
        yield seen.event
    elif seen.type == binlog.TRANSACTION_PAYLOAD:
        for event in events(payload_blocks(seen.body)):
            if event[4] in kinds:
                yield event


def _blocks(single: Iterator[bytes]) -> Iterator[bytes]:
    """Yield events together in blocks of about 4 MiB."""
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
