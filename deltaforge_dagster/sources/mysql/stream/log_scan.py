"""Scan a part of the log event by event, in plain Python, without decoding rows.

For occasional questions: is there a change that is worth a run, which GTIDs precede
an offset, has a table been altered since. `events.binlog` shows the layout of packets and events.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deltaforge_dagster.errors import CorruptLog, SourceUnavailable
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import FILE_START
from deltaforge_dagster.sources.mysql.events import binlog
from deltaforge_dagster.sources.mysql.events.gtid_events import parse_gtid
from deltaforge_dagster.sources.mysql.events.mariadb_events import decompressed
from deltaforge_dagster.sources.mysql.events.nested_events import without_checksum
from deltaforge_dagster.sources.mysql.gtid import GtidSet
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.stream.dump import (
    PACKET_HEADER,
    SILENCE_SECONDS,
    open_dump,
    refusal,
)
from deltaforge_dagster.sources.stream import BUFFER_BYTES, ReadBuffer

_CONTINUED = b"\xff\xff\xff"
_EVENT = 0x00
_ERROR = 0xFF
_FILE_EVENTS = {binlog.ROTATE, binlog.FORMAT_DESCRIPTION}
LOOKED_INTO = frozenset(
    {
        binlog.QUERY,
        binlog.TABLE_MAP,
        binlog.GTID,
        binlog.QUERY_COMPRESSED,
        binlog.GTID_TAGGED,
        binlog.PREVIOUS_GTIDS,
        binlog.TRANSACTION_PAYLOAD,
    }
)
"""Types of events whose content a scan returns by default."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An event of a scan.

    Attributes:
        type: Type code, as in `events.binlog`.
        end: Where the event ends; the offset is 0 if it is in no file.
        event: The event without checksum; empty if the scan does not look into its type.
    """

    type: int
    end: BinlogPosition
    event: bytes

    @property
    def body(self) -> bytes:
        """The event without its header."""
        return self.event[binlog.HEADER :]


class LogScan:
    """The events from `start` to the log's current end. Iterate once.

    Args:
        server: The server.
        start: Where to start: after its GTID set if it has one, else at file and offset.
        reader_id: A replication server id that no other reader uses now.
        seconds: Time limit for connecting.
        kinds: The types of events whose content is needed.

    Attributes:
        log_bytes: Bytes of log received so far.
        server: The server that wrote the events of the last file.
    """

    def __init__(
        self,
        server: MysqlSourceServer,
        start: BinlogPosition,
        reader_id: int,
        seconds: float,
        kinds: Collection[int] = LOOKED_INTO,
    ) -> None:
        self.log_bytes = 0
        self.server = binlog.UNKNOWN_SERVER
        self._kinds = {*kinds, *_FILE_EVENTS}
        self._source = server
        self._stream = open_dump(server, start, reader_id, seconds, follow=False)
        self._file = start.file
        self._pos = 0
        self._checksums = True  # as requested, until a FORMAT_DESCRIPTION says otherwise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[Seen | None]:
        """Yield events, and None whenever a second has passed without one.

        Raises:
            SourceUnavailable: The connection broke.
            CorruptLog: The bytes do not follow the log's format.
        """
        buffer = ReadBuffer(BUFFER_BYTES)
        self._parts: list[bytes] = []
        while True:
            if not buffer.fill(self._stream.receive, 1.0):
                if self._stream.silence > SILENCE_SECONDS:
                    raise SourceUnavailable(f"{self._source.where}: the server says nothing")
                yield None
                continue
            at = 0
            while (end := _packet_end(buffer, at)) is not None:
                self.log_bytes += end - at - PACKET_HEADER
                packet = self._completed_event(memoryview(buffer.data)[at:end])
                at = end
                if packet is None:
                    continue
                if packet[:1] != bytes([_EVENT]):
                    if packet[:1] == bytes([_ERROR]):
                        raise refusal(self._source, bytes(packet))
                    return  # an EOF packet: the end of the log
                yield self._event(packet[1:])
                packet.release()
            buffer.drop(at)

    def _completed_event(self, packet: memoryview) -> memoryview | None:
        """Return the content of an event that this packet completes; None if more packets follow.

        Of an event whose type is not looked into, only the first packet's content is returned.
        """
        content, more = packet[PACKET_HEADER:], packet[:3] == _CONTINUED
        if self._parts:
            if self._is_looked_into(self._parts[0]):
                self._parts.append(bytes(content))
            content = memoryview(b"" if more else b"".join(self._parts))
        elif more:
            self._parts = [bytes(content)]
        if not more:
            self._parts = []
        return None if more else content

    def _is_looked_into(self, packet: bytes) -> bool:
        """Return whether the event at the start of this packet's content is looked into."""
        # A status byte comes before the event, whose type is its fifth byte.
        return len(packet) > 5 and packet[5] in self._kinds

    def _event(self, event: memoryview) -> Seen:
        if len(event) < binlog.HEADER:
            raise CorruptLog(f"{self._source.where}: an event that is too short")
        kind = event[4]
        pos, flags = struct.unpack_from("<IH", event, 13)
        if not pos and not flags & binlog.FLAG_ARTIFICIAL:
            pos = self._pos  # MariaDB: events inside a transaction have no end position
        whole = b""
        if kind in self._kinds:
            if kind == binlog.FORMAT_DESCRIPTION:
                self._checksums = binlog.has_checksums(bytes(event))
                self.server = binlog.log_server(bytes(event))
            end = len(event) - (binlog.CHECKSUM_SIZE if self._checksums else 0)
            whole = without_checksum(bytes(event[:end]))
            if kind == binlog.QUERY_COMPRESSED:
                kind, whole = binlog.QUERY, decompressed(whole)
            if kind == binlog.ROTATE:
                self._file, pos = binlog.parse_rotate(whole[binlog.HEADER :])
        self._pos = pos or self._pos
        return Seen(kind, BinlogPosition(self._file, pos), whole)


