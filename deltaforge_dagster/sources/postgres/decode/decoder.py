"""From bytes of the replication stream to change batches: the decoder of the PostgreSQL source.

A `PostgresDecoder` gets the stream in read buffers, as the socket fills them, and returns record
batches with the columns of `frame.CAPTURED`. A buffer is handled in three steps: `scan` records the
changes and transactions in it, `write_changes` writes their row images, and the other columns are
added in bulk. Python code runs once per buffer and for infrequent messages, never per row. The
decoder has no socket, no thread and no clock: its output depends only on the bytes of the stream,
not on how they are divided into buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent
from deltaforge_dagster.sources.postgres.decode.batches import PostgresBatchWriter, UnchangedToast
from deltaforge_dagster.sources.postgres.decode.layout import (
    END,
    IDLE_LSN,
    IDLE_XID,
    INDEX,
    OFFSET,
    OP_MESSAGE,
    OP_TRUNCATE,
    OPEN,
    REPLY,
    ROW_END,
    ROW_LAST,
    ROW_TX,
    ROW_WIDTH,
    ROWS,
    SKIPPED,
    START_LSN,
    STATE_WIDTH,
    TX_END_LSN,
    TX_FINAL_LSN,
    TX_WIDTH,
    TX_XID,
    TXS,
)
from deltaforge_dagster.sources.postgres.decode.parked_events import (
    ParkedChange,
    changes_of,
    decoded,
)
from deltaforge_dagster.sources.postgres.decode.pgoutput import (
    EPOCH_US,
    MESSAGE_NAMES,
    XLOG_HEADER,
    LogicalMessage,
    MessageFilter,
    parse_message,
    xlog,
)
from deltaforge_dagster.sources.postgres.decode.rows import MARK
from deltaforge_dagster.sources.postgres.decode.scan import (
    BAD_COMMIT,
    BAD_MESSAGE,
    BAD_ORDER,
    BAD_SIZE,
    FOREIGN,
    FULL,
    IGNORED,
    MESSAGE,
    NEED_MORE,
    ON_HOLD,
    PARKED_CHANGE,
    RELATION,
    TYPE,
    UNKNOWN,
    UNKNOWN_TABLE,
    UNSUPPORTED,
    read_64,
    scan,
)
from deltaforge_dagster.sources.postgres.decode.versions import (
    PostgresTableContext,
    PostgresTableVersions,
)
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.rows.arrays import with_tx_end
from deltaforge_dagster.sources.rows.event_ids import id_seed

MAX_ROWS = 1 << 17
"""The most changes, and the most transactions, per round of the kernels.

