"""First kernel: split the stream into messages and find the changes, without decoding their values.

`pgoutput` draws the byte layouts. `scan` tracks the state of the stream (Begin, Commit,
keepalives), writes one line per change (a truncate is a change of each table) and per transaction
(`layout`), and stops at messages that Python has to handle. `rows` decodes the values afterwards.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM109 - kernels are long flat
# loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
from deltaforge_dagster.sources.postgres.decode.layout import (
    END,
    IDLE_LSN,
    IDLE_XID,
    INDEX,
    OFFSET,
    OP_DELETE,
    OP_INSERT,
    OP_TRUNCATE,
    OP_UPDATE,
    OPEN,
    REPLY,
    ROW_END,
    ROW_INDEX,
    ROW_LAST,
    ROW_LSN,
    ROW_OP,
    ROW_START,
    ROW_TABLE,
    ROW_TX,
    ROWS,
    SKIPPED,
    START_LSN,
    TX_END_LSN,
    TX_FINAL_LSN,
    TX_ID_US,
    TX_TS_US,
    TX_XID,
    TXS,
)
from deltaforge_dagster.sources.postgres.decode.pgoutput import EPOCH_US, MAX_MESSAGE, XLOG_HEADER

NEED_MORE, FULL, RELATION, TYPE, MESSAGE, FOREIGN, UNSUPPORTED, PARKED_CHANGE = range(8)
"""Why `scan` stopped: the next message is incomplete; `rows` or `txs` is full; a Relation message;
a Type message; a logical message; a message that ends the stream; an unknown pgoutput message; a
change of a table on hold.
"""
BAD_SIZE, BAD_MESSAGE, BAD_ORDER, BAD_COMMIT, UNKNOWN_TABLE = range(10, 15)
"""Damage: an impossible size; a message of a wrong length for its type, with a negative LSN, or a
Begin with xid 0; a change or Commit outside a transaction, or a Begin inside one; a Commit that
does not match the Begin; a table without a Relation message.
"""

_COPY_DATA, _NOTICE, _PARAMETER = ord("d"), ord("N"), ord("S")
_XLOG, _KEEPALIVE = ord("w"), ord("k")
_BEGIN, _COMMIT, _ORIGIN, _TYPE, _RELATION = ord("B"), ord("C"), ord("O"), ord("Y"), ord("R")
_INSERT, _UPDATE, _DELETE, _TRUNCATE = ord("I"), ord("U"), ord("D"), ord("T")
_MESSAGE = ord("M")

ON_HOLD, IGNORED, UNKNOWN = -3, -2, -1
"""In place of a table version: the relation is on hold; not captured; has no Relation message."""


@kernel
def read_16(source: Bytes, at: int) -> int:
    """Return the big-endian Int16 at `at`, unsigned."""
    # 64 bits wide even without compilation, so that `read_64` overflows into the sign there, too.
    return np.int64(source[at]) << 8 | np.int64(source[at + 1])  # type: ignore[return-value]


@kernel
def read_32(source: Bytes, at: int) -> int:
    """Return the big-endian Int32 at `at`, unsigned."""
    return read_16(source, at) << 16 | read_16(source, at + 2)


@kernel
def read_64(source: Bytes, at: int) -> int:
    """Return the big-endian Int64 at `at`."""
    return read_32(source, at) << 32 | read_32(source, at + 4)


@kernel
def find_version(versions: Longs, oid: int) -> int:
    """Return the current table version of a relation, or `ON_HOLD`, `IGNORED` or `UNKNOWN`.

    `versions` is an open-addressing hash table of (oid, version) with linear probing: its size is a
    power of two, the search begins at `oid & mask`, and at least one line is free (oid -1).
    """
    mask = versions.shape[0] - 1
    line = oid & mask
    while versions[line, 0] != -1:
        if versions[line, 0] == oid:
            return int(versions[line, 1])
        line = (line + 1) & mask
    return UNKNOWN


@kernel
def scan(source: Bytes, length: int, state: Longs, versions: Longs, rows: Longs, txs: Longs) -> int:
    """Scan messages from `state[OFFSET]` on, and return why it stopped.

    Everything before `state[OFFSET]` is done. If Python has to handle a message, the offset is that
    of the message and `state[END]` is its end: the caller handles it, moves the offset there, and
    calls again.
    """
    while True:
        at = state[OFFSET]
        if length - at < 5:
            return NEED_MORE
        kind = source[at]
        size = read_32(source, at + 1)
        if size < 4 or size > MAX_MESSAGE:
            return BAD_SIZE
        end = at + 1 + size
        state[END] = end
        if kind != _COPY_DATA and kind != _NOTICE and kind != _PARAMETER:
            return FOREIGN
        if end > length:
            return NEED_MORE
        if kind != _COPY_DATA:
            state[OFFSET] = end
            continue
        if size < 5:
            return BAD_MESSAGE
        at += 5
        if source[at] == _KEEPALIVE:
            if end - at != 18:
                return BAD_MESSAGE
            if source[at + 17] != 0:
                state[REPLY] = 1
            passed = read_64(source, at + 1)
            if state[OPEN] == 0 and passed > state[IDLE_LSN]:
                state[IDLE_LSN] = passed
                state[IDLE_XID] = -1
            state[OFFSET] = end
            continue
        if source[at] != _XLOG or end - at <= XLOG_HEADER:
            return BAD_MESSAGE
        lsn = read_64(source, at + 1)
        if lsn < 0:
            return BAD_MESSAGE
        at += XLOG_HEADER
        message = source[at]
        if message == _INSERT or message == _UPDATE or message == _DELETE:
            if end - at < 8:
                return BAD_MESSAGE
            if state[OPEN] == 0:
                return BAD_ORDER
            version = find_version(versions, read_32(source, at + 1))
            if version == UNKNOWN:
                return UNKNOWN_TABLE
            if version == IGNORED or state[OPEN] == SKIPPED:
                state[INDEX] += 1
                state[OFFSET] = end
                continue
            if version == ON_HOLD:
                return PARKED_CHANGE
            row = state[ROWS]
            if row == rows.shape[0]:
                return FULL
            if message == _INSERT:
                rows[row, ROW_OP] = OP_INSERT
            elif message == _UPDATE:
                rows[row, ROW_OP] = OP_UPDATE
            else:
                rows[row, ROW_OP] = OP_DELETE
            rows[row, ROW_TX] = state[TXS] - 1
            rows[row, ROW_TABLE] = version
            rows[row, ROW_LSN] = lsn
            rows[row, ROW_INDEX] = state[INDEX]
            rows[row, ROW_START] = at + 5
            rows[row, ROW_END] = end
            rows[row, ROW_LAST] = 0
            state[ROWS] = row + 1
            state[INDEX] += 1
        elif message == _BEGIN:
            if end - at != 21 or read_64(source, at + 1) < 0:
                return BAD_MESSAGE
            # 0 is not a valid xid, and `layout.TX_XID` uses it for non-transactional messages.
            if read_32(source, at + 17) == 0:
                return BAD_MESSAGE
            if state[OPEN] != 0:
                return BAD_ORDER
            tx = state[TXS]
            if tx == txs.shape[0]:
                return FULL
            txs[tx, TX_FINAL_LSN] = read_64(source, at + 1)
            txs[tx, TX_TS_US] = read_64(source, at + 9) + EPOCH_US
            txs[tx, TX_XID] = read_32(source, at + 17)
            txs[tx, TX_END_LSN] = 0
            txs[tx, TX_ID_US] = txs[tx, TX_TS_US]
            state[TXS] = tx + 1
            state[OPEN] = SKIPPED if txs[tx, TX_FINAL_LSN] < state[START_LSN] else 1
            state[INDEX] = 0
        elif message == _COMMIT:
            if end - at != 26:
                return BAD_MESSAGE
            if state[OPEN] == 0:
                return BAD_ORDER
            tx = state[TXS] - 1
            end_lsn = read_64(source, at + 10)
            if read_64(source, at + 2) != txs[tx, TX_FINAL_LSN] or end_lsn <= txs[tx, TX_FINAL_LSN]:
                return BAD_COMMIT
            txs[tx, TX_END_LSN] = end_lsn
            last = state[ROWS] - 1
            if last >= 0 and rows[last, ROW_TX] == tx:
                rows[last, ROW_LAST] = 1
            state[IDLE_LSN] = end_lsn
            state[IDLE_XID] = txs[tx, TX_XID]
            state[OPEN] = 0
        elif message == _RELATION:
            return RELATION
        elif message == _TYPE:
            return TYPE
        elif message == _TRUNCATE:
            if end - at < 6 or end - at - 6 != 4 * read_32(source, at + 1):
                return BAD_MESSAGE
            if state[OPEN] == 0:
                return BAD_ORDER
            relations = read_32(source, at + 1)
            if relations > rows.shape[0]:
                return UNSUPPORTED
            if relations > rows.shape[0] - state[ROWS]:
                return FULL
            for relation in range(relations):
                version = find_version(versions, read_32(source, at + 6 + 4 * relation))
                if version == ON_HOLD and state[OPEN] != SKIPPED:
                    return PARKED_CHANGE
            for relation in range(relations):
                version = find_version(versions, read_32(source, at + 6 + 4 * relation))
                if version == UNKNOWN:
                    return UNKNOWN_TABLE
                if version != IGNORED and state[OPEN] != SKIPPED:
                    row = state[ROWS]
                    rows[row, ROW_OP] = OP_TRUNCATE
                    rows[row, ROW_TX] = state[TXS] - 1
                    rows[row, ROW_TABLE] = version
                    rows[row, ROW_LSN] = lsn
                    rows[row, ROW_INDEX] = state[INDEX]
                    rows[row, ROW_START] = at + 5
                    rows[row, ROW_END] = end
                    rows[row, ROW_LAST] = 0
                    state[ROWS] = row + 1
                state[INDEX] += 1
        elif message == _MESSAGE:
            if state[ROWS] == rows.shape[0] or state[TXS] == txs.shape[0]:
                return FULL
            return MESSAGE
        elif message != _ORIGIN:
            return UNSUPPORTED
        state[OFFSET] = end
