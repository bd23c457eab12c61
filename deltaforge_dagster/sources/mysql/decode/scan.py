"""First kernel: split the stream into events, and find transactions and changes.

`events.binlog` has the layout of packets and events. `scan` keeps the state of the stream, writes
one line per change (`scan_rows`) and per transaction (`layout`), and stops at events that Python
has to handle.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM109, SIM110 - kernels are long
# flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
from deltaforge_dagster.sources.mysql.decode.layout import (
    BAD_EVENT,
    BAD_ORDER,
    BAD_SUM,
    BARE,
    BEGUN,
    CHECKSUM,
    COMPRESSED,
    EVENT,
    EVENT_END,
    EVENT_POS,
    FILE_A,
    FILE_B,
    FOREIGN,
    FORMAT,
    FULL,
    GROUP,
    GTID_OF_MARIADB,
    GTID_OF_MYSQL,
    INDEX,
    MAP_END,
    MAP_ID,
    MAP_START,
    MEASURED,
    MEASURED_OPEN,
    MEASURING,
    NEED_MORE,
    NESTED,
    NEW_FILE,
    NEW_TABLE,
    NEXT_ROW,
    OF_XA,
    OFFSET,
    OPEN,
    PACKET_END,
    PARTIAL,
    PAYLOAD,
    POS,
    PREPARED,
    PREPARING,
    REACHED,
    ROW_LAST,
    ROW_TX,
    ROWS,
    SPLIT,
    STATEMENT,
    TAGGED,
    TX_A,
    TX_B,
    TX_END,
    TX_HAS_GTID,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
    TXS,
    UNSUPPORTED,
    UNTIL,
)
from deltaforge_dagster.sources.mysql.decode.scan_rows import find_table, measure_rows, scan_rows
from deltaforge_dagster.sources.mysql.events.binlog import (
    ANNOTATE_ROWS,
    ANONYMOUS_GTID,
    BINLOG_CHECKPOINT,
    CHECKSUM_SIZE,
    DELETE_ROWS_1,
    DELETE_ROWS_2,
    DELETE_ROWS_COMPRESSED_2,
    FLAG_ARTIFICIAL,
    FLAG_IGNORABLE,
    FORMAT_DESCRIPTION,
    GTID,
    GTID_LIST,
    GTID_TAGGED,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_2,
    IGNORABLE,
    INTVAR,
    MARIADB_GTID,
    PARTIAL_ROW_DATA,
    PARTIAL_UPDATE_ROWS,
    PREVIOUS_GTIDS,
    QUERY,
    QUERY_COMPRESSED,
    RAND,
    ROTATE,
    ROWS_QUERY,
    START_ENCRYPTION,
    STOP,
    TABLE_MAP,
    TRANSACTION_CONTEXT,
    TRANSACTION_PAYLOAD,
    USER_VAR,
    VIEW_CHANGE,
    WRITE_ROWS_1,
    WRITE_ROWS_2,
    WRITE_ROWS_COMPRESSED_1,
    XA_PREPARE,
    XID,
)
from deltaforge_dagster.sources.mysql.values.numbers import (
    read_8,
    read_16,
    read_24,
    read_32,
    read_48,
    read_56,
    read_64,
    read_big,
)


def _crc_tables() -> Longs:
    """Return the tables of CRC-32 (IEEE 802.3) for eight bytes at a time ("slicing by eight").

    Table `n` has each byte's contribution to the checksum after `n` more bytes.
    """
    tables = np.zeros((8, 256), np.int64)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        tables[0, byte] = value
    for step in range(1, 8):
        for byte in range(256):
            value = int(tables[step - 1, byte])
            tables[step, byte] = value >> 8 ^ int(tables[0, value & 255])
    return tables


_CRC = _crc_tables()


@kernel
def crc32(source: Bytes, start: int, end: int) -> int:
    """Return the CRC32 of `source[start:end]`, equal to `zlib.crc32`."""
    value = 0xFFFFFFFF
    at = start
    while end - at >= 8:
        low = value ^ read_32(source, at)
        value = (
            _CRC[7, low & 255]
            ^ _CRC[6, (low >> 8) & 255]
            ^ _CRC[5, (low >> 16) & 255]
            ^ _CRC[4, low >> 24]
            ^ _CRC[3, source[at + 4]]
            ^ _CRC[2, source[at + 5]]
            ^ _CRC[1, source[at + 6]]
            ^ _CRC[0, source[at + 7]]
        )
        at += 8
    while at < end:
        value = (value >> 8) ^ _CRC[0, (value ^ read_8(source, at)) & 255]
        at += 1
    return int(value ^ 0xFFFFFFFF)


SPLIT_SIZE = 0xFFFFFF
"""Size of a packet whose event continues in the next packet."""

_BEGIN = np.frombuffer(b"BEGIN", np.uint8).copy()
_COMMIT = np.frombuffer(b"COMMIT", np.uint8).copy()
_SAVEPOINT = np.frombuffer(b"SAVEPOINT ", np.uint8).copy()


@kernel
def _is_text(source: Bytes, start: int, end: int, text: Bytes) -> bool:
    """Return whether `source[start:end]` begins with `text`."""
    if end - start < text.size:
        return False
    for i in range(text.size):
        if source[start + i] != text[i]:
            return False
    return True


@kernel
def _begin(source: Bytes, at: int, end: int, state: Longs, txs: Longs, seconds: int) -> int:
    """Begin the transaction of the GTID event with the body `source[at:end]`.

    Returns 0, or why it stopped (`layout`). `seconds` is the time in the event's header, used if
    the event has no commit time.
    """
    if end - at < 25:
        return BAD_EVENT
    if state[OPEN] != 0:
        return BAD_ORDER
    tx = state[TXS]
    if tx == txs.shape[0]:
        return FULL
    number = read_64(source, at + 17)
    if number > 0:
        txs[tx, TX_A] = read_big(source, at + 1, 8)
        txs[tx, TX_B] = read_big(source, at + 9, 8)
        txs[tx, TX_NUMBER] = number
        txs[tx, TX_HAS_GTID] = GTID_OF_MYSQL
    else:
        txs[tx, TX_A] = state[FILE_A]
        txs[tx, TX_B] = state[FILE_B]
        txs[tx, TX_NUMBER] = state[EVENT_POS]
        txs[tx, TX_HAS_GTID] = 0
    txs[tx, TX_TAG] = 0
    txs[tx, TX_TS_US] = seconds * 1_000_000
    # The commit times follow the two logical clocks, which exist if the byte before them is 2. The
    # highest bit of the first time says that the commit time on the first server follows it.
    clocks = at + 25
    if end - clocks >= 24 and source[clocks] == 2:
        time = clocks + 17
        committed = read_56(source, time)
        if committed >> 55 != 0:
            if end - time < 14:
                return BAD_EVENT
            txs[tx, TX_TS_US] = read_56(source, time + 7)
        elif committed != 0:
            txs[tx, TX_TS_US] = committed
    txs[tx, TX_END] = 0
    state[TXS] = tx + 1
    state[OPEN] = GROUP
    state[INDEX] = 0
    return 0


# Bits of `flags`, and of `flags_extra` (MariaDB 10.8 and newer, `events.binlog`) those of an ALTER
# TABLE in two phases that begins, or fails.
_STANDALONE, _GROUP_COMMIT, _PREPARED_XA, _COMPLETED_XA = 1, 2, 64, 128
_TWO_PHASES = 2 | 8


@kernel
def _begin_mariadb(source: Bytes, at: int, end: int, state: Longs, txs: Longs) -> int:
    """Begin the transaction of MariaDB's GTID event with the body `source[at:end]`.

    Returns 0, or why it stopped (`layout`).
    """
    if end - at < 19:
        return BAD_EVENT
    if state[OPEN] != 0:
        return BAD_ORDER
    tx = state[TXS]
    if tx == txs.shape[0]:
        return FULL
    number = read_64(source, at)
    flags = read_8(source, at + 12)
    more = at + 13
    if flags & _GROUP_COMMIT != 0:
        more += 8
    if flags & (_PREPARED_XA | _COMPLETED_XA) != 0:
        if end - more < 6:
            return BAD_EVENT
        more += 6 + read_8(source, more + 4) + read_8(source, more + 5)
    if number <= 0 or more > end:
        return BAD_EVENT
    if more < end and read_8(source, more) & _TWO_PHASES != 0:
        return UNSUPPORTED
    txs[tx, TX_A] = read_32(source, at + 8)
    txs[tx, TX_B] = read_32(source, at - HEADER + 5)
    txs[tx, TX_NUMBER] = number
    txs[tx, TX_TAG] = 0
    txs[tx, TX_HAS_GTID] = GTID_OF_MARIADB
    txs[tx, TX_TS_US] = read_32(source, at - HEADER) * 1_000_000
    txs[tx, TX_END] = 0
    state[TXS] = tx + 1
    state[INDEX] = 0
    if flags & _PREPARED_XA != 0:
        state[OPEN] = PREPARING
    elif flags & _STANDALONE != 0:
        state[OPEN] = GROUP
    else:
        state[OPEN] = BEGUN
    return 0


@kernel
def commit(state: Longs, rows: Longs, txs: Longs) -> None:
    """End the open transaction at the current event, which `scan` reads or at which it stopped."""
    tx = state[TXS] - 1
    txs[tx, TX_END] = state[EVENT_POS]
    last = state[ROWS] - 1
    if last >= 0 and rows[last, ROW_TX] == tx:
        rows[last, ROW_LAST] = 1
    state[OPEN] = 0
    state[MEASURED] = state[MEASURED_OPEN]


@kernel
def scan(
    source: Bytes,
    length: int,
    state: Longs,
    maps: Longs,
    map_texts: Bytes,
    tables: Longs,
    columns: Longs,
    rows: Longs,
    txs: Longs,
) -> int:
    """Scan events from `state[OFFSET]` on, and return why it stopped (`layout`).

    The events are in packets, or, if `state[BARE]` is set, directly one after another. Everything
    before `state[OFFSET]` is done. If Python has to handle an event, the offset is that of its
    packet, `state[EVENT]` and `state[EVENT_END]` are the event's bounds (without checksum), and
    `state[PACKET_END]` is where to continue: the caller handles the event, then calls `pass_event`.
    """
    while True:
        at = state[OFFSET]
        bare = state[BARE]
        if state[UNTIL] != 0 and state[OPEN] == 0 and state[POS] >= state[UNTIL] and bare == 0:
            return REACHED
        if bare != 0:
            if length - at < HEADER:
                return NEED_MORE
            packet_end = at + read_32(source, at + 9)
            if packet_end > length:
                return NEED_MORE
        else:
            if length - at < 4:
                return NEED_MORE
            size = read_24(source, at)
            if size == SPLIT_SIZE:
                return SPLIT
            packet_end = at + 4 + size
            if packet_end > length:
                return NEED_MORE
            if size == 0:
                return BAD_EVENT
            if source[at + 4] != 0:
                return FOREIGN
            at += 5
        end = packet_end
        if end - at < HEADER or read_32(source, at + 9) != end - at:
            return BAD_EVENT
        kind = read_8(source, at + 4)
        flags = read_16(source, at + 17)
        if bare != NESTED and (kind == FORMAT_DESCRIPTION or state[CHECKSUM] != 0):
            end -= CHECKSUM_SIZE
            if end - at < HEADER:
                return BAD_EVENT
            # Python verifies the checksum of FORMAT_DESCRIPTION, the event that says whether there
            # are any. A rows event that is continued (NEXT_ROW) was verified when it was begun.
            # Events that are only measured are read again later, and verified then.
            checked = kind == FORMAT_DESCRIPTION or state[NEXT_ROW] != 0 or state[MEASURING] != 0
            if not checked and crc32(source, at, end) != read_32(source, end):
                return BAD_SUM
        low = read_32(source, at + 13)
        pos = state[POS]
        if low != 0 and flags & FLAG_ARTIFICIAL == 0 and bare != NESTED:
            pos = (pos & ~np.int64(0xFFFFFFFF)) | low
            if pos < state[POS]:
                # The 32-bit position wrapped at 4 GiB; only a heartbeat repeats an earlier
                # position.
                heartbeat = kind == HEARTBEAT or kind == HEARTBEAT_2
                pos = state[POS] if heartbeat else pos + (np.int64(1) << 32)
        state[EVENT], state[EVENT_END], state[PACKET_END] = at, end, packet_end
        state[EVENT_POS] = pos
        at += HEADER
        stop = 0
        rows_event = (WRITE_ROWS_2 <= kind <= DELETE_ROWS_2) or (
            WRITE_ROWS_1 <= kind <= DELETE_ROWS_1
        )
        if state[OPEN] == PREPARING and (
            rows_event
            or kind == TABLE_MAP
            or kind == PARTIAL_UPDATE_ROWS
            or WRITE_ROWS_COMPRESSED_1 <= kind <= DELETE_ROWS_COMPRESSED_2
        ):
            return OF_XA
        if rows_event:
            if state[OPEN] != BEGUN:
                return BAD_ORDER
            if state[MEASURING] != 0:
                stop = measure_rows(source, at, end, state, maps, tables)
            else:
                stop = scan_rows(source, kind, at, end, state, maps, tables, columns, rows)
        elif kind == PARTIAL_UPDATE_ROWS:
            return PARTIAL if state[OPEN] == BEGUN else BAD_ORDER
        elif kind == TABLE_MAP:
            if state[OPEN] != BEGUN:
                return BAD_ORDER
            if end - at < 8:
                return BAD_EVENT
            line = find_table(maps, read_48(source, at))
            start, stored = maps[line, MAP_START], maps[line, MAP_END] - maps[line, MAP_START]
            if maps[line, MAP_ID] == -1 or stored != end - at:
                return NEW_TABLE
            for i in range(stored):
                if source[at + i] != map_texts[start + i]:
                    return NEW_TABLE
        elif kind == GTID or kind == ANONYMOUS_GTID:
            if bare == NESTED:
                return BAD_ORDER
            stop = _begin(source, at, end, state, txs, read_32(source, at - HEADER))
        elif kind == MARIADB_GTID:
            if bare == NESTED:
                return BAD_ORDER
            stop = _begin_mariadb(source, at, end, state, txs)
        elif QUERY_COMPRESSED <= kind <= DELETE_ROWS_COMPRESSED_2:
            return COMPRESSED if state[OPEN] != 0 else BAD_ORDER
        elif kind == XID:
            if state[OPEN] != BEGUN:
                return BAD_ORDER
            commit(state, rows, txs)
        elif kind == XA_PREPARE:
            return PREPARED if state[OPEN] == PREPARING else BAD_ORDER
        elif kind == QUERY:
            if end - at < 13:
                return BAD_EVENT
            if state[OPEN] == 0:
                return BAD_ORDER
            text = at + 14 + read_8(source, at + 8) + read_16(source, at + 11)
            if text > end:
                return BAD_EVENT
            if state[OPEN] == GROUP and end - text == 5 and _is_text(source, text, end, _BEGIN):
                state[OPEN] = BEGUN
            elif state[OPEN] == BEGUN and end - text == 6 and _is_text(source, text, end, _COMMIT):
                commit(state, rows, txs)
            elif state[OPEN] != BEGUN or not _is_text(source, text, end, _SAVEPOINT):
                return STATEMENT
        elif kind == TRANSACTION_PAYLOAD:
            return PAYLOAD if state[OPEN] == GROUP and bare != NESTED else BAD_ORDER
        elif kind == GTID_TAGGED or kind == ROTATE or kind == FORMAT_DESCRIPTION:
            if state[OPEN] != 0 or bare == NESTED:
                return BAD_ORDER
            if kind == ROTATE:
                return NEW_FILE
            if kind == FORMAT_DESCRIPTION:
                return FORMAT
            return TAGGED if state[TXS] < txs.shape[0] else FULL
        elif kind == PARTIAL_ROW_DATA or (
            flags & FLAG_IGNORABLE == 0
            and kind != INTVAR
            and kind != RAND
            and kind != USER_VAR
            and kind != HEARTBEAT
            and kind != HEARTBEAT_2
            and kind != STOP
            and kind != IGNORABLE
            and kind != ROWS_QUERY
            and kind != PREVIOUS_GTIDS
            and kind != TRANSACTION_CONTEXT
            and kind != VIEW_CHANGE
            and kind != ANNOTATE_ROWS
            and kind != BINLOG_CHECKPOINT
            and kind != GTID_LIST
            and kind != START_ENCRYPTION
        ):
            return UNSUPPORTED
        if stop != 0:
            return stop
        pass_event(state)


@kernel
def pass_event(state: Longs) -> None:
    """Move on to the event after the current one."""
    state[OFFSET] = state[PACKET_END]
    state[POS] = state[EVENT_POS]
