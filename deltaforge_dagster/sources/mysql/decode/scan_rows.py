"""Part of the first kernel: find the changes in a rows event, without decoding their values.

A rows event has changes of one table, of one kind (MySQL internals documentation,
"ROWS_EVENT")::

    Int48 table id | Int16 flags | version 2 only: Int16 size of extra data, itself included, data
    | packed number of columns | bitmap: columns in the (old) image | UPDATE: in the new image
    | rows until the end: image, or old image and new image

    image       bitmap: 1 for null, one bit for each column that is in the image | their values

Bitmaps have the first column in the lowest bit of the first byte. To find the end of a row, all of
its values are skipped, and their sizes are checked against the end of the event. `rows` decodes the
values afterwards.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM109 - kernels are long flat
# loops over bytes, see `kernels.runtime`

from __future__ import annotations

from deltaforge_dagster.kernels.json_text import STRING_GROWTH, string_size
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
from deltaforge_dagster.sources.mysql.decode.layout import (
    BAD_EVENT,
    BAD_ROWS,
    COLUMN_DEFAULT,
    COLUMN_KIND,
    COLUMN_PREFIX,
    COLUMN_SIZE,
    EVENT_POS,
    FULL,
    INDEX,
    LACKING,
    MAP_ID,
    MAP_VERSION,
    MEASURED_OPEN,
    NEXT_ROW,
    NO_COLUMNS,
    NOT_ASKED,
    ON_HOLD,
    OP_DELETE,
    OP_INSERT,
    OP_UPDATE,
    PARKED_INDEX,
    PARKED_ROWS,
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
    TXS,
    UNKNOWN_TABLE,
)
from deltaforge_dagster.sources.mysql.events.binlog import (
    UPDATE_ROWS_1,
    UPDATE_ROWS_2,
    WRITE_ROWS_1,
    WRITE_ROWS_2,
)
from deltaforge_dagster.sources.mysql.values.numbers import (
    VECTOR_GROWTH,
    read_8,
    read_16,
    read_48,
    read_size,
)
from deltaforge_dagster.sources.mysql.values.types import BLOB, BYTES, JSON, UTF_8_TEXT, VECTOR

_EXACT = 1 << 16
"""From this size on, a text's room is computed exactly; below, it is six bytes per byte."""


@kernel
def find_table(tables: Longs, table_id: int) -> int:
    """Return the line of a table id, or the free line for it if it is not there.

    `tables` is an open-addressing hash table (`MAP_*`) with linear probing: its size is a power of
    two, and the search begins at `id & mask`. At least one line must be free.
    """
    mask = tables.shape[0] - 1
    line = table_id & mask
    while tables[line, MAP_ID] != -1 and tables[line, MAP_ID] != table_id:
        line = (line + 1) & mask
    return int(line)


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
    """Return the offset after the image at `at`, and the most bytes that its long values need.

    Long values are those of unbounded size, which need these bytes as JSON. The offset is negative
    if the image does not end before `end`. `bits` is the offset of the bitmap of columns in the
    image, `present` the number of bits that are set.
    """
    nulls = at
    at += (present + 7) >> 3
    if at > end:
        return -1, 0
    room = 0
    null_bit = 0
    first = tables[table, TABLE_FIRST]
    for index in range(tables[table, TABLE_COLUMNS]):
        if (source[bits + (index >> 3)] >> (index & 7)) & 1 == 0:
            continue
        null = (source[nulls + (null_bit >> 3)] >> (null_bit & 7)) & 1
        null_bit += 1
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
                # A byte that needs no escape may become up to three bytes of UTF-8.
                room += string_size(source, at, at + size) + 2 * size
        elif size > end - at:
            return -1, 0
        at += size
    return at, room


@kernel
def _count_bits(source: Bytes, at: int, bits: int) -> int:
    """Return how many of the first `bits` bits from `at` on are set."""
    count = 0
    for bit in range(bits):
        count += (read_8(source, at + (bit >> 3)) >> (bit & 7)) & 1
    return count


@kernel
def scan_rows(
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
    """Add a line to `rows` for each captured change in the rows event with body `source[at:end]`.

    Returns 0 when the event is done, otherwise why it stopped (`layout`).
    """
    if end - at < 10:
        return BAD_EVENT
    map_line = find_table(maps, read_48(source, at))
    if maps[map_line, MAP_ID] == -1:
        return UNKNOWN_TABLE
    table = maps[map_line, MAP_VERSION]
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
    captured = tables[table, TABLE_CAPTURED] == 1
    if captured and insert and present < count:
        for index in range(count):
            in_image = (source[bits + (index >> 3)] >> (index & 7)) & 1
            if (
                in_image == 0
                and columns[tables[table, TABLE_FIRST] + index, COLUMN_DEFAULT] == NOT_ASKED
            ):
                return LACKING
    if state[NEXT_ROW] != 0:
        at = state[NEXT_ROW]
    else:
        state[PARKED_INDEX] = state[INDEX]
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
    return PARKED_ROWS if tables[table, TABLE_CAPTURED] == ON_HOLD else 0


@kernel
def measure_rows(source: Bytes, at: int, end: int, state: Longs, maps: Longs, tables: Longs) -> int:
    """Add the size of the rows event with the body `source[at:end]` to the state.

    Events of tables that are not captured are not counted. Returns 0, or why it stopped (`layout`).
    """
    if end - at < 10:
        return BAD_EVENT
    map_line = find_table(maps, read_48(source, at))
    if maps[map_line, MAP_ID] == -1:
        return UNKNOWN_TABLE
    captured = tables[maps[map_line, MAP_VERSION], TABLE_CAPTURED]
    if captured == ON_HOLD:
        return PARKED_ROWS
    if captured == 1:
        state[MEASURED_OPEN] += end - at
    return 0
