"""A quick look through a part of the log, event by event in plain Python, decoding no row.

For questions that come up once in a while: is there a change worth a run, which GTIDs lie before
an offset, was a table altered since. `binlog` draws packets and events.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deltaforge_dagster.errors import CorruptLog, SourceUnavailable
from deltaforge_dagster.gtid import GtidSet
from deltaforge_dagster.positions import BinlogPosition
from deltaforge_dagster.sources.mysql import binlog
from deltaforge_dagster.sources.mysql.connection import Server
from deltaforge_dagster.sources.mysql.dump import (
    PACKET_HEADER,
    SILENCE_SECONDS,
    open_dump,
    refusal,
)
from deltaforge_dagster.sources.mysql.server_log import FILE_START
from deltaforge_dagster.sources.pieces import PIECE_BYTES, PieceBuffer

_CONTINUED = 0xFFFFFF
_EVENT = 0x00
_ERROR = 0xFF
_BODIES = {
    binlog.QUERY,
    binlog.ROTATE,
    binlog.FORMAT_DESCRIPTION,
    binlog.TABLE_MAP,
    binlog.GTID,
    binlog.PREVIOUS_GTIDS,
}
"""Events that are looked into."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An event.

    Attributes:
        type: As in `binlog`.
        end: Where it ends; 0 as offset if it stands in no file.
        body: What follows its header, without checksum; empty for types that nobody looks into.
    """

    type: int
    end: BinlogPosition
    body: bytes


class LogScan:
    """The events from `start` to the end that the log has now; iterate once.

    Args:
        server: Where.
        start: From its GTID set if it has one, else from file and offset.
        reader_id: A server id of its own: the server ends the older of two readers with the same.
        seconds: For connecting.

    Attributes:
        log_bytes: Bytes of log received so far.
    """

    def __init__(
        self, server: Server, start: BinlogPosition, reader_id: int, seconds: float
    ) -> None:
        self.log_bytes = 0
        self._server = server
        self._stream = open_dump(server, start, reader_id, seconds, follow=False)
        self._file = start.file
        self._checksums = True  # those that the server makes for us, before a file says otherwise

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
        """Yield events; None when a second has passed without any.

        Raises:
            SourceUnavailable: The connection broke.
            CorruptLog: What came is not the log.
        """
        buffer = PieceBuffer(PIECE_BYTES)
        skipping = continued = False
        while True:
            if not buffer.fill(self._stream.receive, 1.0):
                if self._stream.silence > SILENCE_SECONDS:
                    raise SourceUnavailable(f"{self._server.where}: the server says nothing")
                yield None
                continue
            at = 0
            while buffer.length - at >= PACKET_HEADER:
                size = int.from_bytes(buffer.data[at : at + 3], "little")
                begin, end = at + PACKET_HEADER, at + PACKET_HEADER + size
                if buffer.length < end:
                    break
                packet = memoryview(buffer.data)[begin:end]
                continued, skipping = size == _CONTINUED, continued
                at = end
                self.log_bytes += size
                if skipping:
                    continue
                if packet[:1] != bytes([_EVENT]):
                    if packet[:1] == bytes([_ERROR]):
                        raise refusal(self._server, bytes(packet))
                    return
                yield self._event(packet[1:])
                packet.release()
            buffer.drop(at)

    def _event(self, event: memoryview) -> Seen:
        if len(event) < binlog.HEADER:
            raise CorruptLog(f"{self._server.where}: an event that is too short")
        kind = event[4]
        (pos,) = struct.unpack_from("<I", event, 13)
        body = b""
        if kind in _BODIES:
            if kind == binlog.FORMAT_DESCRIPTION:
                self._checksums = binlog.has_checksums(bytes(event))
            end = len(event) - (binlog.CHECKSUM_SIZE if self._checksums else 0)
            body = bytes(event[binlog.HEADER : end])
            if kind == binlog.ROTATE:
                self._file, pos = binlog.parse_rotate(body)
        return Seen(kind, BinlogPosition(self._file, pos), body)


def executed_before(
    server: Server, position: BinlogPosition, reader_id: int, seconds: float
) -> GtidSet:
    """Return the GTIDs that the server had executed when its log stood at `position`.

    Reads the position's file up to there.

    Raises:
        CorruptLog: The file does not begin with the set of those before it.
        DeltaforgeError: Whatever the server refused.
    """
    found: GtidSet | None = None
    begin = BinlogPosition(position.file, FILE_START)
    with LogScan(server, begin, reader_id, seconds) as scan:
        for event in scan:
            if event is None:
                continue
            if event.end > position:
                break
            if event.type == binlog.PREVIOUS_GTIDS:
                found = GtidSet.from_bytes(event.body)
            if event.type == binlog.GTID and found is not None:
                number = int.from_bytes(event.body[17:25], "little")
                found.add(str(uuid.UUID(bytes=event.body[1:17])), number, number)
    if found is None:
        raise CorruptLog(f"{server.where}: {position.file} does not say which GTIDs are before it")
    return found


def table_of(table_map: bytes) -> tuple[str, str]:
    """Return database and table that a TABLE_MAP event's body begins with (see `table_map`)."""
    size = table_map[8]
    database = table_map[9 : 9 + size]
    at = 10 + size
    return database.decode(), table_map[at + 1 : at + 1 + table_map[at]].decode()
