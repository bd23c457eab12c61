"""Held changes of a PostgreSQL log: what is kept of them, and how they come back.

The log describes every row, but not every type, and not always the key: of a table where that is not
enough now each change is kept, in log order, with what its place in the log says: the transaction (a
line of `layout.TX_*`) and how many changes of it come before. So it gets the id, the position and the
time that it would have had. The rest are messages, as the decoder reads them: the types and
the table as the log described them, and the change; of a TRUNCATE only the part of this table.

Each is one byte string (`base.pack_held`) that ends in the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.base import pack_held, unpack_held
from deltaforge_dagster.sources.rows.arrays import with_tx_end

_TRUNCATE = ord("T")


@dataclass(frozen=True, slots=True)
class HeldChange:
    """A change of one table.

    Attributes:
        tx: The line of its transaction.
        index: Changes of the transaction before it.
        description: Of types and table, in XLogData messages.
        change: The change, in another.
    """

    tx: tuple[int, ...]
    index: int
    description: bytes
    change: bytes

    def data(self) -> bytes:
        """Return the bytes to keep."""
        head = {"tx": self.tx, "index": self.index, "described": len(self.description)}
        return pack_held(head, self.description + self.change)


def parse_held(data: bytes) -> HeldChange:
    """Return what `HeldChange.data` returned.

    Raises:
        CorruptLog: The bytes are no such.
    """
    try:
        head, messages = unpack_held(data)
        described = int(head["described"])
        tx, index = tuple(map(int, head["tx"])), int(head["index"])
        return HeldChange(tx, index, messages[:described], messages[described:])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptLog(f"a held change that cannot be read: {error}") from error


def changes_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the OID of each table that a pgoutput message changes, and the part that is about it."""
    if message[0] != _TRUNCATE:
        yield int.from_bytes(message[1:5], "big"), message
        return
    flags = message[5:6]
    for at in range(6, len(message), 4):
        oid = message[at : at + 4]
        yield int.from_bytes(oid, "big"), message[:1] + (1).to_bytes(4, "big") + flags + oid


def decoded(
    events: Iterator[bytes], decode: Callable[[HeldChange], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the row of each kept change, the last one of each transaction as its end."""
    before: HeldChange | None = None
    for data in events:
        kept = parse_held(data)
        if before is not None:
            row = decode(before)
            yield row if kept.tx == before.tx else with_tx_end(row)
        before = kept
    if before is not None:
        yield with_tx_end(decode(before))
