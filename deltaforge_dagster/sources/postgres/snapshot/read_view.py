"""Read views of PostgreSQL: the transactions that a read could see, or must see (`Watermark`).

A snapshot is `xmin:xmax:xip` (manual: "Transaction ID and Snapshot Information Functions"). A
committed transaction is visible if its xid is below `xmax` and not in `xip`, wherever its commit is
in the log: the log contains a commit before other sessions can see it, long before if a synchronous
standby does not answer. The xids in the log and in `xip` are those of top-level transactions; in
the log they have 32 bits, in the snapshot 64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.positions import Position, format_lsn
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.snapshot import Mask, by_transaction

if TYPE_CHECKING:  # comparing read views must not load the client library
    import psycopg


@dataclass(frozen=True, slots=True)
class XidReadView:
    """The read view of a PostgreSQL snapshot.

    Attributes:
        xmax: The first xid (64 bits) after the last transaction that had ended; from there on, none
            is visible.
        running: The xids below `xmax` of transactions that had not ended.
        since: A position: every transaction that is not visible was committed after it.
    """

    xmax: int
    running: tuple[int, ...]
    since: LsnPosition

    @classmethod
    def of(cls, snapshot: str, since: LsnPosition) -> XidReadView:
        """Return the read view of a snapshot in PostgreSQL's notation.

        Raises:
            CorruptLog: The text is not a snapshot.
        """
        try:
            _, xmax, running = snapshot.split(":")
            return cls(int(xmax), tuple(int(xid) for xid in running.split(",") if xid), since)
        except ValueError:
            raise CorruptLog("not a snapshot of PostgreSQL") from None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Parse the fields that `to_json` wrote; return None if another kind of source has them."""
        if "xmax" not in fields:
            return None
        running = tuple(int(xid) for xid in fields["running"])
        return cls(int(fields["xmax"]), running, LsnPosition(parse_lsn(fields["since"])))

    def sees(self, xids: Sequence[str]) -> bool:
        """Return whether all of these transactions, by xid, are visible if they were committed."""
        return not xids or not self._not_visible(xids).any()

    def to_json(self) -> str:
        """Return `{"xmax": n, "running": [...], "since": "X/Y"}`."""
        since = format_lsn(self.since.lsn)
        return json.dumps({"xmax": self.xmax, "running": self.running, "since": since})

    def covers(self, position: Position) -> bool:
        """Return whether the read certainly saw every transaction up to a position."""
        return isinstance(position, LsnPosition) and position <= self.since

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Mark the changes that the read may not have seen; never non-transactional messages."""
        return by_transaction(rows, self._not_visible)

    def _not_visible(self, texts: Sequence[str]) -> Mask:
        numbers = np.array([int(text) for text in texts], np.uint32)
        # The full xid is the 64-bit number nearest to xmax that ends with these 32 bits.
        distance = (numbers - np.uint32(self.xmax & 0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        whole = self.xmax + distance.astype(np.int64)
        return (whole >= self.xmax) | np.isin(whole, np.array(self.running, np.int64))


@dataclass(frozen=True, slots=True)
class Watermark:
    """What each read of a snapshot must see.

    It is the end of the log at some time, and the transactions that were open right after. A read
    that sees all these transactions sees everything that was committed up to `lsn`, including
    commits that were in the log but not visible yet. The open transactions are taken from their
    locks, because PostgreSQL's snapshot does not list those that began after the last one that has
    ended.

    Attributes:
        lsn: The end of the log.
        running: The xids of the open transactions and subtransactions, with 32 bits as in the log.
    """

    lsn: int
    running: tuple[str, ...]

    def to_json(self) -> str:
        """Return the text that `parse` reads back."""
        return json.dumps({"lsn": format_lsn(self.lsn), "running": self.running})

    @classmethod
    def parse(cls, text: str) -> Watermark:
        """Parse the text that `to_json` wrote."""
        fields = json.loads(text)
        return cls(parse_lsn(fields["lsn"]), tuple(fields["running"]))

    @classmethod
    def now(cls, connection: psycopg.Connection) -> Watermark:
        """Return the current watermark."""
        # The module imports the client library.
        from deltaforge_dagster.sources.postgres.connection.identity import (  # noqa: PLC0415
            insert_lsn,
        )

        # The end of the log first: a transaction that has logged its commit before it is either
        # visible, or still holds its lock.
        lsn = insert_lsn(connection)
        running = connection.execute(
            "SELECT transactionid::text FROM pg_locks"
            " WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        ).fetchall()
        return cls(lsn, tuple(row[0] for row in running))