def _packet_end(buffer: ReadBuffer, at: int) -> int | None:
    """Return where the packet at `at` ends; None if it has not arrived completely."""
    if buffer.length - at < PACKET_HEADER:
        return None
    end = at + PACKET_HEADER + int.from_bytes(buffer.data[at : at + 3], "little")
    return end if end <= buffer.length else None


def executed_before(
    server: MysqlSourceServer, position: BinlogPosition, reader_id: int, seconds: float
) -> GtidSet:
    """Return the GTIDs of all transactions before a file position.

    Reads the position's file up to there.

    Raises:
        CorruptLog: The file has no PREVIOUS_GTIDS event at its beginning.
        DeltaforgeError: As `refusals` translates the server's error.
    """
    executed: GtidSet | None = None
    begin = BinlogPosition(position.file, FILE_START)
    with LogScan(server, begin, reader_id, seconds) as scan:
        for event in scan:
            if event is None:
                continue
            if event.type == binlog.PREVIOUS_GTIDS:  # even if `position` is the file's start
                executed = GtidSet.from_bytes(event.body)
            if event.end > position and executed is not None:
                break
            gtid = parse_gtid(event.type, event.body)
            if gtid is not None and executed is not None:
                executed.add(gtid.server, gtid.number, gtid.number, gtid.tag)
    if executed is None:
        raise CorruptLog(f"{server.where}: {position.file} does not say which GTIDs are before it")
    return executed


_BEGINS = {binlog.GTID, binlog.ANONYMOUS_GTID, binlog.GTID_TAGGED, binlog.MARIADB_GTID}


def between_transactions(
    server: MysqlSourceServer, position: BinlogPosition, reader_id: int, seconds: float
) -> BinlogPosition:
    """Return the last boundary of transactions at or before `position`, without GTIDs.

    Reads the position's file up to there. If the log's last transaction does not end with an XID
    event, its end cannot be recognized, and the boundary before it is returned.

    Raises:
        DeltaforgeError: As `refusals` translates the server's error.
    """
    boundary = before = BinlogPosition(position.file, FILE_START)
    with LogScan(server, boundary, reader_id, seconds, kinds=()) as scan:
        for event in scan:
            if event is None or not event.end.pos:
                continue
            if event.end.file != position.file:
                break
            if event.type in _BEGINS:
                boundary = before
            if event.end > position:
                break
            before = event.end
            if event.type == binlog.XID:
                boundary = before
    return boundary


def table_of(table_map: bytes) -> tuple[str, str]:
    """Return database and table from the body of a TABLE_MAP event (see `events.table_map`)."""
    size = table_map[8]
    database = table_map[9 : 9 + size]
    at = 10 + size
    return database.decode(), table_map[at + 1 : at + 1 + table_map[at]].decode()
