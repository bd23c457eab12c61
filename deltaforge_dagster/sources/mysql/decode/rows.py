"""Second kernel: write the row images of scanned changes as JSON text, and their event ids.

An image (its layout is in `scan_rows`) becomes `{"column":value,...}`, with columns in the table's
order, without white space. Columns that are not in the image are not written, except in an insert
those whose default is known. `write_changes` fills three text columns at once, each in the form of
an Arrow string array (bytes, ends of the rows, validity)::

    change   before      after       key, from
    insert   null        image       the image
    update   old image   new image   the new image; the old one for columns that are not in it
    delete   old image   null        the old image

`scan` has checked every size against the end of its event, and has computed the most room that a
row may need. So this kernel only checks the room for whole rows.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR0917 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.json_strings import write_base64, write_utf_8
from deltaforge_dagster.kernels.json_text import INVALID, write_null
from deltaforge_dagster.kernels.runtime import (
    CLOSE_BRACE,
    COMMA,
    OPEN_BRACE,
    QUOTE,
    Bytes,
    Longs,
    copy,
    kernel,
)
from deltaforge_dagster.sources.mysql.decode.layout import (
    COLUMN_DEFAULT,
    COLUMN_DEFAULT_END,
    COLUMN_FIRST,
    COLUMN_KEY,
    COLUMN_KIND,
    COLUMN_NAME,
    COLUMN_NAME_END,
    COLUMN_PREFIX,
    COLUMN_SECOND,
    COLUMN_SIZE,
    OP_DELETE,
    OP_INSERT,
    ROW_INDEX,
    ROW_NEW,
    ROW_NEW_BITS,
    ROW_NEW_COUNT,
    ROW_OLD,
    ROW_OLD_BITS,
    ROW_OLD_COUNT,
    ROW_OP,
    ROW_SIZE,
    ROW_TABLE,
    ROW_TX,
    TABLE_COLUMNS,
    TABLE_FIRST,
    TABLE_KEYS,
    TX_A,
    TX_B,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
)
from deltaforge_dagster.sources.mysql.values.fixed_binary import (
    write_inet4,
    write_inet6,
    write_uuid,
)
from deltaforge_dagster.sources.mysql.values.floats import write_float, write_vector
from deltaforge_dagster.sources.mysql.values.json_binary import write_json
from deltaforge_dagster.sources.mysql.values.numbers import (
    read_8,
    read_big,
    read_size,
    read_unsigned,
)
from deltaforge_dagster.sources.mysql.values.scalars import (
    write_date,
    write_datetime,
    write_decimal,
    write_micros,
    write_signed,
    write_time,
    write_timestamp,
    write_unsigned,
)
from deltaforge_dagster.sources.mysql.values.texts import (
    CodePoints,
    write_padded,
    write_set,
    write_text,
)
from deltaforge_dagster.sources.mysql.values.types import (
    BIT,
    DATE,
    DATETIME,
    DECIMAL,
    ENUM,
    FLOAT,
    INET4,
    INET6,
    JSON,
    MICROS,
    PADDED_BYTES,
    SET,
    SIGNED,
    TIME,
    TIMESTAMP,
    UNSIGNED,
    UTF_8_TEXT,
    UUID,
    VECTOR,
    YEAR,
)
from deltaforge_dagster.sources.rows.event_ids import mix_a, mix_b, write_event_id

BEFORE, AFTER, KEY = range(3)
"""Lines of `ends` and `valid`."""

BAD_VALUE = INVALID
NO_ROOM, NO_KEY_VALUE = -2, -3
"""Values of `report[CODE]`: a value does not match its type; a text column is full; a key column is
in neither image.
"""

CODE, COLUMN = range(2)
"""Fields of `report`: why `write_changes` stopped; the column's line in `columns`, -1 if none."""
REPORT_WIDTH = 2

_ABSENT = -1


