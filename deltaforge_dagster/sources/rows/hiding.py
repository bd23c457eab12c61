r"""Apply column rules to row images before they become a record batch.

Sources write complete row images into scratch memory. If rules apply to a table, only the images
that the kernel `hide_values` rewrites go into the record batch. So no hidden value is ever
journaled, parked, sent, logged or counted.

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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import (
    CorruptLog,
    DeltaforgeError,
    SourceMisconfigured,
    UnsupportedEvent,
)
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
    read_only,
)
from deltaforge_dagster.kernels.sha256 import DIGITS, PADDING, WORDS, write_sha256
from deltaforge_dagster.sources.rows.arrays import text_column
from deltaforge_dagster.sources.rows.columns import (
    EXCLUDE,
    HASH,
    KEEP,
    MASK,
    ColumnRules,
    Rule,
    visible,
)
from deltaforge_dagster.tables import Column, TableSchema

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

_MAX_TEXT = (1 << 31) - 1
"""The most bytes that an Arrow string array can contain."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Row texts after column rules were applied.

    Attributes:
        texts, ends: In the form of the arguments of `Hiding.show`.
        rows: How many rows were processed before `error`; all of them without an error.
        error: Why processing stopped; its message does not say where in the log. None if it did not
            stop.
    """

    texts: Sequence[Bytes]
    ends: Longs
    rows: int
    error: DeltaforgeError | None = None


class Hiding:
    """Applies the column rules of a pipeline to the rows of one stream, by their table versions."""

    def __init__(self, rules: ColumnRules) -> None:
        self._rules = rules
        self._salt = np.frombuffer(rules.salt, np.uint8)
        self._words = np.empty(WORDS, np.int64)
        self._report = np.empty(2, np.int64)
        self._table_of = np.empty(0, np.int64)
        self._tables = np.empty((0, TABLE_WIDTH), np.int64)
        self._columns = np.empty((0, COLUMN_WIDTH), np.int64)
        self._growth = np.zeros(1, np.int64)  # bytes added to an image, by table; last: none
        self._texts = np.empty(0, np.uint8)
        self._names: list[str] = []

    def refuse_to_hold(self, schema: str, table: str, reason: str) -> None:
        """Raise an error if changes of a table must not be parked because column rules apply to it.

        Parked changes are stored as raw log events, which contain the values that the rules hide.

        Args:
            schema: The table's schema; for MySQL, its database.
            table: The table.
            reason: Why its changes would be parked.

        Raises:
            SourceMisconfigured: A rule's table pattern matches the table.
        """
        if self._rules.touches(schema, table):
            raise SourceMisconfigured(
                f"{reason}. Its changes are not held meanwhile: engine.columns hides columns of the"
                " table, and what is held is the log as it is"
            )

    def add(self, version: int, table: TableSchema) -> TableSchema:
        """Add a table version; return the table as its rows appear under the rules.

        It is the one to be registered.

        Args:
            version: Number of the version in the stream: 0, 1, 2 ...
            table: The table with all its columns.

        Raises:
            SourceMisconfigured: A rule would exclude, mask or truncate a key column.
        """
        rules = self._rules.of(table)
        if rules is None:
            return table
        first = len(self._columns)
        lines = []
        for column, rule in zip(table.columns, rules, strict=True):
            name, name_end = self._add_text(json.dumps(column.name, ensure_ascii=False) + ":")
            if rule.action == MASK:
                bounds = self._add_text(json.dumps(rule.text, ensure_ascii=False))
            else:
                bounds = rule.characters, 0
            lines.append((rule.action, name, name_end, *bounds))
            self._names.append(f"column {column.name} ({column.data_type})")
        self._columns = np.vstack([self._columns, np.array(lines, np.int64)])
        grown = np.full(version + 1, -1, np.int64)
        grown[: self._table_of.size] = self._table_of
        grown[version] = len(self._tables)
        self._table_of = grown
        self._tables = np.vstack([self._tables, np.array([[first, len(lines)]], np.int64)])
        self._growth = np.insert(self._growth, -1, sum(map(_growth, rules)))
        return visible(table, rules)

    def show(self, texts: Sequence[Bytes], ends: Longs, valid: Bytes, versions: Longs) -> Shown:
        """Apply the rules to rows.

        Args:
            texts: The text columns (`before`, `after`, `key`), each with the texts of all rows one
                after the other.
            ends: `ends[column, row]` is where the row's text ends; may have more entries than rows.
            valid: `valid[column, row]` is 0 for null.
            versions: The number of each row's table version.
        """
        count = len(versions)
        tables = self._tables_of(versions)
        if not (tables >= 0).any():
            return Shown(texts, ends, count)
        growth = int(self._growth[tables].sum())
        shown_ends = np.empty((len(texts), count), np.int64)
        shown = []
        rows, error = count, None
        for text, source in enumerate(texts):
            out = np.empty(int(ends[text, count - 1]) + growth, np.uint8)
            sizes = np.diff(ends[text, :count], prepend=0)
            message = np.empty(self._salt.size + int(sizes.max()) + PADDING, np.uint8)
            message[: self._salt.size] = self._salt
            stop = int(
                hide_values(
                    read_only(source),
                    ends[text, :count],
                    valid[text, :count],
                    tables,
                    self._tables,
                    self._columns,
                    self._texts,
                    self._salt.size,
                    message,
                    self._words,
                    out,
                    shown_ends[text],
                    self._report,
                )
            )
            if stop < rows:
                rows, error = stop, self._error()
            shown.append(out)
        large = np.flatnonzero(shown_ends[:, :rows].max(axis=0, initial=0) > _MAX_TEXT)
        if large.size:
            rows, error = int(large[0]), UnsupportedEvent("a row is larger than 2 GiB as JSON")
        return Shown(shown, shown_ends, rows, error)

    def _tables_of(self, versions: Longs) -> Longs:
        """Return for each row's version its line in `_tables`; -1 if no rules apply to it."""
        tables = np.full(len(versions), -1, np.int64)
        added = versions < self._table_of.size
        tables[added] = self._table_of[versions[added]]
        return tables

    def _error(self) -> DeltaforgeError:
        """Return the error for the code that `hide_values` put into its report."""
        column = int(self._report[COLUMN])
        if self._report[CODE] == NOT_TEXT:
            return SourceMisconfigured(
                f"engine.columns.truncate: a value of {self._names[column]} is no text;"
                " exclude, mask or hash it instead"
            )
        return CorruptLog("a row has other columns than its table")

    def _add_text(self, text: str) -> tuple[int, int]:
        encoded = np.frombuffer(text.encode(), np.uint8)
        start = self._texts.size
        self._texts = np.concatenate([self._texts, encoded])
        return start, self._texts.size


