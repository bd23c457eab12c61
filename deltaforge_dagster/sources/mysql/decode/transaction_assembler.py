"""Make change batches, in log order and with positions, from the changes of the `scan` kernel.

The last change of a transaction has `tx_end` set. So the newest change of an open transaction is
withheld until it is known whether another change or the commit follows.

The position of a reader (`StreamProgress`) is file and offset, and the GTIDs of all transactions
that it has read. A GTID is added when its transaction has ended, not when its first event is seen:
with a position that contains the GTID of an unfinished transaction, the rest of it would be lost
after a restart.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch
from deltaforge_dagster.sources.mysql.decode.batches import MysqlBatchWriter
from deltaforge_dagster.sources.mysql.decode.layout import (
    EVENT_POS,
    GTID_OF_MARIADB,
    OFFSET,
    OPEN,
    POS,
    ROW_END,
    ROW_LAST,
    ROW_TX,
    ROW_WIDTH,
    ROWS,
    STATE_WIDTH,
    TX_A,
    TX_B,
    TX_END,
    TX_HAS_GTID,
    TX_NUMBER,
    TX_TAG,
    TX_WIDTH,
    TXS,
)
from deltaforge_dagster.sources.mysql.decode.scan import commit
from deltaforge_dagster.sources.mysql.position import (
    BinlogPosition,
    DomainGtids,
    GtidSet,
    is_of_mariadb,
)
from deltaforge_dagster.sources.rows.arrays import with_tx_end

MAX_ROWS = 1 << 17
"""The most changes, and the most transactions, per round of the kernels."""


class GtidRun(NamedTuple):
    """Transactions of one server and tag with consecutive GTIDs, from `first` to `last` inclusive.

    For MariaDB, `sid` contains domain and server id (64 bits each, big-endian) instead of the UUID.
    """

    sid: bytes
    first: int
    last: int
    tag: str = ""
    of_mariadb: bool = False


class PositionTracker(Protocol):
    """Turns files and offsets of the log into positions, with the GTID set that was read so far."""

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> Position:
        """Add transactions that have ended, in log order; return the position after them.

        Without GTIDs, `gtids` is empty.
        """
        ...

    def within(self, file: str, pos: int) -> Position:
        """Return the position of an offset between or inside transactions, without adding GTIDs."""
        ...


class TransactionAssembler:
    """The arrays into which kernels write changes and transactions, and the batches made of them.

    Args:
        writer: Writes the columns of batches.
        progress: Gets the GTID and the end of every transaction that has ended.

    Attributes:
        state, rows, txs: The arrays of the kernels (`layout`).
        file: The current log file.
        batches: Finished batches; the decoder takes them and replaces the list.
    """

    def __init__(self, writer: MysqlBatchWriter, progress: PositionTracker) -> None:
        self.state = np.zeros(STATE_WIDTH, np.int64)
        self.rows = np.empty((MAX_ROWS, ROW_WIDTH), np.int64)
        self.txs = np.empty((MAX_ROWS, TX_WIDTH), np.int64)
        self.file = ""
        self.batches: list[ChangeBatch] = []
        self._writer = writer
        self._progress = progress
        self._reported_lines = 0  # lines of txs that were reported to progress
        self._last: pa.RecordBatch | None = None
        self._last_line = 0  # its transaction's line in txs
        self._reported_end = ("", 0)  # file and offset that were reported last
        self._unclaimed = 0

    def begin_round(self) -> None:
        """Clear the arrays for the next round; an open transaction moves to the first line."""
        state = self.state
        state[ROWS] = 0
        self.txs[0] = self.txs[max(int(state[TXS]) - 1, 0)]
        state[TXS] = 1 if state[OPEN] else 0
        self._reported_lines = self._last_line = 0

    def claim(self, log_bytes: int) -> None:
        """Add log bytes that contained no changes; they are counted in the next batch."""
        self._unclaimed += log_bytes

    def add(self, row: pa.RecordBatch) -> None:
        """Add a finished change that is not in `rows`, as the newest of the open transaction."""
        self._release_last(more=True)
        self._keep_last(row)

    def commit(self) -> None:
        """End the open transaction at the current event."""
        state = self.state
        commit(state, self.rows, self.txs)
        self._release_last(more=False)
        ended = int(state[TXS])
        if ended > self._reported_lines:
            self.batches.append(ChangeBatch(None, self._committed(ended)))

    def here(self) -> Position:
        """Return the position of the current event."""
        return self._progress.within(self.file, int(self.state[EVENT_POS]))

    def where(self, *, inside: bool) -> str:
        """Return where in the log the decoder is, for error messages.

        Args:
            inside: Whether it is inside an event that contains other events.
        """
        location = f"{self.file}:{int(self.state[POS])}"
        return f"in the event that ends at {location}" if inside else f"after {location}"

    def report_passed(self) -> None:
        """Add a batch with idle progress, if the position has moved; no transaction may be open."""
        position = (self.file, int(self.state[POS]))
        if position != self._reported_end:
            self._reported_end = position
            self.batches.append(ChangeBatch(None, self._progress.within(*position)))

    def flush(self, source: Bytes, start: int) -> None:
        """Turn the scanned rows into batches.

        First the complete transactions, then idle progress after them, then the changes of the
        transaction that is still open, except the last, which is withheld.

        Args:
            source: The read buffer.
            start: Where in the buffer the scan began.
        """
        rows, state = self.rows, self.state
        count = int(state[ROWS])
        self._release_last(more=bool(count) and rows[0, ROW_TX] == 0)
        committed = np.flatnonzero(rows[:count, ROW_LAST])
        whole = int(committed[-1]) + 1 if committed.size else 0
        cursor = self._write(source, 0, whole, start)
        ended = int(state[TXS]) - (1 if state[OPEN] else 0)
        if ended > self._reported_lines:
            self.batches.append(ChangeBatch(None, self._committed(ended)))
        if count > whole:
            cursor = self._write(source, whole, count - 1, cursor)
            newest, _, error = self._writer.write(
                source, rows, count - 1, count, self.txs, self.file
            )
            if error is not None:
                raise error
            self._keep_last(newest)
        self._unclaimed += max(int(state[OFFSET]) - cursor, 0)
        state[ROWS] = 0

    def _keep_last(self, row: pa.RecordBatch | None) -> None:
        """Withhold the newest change until it is known whether its transaction goes on."""
        self._last, self._last_line = row, int(self.state[TXS]) - 1

    def _release_last(self, *, more: bool) -> None:
        """Add the withheld change to the batches, if it is known whether it is the last.

        `more` says that another change of the transaction follows. Otherwise the change is the last
        if the transaction has ended; if the transaction is open, the change stays withheld.
        """
        last = self._last
        if last is None:
            return
        if more:
            self._last = None
            self.batches.append(ChangeBatch(last, None))
        elif self.txs[self._last_line, TX_END]:
            self._last = None
            position = self._committed(self._last_line + 1)
            self.batches.append(ChangeBatch(with_tx_end(last), position))

    def _write(self, source: Bytes, first: int, last: int, cursor: int) -> int:
        """Write `rows[first:last]`; return where in the buffer the last one ends."""
        rows = self.rows
        while first < last:
            batch, stop, error = self._writer.write(source, rows, first, last, self.txs, self.file)
            if batch is not None:
                committed = np.flatnonzero(rows[first:stop, ROW_LAST])
                cut = int(committed[-1]) + 1 if committed.size else 0
                log_bytes = int(rows[stop - 1, ROW_END]) - cursor + self._unclaimed
                cursor, self._unclaimed = int(rows[stop - 1, ROW_END]), 0
                if cut:
                    position = self._committed(int(rows[first + cut - 1, ROW_TX]) + 1)
                    self.batches.append(ChangeBatch(batch.slice(0, cut), position, log_bytes))
                    log_bytes = 0
                if cut < stop - first:
                    self.batches.append(ChangeBatch(batch.slice(cut), None, log_bytes))
            if error is not None:
                raise error
            first = stop
        return cursor

    def _committed(self, lines: int) -> Position:
        """Report the transactions before line `lines` of `txs` to the position tracker.

        Returns the position after them.
        """
        txs = self.txs[self._reported_lines : lines]
        self._reported_lines = lines
        runs: list[GtidRun] = []
        numbered = txs[txs[:, TX_HAS_GTID] != 0]
        if len(numbered):
            numbers = numbered[:, TX_NUMBER]
            sources = numbered[:, (TX_A, TX_B, TX_TAG)]
            same = np.all(sources[1:] == sources[:-1], axis=1)
            breaks = np.flatnonzero(~same | (numbers[1:] != numbers[:-1] + 1)) + 1
            for start, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True):
                sid = numbered[start, (TX_A, TX_B)].astype(">i8").tobytes()
                tag = self._writer.tags[int(numbered[start, TX_TAG])]
                of_mariadb = numbered[start, TX_HAS_GTID] == GTID_OF_MARIADB
                numbers_of = int(numbers[start]), int(numbers[end - 1])
                runs.append(GtidRun(sid, *numbers_of, tag, bool(of_mariadb)))
        self._reported_end = (self.file, int(txs[-1, TX_END]))
        return self._progress.committed(runs, *self._reported_end)


class StreamProgress:
    """The position of one reader that began at `start`.

    It must be told of every transaction of the log.
    """

    def __init__(self, start: BinlogPosition) -> None:
        self._text = start.gtid_set
        self._executed: GtidSet | DomainGtids | None = None
        if self._text:
            kind = DomainGtids if is_of_mariadb(self._text) else GtidSet
            self._executed = kind.parse(self._text)

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> BinlogPosition:
        """Add the GTIDs of transactions, in log order; return the position after the last of them.

        Raises:
            CorruptLog: The number of a GTID of MariaDB does not increase in its domain.
        """
        if self._text is not None and gtids:
            for run in gtids:
                self._add(run)
            self._text = str(self._executed)
        return BinlogPosition(file, pos, self._text)

    def within(self, file: str, pos: int) -> BinlogPosition:
        """Return a position inside or between transactions, with the GTIDs of those that ended."""
        return BinlogPosition(file, pos, self._text)

    def _add(self, run: GtidRun) -> None:
        if self._executed is None:  # the set was empty: the first GTID says whether it is MariaDB's
            self._executed = DomainGtids() if run.of_mariadb else GtidSet()
        if isinstance(self._executed, GtidSet):
            self._executed.add(str(uuid.UUID(bytes=run.sid)), run.first, run.last, run.tag)
            return
        domain, server = struct.unpack(">QQ", run.sid)
        for number in sorted({run.first, run.last}):
            self._executed.advance(domain, server, number)
