"""Second kernel: write the row images of scanned changes as JSON text, and their event ids.

A tuple (drawn in `pgoutput`) becomes `{"column":value,...}`, with columns in the table's order,
without white space. `write_changes` fills three text columns at once, each in the form of an Arrow
string array (bytes, ends of the rows, validity)::

    change   tuples sent        before            after        key, from
    insert   N                  null              N            N
    update   N                  null              N            N
    update   K, N or O, N       K or O            N            N; from K or O where N says unchanged
    delete   K or O             K or O            null         K or O
    truncate none               null              null         null
    message  its content        null              the content  null

K has the key columns, and null for all others; O is the complete old row. In N, unchanged TOAST
values are missing. `unchanged_toast` says what replaces them:

- `MARK`: `{"_unchanged":true}`;
- `OMIT`: nothing, the column is left out;
- `RESELECT`: the value in O if there is one, else the value in `reselected` for the row and column,
  else as `MARK`.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM109 - kernels are long flat
# loops over bytes, see `kernels.runtime`

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.json_text import (
    INVALID,
    OVERHEAD,
    STRING,
    STRING_GROWTH,
    TOO_DEEP,
    string_size,
    write_document,
    write_null,
    write_scalar,
)
from deltaforge_dagster.kernels.runtime import (
    CLOSE_BRACE,
    COMMA,
    OPEN_BRACE,
    Bytes,
    Longs,
    copy,
    kernel,
)
from deltaforge_dagster.sources.postgres.decode.array_text import (
    ARRAY_GROWTH,
    ARRAY_OVERHEAD,
    write_array,
)
from deltaforge_dagster.sources.postgres.decode.layout import (
    COLUMN_DELIMITER,
    COLUMN_KEY,
    COLUMN_KIND,
    COLUMN_NAME,
    COLUMN_NAME_END,
    OP_DELETE,
    OP_INSERT,
    OP_MESSAGE,
    OP_TRUNCATE,
    ROW_END,
    ROW_INDEX,
    ROW_OP,
    ROW_START,
    ROW_TABLE,
    ROW_TX,
    TABLE_COLUMNS,
    TABLE_FIRST,
    TABLE_KEYS,
    TX_FINAL_LSN,
    TX_ID_US,
    TX_XID,
)
from deltaforge_dagster.sources.postgres.decode.scan import read_16, read_32
from deltaforge_dagster.sources.rows.event_ids import mix_a, mix_b, write_event_id

BEFORE, AFTER, KEY = range(3)
"""Lines of `ends` and `valid`."""

MAX_ROOM = (1 << 31) - 1
"""The most bytes of a text column: an Arrow string array can contain no more."""

BAD_VALUE = INVALID
TOO_DEEP_VALUE = TOO_DEEP
NO_ROOM, BAD_TUPLE, BINARY_VALUE, NO_KEY_VALUE = -3, -4, -5, -6
"""Values of `report[CODE]`: a value does not match its type; a JSON document is nested too deeply;
a text column is full; a tuple does not follow its format; a value was sent in binary format; a key
column was not sent.
"""

CODE, COLUMN, PLACE, NEXT_RESELECTED = range(4)
"""Fields of `report`: why `write_changes` stopped; the column's line in `columns`, -1 if none;
offset in the buffer; the next unused line of `reselected`.
"""
REPORT_WIDTH = 4

MAX_COLUMNS = 1664
"""The most columns that PostgreSQL allows in a tuple (`MaxTupleAttributeNumber`)."""

MARK: Literal[0] = 0
OMIT: Literal[1] = 1
RESELECT: Literal[2] = 2
"""The values of `unchanged_toast`."""

RESELECTED_ROW, RESELECTED_COLUMN, RESELECTED_START, RESELECTED_END = range(4)
"""Fields of `reselected`, whose lines are ordered by row and column: number of the row; index of
the column; start and end of the value's text in `source`, start -1 for null.
"""
RESELECTED_WIDTH = 4

_UNCHANGED = np.frombuffer(b'{"_unchanged":true}', np.uint8).copy()
_NULL, _TOAST, _TEXT, _BINARY = ord("n"), ord("u"), ord("t"), ord("b")
_NEW, _OLD_KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")
_NOT_SENT = -1
_NO_TEXT = -1


@kernel
def _room_for(kind: int, delimiter: int, source: Bytes, start: int, end: int, left: int) -> bool:
    """Return whether `left` bytes are enough room to write a value."""
    size = end - start
    if delimiter != 0:
        return size * ARRAY_GROWTH + ARRAY_OVERHEAD <= left
    if size * STRING_GROWTH + OVERHEAD <= left:
        return True
    # Only a string can grow much: its exact size is computed instead of reserving six times its
    # size. bytea in escape format may grow by a third.
    if kind == STRING:
        return string_size(source, start, end) + OVERHEAD <= left
    return size + size // 3 + OVERHEAD <= left


@kernel
def _next_reselected(row: int, index: int, reselected: Longs, report: Longs) -> int:
    """Return the line of `reselected` for a value, or -1; lines are used in order."""
    line = report[NEXT_RESELECTED]
    if (
        line < reselected.shape[0]
        and reselected[line, RESELECTED_ROW] == row
        and reselected[line, RESELECTED_COLUMN] == index
    ):
        report[NEXT_RESELECTED] = line + 1
        return int(line)
    return -1


@kernel
def _write_tuple(
    source: Bytes,
    at: int,
    end: int,
    row: int,
    table: int,
    tables: Longs,
    columns: Longs,
    names: Bytes,
    out: Bytes,
    out_at: int,
    spans: Longs,
    stack: Bytes,
    report: Longs,
    unchanged_toast: int,
    before: Bytes,
    old_spans: Longs,
    old_whole: bool,
    reselected: Longs,
) -> tuple[int, int]:
    """Write the tuple at `source[at]` into `out` from `out_at` on.

    Returns the offsets after it in `source` and in `out`; the latter is a negative code on failure.
    `spans` receives start and end in `out` of each column's value; the start is `_NOT_SENT` for a
    missing value. `old_spans` describes the old row in `before` in the same way; unless
    `old_whole`, only its key columns have values.
    """
    first = tables[table, TABLE_FIRST]
    report[COLUMN] = -1
    report[PLACE] = at
    if end - at < 2 or read_16(source, at) != tables[table, TABLE_COLUMNS]:
        return at, BAD_TUPLE
    at += 2
    count = tables[table, TABLE_COLUMNS]
    if out.size - out_at < OVERHEAD:
        return at, NO_ROOM
    out[out_at] = OPEN_BRACE
    out_at += 1
    opened = out_at
    for index in range(count):
        column = first + index
        report[COLUMN] = column
        report[PLACE] = at
        name, name_end = columns[column, COLUMN_NAME], columns[column, COLUMN_NAME_END]
        # Room for the name, and either a value that has no text, or the closing brace.
        if out.size - out_at < name_end - name + OVERHEAD:
            return at, NO_ROOM
        if at >= end:
            return at, BAD_TUPLE
        sent = source[at]
        at += 1
        if sent == _TOAST and unchanged_toast == OMIT:
            spans[index, 0] = _NOT_SENT
            continue
        if out_at > opened:
            out[out_at] = COMMA
            out_at += 1
        out_at = copy(names, name, name_end, out, out_at)
        spans[index, 0] = out_at
        text, text_end = _NO_TEXT, _NO_TEXT
        if sent == _TEXT:
            if end - at < 4:
                return at, BAD_TUPLE
            size = read_32(source, at)
            at += 4
            if size > end - at:
                return at, BAD_TUPLE
            text, text_end = at, at + size
            at += size
        elif sent == _NULL:
            out_at = write_null(out, out_at)
        elif sent == _TOAST:
            spans[index, 0] = _NOT_SENT
            line = -1
            old = _NOT_SENT
            if unchanged_toast == RESELECT and (old_whole or columns[column, COLUMN_KEY] != 0):
                old = old_spans[index, 0]
            if unchanged_toast == RESELECT and old == _NOT_SENT:
                line = _next_reselected(row, index, reselected, report)
            if old != _NOT_SENT:
                if out.size - out_at < old_spans[index, 1] - old + OVERHEAD:
                    return at, NO_ROOM
                out_at = copy(before, old, old_spans[index, 1], out, out_at)
            elif line < 0:
                out_at = copy(_UNCHANGED, 0, _UNCHANGED.size, out, out_at)
            elif reselected[line, RESELECTED_START] < 0:
                out_at = write_null(out, out_at)
            else:
                text, text_end = (
                    reselected[line, RESELECTED_START],
                    reselected[line, RESELECTED_END],
                )
        else:
            return at, BINARY_VALUE if sent == _BINARY else BAD_TUPLE
        if text != _NO_TEXT:
            kind, delimiter = columns[column, COLUMN_KIND], columns[column, COLUMN_DELIMITER]
            left = out.size - out_at - OVERHEAD
            if not _room_for(kind, delimiter, source, text, text_end, left):
                return at, NO_ROOM
            if delimiter != 0:
                out_at = write_array(kind, delimiter, source, text, text_end, out, out_at, stack)
            else:
                out_at = write_scalar(kind, source, text, text_end, out, out_at, stack)
            if out_at < 0:
                return at, out_at
        spans[index, 1] = out_at
    out[out_at] = CLOSE_BRACE
    return at, out_at + 1


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
    out_at: int,
    report: Longs,
) -> int:
    """Write the key: values of key columns from `image` or, if missing there, `old_image`."""
    opening = OPEN_BRACE
    for index in range(tables[table, TABLE_COLUMNS]):
        column = tables[table, TABLE_FIRST] + index
        if columns[column, COLUMN_KEY] == 0:
            continue
        name, name_end = columns[column, COLUMN_NAME], columns[column, COLUMN_NAME_END]
        sent = spans[index, 0] != _NOT_SENT
        if not sent and old_spans[index, 0] == _NOT_SENT:
            report[COLUMN] = column
            return NO_KEY_VALUE
        start = spans[index, 0] if sent else old_spans[index, 0]
        end = spans[index, 1] if sent else old_spans[index, 1]
        if out.size - out_at < name_end - name + end - start + OVERHEAD:
            return NO_ROOM
        out[out_at] = opening
        opening = COMMA
        out_at = copy(names, name, name_end, out, out_at + 1)
        if sent:
            out_at = copy(image, start, end, out, out_at)
        else:
            out_at = copy(old_image, start, end, out, out_at)
    out[out_at] = CLOSE_BRACE
    return out_at + 1


@kernel
def write_changes(
    source: Bytes,
    rows: Longs,
    first: int,
    last: int,
    tables: Longs,
    columns: Longs,
    names: Bytes,
    before: Bytes,
    after: Bytes,
    key: Bytes,
    ends: Longs,
    valid: Bytes,
    spans: Longs,
    stack: Bytes,
    report: Longs,
    unchanged_toast: int,
    reselected: Longs,
) -> int:
    """Write the images and keys of `rows[first:last]`; return the number of the row it stopped at.

    `before`, `after` and `key` are filled from their start; `ends[text, i]` is where the text of
    row `first + i` ends, and `valid[text, i]` is 0 for null. If it stopped before `last`, `report`
    says why, and that row was not written. `spans` is scratch of shape (2, `MAX_COLUMNS`, 2).
    """
    before_at = after_at = key_at = int(np.int64(0))
    new_spans, old_spans = spans[0], spans[1]
    report[NEXT_RESELECTED] = 0
    for row in range(first, last):
        at, end = rows[row, ROW_START], rows[row, ROW_END]
        op, table = rows[row, ROW_OP], rows[row, ROW_TABLE]
        before_to, after_to, key_to = before_at, after_at, key_at
        line = row - first
        if op == OP_TRUNCATE or op == OP_MESSAGE:
            if op == OP_MESSAGE:
                report[COLUMN], report[PLACE] = -1, at
                if end - at + OVERHEAD > after.size - after_at:
                    report[CODE] = NO_ROOM
                    return row
                after_to = write_document(source, at, end, after, after_at, stack)
                if after_to < 0:
                    report[CODE] = after_to
                    return row
                after_at = after_to
            ends[BEFORE, line], ends[AFTER, line], ends[KEY, line] = before_at, after_at, key_at
            valid[BEFORE, line], valid[KEY, line] = 0, 0
            valid[AFTER, line] = op == OP_MESSAGE
            continue
        part = np.int64(source[at])
        has_old = op != OP_INSERT and (part == _OLD_KEY or part == _OLD_ROW)
        report[CODE], report[COLUMN], report[PLACE] = BAD_TUPLE, -1, at
        if has_old:
            at, before_to = _write_tuple(
                source, at + 1, end, row, table, tables, columns, names,
                before, before_at, old_spans, stack, report,
                MARK, before, old_spans, False, reselected,
            )  # fmt: skip
            if before_to < 0:
                report[CODE] = before_to
                return row
        elif op == OP_DELETE:
            return row
        else:
            for index in range(tables[table, TABLE_COLUMNS]):
                old_spans[index, 0] = _NOT_SENT
        if op != OP_DELETE:
            if at >= end or source[at] != _NEW:
                report[PLACE] = at
                return row
            at, after_to = _write_tuple(
                source, at + 1, end, row, table, tables, columns, names,
                after, after_at, new_spans, stack, report,
                unchanged_toast, before, old_spans, part == _OLD_ROW, reselected,
            )  # fmt: skip
            if after_to < 0:
                report[CODE] = after_to
                return row
        if at != end:
            report[COLUMN], report[PLACE] = -1, at
            return row
        if tables[table, TABLE_KEYS] > 0:
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
        valid[BEFORE, line] = has_old
        valid[AFTER, line] = op != OP_DELETE
        valid[KEY, line] = tables[table, TABLE_KEYS] > 0
    return last


@kernel
def write_event_ids(
    rows: Longs, first: int, last: int, txs: Longs, seed: npt.NDArray[np.uint64], out: Bytes
) -> None:
    """Write the event ids of `rows[first:last]`, 36 bytes each, from the start of `out`.

    A change is identified by its transaction's commit LSN and xid, and its index in the
    transaction.
    """
    at = 0
    for row in range(first, last):
        tx = rows[row, ROW_TX]
        a, b = seed[0], seed[1]
        lsn, xid = np.uint64(txs[tx, TX_FINAL_LSN]), np.uint64(txs[tx, TX_XID])
        index = np.uint64(rows[row, ROW_INDEX])
        a = mix_a(mix_a(mix_a(a ^ lsn) ^ xid) ^ index)
        b = mix_b(mix_b(mix_b(b ^ lsn) ^ xid) ^ index)
        at = write_event_id(txs[tx, TX_ID_US], a, b, out, at)
