"""First kernel: split the stream into events and note every change, without reading its values.

The byte layouts of packets and events are drawn in `binlog`. A rows event holds changes of one
table, of one kind (MySQL internals documentation, "ROWS_EVENT")::

    Int48 table id | Int16 flags | version 2 only: Int16 size of extra data, itself included, data
    | packed number of columns | bitmap: columns in the (old) image | UPDATE: in the new image
    | rows until the end: image, or old image and new image

    image       bitmap: 1 for null, one bit for each column that is in the image | their values

Bitmaps have the first column in the lowest bit of the first byte. `scan` reads what steers the
stream into its state, writes one line per change and per transaction (`layout`), and stops where
Python has to act. To find where a row ends it passes over all of its
values, which is also where their sizes are compared with the end of the event. The values are read
by `rows` afterwards.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM109, SIM110 - kernels are long flat loops over bytes, see `sources.kernel`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.sources.json_text import STRING_GROWTH, string_size
from deltaforge_dagster.sources.kernel import Bytes, Longs, kernel
from deltaforge_dagster.sources.mysql.binlog import (
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
    MARIADB_GTID,
    PARTIAL_UPDATE_ROWS,
    PREVIOUS_GTIDS,
    QUERY,
    QUERY_COMPRESSED,
    ROTATE,
    ROWS_QUERY,
    START_ENCRYPTION,
    STOP,
    TABLE_MAP,
    TRANSACTION_CONTEXT,
    TRANSACTION_PAYLOAD,
    UPDATE_ROWS_1,
    UPDATE_ROWS_2,
    VIEW_CHANGE,
    WRITE_ROWS_1,
    WRITE_ROWS_2,
    WRITE_ROWS_COMPRESSED_1,
    XA_PREPARE,
    XID,
)
from deltaforge_dagster.sources.mysql.checksum import crc32
from deltaforge_dagster.sources.mysql.floats import VECTOR_GROWTH
from deltaforge_dagster.sources.mysql.layout import (
    BARE,
    BEGUN,
    CHECKSUM,
    COLUMN_KIND,
    COLUMN_PREFIX,
    COLUMN_SIZE,
    EVENT,
    EVENT_END,
    EVENT_POS,
    FILE_A,
    FILE_B,
    GROUP,
    GTID_OF_MARIADB,
    GTID_OF_MYSQL,
    HELD,
    HELD_INDEX,
    INDEX,
    INNER,
    MAP_END,
    MAP_ID,
    MAP_START,
    MAP_VERSION,
    NEXT_ROW,
    OFFSET,
    OP_DELETE,
    OP_INSERT,
    OP_UPDATE,
    OPEN,
    PACKET_END,
    POS,
    PREPARING,
    ROW_END,
    ROW_INDEX,
    ROW_LAST,
    ROW_NEW,
    ROW_NEW_BITS,
    ROW_NEW_COUNT,
    ROW_OLD,
    ROW_OLD_BITS,
    ROW_OLD_COUNT,
    ROW_OP,
    ROW_POS,
    ROW_SIZE,
    ROW_TABLE,
    ROW_TX,
    ROWS,
    TABLE_CAPTURED,
    TABLE_COLUMNS,
    TABLE_FIRST,
    TABLE_SIZE,
    TX_A,
    TX_B,
    TX_END,
    TX_HAS_GTID,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
    TXS,
)
from deltaforge_dagster.sources.mysql.numbers import (
    read_8,
    read_16,
    read_24,
    read_32,
    read_48,
    read_56,
    read_64,
    read_big,
    read_size,
)
from deltaforge_dagster.sources.mysql.values import BLOB, BYTES, JSON, UTF_8_TEXT, VECTOR

NEED_MORE, FULL, FOREIGN, SPLIT, NEW_TABLE, STATEMENT, NEW_FILE, FORMAT, UNSUPPORTED = range(9)
TAGGED, PAYLOAD, OF_XA, PREPARED, COMPRESSED, PARTIAL = range(9, 15)
"""Why `scan` stops: the rest is not whole; no line left in rows or txs; a packet that is no
event; an event in several packets; a TABLE_MAP event not seen before; a QUERY event that is no
transaction control; a ROTATE event; a FORMAT_DESCRIPTION event; an event that is not decoded. A
GTID_TAGGED event; a TRANSACTION_PAYLOAD event; an event about rows of an XA transaction; an XA_PREPARE
event; an event of MariaDB's that is compressed; a
PARTIAL_UPDATE_ROWS event."""
HELD_ROWS = 19
"""A rows event of a table whose changes are kept back; they are counted."""
BAD_EVENT, BAD_SUM, BAD_ORDER, BAD_ROWS, UNKNOWN_TABLE, NO_COLUMNS = range(20, 26)
"""Damage: an event that is shorter or longer than its kind; a wrong CRC32; an event where a
transaction may not have it; a row that does not follow its table; a table never described. And a
change without any column in its image."""

SPLIT_SIZE = 0xFFFFFF
"""Size of a packet that the next one goes on with."""

_EXACT = 1 << 16
"""From this size on the room for a text is counted, rather than asked for six times of it."""

_BEGIN = np.frombuffer(b"BEGIN", np.uint8).copy()
_COMMIT = np.frombuffer(b"COMMIT", np.uint8).copy()
_SAVEPOINT = np.frombuffer(b"SAVEPOINT ", np.uint8).copy()


@kernel
def find_table(tables: Longs, table_id: int) -> int:
    """Return the line of a table id, or of the free line where it would stand.

    `tables` is an open-addressing hash table (`MAP_*`): its size is a power of two, an id's line is
    the first from `id & mask` on, and at least one line is free.
    """
    mask = tables.shape[0] - 1
    line = table_id & mask
    while tables[line, MAP_ID] != -1 and tables[line, MAP_ID] != table_id:
        line = (line + 1) & mask
    return int(line)


@kernel
def _is_text(source: Bytes, start: int, end: int, text: Bytes) -> bool:
    """Say whether `source[start:end]` begins with `text`."""
    if end - start < text.size:
        return False
    for i in range(text.size):
        if source[start + i] != text[i]:
            return False
    return True


@kernel
def _image_end(
    source: Bytes,
    at: int,
    end: int,
    bits: int,
    present: int,
    table: int,
    tables: Longs,
    columns: Longs,
) -> tuple[int, int]:
    """Return the place after the image at `at`, negative if it does not end before `end`.

    The second number is how many bytes of JSON its values of unbounded size need at most. `bits` is
    where the bitmap of its columns stands, `present` how many are in it.
    """
    nulls = at
    at += (present + 7) >> 3
    if at > end:
        return -1, 0
    room = 0
    place = 0
    first = tables[table, TABLE_FIRST]
    for index in range(tables[table, TABLE_COLUMNS]):
        if (source[bits + (index >> 3)] >> (index & 7)) & 1 == 0:
            continue
        null = (source[nulls + (place >> 3)] >> (place & 7)) & 1
        place += 1
        if null != 0:
            continue
        column = first + index
        size = columns[column, COLUMN_SIZE]
        prefix = columns[column, COLUMN_PREFIX]
        if prefix != 0:
            if end - at < prefix:
                return -1, 0
            size = read_size(source, at, prefix)
            at += prefix
            if size > end - at:
                return -1, 0
            kind = columns[column, COLUMN_KIND]
            if kind == VECTOR:
                room += size * VECTOR_GROWTH
            elif size < _EXACT or kind == JSON:
                room += size * STRING_GROWTH
            elif kind == BLOB:
                room += 2 * size
            elif kind == UTF_8_TEXT or kind == BYTES:
                # As a string, or as Base64.
                room += max(string_size(source, at, at + size), 2 * size)
            else:
                # Up to three bytes for one that is not escaped.
                room += string_size(source, at, at + size) + 2 * size
        elif size > end - at:
            return -1, 0
        at += size
    return at, room


@kernel
def _count_bits(source: Bytes, at: int, bits: int) -> int:
    """Return how many of the first bits from `at` on are set."""
    count = 0
    for bit in range(bits):
        count += (read_8(source, at + (bit >> 3)) >> (bit & 7)) & 1
    return count


@kernel
def _scan_rows(
    source: Bytes,
    kind: int,
    at: int,
    end: int,
    state: Longs,
    maps: Longs,
    tables: Longs,
    columns: Longs,
    rows: Longs,
) -> int:
    """Note the changes of the rows event whose body is `source[at:end]`; return 0 when done."""
    if end - at < 10:
        return BAD_EVENT
    found = find_table(maps, read_48(source, at))
    if maps[found, MAP_ID] == -1:
        return UNKNOWN_TABLE
    table = maps[found, MAP_VERSION]
    at += 8
    if kind >= WRITE_ROWS_2:
        extra = read_16(source, at)
        if extra < 2 or extra > end - at:
            return BAD_EVENT
        at += extra
    count = tables[table, TABLE_COLUMNS]
    if end - at < 1:
        return BAD_EVENT
    sent = read_8(source, at)
    at += 1
    if sent == 252:
        if end - at < 2:
            return BAD_EVENT
        sent = read_16(source, at)
        at += 2
    if sent != count:
        return BAD_ROWS
    update = kind == UPDATE_ROWS_1 or kind == UPDATE_ROWS_2
    insert = kind == WRITE_ROWS_1 or kind == WRITE_ROWS_2
    width = (count + 7) >> 3
    if end - at < (2 * width if update else width):
        return BAD_EVENT
    bits = at
    at += width
    present = _count_bits(source, bits, count)
    new_bits, new_present = bits, present
    if update:
        new_bits = at
        at += width
        new_present = _count_bits(source, new_bits, count)
    if present == 0:
        return NO_COLUMNS
    if state[NEXT_ROW] != 0:
        at = state[NEXT_ROW]
    else:
        state[HELD_INDEX] = state[INDEX]
    captured = tables[table, TABLE_CAPTURED] == 1
    while at < end:
        row = state[ROWS]
        if row == rows.shape[0]:
            state[NEXT_ROW] = at
            return FULL
        middle, room = _image_end(source, at, end, bits, present, table, tables, columns)
        if middle < 0:
            return BAD_ROWS
        after, new_room = middle, 0
        if update:
            after, new_room = _image_end(
                source, middle, end, new_bits, new_present, table, tables, columns
            )
            if after < 0:
                return BAD_ROWS
        if captured:
            rows[row, ROW_TX] = state[TXS] - 1
            rows[row, ROW_TABLE] = table
            rows[row, ROW_POS] = state[EVENT_POS]
            rows[row, ROW_INDEX] = state[INDEX]
            rows[row, ROW_OLD] = at
            rows[row, ROW_NEW] = at if insert else middle
            rows[row, ROW_END] = after
            rows[row, ROW_OLD_BITS] = bits
            rows[row, ROW_NEW_BITS] = new_bits
            rows[row, ROW_OLD_COUNT] = present
            rows[row, ROW_NEW_COUNT] = new_present
            rows[row, ROW_SIZE] = max(room, new_room) + tables[table, TABLE_SIZE]
            rows[row, ROW_LAST] = 0
            if insert:
                rows[row, ROW_OP] = OP_INSERT
            elif update:
                rows[row, ROW_OP] = OP_UPDATE
            else:
                rows[row, ROW_OP] = OP_DELETE
            state[ROWS] = row + 1
        state[INDEX] += 1
        at = after
    state[NEXT_ROW] = 0
    return HELD_ROWS if tables[table, TABLE_CAPTURED] == HELD else 0


@kernel
def _begin(source: Bytes, at: int, end: int, state: Longs, txs: Longs, seconds: int) -> int:
    """Open the transaction of the GTID event whose body is `source[at:end]`; return 0 when done."""
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
    # The commit times follow the two clocks, which the byte 2 announces.
    clocks = at + 25
    if end - clocks >= 24 and source[clocks] == 2:
        time = clocks + 17
        here = read_56(source, time)
        if here >> 55 != 0:
            if end - time < 14:
                return BAD_EVENT
            txs[tx, TX_TS_US] = read_56(source, time + 7)
        elif here != 0:
            txs[tx, TX_TS_US] = here
    txs[tx, TX_END] = 0
    state[TXS] = tx + 1
    state[OPEN] = GROUP
    state[INDEX] = 0
    return 0


_STANDALONE, _GROUP_COMMIT, _PREPARED_XA, _COMPLETED_XA = 1, 2, 64, 128
_TWO_PHASES = 2 | 8


@kernel
def _begin_mariadb(source: Bytes, at: int, end: int, state: Longs, txs: Longs) -> int:
    """Open the transaction of MariaDB's GTID event whose body is `source[at:end]`."""
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
    """Close the open transaction at the event that is read, or that `scan` stopped at."""
    tx = state[TXS] - 1
    txs[tx, TX_END] = state[EVENT_POS]
    last = state[ROWS] - 1
    if last >= 0 and rows[last, ROW_TX] == tx:
        rows[last, ROW_LAST] = 1
    state[OPEN] = 0


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
    """Read events from `state[OFFSET]` on, and return why it stopped.

    They stand in packets, or, as `state[BARE]` says, one directly behind the other.

    Everything before `state[OFFSET]` is done. Where Python has to act, the offset is that of the
    packet, `state[EVENT]` and `state[EVENT_END]` are where the event stands (without its sum) and
    `state[PACKET_END]` is where to go on: the caller acts, and calls `pass_event`.
    """
    while True:
        at = state[OFFSET]
        bare = state[BARE]
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
        if bare != INNER and (kind == FORMAT_DESCRIPTION or state[CHECKSUM] != 0):
            end -= CHECKSUM_SIZE
            if end - at < HEADER:
                return BAD_EVENT
            # Python looks at that of FORMAT_DESCRIPTION, which says whether there are any.
            checked = kind == FORMAT_DESCRIPTION or state[NEXT_ROW] != 0
            if not checked and crc32(source, at, end) != read_32(source, end):
                return BAD_SUM
        low = read_32(source, at + 13)
        pos = state[POS]
        if low != 0 and flags & FLAG_ARTIFICIAL == 0 and bare != INNER:
            pos = (pos & ~np.int64(0xFFFFFFFF)) | low
            if pos < state[POS]:
                # Only events of the file stand beyond 4 GiB; a heartbeat repeats what was sent.
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
            stop = _scan_rows(source, kind, at, end, state, maps, tables, columns, rows)
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
            if bare == INNER:
                return BAD_ORDER
            stop = _begin(source, at, end, state, txs, read_32(source, at - HEADER))
        elif kind == MARIADB_GTID:
            if bare == INNER:
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
            return PAYLOAD if state[OPEN] == GROUP and bare != INNER else BAD_ORDER
        elif kind == GTID_TAGGED or kind == ROTATE or kind == FORMAT_DESCRIPTION:
            if state[OPEN] != 0 or bare == INNER:
                return BAD_ORDER
            if kind == ROTATE:
                return NEW_FILE
            if kind == FORMAT_DESCRIPTION:
                return FORMAT
            return TAGGED if state[TXS] < txs.shape[0] else FULL
        elif (
            flags & FLAG_IGNORABLE == 0
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
    """Go on after the event that was read."""
    state[OFFSET] = state[PACKET_END]
    state[POS] = state[EVENT_POS]