@kernel
def _write_image(
    source: Bytes,
    at: int,
    bits: int,
    present: int,
    table: int,
    tables: Longs,
    columns: Longs,
    labels: Longs,
    names: Bytes,
    characters: CodePoints,
    out: Bytes,
    offset: int,
    spans: Longs,
    stack: Longs,
    report: Longs,
    inserted: bool,
) -> int:
    """Write the image at `source[at]` into `out` from `offset` on.

    Returns the offset after it in `out`, or a negative code. `spans` receives start and end in
    `out` of each key column's value; the start is `_ABSENT` if the column is not in the image.
    `bits` is the offset of the bitmap of columns in the image, `present` the number of bits that
    are set. An `inserted` row has the defaults of columns that are not in the image.
    """
    first, count = tables[table, TABLE_FIRST], tables[table, TABLE_COLUMNS]
    nulls = at
    at += (present + 7) >> 3
    null_bit = 0
    opening = OPEN_BRACE
    for index in range(count):
        column = first + index
        if (source[bits + (index >> 3)] >> (index & 7)) & 1 == 0:
            spans[index, 0] = _ABSENT
            if inserted and columns[column, COLUMN_DEFAULT] >= 0:
                out[offset] = opening
                opening = COMMA
                started = copy(
                    names, columns[column, COLUMN_NAME], columns[column, COLUMN_NAME_END],
                    out, offset + 1,
                )  # fmt: skip
                offset = copy(
                    names, columns[column, COLUMN_DEFAULT], columns[column, COLUMN_DEFAULT_END],
                    out, started,
                )  # fmt: skip
                if columns[column, COLUMN_KEY] != 0:
                    spans[index, 0] = started
                    spans[index, 1] = offset
            continue
        out[offset] = opening
        opening = COMMA
        offset = copy(
            names, columns[column, COLUMN_NAME], columns[column, COLUMN_NAME_END], out, offset + 1
        )
        started = offset
        null = (source[nulls + (null_bit >> 3)] >> (null_bit & 7)) & 1
        null_bit += 1
        if null != 0:
            offset = write_null(out, offset)
        else:
            kind = columns[column, COLUMN_KIND]
            size = columns[column, COLUMN_SIZE]
            prefix = columns[column, COLUMN_PREFIX]
            if prefix != 0:
                size = read_size(source, at, prefix)
                at += prefix
            end = at + size
            if kind == UTF_8_TEXT:
                offset = write_utf_8(source, at, end, out, offset)
                if offset == INVALID:
                    offset = write_base64(source, at, end, out, started)
            elif kind == SIGNED:
                offset = write_signed(source, at, size, out, offset)
            elif kind == UNSIGNED:
                offset = write_unsigned(read_unsigned(source, at, size), out, offset)
            elif kind == DECIMAL:
                offset = write_decimal(
                    source, at, columns[column, COLUMN_FIRST], columns[column, COLUMN_SECOND],
                    out, offset,
                )  # fmt: skip
            elif kind == DATETIME:
                offset = write_datetime(source, at, columns[column, COLUMN_FIRST], out, offset)
            elif kind == TIMESTAMP:
                offset = write_timestamp(source, at, columns[column, COLUMN_FIRST], out, offset)
            elif kind == DATE:
                offset = write_date(source, at, out, offset)
            elif kind == TIME:
                offset = write_time(source, at, columns[column, COLUMN_FIRST], out, offset)
            elif kind == FLOAT:
                offset = write_float(source, at, size, out, offset)
            elif kind == JSON:
                offset = write_json(source, at, end, out, offset, stack)
            elif kind == VECTOR:
                offset = write_vector(source, at, end, out, offset)
            elif kind == MICROS:
                offset = write_micros(source, at, columns[column, COLUMN_FIRST], out, offset)
            elif kind == YEAR:
                year = read_8(source, at)
                offset = write_unsigned(np.uint64(year + 1900 if year != 0 else 0), out, offset)
            elif kind == BIT:
                offset = write_unsigned(np.uint64(read_big(source, at, size)), out, offset)
            elif kind == ENUM:
                label = read_size(source, at, size)
                if label > columns[column, COLUMN_SECOND]:
                    offset = INVALID
                else:
                    out[offset] = QUOTE
                    offset += 1
                    if label != 0:
                        line = columns[column, COLUMN_FIRST] + label - 1
                        offset = copy(names, labels[line, 0], labels[line, 1], out, offset)
                    out[offset] = QUOTE
                    offset += 1
            elif kind == SET:
                offset = write_set(
                    read_unsigned(source, at, size), columns[column, COLUMN_FIRST],
                    columns[column, COLUMN_SECOND], labels, names, out, offset,
                )  # fmt: skip
            elif kind == PADDED_BYTES:
                offset = write_padded(
                    source, at, end, columns[column, COLUMN_FIRST],
                    columns[column, COLUMN_SECOND], out, offset,
                )  # fmt: skip
            elif kind == UUID:
                offset = write_uuid(source, at, end, out, offset)
            elif kind == INET4:
                offset = write_inet4(source, at, end, out, offset)
            elif kind == INET6:
                offset = write_inet6(source, at, end, out, offset)
            else:
                offset = write_text(
                    kind, source, at, end, columns[column, COLUMN_FIRST],
                    columns[column, COLUMN_SECOND], characters, out, offset,
                )  # fmt: skip
            if offset == INVALID:
                report[COLUMN] = column
                return BAD_VALUE
            at = end
        if columns[column, COLUMN_KEY] != 0:
            spans[index, 0] = started
            spans[index, 1] = offset
    if opening == OPEN_BRACE:
        out[offset] = OPEN_BRACE
        offset += 1
    out[offset] = CLOSE_BRACE
    return offset + 1


