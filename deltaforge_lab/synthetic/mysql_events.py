"""Makes binary log streams without a server, to measure and test the decoder.

The functions build the events whose layouts `binlog`, `table_map` and `scan_rows` document;
`orders` combines them into a stream of plain transactions on one table.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltaforge_dagster.sources.mysql.events.binlog import (
    ANONYMOUS_GTID,
    CHECKSUM_SIZE,
    FLAG_ARTIFICIAL,
    FORMAT_DESCRIPTION,
    GTID,
    HEADER,
    QUERY,
    ROTATE,
    TABLE_MAP,
    WRITE_ROWS_2,
    XID,
)

FILE = "binlog.000001"
SID = bytes(range(16))
_MAX_PACKET = 0xFFFFFF


def packed(number: int) -> bytes:
    """Return a length-encoded integer."""
    if number < 251:
        return bytes([number])
    if number < 1 << 16:
        return b"\xfc" + number.to_bytes(2, "little")
    if number < 1 << 24:
        return b"\xfd" + number.to_bytes(3, "little")
    return b"\xfe" + number.to_bytes(8, "little")


def bitmap(bits: Sequence[bool]) -> bytes:
    """Return `bits` packed into bytes, the first one in the lowest bit of the first byte."""
    size = (len(bits) + 7) // 8
    return sum(1 << i for i, bit in enumerate(bits) if bit).to_bytes(size, "little")


def packets(content: bytes) -> bytes:
    """Return the packets in which a server sends `content`.

    It includes the status byte before an event.
    """
    parts = []
    sequence = 1
    at = 0
    while True:
        part = content[at : at + _MAX_PACKET]
        parts.append(len(part).to_bytes(3, "little") + bytes([sequence & 255]) + part)
        if len(part) < _MAX_PACKET:
            return b"".join(parts)
        at += _MAX_PACKET
        sequence += 1


@dataclass
class SyntheticLog:
    """Builds a binary log stream: the bytes that a server sends, and the position in the file."""

    checksums: bool = True
    pos: int = 4
    clock: int = 1_767_322_245
    parts: list[bytes] = field(default_factory=list)

    def event(
        self, kind: int, body: bytes, *, flags: int = 0, end: int | None = None
    ) -> SyntheticLog:
        """Add an event; `end` overrides the end position in its header."""
        # Until a format description event says that a file has no checksums, the server sends them
        # as requested.
        summed = self.checksums or kind == FORMAT_DESCRIPTION or not self.parts
        size = HEADER + len(body) + (CHECKSUM_SIZE if summed else 0)
        if end is None:
            self.pos += size
            end = self.pos
        head = struct.pack("<IBIIIH", self.clock, kind, 1, size, end & 0xFFFFFFFF, flags)
        event = head + body
        if summed:
            event += zlib.crc32(event).to_bytes(CHECKSUM_SIZE, "little")
        self.parts.append(packets(b"\0" + event))
        return self

    def start(
        self, file: str = FILE, position: int = 4, *, version: str = "8.0.15"
    ) -> SyntheticLog:
        """Add the artificial ROTATE and the FORMAT_DESCRIPTION event that begin a file's dump."""
        self.event(
            ROTATE, struct.pack("<Q", position) + file.encode(), flags=FLAG_ARTIFICIAL, end=0
        )
        self.pos = position
        body = struct.pack("<H50sIB", 4, version.encode(), 0, HEADER) + bytes(40)
        return self.event(FORMAT_DESCRIPTION, body + bytes([self.checksums]))

    def begin(self, number: int, ts_us: int = 0, *, original: int | None = None) -> SyntheticLog:
        """Add a GTID event (an ANONYMOUS_GTID event for number 0) and BEGIN."""
        self.gtid(number, ts_us, original=original)
        return self.query("BEGIN")

    def gtid(self, number: int, ts_us: int = 0, *, original: int | None = None) -> SyntheticLog:
        """Add a GTID event (an ANONYMOUS_GTID event for number 0).

        `ts_us` is the time of the commit on this server, `original` that on the server of origin,
        if it is another one. Both are in microseconds since 1970.
        """
        sid = SID if number else bytes(16)
        body = struct.pack("<B16sqBqq", 0, sid, number, 2, 0, 1)
        if original is None:
            body += ts_us.to_bytes(7, "little")
        else:
            body += (ts_us | 1 << 55).to_bytes(7, "little") + original.to_bytes(7, "little")
        return self.event(GTID if number else ANONYMOUS_GTID, body + packed(300) + bytes(4))

    def query(self, statement: str, database: str = "shop") -> SyntheticLog:
        """Add a QUERY event, with some status variables."""
        name = database.encode()
        head = struct.pack("<IIBHH", 8, 0, len(name), 0, 5)
        return self.event(QUERY, head + b"\0" * 5 + name + b"\0" + statement.encode())

    def table(self, table_id: int, description: bytes) -> SyntheticLog:
        """Add a TABLE_MAP event."""
        return self.event(TABLE_MAP, table_id.to_bytes(6, "little") + b"\1\0" + description)

    def rows(self, kind: int, table_id: int, content: bytes, *, extra: bytes = b"") -> SyntheticLog:
        """Add a rows event; `content` is its body from the number of columns on."""
        head = table_id.to_bytes(6, "little") + b"\1\0"
        if kind >= WRITE_ROWS_2:
            head += struct.pack("<H", 2 + len(extra)) + extra
        return self.event(kind, head + content)

    def commit(self, xid: int = 9) -> SyntheticLog:
        """Add an XID event."""
        return self.event(XID, struct.pack("<q", xid))

    def stream(self) -> bytes:
        """Return all bytes so far."""
        return b"".join(self.parts)


