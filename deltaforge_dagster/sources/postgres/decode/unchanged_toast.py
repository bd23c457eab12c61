"""Kernel that finds unchanged TOAST values, which the log does not contain.

PostgreSQL stores values above about 2 kB outside the row (manual, section "TOAST"), and logs them
only when they are written. If an update does not change such a value, the new tuple (drawn in
`pgoutput`) has `u` in its place. An update with a complete old row (`O`, replica identity FULL) has
the value there.
"""

# ruff: noqa: C901, PLR0917, PLR1714, SIM109 - kernels are long flat loops over bytes, see
# `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel
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
from deltaforge_dagster.sources.postgres.decode.scan import read_16, read_32

HOLE_ROW, HOLE_COLUMN, HOLE_START, HOLE_END = range(4)
"""Fields of `holes`: number of the row; index of a column; start and end in the buffer of a key
column's text, or `MISSING` twice for a column with a missing value.
"""
HOLE_WIDTH = 4
MISSING = -1

_NEW, _OLD_KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")
_NULL, _TOAST, _TEXT = ord("n"), ord("u"), ord("t")


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
