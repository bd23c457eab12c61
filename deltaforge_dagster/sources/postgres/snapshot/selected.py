"""Write the rows of a COPY as row images, identical to those of the log's rows.

COPY's text is converted to tuples as in the log (`copy_text`), which the log's own kernel writes
(`decode.rows`). So there is only one conversion for each type.
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
    """Writes row images and keys of one table's rows, byte-identical to those from the log.

    The rows must come from a session with our settings (`connection.server.SETTINGS`), and from
    `COPY ... TO STDOUT`, which uses every type's output function as the log does; a cast to text
    may differ.

    Args:
        columns: Names and types of the selected columns, in their order.
        key: Names of the key columns.
    """

    def __init__(self, columns: Mapping[str, PostgresValueType], key: Collection[str] = ()) -> None:
        self._columns = columns
        self._lines, self._names = lay_out_columns(list(columns), list(columns.values()), key, 0)
        self._table = np.array([[0, len(columns), len(key)]], np.int64)
        self._spans = np.empty((2, MAX_COLUMNS, 2), np.int64)
        self._stack = np.empty(MAX_DEPTH, np.uint8)

    def write(self, copied: Bytes | bytes) -> tuple[pa.Array[Any], pa.Array[Any]]:
        """Return the images and the keys (null without key columns) of complete lines of COPY text.

        Raises:
            CorruptLog: The text does not follow COPY's format, or a value does not match its type.
            UnsupportedEvent: A JSON document is nested too deeply, or the rows together exceed 2
                GiB as JSON.
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
    """Compile the kernels for selected rows, or load them from the cache."""
    PostgresSelectedRows({"id": PostgresValueType("integer", INTEGER)}, ("id",)).write(b"1\n")