@dataclass(frozen=True)
class SyntheticColumn:
    """A column for `description`: its type code in the log, and its metadata.

    The metadata is as with binlog_row_metadata=FULL.
    """

    name: str
    code: int
    metadata: bytes = b""
    unsigned: bool = False
    collation: int | None = None
    labels: tuple[str, ...] = ()
    nullable: bool = True


_NUMBERS = {1, 2, 3, 4, 5, 8, 9, 246}
_ENUM, _SET, _STRING = 247, 248, 254


def description(
    database: str,
    table: str,
    fields: Sequence[SyntheticColumn],
    key: Sequence[int] = (),
    *,
    full: bool = True,
) -> bytes:
    """Return a TABLE_MAP event's body after the flags, with labels in UTF-8."""
    body = b""
    for name in (database, table):
        body += bytes([len(name.encode())]) + name.encode() + b"\0"
    metadata = b"".join(f.metadata for f in fields)
    body += packed(len(fields)) + bytes(f.code for f in fields)
    body += packed(len(metadata)) + metadata + bitmap([f.nullable for f in fields])

    def add(kind: int, content: bytes) -> None:
        nonlocal body
        if content:
            body += bytes([kind]) + packed(len(content)) + content

    signs = "".join(str(int(f.unsigned)) for f in fields if f.code in _NUMBERS)
    signs += "0" * (-len(signs) % 8)
    add(1, bytes(int(signs[at : at + 8], 2) for at in range(0, len(signs), 8)))
    add(3, b"".join(packed(f.collation) for f in fields if f.collation is not None))
    if full:
        add(4, b"".join(packed(len(f.name.encode())) + f.name.encode() for f in fields))
        for kind, code in ((5, _SET), (6, _ENUM)):
            labels = b""
            for f in fields:
                if f.code == _STRING and f.metadata[0] == code:
                    labels += packed(len(f.labels))
                    labels += b"".join(
                        packed(len(label.encode())) + label.encode() for label in f.labels
                    )
            add(kind, labels)
        add(8, b"".join(packed(column) for column in key))
        labelled = [f for f in fields if f.code == _STRING and f.metadata[0] in (_ENUM, _SET)]
        add(10, packed(45) if labelled else b"")
    return body


ORDERS = (
    SyntheticColumn("id", 8, nullable=False),
    SyntheticColumn("customer", 15, b"\x90\x01", collation=255),
    SyntheticColumn("amount", 246, b"\x0a\x02"),
    SyntheticColumn("status", 15, b"\x50\x00", collation=255),
    SyntheticColumn("created_at", 18, b"\x06"),
    SyntheticColumn("note", 252, b"\x02", collation=255),
)
"""An ordinary table: `id bigint primary key, customer varchar(100), amount decimal(10,2), status
varchar(20), created_at datetime(6), note text`, all utf8mb4."""


def orders_row(number: int) -> bytes:
    """Return the image of a row of `ORDERS`, with all columns and no nulls."""
    customer = b"customer-%05d" % (number * 7919 % 100_000)
    status = (b"new", b"paid", b"shipped", b"cancelled")[number % 4]
    note = b"order %d: leave at the door, please" % number
    month = 2026 * 13 + 3
    clock = (number // 3600 % 24) << 12 | (number // 60 % 60) << 6 | number % 60
    created = (1 << 39) | month << 22 | (number % 28 + 1) << 17 | clock
    return b"".join(
        (
            b"\0",
            struct.pack("<q", number),
            struct.pack("<H", len(customer)) + customer,
            (number % 10_000 | 1 << 31).to_bytes(4) + (number % 100).to_bytes(1),
            bytes([len(status)]) + status,
            created.to_bytes(5) + (number % 1_000_000).to_bytes(3),
            struct.pack("<H", len(note)) + note,
        )
    )


def orders(rows: int, *, rows_per_tx: int = 1000, rows_per_event: int = 80) -> bytes:
    """Return a stream with a CREATE TABLE statement and `rows` inserts into `shop.orders`.

    Rows events have the usual size, 8 KiB.
    """
    log = SyntheticLog().start().gtid(1).query("CREATE TABLE orders (id bigint PRIMARY KEY)")
    table = description("shop", "orders", ORDERS, (0,))
    head = packed(len(ORDERS)) + bitmap([True] * len(ORDERS))
    for first in range(0, rows, rows_per_tx):
        last = min(first + rows_per_tx, rows)
        log.begin(first // rows_per_tx + 2, 1_767_322_245_000_000 + first).table(108, table)
        for start in range(first, last, rows_per_event):
            numbers = range(start, min(start + rows_per_event, last))
            log.rows(WRITE_ROWS_2, 108, head + b"".join(map(orders_row, numbers)))
        log.commit()
    return log.stream()