@kernel
def _write_key(
    table: int,
    tables: Longs,
    columns: Longs,
    names: Bytes,
    image: Bytes,
    spans: Longs,
    old_image: Bytes,
    old_spans: Longs,
    out: Bytes,
    offset: int,
    report: Longs,
) -> int:
    """Write the key, whose values are copied from `image` or, if not in it, from `old_image`."""
    opening = OPEN_BRACE
    for index in range(tables[table, TABLE_KEYS]):
        column = tables[table, TABLE_FIRST] + index
        if columns[column, COLUMN_KEY] == 0:
            continue
        out[offset] = opening
        opening = COMMA
        offset = copy(
            names, columns[column, COLUMN_NAME], columns[column, COLUMN_NAME_END], out, offset + 1
        )
        if spans[index, 0] != _ABSENT:
            offset = copy(image, spans[index, 0], spans[index, 1], out, offset)
        elif old_spans[index, 0] != _ABSENT:
            offset = copy(old_image, old_spans[index, 0], old_spans[index, 1], out, offset)
        else:
            report[COLUMN] = column
            return NO_KEY_VALUE
    out[offset] = CLOSE_BRACE
    return offset + 1


@kernel
def write_changes(
    source: Bytes,
    rows: Longs,
    first: int,
    last: int,
    tables: Longs,
    columns: Longs,
    labels: Longs,
    names: Bytes,
    characters: CodePoints,
    before: Bytes,
    after: Bytes,
    key: Bytes,
    ends: Longs,
    valid: Bytes,
    spans: Longs,
    stack: Longs,
    report: Longs,
) -> int:
    """Write the images and keys of `rows[first:last]`; return the first row that is not written.

    `before`, `after` and `key` (all of one size) are filled from their start; `ends[text, i]` is
    where the text of row `first + i` ends, and `valid[text, i]` is 0 for null. If it stopped before
    `last`, `report` says why, and that row was not written. `spans` is scratch memory of shape (2,
    `MAX_COLUMNS`, 2); `stack` is that of `values.json_binary`.
    """
    before_at = after_at = key_at = int(np.int64(0))
    new_spans, old_spans = spans[0], spans[1]
    for row in range(first, last):
        op, table = rows[row, ROW_OP], rows[row, ROW_TABLE]
        need = rows[row, ROW_SIZE]
        line = row - first
        before_to, after_to, key_to = before_at, after_at, key_at
        report[CODE], report[COLUMN] = NO_ROOM, -1
        if before.size - max(before_at, after_at, key_at) < need:
            return row
        has_key = tables[table, TABLE_KEYS] > 0
        if op != OP_INSERT:
            before_to = _write_image(
                source, rows[row, ROW_OLD], rows[row, ROW_OLD_BITS], rows[row, ROW_OLD_COUNT],
                table, tables, columns, labels, names, characters,
                before, before_at, old_spans, stack, report, False,
            )  # fmt: skip
            if before_to < 0:
                report[CODE] = before_to
                return row
        elif has_key:
            for index in range(tables[table, TABLE_KEYS]):
                old_spans[index, 0] = _ABSENT
        if op != OP_DELETE:
            after_to = _write_image(
                source, rows[row, ROW_NEW], rows[row, ROW_NEW_BITS], rows[row, ROW_NEW_COUNT],
                table, tables, columns, labels, names, characters,
                after, after_at, new_spans, stack, report, op == OP_INSERT,
            )  # fmt: skip
            if after_to < 0:
                report[CODE] = after_to
                return row
        if has_key:
            if op == OP_DELETE:
                key_to = _write_key(
                    table, tables, columns, names, before, old_spans, before, old_spans,
                    key, key_at, report,
                )  # fmt: skip
            else:
                key_to = _write_key(
                    table, tables, columns, names, after, new_spans, before, old_spans,
                    key, key_at, report,
                )  # fmt: skip
            if key_to < 0:
                report[CODE] = key_to
                return row
        before_at, after_at, key_at = before_to, after_to, key_to
        ends[BEFORE, line], ends[AFTER, line], ends[KEY, line] = before_at, after_at, key_at
        valid[BEFORE, line] = op != OP_INSERT
        valid[AFTER, line] = op != OP_DELETE
        valid[KEY, line] = has_key
    return last


@kernel
def write_event_ids(
    rows: Longs, first: int, last: int, txs: Longs, seed: npt.NDArray[np.uint64], out: Bytes
) -> None:
    """Write the event ids of `rows[first:last]` to the start of `out`, 36 bytes each, in sequence.

    A change is identified by the GTID of its transaction and its index in it; without a GTID, by
    the file's name and the offset at which the transaction begins. So with GTIDs, ids are the same
    on every server that has the transactions.
    """
    at = 0
    tx = -1
    tx_a, tx_b = seed[0], seed[1]
    for row in range(first, last):
        if rows[row, ROW_TX] != tx:
            tx = rows[row, ROW_TX]
            tx_a, tx_b = seed[0], seed[1]
            for column in (TX_A, TX_B, TX_NUMBER):
                number = np.uint64(txs[tx, column])
                tx_a, tx_b = mix_a(tx_a ^ number), mix_b(tx_b ^ number)
            if txs[tx, TX_TAG] != 0:
                number = np.uint64(txs[tx, TX_TAG])
                tx_a, tx_b = mix_a(tx_a ^ number), mix_b(tx_b ^ number)
        index = np.uint64(rows[row, ROW_INDEX])
        a, b = mix_a(tx_a ^ index), mix_b(tx_b ^ index)
        at = write_event_id(txs[tx, TX_TS_US], a, b, out, at)
