"""Makes replication streams without a server, to measure and test the decoder.

The functions build the messages whose layouts `pgoutput` documents; `orders` combines them into a
stream of plain transactions on one table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal

from deltaforge_dagster.sources.postgres.decode.pgoutput import copy_data, xlog

UNCHANGED: Final = False
"""The cell of an unchanged TOAST value, which is not sent."""

Cell = bytes | None | Literal[False]
"""A value as text, None for null, or `UNCHANGED`."""


def keepalive(lsn: int, *, reply: bool = False) -> bytes:
    """Return a keepalive message, wrapped in CopyData as the server sends it."""
    return copy_data(b"k" + struct.pack(">qqB", lsn, 0, reply))


def begin(final_lsn: int, clock: int, xid: int) -> bytes:
    """Return a Begin message; `clock` counts microseconds since 2000."""
    return b"B" + struct.pack(">qqI", final_lsn, clock, xid)


def commit(final_lsn: int, end_lsn: int, clock: int) -> bytes:
    """Return a Commit message."""
    return b"C" + struct.pack(">Bqqq", 0, final_lsn, end_lsn, clock)


def relation(
    oid: int,
    schema: str,
    table: str,
    columns: Sequence[tuple[str, int, int, bool]],
    identity: str = "d",
) -> bytes:
    """Return a Relation message; a column is (name, type OID, modifier, part of the identity)."""
    content = struct.pack(">I", oid) + schema.encode() + b"\0" + table.encode() + b"\0"
    content += identity.encode() + struct.pack(">H", len(columns))
    for name, type_oid, modifier, in_identity in columns:
        content += struct.pack(">B", in_identity) + name.encode() + b"\0"
        content += struct.pack(">Ii", type_oid, modifier)
    return b"R" + content


def row(cells: Sequence[Cell]) -> bytes:
    """Return a TupleData, the part of a message that has a row's values."""
    parts = [struct.pack(">H", len(cells))]
    for cell in cells:
        if cell is None:
            parts.append(b"n")
        elif cell is False:
            parts.append(b"u")
        else:
            parts.append(b"t" + struct.pack(">I", len(cell)) + cell)
    return b"".join(parts)


def insert(oid: int, new: Sequence[Cell]) -> bytes:
    """Return an Insert message."""
    return b"I" + struct.pack(">I", oid) + b"N" + row(new)


def update(
    oid: int, new: Sequence[Cell], old: Sequence[Cell] | None = None, old_part: bytes = b"K"
) -> bytes:
    """Return an Update message; `old_part` is `K` if `old` is the key, `O` if the whole row."""
    old_image = b"" if old is None else old_part + row(old)
    return b"U" + struct.pack(">I", oid) + old_image + b"N" + row(new)


def delete(oid: int, old: Sequence[Cell], old_part: bytes = b"K") -> bytes:
    """Return a Delete message."""
    return b"D" + struct.pack(">I", oid) + old_part + row(old)


def truncate(oids: Sequence[int], flags: int = 0) -> bytes:
    """Return a Truncate message; flag 1 is CASCADE, 2 RESTART IDENTITY."""
    relations = b"".join(struct.pack(">I", oid) for oid in oids)
    return b"T" + struct.pack(">IB", len(oids), flags) + relations


def message(lsn: int, prefix: str, content: bytes, *, transactional: bool = True) -> bytes:
    """Return a logical message."""
    head = b"M" + struct.pack(">Bq", transactional, lsn) + prefix.encode() + b"\0"
    return head + struct.pack(">I", len(content)) + content


ORDERS_OID = 16385
ORDERS_COLUMNS = (
    ("id", 20, -1, True),
    ("customer", 25, -1, False),
    ("amount", 1700, (10 << 16 | 2) + 4, False),
    ("status", 25, -1, False),
    ("created_at", 1114, -1, False),
    ("note", 25, -1, False),
)
"""An ordinary table: `id bigint primary key, customer text, amount numeric(10,2), status text,
created_at timestamp, note text`."""


def orders(rows: int, *, rows_per_tx: int = 100) -> bytes:
    """Return the stream of `rows` inserts into the table `public.orders`."""
    parts = []
    lsn = 0x16B_0000
    clock = 800_000_000_000_000
    for first in range(0, rows, rows_per_tx):
        last = min(first + rows_per_tx, rows)
        final_lsn = lsn + 200 * (last - first)
        xid = 700 + first // rows_per_tx
        parts.append(xlog(lsn, begin(final_lsn, clock, xid)))
        if first == 0:
            parts.append(xlog(0, relation(ORDERS_OID, "public", "orders", ORDERS_COLUMNS)))
        for number in range(first, last):
            lsn += 200
            cells = (
                b"%d" % number,
                b"customer-%05d" % (number * 7919 % 100_000),
                b"%d.%02d" % (number % 10_000, number % 100),
                (b"new", b"paid", b"shipped", b"cancelled")[number % 4],
                b"2026-03-%02d 12:%02d:%02d.%06d"
                % (number % 28 + 1, number // 60 % 60, number % 60, number % 1_000_000),
                b"order %d: leave at the door, please" % number,
            )
            parts.append(xlog(lsn, insert(ORDERS_OID, cells)))
        parts.append(xlog(final_lsn + 48, commit(final_lsn, final_lsn + 48, clock)))
        lsn = final_lsn + 48
        clock += 1000
    return b"".join(parts)