class HiddenTable:
    """Applies a pipeline's column rules to rows of one table that are not from the log stream.

    Attributes:
        visible: The table as its rows appear under the rules, to be registered.

    Raises:
        SourceMisconfigured: A rule would exclude, mask or truncate a key column.
    """

    def __init__(self, rules: ColumnRules, table: TableSchema) -> None:
        self._hiding = Hiding(rules)
        self._table = table
        self.visible = self._hiding.add(0, table)

    def column(self, images: pa.Array[Any]) -> pa.Array[Any]:
        """Apply the rules to a column of row images or keys.

        Raises:
            SourceMisconfigured: A value that should be truncated is neither text nor binary.
        """
        if self.visible is self._table or not len(images):
            return images
        _, offsets, data = images.buffers()
        if offsets is None or data is None:
            return images
        bounds = np.frombuffer(memoryview(offsets), np.int32)[images.offset :][: len(images) + 1]
        ends = (bounds[1:] - bounds[0]).astype(np.int64).reshape(1, -1)
        valid = images.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8).reshape(1, -1)
        texts = (read_only(memoryview(data))[bounds[0] :],)
        shown = self._hiding.show(texts, ends, valid, np.zeros(len(images), np.int64))
        if shown.error is not None:
            raise type(shown.error)(f"{shown.error}: table {self._table.full_name}")
        return text_column(shown.texts[0], shown.ends[0], valid[0])


def warm() -> None:
    """Compile the kernels, or load them from the cache, by hiding a synthetic value."""
    table = TableSchema("made-up", None, "t", (Column("a", "", None, True, 1),), ())
    rules = ColumnRules(ColumnOptions(mask={"t.a": ""}))
    HiddenTable(rules, table).column(pa.array(['{"a":1}']))


def _growth(rule: Rule) -> int:
    """Return by how many bytes a rule can make a value longer, at most."""
    if rule.action == HASH:
        return DIGITS + 2
    return len(json.dumps(rule.text, ensure_ascii=False).encode()) if rule.action == MASK else 0


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
    kept = 0x30 if rest == 1 else 0x3C  # the bits of the last digit that belong to a whole byte
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
