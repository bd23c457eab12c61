r"""Kernel: rewrite row images as column rules require.

An image is JSON text as a source writes it: `{"column":value,...}`, with columns in the table's
order, some of them missing, without white space. Images from the log and from a SELECT are treated
alike. `null` stays, and so does `{"_unchanged":true}`, which stands for an unchanged value that is
not in the log. Other values depend on the action of their column (module `columns`)::

    KEEP       the value itself
    EXCLUDE    neither name nor value
    MASK       a fixed text
    HASH       SHA-256 of salt and value, as a string; of a string, its characters in UTF-8 are
               hashed, of any other value its JSON text
    TRUNCATE   of a string the first characters, of {"_base64":"..."} the first bytes

A character is a code point, however it is escaped: a surrogate pair of two `\u` escapes counts
once.
"""

# ruff: noqa: C901, PLR0917, SIM110 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.json_fields import blank, string_end, value_end
from deltaforge_dagster.kernels.json_strings import BASE64_VALUES, character_end, write_plain
from deltaforge_dagster.kernels.json_text import BASE64, BASE64_OPEN, NULL, UNCHANGED, equals
from deltaforge_dagster.kernels.runtime import (
    CLOSE_BRACE,
    COMMA,
    EQUALS,
    OPEN_BRACE,
    QUOTE,
    Bytes,
    Longs,
    copy,
    kernel,
)
from deltaforge_dagster.kernels.sha256 import write_sha256
from deltaforge_dagster.sources.rows.columns import EXCLUDE, HASH, KEEP, MASK

# `columns` has one line per column of each table with rules, in the order of the images.
COLUMN_ACTION, COLUMN_NAME, COLUMN_NAME_END, COLUMN_FIRST, COLUMN_SECOND = range(5)
"""Action; start and end of `"name":` in `texts`; then, for `MASK`, start and end of the JSON text
in `texts`, or, for `TRUNCATE`, the number of characters (or bytes) that remain.
"""
COLUMN_WIDTH = 5

# `tables` has one line per table with rules.
TABLE_FIRST, TABLE_COLUMNS = range(2)
"""Line of its first column; number of columns."""
TABLE_WIDTH = 2

NOT_ITS_TABLE, NOT_TEXT = -1, -2
"""Values of `report[CODE]`: an image has a column that its table does not have; a value cannot be
truncated."""
CODE, COLUMN = range(2)
"""Fields of `report`: why the kernel stopped; the column's line in `columns`, -1 if none."""


@kernel
def _begins(source: Bytes, at: int, end: int, texts: Bytes, start: int, stop: int) -> bool:
    """Return whether `source[at:end]` begins with `texts[start:stop]`."""
    if end - at < stop - start:
        return False
    for i in range(stop - start):
        if source[at + i] != texts[start + i]:
            return False
    return True


@kernel
def _write_hash(
    source: Bytes,
    at: int,
    end: int,
    salt: int,
    message: Bytes,
    words: Longs,
    out: Bytes,
    out_at: int,
) -> int:
    """Write the hash of a value as a JSON string; `message` begins with `salt` bytes of salt."""
    if source[at] == QUOTE:
        size = write_plain(source, at + 1, end - 1, message, salt)
    else:
        size = copy(source, at, end, message, salt)
    out[out_at] = QUOTE
    out_at = write_sha256(message, size, words, out, out_at + 1)
    out[out_at] = QUOTE
    return out_at + 1


@kernel
def _write_first_bytes(
    source: Bytes, at: int, end: int, count: int, out: Bytes, out_at: int
) -> int:
    """Write the Base64 text of the first `count` bytes of the Base64 text `source[at:end]`."""
    digits = end - at
    while digits > 0 and source[at + digits - 1] == EQUALS:
        digits -= 1
    if digits * 3 // 4 <= count:
        return copy(source, at, end, out, out_at)
    stop = at + count // 3 * 4
    out_at = copy(source, at, stop, out, out_at)
    rest = count % 3
    if rest == 0:
        return out_at
    out_at = copy(source, stop, stop + rest, out, out_at)
    kept = 0x30 if rest == 1 else 0x3C
    out[out_at] = BASE64[BASE64_VALUES[source[stop + rest]] & kept]
    out_at += 1
    for _ in range(3 - rest):
        out[out_at] = EQUALS
        out_at += 1
    return out_at


