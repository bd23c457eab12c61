"""What the first kernel noted becomes change batches, in log order, with the positions after them.

A batch is given away only once it is known where its transactions end, so the last change of a
transaction that is still open waits here until something follows it: another change, or the
commit, which makes it the one with `tx_end`.
"""

from __future__ import annotations

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
from deltaforge_dagster.sources.rows.arrays import with_tx_end

MAX_ROWS = 1 << 17
"""Changes, and transactions, per round of the kernels."""


class GtidRun(NamedTuple):
    """Transactions of one server and tag with numbers `first` to `last`, both included.

    Of MariaDB they are those of one domain and server, which are the halves of `sid`.
    """

    sid: bytes
    first: int
    last: int
    tag: str = ""
    of_mariadb: bool = False


class PositionTracker(Protocol):
    """Turns what was read into positions: it knows the executed GTID set of the stream."""

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> Position:
        """Take in transactions that have ended, in log order; return the position after them.

        Without GTIDs `gtids` is empty.
        """
        ...

    def within(self, file: str, pos: int) -> Position:
        """Return the position of a place between transactions, or inside one; changes nothing."""
        ...


class TransactionAssembler:
    """Lines of changes and transactions, and the batches made of them.

    Args:
        writer: Writes the columns.
        progress: Told of every transaction that has ended.

    Attributes:
        state, rows, txs: What the kernels write into (`layout`).
        file: The file that is read.
        batches: What is to be handed on; whoever takes them empties the list.
    """

    def __init__(self, writer: MysqlBatchWriter, progress: PositionTracker) -> None:
        self.state = np.zeros(STATE_WIDTH, np.int64)
        self.rows = np.empty((MAX_ROWS, ROW_WIDTH), np.int64)
        self.txs = np.empty((MAX_ROWS, TX_WIDTH), np.int64)
        self.file = ""
        self.batches: list[ChangeBatch] = []
        self._writer = writer
        self._progress = progress
        self._told = 0  # lines of txs that progress knows
        self._last: pa.RecordBatch | None = None
        self._last_line = 0  # of txs
        self._passed = ("", 0)  # what was told last of where the log is read to
        self._unclaimed = 0

    def begin_round(self) -> None:
        """Make room for the kernels: the open transaction, the last line so far, is the first now."""
        state = self.state
        state[ROWS] = 0
        self.txs[0] = self.txs[max(int(state[TXS]) - 1, 0)]
        state[TXS] = 1 if state[OPEN] else 0
        self._told = self._last_line = 0

    def claim(self, log_bytes: int) -> None:
        """Count bytes of log that were read besides the changes."""
        self._unclaimed += log_bytes

    def add(self, row: pa.RecordBatch) -> None:
        """Add a change that is no line: the newest of the open transaction."""
        self._release_last(more=True)
        self._keep_last(row)

    def commit(self) -> None:
        """Close the open transaction at the event that was read."""
        state = self.state
        commit(state, self.rows, self.txs)
        self._release_last(more=False)
        ended = int(state[TXS])
        if ended > self._told:
            self.batches.append(ChangeBatch(None, self._committed(ended)))

    def here(self) -> Position:
        """Return the position of the event that is read; changes nothing."""
        return self._progress.within(self.file, int(self.state[EVENT_POS]))

    def where(self, *, inside: bool) -> str:
        """Say for an error message where reading stands; `inside` an event that holds others."""
        place = f"{self.file}:{int(self.state[POS])}"
        return f"in the event that ends at {place}" if inside else f"after {place}"

    def report_passed(self) -> None:
        """Tell how far the log is read without a transaction open, when that is new."""
        position = (self.file, int(self.state[POS]))
        if position != self._passed:
            self._passed = position
            self.batches.append(ChangeBatch(None, self._progress.within(*position)))

    def flush(self, source: Bytes, begun: int) -> None:
        """Turn the scanned rows into batches; `begun` is where in the buffer the scan began.

        First come whole transactions, then how far the log has passed without a change since, then
        the changes of the transaction that is still open, but for the last one, which waits.
        """
        rows, state = self.rows, self.state
        count = int(state[ROWS])
        self._release_last(more=bool(count) and rows[0, ROW_TX] == 0)
        committed = np.flatnonzero(rows[:count, ROW_LAST])
        whole = int(committed[-1]) + 1 if committed.size else 0
        cursor = self._write(source, 0, whole, begun)
        ended = int(state[TXS]) - (1 if state[OPEN] else 0)
        if ended > self._told:
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
        """Keep the newest change back until it is known whether its transaction has more (`tx_end`)."""
        self._last, self._last_line = row, int(self.state[TXS]) - 1

    def _release_last(self, *, more: bool) -> None:
        """Hand on the last change, once it is known whether its transaction has `more`.

        Otherwise its transaction may still be open, and it stays.
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
        """Tell progress of the transactions before line `lines`; return the position after them."""
        txs = self.txs[self._told : lines]
        self._told = lines
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
        self._passed = (self.file, int(txs[-1, TX_END]))
        return self._progress.committed(runs, *self._passed)