Enough for 4 MiB of the smallest rows.
"""

_DAMAGE = {
    BAD_SIZE: "a message of an impossible size",
    BAD_MESSAGE: "a message that does not follow its format",
    BAD_ORDER: "a change or Commit outside a transaction, or a Begin inside one",
    BAD_COMMIT: "a Commit that does not fit its Begin",
    UNKNOWN_TABLE: "a change of a table that was never described",
}


@dataclass(frozen=True, slots=True)
class DecodedPgoutput:
    """What a read buffer contained.

    Attributes:
        consumed: Number of bytes that were decoded; the rest must be at the start of the next
            buffer.
        batches: Changes and idle progress, in log order.
        reply_requested: Whether the server requests a status message at once.
        foreign: Type letter of the message at `consumed` if it ends the stream (error, end of copy
            ...), else "".
        error: Why decoding cannot continue; raise it after `batches` were passed on.
    """

    consumed: int
    batches: tuple[ChangeBatch, ...]
    reply_requested: bool = False
    foreign: str = ""
    error: DeltaforgeError | None = None


class PostgresDecoder:
    """Decodes one replication stream, from `START_REPLICATION` to its end.

    Args:
        context: What the tables are selected and described with.
        source_id: `id` of the source, on which event ids depend.
        start: Transactions that committed before it are skipped, because they were read before.
        unchanged_toast: What replaces unchanged TOAST values.
        holds: Full names of tables whose changes are returned undecoded, with the reasons
            (`parked_events`). Tables that cannot be decoded now are added.
    """

    def __init__(
        self,
        context: PostgresTableContext,
        *,
        source_id: str,
        start: LsnPosition,
        unchanged_toast: UnchangedToast = MARK,
        holds: Mapping[str, str] | None = None,
    ) -> None:
        self._versions = PostgresTableVersions(context, holds or {})
        self._writer = PostgresBatchWriter(
            context.db, self._versions, id_seed(source_id), MAX_ROWS, unchanged_toast
        )
        self._messages = MessageFilter()
        self._state = np.zeros(STATE_WIDTH, np.int64)
        self._state[START_LSN] = start.lsn
        self._rows = np.empty((MAX_ROWS, ROW_WIDTH), np.int64)
        self._txs = np.empty((MAX_ROWS, TX_WIDTH), np.int64)
        # The newest change of the open transaction, kept back until it is known whether it is the
        # last.
        self._last_change: pa.RecordBatch | None = None
        self._last_description = b""
        self._reported_lsn = start.lsn
        self._unreported_bytes = 0
        self._error: DeltaforgeError | None = None

    def feed(self, data: Bytes | bytes | bytearray | memoryview, length: int) -> DecodedPgoutput:
        """Decode `data[:length]`: the bytes that the last call did not consume, then new ones.

        `data` may be overwritten as soon as this returns. Errors are returned as
        `DecodedPgoutput.error`, not raised. After an error, every call returns it again.
        """
        source = read_only(data)[:length]
        state = self._state
        state[OFFSET] = state[REPLY] = 0
        batches: list[ChangeBatch] = []
        foreign = ""
        stop = FULL
        # The hash overflows on purpose, which NumPy reports when kernels run as plain Python.
        with np.errstate(over="ignore"):
            while stop == FULL and self._error is None:
                begun = int(state[OFFSET])
                stop = self._scan(source)
                batches += self._flush(source, begun)
                if stop == PARKED_CHANGE and self._error is None:
                    batches += self._hold_change(source)
                    stop = FULL
        if stop == FOREIGN and self._error is None:
            foreign = chr(source[state[OFFSET]])
        return DecodedPgoutput(
            int(state[OFFSET]), tuple(batches), bool(state[REPLY]), foreign, self._error
        )

    def _scan(self, source: Bytes) -> int:
        """Scan into `rows` and `txs`; return the final stop code.

        Messages that stop the kernel are handled, and scanning continues.
        """
        state, versions = self._state, self._versions
        self._begin_round()
        while True:
            stop = int(scan(source, source.size, state, versions.in_force, self._rows, self._txs))
            if stop in (NEED_MORE, FULL, FOREIGN, PARKED_CHANGE):
                return stop
            try:
                self._handle(stop, source)
            except DeltaforgeError as error:
                self._error = error
                return stop
            state[OFFSET] = state[END]

    def _begin_round(self) -> None:
        """Clear the arrays for the next round; an open transaction moves to the first line."""
        state = self._state
        state[ROWS] = 0
        self._txs[0] = self._txs[max(int(state[TXS]) - 1, 0)]
        state[TXS] = 1 if state[OPEN] else 0

    def _hold_change(self, source: Bytes) -> list[ChangeBatch]:
        """Return batches for a change of a table on hold, undecoded.

        Everything before it was returned already. A TRUNCATE may also be about other tables; for
        these, it is decoded.
        """
        state, at = self._state, int(self._state[OFFSET])
        begun, end = at + 5 + XLOG_HEADER, int(state[END])
        lsn = int(read_64(source, at + 6))
        batches: list[ChangeBatch] = []
        for oid, change in changes_of(source[begun:end].tobytes()):
            self._begin_round()
            version = self._versions.of_table(oid)
            if version == UNKNOWN:
                self._error = CorruptLog(f"{_DAMAGE[UNKNOWN_TABLE]}, {self._where()}")
                return batches
            index = int(state[INDEX])
            if version == ON_HOLD:
                table, description = self._versions.description(oid)
                tx = tuple(self._txs[0].tolist())
                kept = ParkedChange(tx, index, description, xlog(lsn, change))
                event = ParkedEvent(table, self._versions.holds[table], kept.data())
                batches.append(ChangeBatch(None, None, parked=(event,)))
            elif version != IGNORED:
                self._rows[0] = OP_TRUNCATE, 0, version, lsn, index, begun + 5, end, 0
                state[ROWS] = 1
                batches += self._flush(source, at)
            state[INDEX] += 1
        state[OFFSET] = end
        self._unreported_bytes += end - at
        return batches

    def decode_parked(self, events: Iterator[bytes]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of parked changes, with their original positions and ids.

        Raises:
            UnsupportedEvent: The changes still cannot be decoded.
        """
        with np.errstate(over="ignore"):
            yield from decoded(events, self._decode_parked)

    def _decode_parked(self, kept: ParkedChange) -> pa.RecordBatch:
        state = self._state
        self._txs[0] = kept.tx
        state[TXS], state[OPEN], state[INDEX], state[OFFSET] = 1, 1, kept.index, 0
        repeated = kept.description == self._last_description  # describing may ask the catalog
        source = read_only(kept.change if repeated else kept.description + kept.change)
        self._last_description = kept.description
        self._scan(source)
        for reason in self._versions.holds.values():
            raise UnsupportedEvent(reason)
        if self._error is None:
            row, _, self._error = self._writer.write(source, self._rows, 0, 1, self._txs)
        if self._error is not None:
            raise self._error
        assert row is not None
        return row

    def _handle(self, stop: int, source: Bytes) -> None:
        """Handle the message at which `scan` stopped; the scan then continues after it."""
        state = self._state
        at, end = int(state[OFFSET]), int(state[END])
        if stop not in (RELATION, TYPE, MESSAGE, UNSUPPORTED):
            raise CorruptLog(f"{_DAMAGE[stop]}, {self._where()}")
        begun = at + 5 + XLOG_HEADER
        if stop == RELATION:
            self._versions.describe(source[begun + 1 : end].tobytes(), self._position())
        elif stop == TYPE:
            self._versions.name_type(source[begun + 1 : end].tobytes())
        elif stop == MESSAGE:
            # A damaged time overflows into the sign, as the kernel does with that of a transaction.
            sent_us = int(np.int64(EPOCH_US) + np.int64(read_64(source, begun - 8)))
            parsed = parse_message(source[begun + 1 : end].tobytes())
            self._take_message(parsed, source[end - parsed.size : end], end, sent_us)
        else:
            kind, lsn = chr(source[begun]), format_lsn(int(read_64(source, at + 6)))
            raise UnsupportedEvent(
                f"the log holds a {MESSAGE_NAMES.get(kind, repr(kind))} message (byte"
                f" 0x{ord(kind):02X}) at {lsn}, which this version does not decode,"
                f" {self._where()}"
            )

    def _take_message(
        self, message: LogicalMessage, content: Bytes, end: int, sent_us: int
    ) -> None:
        """Record a logical message as a change of the open transaction, or as one of its own."""
        state, rows, txs = self._state, self._rows, self._txs
        if message.transactional != bool(state[OPEN]):
            raise CorruptLog(f"{_DAMAGE[BAD_ORDER]}, {self._where()}")
        index = int(state[INDEX]) if message.transactional else 0
        state[INDEX] += message.transactional
        old = message.lsn <= state[START_LSN] and not message.transactional
        if old or state[OPEN] == SKIPPED:
            return
        is_event = self._messages.takes(message, content)
        if not message.transactional:
            state[IDLE_LSN], state[IDLE_XID] = message.lsn, -1
        if not is_event:
            return
        if not message.transactional:
            txs[state[TXS]] = (0, message.lsn, sent_us, message.lsn, 0)
            state[TXS] += 1
        version = self._versions.of_messages(message.prefix)
        last = not message.transactional
        rows[state[ROWS]] = (
            OP_MESSAGE, state[TXS] - 1, version, message.lsn, index, end - message.size, end, last
        )  # fmt: skip
        state[ROWS] += 1

    def _position(self) -> LsnPosition:
        """Return the position of the open transaction's commit, or else of the last one."""
        if not self._state[OPEN]:
            return LsnPosition(max(self._reported_lsn, int(self._state[IDLE_LSN])))
        tx = self._txs[self._state[TXS] - 1]
        return LsnPosition(int(tx[TX_FINAL_LSN]), int(tx[TX_XID]))

    def _where(self) -> str:
        """Return the current place in the log, for error messages."""
        position = self._position()
        if not self._state[OPEN]:
            return f"after {format_lsn(position.lsn)}"
        return f"in transaction {position.tx_id}, committed at {format_lsn(position.lsn)}"

    def _flush(self, source: Bytes, begun: int) -> list[ChangeBatch]:
        """Turn the scanned rows into batches; `begun` is where in the buffer the scan began.

        First the complete transactions, then idle progress after them, then the changes of the
        transaction that is still open, except the last, which is kept back.
        """
        rows, state = self._rows, self._state
        count = int(state[ROWS])
        batches = self._release_last_change(count)
        committed = np.flatnonzero(rows[:count, ROW_LAST])
        whole = int(committed[-1]) + 1 if committed.size else 0
        written, cursor, error = self._write(source, 0, whole, begun)
        batches += written
        if error is not None:  # it comes before any error that the scan found
            self._error = error
            return batches
        if state[IDLE_LSN] > self._reported_lsn:
            xid = int(state[IDLE_XID])
            batches.append(self._ending_at(None, int(state[IDLE_LSN]), None if xid < 0 else xid))
        if count > whole and self._error is None:
            written, cursor, error = self._write(source, whole, count - 1, cursor)
            batches += written
            if error is None:
                self._last_change, _, error = self._writer.write(
                    source, rows, count - 1, count, self._txs
                )
            self._error = error
        self._unreported_bytes += int(state[OFFSET]) - cursor
        return batches

    def _release_last_change(self, count: int) -> list[ChangeBatch]:
        """Return the withheld change, if it is known whether it is its transaction's last."""
        parked, tx = self._last_change, self._txs[0]
        if parked is None:
            return []
        if count and self._rows[0, ROW_TX] == 0:
            self._last_change = None
            return [ChangeBatch(parked, None)]
        if tx[TX_END_LSN]:
            self._last_change = None
            return [self._ending_at(with_tx_end(parked), int(tx[TX_END_LSN]), int(tx[TX_XID]))]
        return []

    def _write(
        self, source: Bytes, first: int, last: int, cursor: int
    ) -> tuple[list[ChangeBatch], int, DeltaforgeError | None]:
        """Write `rows[first:last]`; return also where in the buffer the last one ends."""
        rows, txs = self._rows, self._txs
        batches: list[ChangeBatch] = []
        error: DeltaforgeError | None = None
        while first < last and error is None:
            batch, stop, error = self._writer.write(source, rows, first, last, txs)
            if batch is None:
                break
            committed = np.flatnonzero(rows[first:stop, ROW_LAST])
            cut = int(committed[-1]) + 1 if committed.size else 0
            log_bytes = int(rows[stop - 1, ROW_END]) - cursor + self._unreported_bytes
            cursor, self._unreported_bytes = int(rows[stop - 1, ROW_END]), 0
            if cut:
                tx = txs[rows[first + cut - 1, ROW_TX]]
                whole = batch.slice(0, cut)
                xid = int(tx[TX_XID]) or None
                batches.append(self._ending_at(whole, int(tx[TX_END_LSN]), xid, log_bytes))
                log_bytes = 0
            if cut < stop - first:
                batches.append(ChangeBatch(batch.slice(cut), None, log_bytes))
            first = stop
        return batches, cursor, error

    def _ending_at(
        self, rows: pa.RecordBatch | None, lsn: int, xid: int | None, log_bytes: int = 0
    ) -> ChangeBatch:
        """Return a batch whose end is `lsn`, and record that position as returned."""
        self._reported_lsn = lsn
        return ChangeBatch(rows, LsnPosition(lsn, xid), log_bytes)