@kernel
def _write_truncated(source: Bytes, at: int, end: int, count: int, out: Bytes, out_at: int) -> int:
    """Write the first `count` characters of a string, or bytes of `{"_base64":"..."}`.

    Returns the offset after them, or `NOT_TEXT` for any other value.
    """
    if source[at] == QUOTE:
        stop = at + 1
        for _ in range(count):
            if stop >= end - 1:
                break
            stop = character_end(source, stop, end - 1)
        out_at = copy(source, at, stop, out, out_at)
        out[out_at] = QUOTE
        return out_at + 1
    opened = at + BASE64_OPEN.size
    if not _begins(source, at, end, BASE64_OPEN, 0, BASE64_OPEN.size):
        return NOT_TEXT
    closed = string_end(source, opened - 1, end)
    if closed != end - 1:
        return NOT_TEXT
    out_at = copy(source, at, opened, out, out_at)
    out_at = _write_first_bytes(source, opened, closed - 1, count, out, out_at)
    return copy(source, closed - 1, end, out, out_at)


@kernel
def _write_image(
    source: Bytes,
    at: int,
    end: int,
    first: int,
    last: int,
    columns: Longs,
    texts: Bytes,
    salt: int,
    message: Bytes,
    words: Longs,
    out: Bytes,
    out_at: int,
    report: Longs,
) -> int:
    """Rewrite the image `source[at:end]` of a table with the columns `first` to `last - 1`.

    Returns the offset after it in `out`, or a negative code.
    """
    report[COLUMN] = -1
    out[out_at] = OPEN_BRACE
    out_at += 1
    opened = out_at
    column = first
    at += 1
    end -= 1
    while at < end:
        while column < last and not _begins(
            source, at, end, texts, columns[column, COLUMN_NAME], columns[column, COLUMN_NAME_END]
        ):
            column += 1
        if column == last:
            return NOT_ITS_TABLE
        report[COLUMN] = column
        value = at + columns[column, COLUMN_NAME_END] - columns[column, COLUMN_NAME]
        if value >= end:
            return NOT_ITS_TABLE
        after = value_end(source, value, end)
        stop = after
        while stop < end and blank(source[stop]):
            stop += 1
        action = columns[column, COLUMN_ACTION]
        if action != EXCLUDE:
            if out_at > opened:
                out[out_at] = COMMA
                out_at += 1
            out_at = copy(source, at, value, out, out_at)
            if (
                action == KEEP
                or equals(source, value, after, NULL)
                or equals(source, value, after, UNCHANGED)
            ):
                out_at = copy(source, value, stop, out, out_at)
            elif action == MASK:
                out_at = copy(
                    texts,
                    columns[column, COLUMN_FIRST],
                    columns[column, COLUMN_SECOND],
                    out,
                    out_at,
                )
            elif action == HASH:
                out_at = _write_hash(source, value, after, salt, message, words, out, out_at)
            else:
                out_at = _write_truncated(
                    source, value, after, columns[column, COLUMN_FIRST], out, out_at
                )
                if out_at < 0:
                    return out_at
        at = stop + 1
        column += 1
    out[out_at] = CLOSE_BRACE
    return out_at + 1


@kernel
def hide_values(
    source: Bytes,
    ends: Longs,
    valid: Bytes,
    tables_of: Longs,
    tables: Longs,
    columns: Longs,
    texts: Bytes,
    salt: int,
    message: Bytes,
    words: Longs,
    out: Bytes,
    out_ends: Longs,
    report: Longs,
) -> int:
    """Rewrite one text column of all rows; return how many are done, not all after an error.

    `ends` (where each row's text ends in `source`) and `valid` (0 for null) describe the input,
    `out_ends` the output. `out` must have room for what the rules add. `tables_of` is each row's
    line in `tables`, -1 if no rules apply. `message` begins with `salt` bytes of salt, and has room
    for the largest image.
    """
    at = out_at = int(np.int64(0))
    for row in range(ends.size):
        end, table = ends[row], tables_of[row]
        if table < 0 or valid[row] == 0:
            out_at = copy(source, at, end, out, out_at)
        else:
            first = tables[table, TABLE_FIRST]
            out_at = _write_image(
                source, at, end, first, first + tables[table, TABLE_COLUMNS], columns, texts, salt,
                message, words, out, out_at, report,
            )  # fmt: skip
            if out_at < 0:
                report[CODE] = out_at
                return row
        out_ends[row] = out_at
        at = end
    return ends.size
