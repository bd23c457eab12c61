"""Reselect unchanged TOAST: read large values that the log does not contain from the current rows.

PostgreSQL stores values above about 2 kB outside the row (manual, section "TOAST"), and logs them
only when they are written. If an update does not change such a value, the new tuple (drawn in
`pgoutput`) has `u` in its place. An update with a complete old row (`O`, replica identity FULL) has
the value there.

The kernel `find_unchanged_toast` finds the missing values of a batch and the keys of their rows.
From these, `ToastReselector` makes one question per table. The answer is COPY text, which `rows`
converts in the same way as values from the log. Only implementations of `Reselect` know the server;
the decoder does not.
"""

# ruff: noqa: C901, PLR0917, PLR1714, SIM109 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel, read_only
from deltaforge_dagster.sources.postgres.decode.layout import (
    COLUMN_KEY,
    OP_UPDATE,
    ROW_END,
    ROW_OP,
    ROW_START,
    ROW_TABLE,
    TABLE_COLUMNS,
    TABLE_FIRST,
)
from deltaforge_dagster.sources.postgres.decode.rows import (
    RESELECTED_COLUMN,
    RESELECTED_ROW,
    RESELECTED_START,
    RESELECTED_WIDTH,
)
from deltaforge_dagster.sources.postgres.decode.scan import read_16, read_32
from deltaforge_dagster.sources.postgres.decode.versions import PostgresTableVersions
from deltaforge_dagster.sources.postgres.snapshot.copy_text import read_copied
from deltaforge_dagster.tables import Column, TableSchema

HOLE_ROW, HOLE_COLUMN, HOLE_START, HOLE_END = range(4)
"""Fields of `holes`: number of the row; index of a column; start and end in the buffer of a key
column's text, or `MISSING` twice for a column with a missing value.
"""
HOLE_WIDTH = 4
MISSING = -1

_NEW, _OLD_KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")
_NULL, _TOAST, _TEXT = ord("n"), ord("u"), ord("t")
_HOLES = 1 << 16
NOTHING = np.empty((0, RESELECTED_WIDTH), np.int64)
"""No reselected values."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for values of rows of one table.

    Attributes:
        relation: The table's OID.
        table: The table version that the rows are decoded with.
        columns: The columns with missing values.
        keys: The key columns, each with its text in every row.
    """

    relation: int
    table: TableSchema
    columns: tuple[Column, ...]
    keys: tuple[tuple[Column, list[str]], ...]

    @property
    def rows(self) -> int:
        """Number of rows in the request."""
        return len(self.keys[0][1])


@dataclass(frozen=True, slots=True)
class Answer:
    """The current values of a table.

    Attributes:
        columns: The columns of the question that the table still has, with the same type.
        copied: COPY text: a line for each row that exists, in the question's order; the row's
            number from 0, then the values of `columns`.
        asked: How many rows of the question it answers, from the first on; at least one.
    """

    columns: tuple[Column, ...]
    copied: bytes
    asked: int


