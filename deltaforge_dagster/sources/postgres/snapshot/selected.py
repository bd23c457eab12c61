"""Rows that were selected, as the log would have them: COPY text to row images.

There is one conversion for each type. COPY's text becomes tuples as in the log (`copy_text`), and the
log's own kernel (`rows`) writes them, with the kinds that `types` names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.json_text import INTEGER, MAX_DEPTH
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.postgres.decode.layout import (
    OP_INSERT,
    ROW_END,
    ROW_START,
    ROW_WIDTH,
)
from deltaforge_dagster.sources.postgres.decode.rows import (
    AFTER,
    CODE,
    COLUMN,
    KEY,
    MARK,
    MAX_COLUMNS,
    MAX_ROOM,
    NO_ROOM,
    REPORT_WIDTH,
    TOO_DEEP_VALUE,
    write_changes,
)
from deltaforge_dagster.sources.postgres.decode.toast_reselect import NOTHING
from deltaforge_dagster.sources.postgres.decode.types import PostgresValueType
from deltaforge_dagster.sources.postgres.decode.versions import lay_out_columns
from deltaforge_dagster.sources.postgres.snapshot.copy_text import read_copied
from deltaforge_dagster.sources.rows.arrays import text_column

_LEAST_ROOM = 1 << 16


class PostgresSelectedRows:
    """Writes row images and keys of one table's rows, byte for byte those of the log.

    The rows must come from a session with our settings (`server.SETTINGS`), by
    `COPY ... TO STDOUT`, which shows every value as its type does: a cast to text does not.

    Args:
        columns: Name and type of the selected columns, in their order.
        key: Names of the key columns.
    """

    def __init__(self, columns: Mapping[str, PostgresValueType], key: Collection[str] = ()) -> None:
        self._columns = columns
        self._lines, self._names = lay_out_columns(list(columns), list(columns.values()), key, 0)
        self._table = np.array([[0, len(columns), len(key)]], np.int64)
        self._spans = np.empty((2, MAX_COLUMNS, 2), np.int64)
        self._stack = np.empty(MAX_DEPTH, np.uint8)

    def write(self, copied: Bytes | bytes) -> tuple[pa.Array[Any], pa.Array[Any]]:
        """Return the images and the keys (null without key columns) of whole lines of COPY text.

        Raises:
            CorruptLog: The text is not of that format, or a value not of its type's form.
            UnsupportedEvent: A document is nested too deeply, or the rows are beyond 2 GiB.
        """
        source, _, ends = read_copied(copied, len(self._columns))
        count = len(ends)
        rows = np.zeros((count, ROW_WIDTH), np.int64)  # op `OP_INSERT`, table 0
        assert OP_INSERT == 0
        rows[1:, ROW_START], rows[:, ROW_END] = ends[:-1], ends
        text_ends, valid = np.empty((3, count), np.int64), np.empty((3, count), np.uint8)
        report = np.empty(REPORT_WIDTH, np.int64)
        source.flags.writeable = False
        room = max(2 * source.size, _LEAST_ROOM)
        while True:
            texts = (np.empty(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint8))
            stop = write_changes(
                source,
                rows,
                0,
                count,
                self._table,
                self._lines,
                self._names,
                *texts,
                text_ends,
                valid,
                self._spans,
                self._stack,
                report,
                MARK,
                NOTHING,
            )
            if stop == count:
                break
            if report[CODE] != NO_ROOM or room == MAX_ROOM:
                raise self._error(int(report[CODE]), int(report[COLUMN]))
            room = min(room * 2, MAX_ROOM)
        return (
            text_column(texts[AFTER], text_ends[AFTER], valid[AFTER]),
            text_column(texts[KEY], text_ends[KEY], valid[KEY]),
        )

    def _error(self, code: int, column: int) -> CorruptLog | UnsupportedEvent:
        name, type_ = list(self._columns.items())[max(column, 0)]
        where = f"column {name} ({type_.name})"
        if code == NO_ROOM:
            return UnsupportedEvent(f"selected rows are larger than 2 GiB as JSON: {where}")
        if code == TOO_DEEP_VALUE:
            return UnsupportedEvent(
                f"a JSON document nested deeper than {MAX_DEPTH} levels: {where}"
            )
        return CorruptLog(f"a selected value that is not of its type's form: {where}")


def warm() -> None:
    """Compile the kernels of rows that are selected, or load them from the cache."""
    PostgresSelectedRows({"id": PostgresValueType("integer", INTEGER)}, ("id",)).write(b"1\n")
