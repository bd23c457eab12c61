"""What a read of a table could see in PostgreSQL, and what it has to see.

`xmin:xmax:xip` (manual: "Transaction ID and Snapshot Information Functions"). A transaction was seen if its
number is below `xmax` and not in `xip`, wherever its commit stands in the log: the log has a commit before
others can see it, long before it while a synchronous standby does not answer. The log's numbers are those of
top-level transactions, as are those of `xip`; they have 32 bits, the snapshot's 64.
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
from deltaforge_dagster.sources.snapshot.base import Mask, by_transaction

if TYPE_CHECKING:  # who only compares read views needs no client library
    import psycopg


@dataclass(frozen=True, slots=True)
class XidReadView:
    """What a PostgreSQL snapshot sees.

    Attributes:
        xmax: The number after the last one that had ended, as 64 bits. Later ones may have been running.
        running: Those below it that had not ended.
        since: Everything that is not visible was committed after this position.
    """

    xmax: int
    running: tuple[int, ...]
    since: LsnPosition

    @classmethod
    def of(cls, snapshot: str, since: LsnPosition) -> XidReadView:
        """Return what a snapshot in PostgreSQL's notation sees.

        Raises:
            CorruptLog: It is none.
        """
        try:
            _, xmax, running = snapshot.split(":")
            return cls(int(xmax), tuple(int(xid) for xid in running.split(",") if xid), since)
        except ValueError:
            raise CorruptLog("not a snapshot of PostgreSQL") from None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self | None:
        """Return what `to_json` wrote, None for another kind's."""
        if "xmax" not in fields:
            return None
        running = tuple(int(xid) for xid in fields["running"])
        return cls(int(fields["xmax"]), running, LsnPosition(parse_lsn(fields["since"])))

    def sees(self, xids: Sequence[str]) -> bool:
        """Say whether all of these transactions were seen, if they were committed."""
        return not xids or not self._not_visible(xids).any()

    def to_json(self) -> str:
        """Return `{"xmax": n, "running": [...], "since": "X/Y"}`."""
        since = format_lsn(self.since.lsn)
        return json.dumps({"xmax": self.xmax, "running": self.running, "since": since})

    def covers(self, position: Position) -> bool:
        """Say whether every transaction up to a position was seen for certain."""
        return isinstance(position, LsnPosition) and position <= self.since

    def not_visible(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Say which changes were perhaps not seen; messages outside of transactions always were."""
        return by_transaction(rows, self._not_visible)

    def _not_visible(self, texts: Sequence[str]) -> Mask:
        numbers = np.array([int(text) for text in texts], np.uint32)
        # The 64 bits of a number are the nearest to xmax that end in these 32.
        distance = (numbers - np.uint32(self.xmax & 0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        whole = self.xmax + distance.astype(np.int64)
        return (whole >= self.xmax) | np.isin(whole, np.array(self.running, np.int64))


@dataclass(frozen=True, slots=True)
class Watermark:
    """What each read of a snapshot has to see: where the log stood, and what was running a little later.

    A read that sees all of these sees everything that was committed up to `lsn`: also what stood in the
    log by then, and could not be seen. A snapshot does not say which are running: it names none that began
    after the last one that has ended. Their locks do.

    Attributes:
        lsn: Where the log ended.
        running: Numbers of transactions, and of subtransactions, as the log has them.
    """

    lsn: int
    running: tuple[str, ...]

    def to_json(self) -> str:
        """Return the text that `parse` reads back."""
        return json.dumps({"lsn": format_lsn(self.lsn), "running": self.running})

    @classmethod
    def parse(cls, text: str) -> Watermark:
        """Return what `to_json` wrote."""
        fields = json.loads(text)
        return cls(parse_lsn(fields["lsn"]), tuple(fields["running"]))

    @classmethod
    def now(cls, connection: psycopg.Connection) -> Watermark:
        """Return that of now."""
        lsn = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        running = connection.execute(
            "SELECT transactionid::text FROM pg_locks"
            " WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        ).fetchall()
        assert lsn is not None
        return cls(parse_lsn(lsn[0]), tuple(row[0] for row in running))
