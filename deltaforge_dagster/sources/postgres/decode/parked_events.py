"""Parked changes of a PostgreSQL log: their serialized form, and how they are decoded later.

The log describes the columns of every table, but not every type, and not always the key. If a
table's changes cannot be decoded for that reason, each is kept, in log order, with its transaction
(a line of `layout.TX_*`) and the number of earlier changes in it. So it later gets the id, position
and time that it would have had. The rest are XLogData messages as in the stream: the descriptions
of types and table, and the change; of a TRUNCATE, only the part about this table.

Each is one byte string (`base.pack_parked`) that ends with the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.base import pack_parked, unpack_parked
from deltaforge_dagster.sources.rows.arrays import with_tx_end

_TRUNCATE = ord("T")


@dataclass(frozen=True, slots=True)
class ParkedChange:
    """A parked change of one table.

    Attributes:
        tx: The line of its transaction.
        index: Number of changes of the transaction before it.
        description: XLogData messages with the Type messages and the Relation message of the table.
        change: An XLogData message with the change.
    """

    tx: tuple[int, ...]
    index: int
    description: bytes
    change: bytes

    def data(self) -> bytes:
        """Return the bytes to store."""
        head = {"tx": self.tx, "index": self.index, "described": len(self.description)}
        return pack_parked(head, self.description + self.change)


def parse_parked(data: bytes) -> ParkedChange:
    """Parse the bytes that `ParkedChange.data` returned.

    Raises:
        CorruptLog: The bytes are not a parked change.
    """
    try:
        head, messages = unpack_parked(data)
        described = int(head["described"])
        tx, index = tuple(map(int, head["tx"])), int(head["index"])
        return ParkedChange(tx, index, messages[:described], messages[described:])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptLog(f"a held change that cannot be read: {error}") from error


def changes_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the OID of each table that a pgoutput message changes, and a message for it alone."""
    if message[0] != _TRUNCATE:
        yield int.from_bytes(message[1:5], "big"), message
        return
    flags = message[5:6]
    for at in range(6, len(message), 4):
        oid = message[at : at + 4]
        yield int.from_bytes(oid, "big"), message[:1] + (1).to_bytes(4, "big") + flags + oid


def decoded(
    events: Iterator[bytes], decode: Callable[[ParkedChange], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decode parked changes; yield each one's row, with `tx_end` set if it ends a transaction."""
    before: ParkedChange | None = None
    for data in events:
        kept = parse_parked(data)
        if before is not None:
            row = decode(before)
            yield row if kept.tx == before.tx else with_tx_end(row)
        before = kept
    if before is not None:
        yield with_tx_end(decode(before))
