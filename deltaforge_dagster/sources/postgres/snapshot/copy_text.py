r"""Kernel that converts rows of `COPY ... TO STDOUT` to tuples like those in the log.

Manual, command COPY, section "Text Format"::

    row       value TAB value ... NEWLINE
    value     \N for null, or the type's text as SELECT shows it, in which a backslash,
              and the six control characters below, are escaped: \\ \b \f \n \r \t \v

The output for a row is that of an Insert message (drawn in `decode.pgoutput`): `N`, then the tuple.
So the kernels that write the log's rows also write selected rows.
"""

# ruff: noqa: C901 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import numpy as np

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import BACKSLASH, UPPER_N, Bytes, Longs, kernel, read_only

_TAB, _NEWLINE = ord("\t"), ord("\n")
_NEW, _NULL, _TEXT = ord("N"), ord("n"), ord("t")
_CELL_BYTES = 5
"""Bytes before a text in a tuple: letter and size."""

NULL_START = -1
"""Stands for start and end of a null value."""

_UNESCAPED = np.full(256, -1, np.int16)
"""The byte that a backslash and this byte stand for, -1 for none."""
for _letter, _byte in zip(b"\\bfnrtv", b"\\\b\f\n\r\t\v", strict=True):
    _UNESCAPED[_letter] = _byte

_IS_ORDINARY = np.ones(256, np.bool_)
"""Whether a byte is an ordinary one: neither a delimiter nor a backslash."""
_IS_ORDINARY[[_TAB, _NEWLINE, BACKSLASH]] = False


@kernel
def _tuples(source: Bytes, columns: int, out: Bytes, fields: Longs, ends: Longs) -> int:
    """Write one tuple for each line; return their number, or `INVALID`.

    `fields[row, column]` receives start and end of a value's text in `out`, `ends[row]` the end of
    the tuple.
    """
    out_at, row, at = 0, 0, 0
    if source.size > 0 and source[source.size - 1] != _NEWLINE:
        return INVALID
    # The source ends with a newline, so the loops below always stop.
    while at < source.size:
        if row == ends.size:
            return INVALID
        out[out_at] = _NEW
        out[out_at + 1] = columns >> 8
        out[out_at + 2] = columns & 255
        out_at += 3
        for column in range(columns):
            stop = _TAB if column < columns - 1 else _NEWLINE
            null = (
                source[at] == BACKSLASH
                and source.size - at > 2
                and source[at + 1] == UPPER_N
                and source[at + 2] == stop
            )
            if null:
                out[out_at] = _NULL
                out_at += 1
                at += 3
                fields[row, column, 0], fields[row, column, 1] = NULL_START, NULL_START
                continue
            head = out_at
            out_at += _CELL_BYTES
            while True:
                while _IS_ORDINARY[source[at]]:
                    out[out_at] = source[at]
                    out_at += 1
                    at += 1
                if source[at] != BACKSLASH:
                    break
                if _UNESCAPED[source[at + 1]] < 0:
                    return INVALID
                out[out_at] = _UNESCAPED[source[at + 1]]
                out_at += 1
                at += 2
            if source[at] != stop:
                return INVALID
            at += 1
            size = out_at - head - _CELL_BYTES
            out[head] = _TEXT
            for i in range(4):
                out[head + 1 + i] = (size >> (24 - 8 * i)) & 255
            fields[row, column, 0], fields[row, column, 1] = head + _CELL_BYTES, out_at
        ends[row] = out_at
        row += 1
    return row


def read_copied(copied: Bytes | bytes, columns: int) -> tuple[Bytes, Longs, Longs]:
    """Convert complete lines of COPY text to tuples.

    Args:
        copied: The lines.
        columns: The number of columns in each line, at least one.

    Returns:
        The tuples; for each row and column, start and end of its text in them, `NULL_START`
        twice for null; for each row, the end of its tuple.

    Raises:
        CorruptLog: The bytes do not follow the format.
    """
    source = read_only(copied)
    lines = int(np.count_nonzero(source == _NEWLINE))
    separators = lines + int(np.count_nonzero(source == _TAB))
    out = np.empty(source.size + 3 * lines + _CELL_BYTES * separators, np.uint8)
    fields = np.empty((lines, columns, 2), np.int64)
    ends = np.empty(lines, np.int64)
    if separators != lines * columns or _tuples(source, columns, out, fields, ends) != lines:
        raise CorruptLog("the server's answer to COPY does not follow its format")
    return out[: int(ends[-1]) if lines else 0], fields, ends