@runtime_checkable
class Reselect(Protocol):
    """Reads current values from the source."""

    def answer(self, question: Question) -> Answer:
        """Return the rows' current values; if they are large, only those of the first rows.

        Raises:
            DeltaforgeError: The server does not answer, or denies access to the role.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReselectedValues:
    """Reselected values for `rows.write_changes`.

    `source` is the read buffer followed by the values' texts.
    """

    lines: Longs
    source: Bytes


class ToastReselector:
    """Finds missing values in the rows of one stream and reselects them."""

    def __init__(self, versions: PostgresTableVersions, reselect: Reselect) -> None:
        self._versions = versions
        self._reselect = reselect
        self._holes = new_holes(_HOLES)

    def reselect(
        self, source: Bytes, rows: Longs, first: int, last: int
    ) -> tuple[ReselectedValues, int]:
        """Return the missing values of `rows[first:last]`, or of its first rows, and their end.

        At least one row is covered.

        Raises:
            DeltaforgeError: As `Reselect.answer` does.
        """
        versions = self._versions
        count, stop = find_unchanged_toast(
            source, rows, first, last, versions.tables, versions.columns, self._holes
        )
        last = max(int(stop), first + 1)
        holes = self._holes[:count]
        version_of = rows[holes[:, HOLE_ROW], ROW_TABLE]
        parts: list[tuple[Longs, Bytes]] = []
        for version in dict.fromkeys(version_of.tolist()):
            lines, text, asked = self._reselect_table(source, version, holes[version_of == version])
            last = min(last, asked)
            parts.append((lines, text))
        return _merged(source, parts, last), last

    def _reselect_table(
        self, source: Bytes, version: int, holes: Longs
    ) -> tuple[Longs, Bytes, int]:
        """Reselect values of one table.

        Returns:
            Their lines, their texts, and the first row that is not covered.
        """
        table = self._versions.schemas[version]
        key = [c.name in table.primary_key for c in table.columns]
        in_key = np.array(key, np.bool_)[holes[:, HOLE_COLUMN]]
        wanted = holes[(holes[:, HOLE_START] == MISSING) & ~in_key]
        indexes = [index for index, is_key in enumerate(key) if is_key]
        numbers, texts = _keys(source, holes[in_key], indexes)
        end = int(holes[-1, HOLE_ROW]) + 1
        columns = sorted(set(wanted[:, HOLE_COLUMN].tolist()))
        if not columns or not indexes or not numbers:
            return NOTHING, source[:0], end
        answer = self._reselect.answer(
            Question(
                relation=self._versions.relations[version],
                table=table,
                columns=tuple(table.columns[index] for index in columns),
                keys=tuple((table.columns[p], t) for p, t in zip(indexes, texts, strict=True)),
            )
        )
        if answer.asked < len(numbers):
            end = numbers[answer.asked]
        text, fields, _ = read_copied(answer.copied, 1 + len(answer.columns))
        lines = [
            (_row(numbers, text[start:stop].tobytes()), column.ordinal_position - 1, *bounds)
            for (start, stop), *values in fields.tolist()
            for column, bounds in zip(answer.columns, values, strict=True)
        ]
        missing = set(map(tuple, wanted[:, [HOLE_ROW, HOLE_COLUMN]].tolist()))
        kept = [line for line in lines if line[:2] in missing]
        return np.array(kept, np.int64).reshape(-1, RESELECTED_WIDTH), text, end


@kernel
def find_unchanged_toast(
    source: Bytes,
    rows: Longs,
    first: int,
    last: int,
    tables: Longs,
    columns: Longs,
    holes: Longs,
) -> tuple[int, int]:
    """Record in `holes` the missing values of updates in `rows[first:last]`, and their rows' keys.

    Returns the number of used lines of `holes`, and the row where it stopped: `last`, or a row for
    which `holes` has no room, or one that does not follow its format. Lines are ordered by row; a
    row is recorded completely or not at all.
    """
    used = 0
    for row in range(first, last):
        at, end = rows[row, ROW_START], rows[row, ROW_END]
        if rows[row, ROW_OP] != OP_UPDATE or at >= end or source[at] == _OLD_ROW:
            continue
        count = tables[rows[row, ROW_TABLE], TABLE_COLUMNS]
        first_column = tables[rows[row, ROW_TABLE], TABLE_FIRST]
        if used + 2 * count > holes.shape[0]:
            return used, row
        started = used
        has_hole = False
        # A key value that is not in the new tuple is in the old key, which precedes it.
        for part in (_OLD_KEY, _NEW):
            if at >= end or source[at] != part:
                if part == _OLD_KEY:
                    continue
                return started, row
            if end - at < 3 or read_16(source, at + 1) != count:
                return started, row
            at += 3
            for index in range(count):
                after = _cell_end(source, at, end)
                if after == MISSING:
                    return started, row
                is_key = columns[first_column + index, COLUMN_KEY] != 0
                unchanged_toast = source[at] == _TOAST and part == _NEW
                if unchanged_toast or (is_key and source[at] == _TEXT):
                    holes[used, HOLE_ROW] = row
                    holes[used, HOLE_COLUMN] = index
                    holes[used, HOLE_START] = MISSING if unchanged_toast else at + 5
                    holes[used, HOLE_END] = MISSING if unchanged_toast else after
                    used += 1
                    has_hole = has_hole or unchanged_toast
                at = after
        if not has_hole:
            used = started
    return used, last


def new_holes(lines: int) -> Longs:
    """Return the array `holes` for `find_unchanged_toast`, with this many lines."""
    return np.empty((lines, HOLE_WIDTH), np.int64)


def _keys(source: Bytes, holes: Longs, indexes: list[int]) -> tuple[list[int], list[list[str]]]:
    """Return the numbers of the rows whose whole key is known, and each key column's texts."""
    by_row: dict[int, dict[int, str]] = {}
    for row, column, start, end in holes[holes[:, HOLE_START] != MISSING].tolist():
        # A key that is not UTF-8 is altered by this, and so matches no row.
        text = source[start:end].tobytes().decode(errors="replace")
        by_row.setdefault(row, {})[column] = text
    whole = {row: key for row, key in by_row.items() if len(key) == len(indexes)}
    return list(whole), [[key[index] for key in whole.values()] for index in indexes]


def _row(numbers: list[int], text: bytes) -> int:
    """Return the row that a line of COPY text belongs to.

    `text` is the line's first field, an index into `numbers`.
    """
    if not text.isdigit() or int(text) >= len(numbers):
        raise CorruptLog("the server's answer names a row that was not asked for")
    return numbers[int(text)]


def _merged(source: Bytes, parts: list[tuple[Longs, Bytes]], last: int) -> ReselectedValues:
    """Append the texts to the read buffer; drop rows from `last` on.

    The lines are sorted by row and column.
    """
    if not any(len(lines) for lines, _ in parts):
        return ReselectedValues(NOTHING, source)
    base = source.size
    for lines, text in parts:
        offsets = lines[:, RESELECTED_START:]
        offsets[offsets >= 0] += base
        base += text.size
    together = np.concatenate([lines for lines, _ in parts])
    together = together[together[:, RESELECTED_ROW] < last]
    order = np.lexsort((together[:, RESELECTED_COLUMN], together[:, RESELECTED_ROW]))
    whole = np.concatenate([source, *(text for _, text in parts)])
    return ReselectedValues(np.ascontiguousarray(together[order]), read_only(whole))


@kernel
def _cell_end(source: Bytes, at: int, end: int) -> int:
    """Return the offset after the value at `at`; `MISSING` if it does not follow the format."""
    if at >= end:
        return MISSING
    sent = source[at]
    if sent == _NULL or sent == _TOAST:
        return at + 1
    if sent != _TEXT or end - at < 5:
        return MISSING
    after = at + 5 + read_32(source, at + 1)
    return after if after <= end else MISSING
