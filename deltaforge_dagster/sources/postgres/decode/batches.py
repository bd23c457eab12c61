"""Build record batches of the change frame from scanned rows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.kernels.json_text import MAX_DEPTH
from deltaforge_dagster.kernels.runtime import Bytes, Longs
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.decode.layout import (
    OP_INSERT,
    OP_LETTERS,
    OP_MESSAGE,
    OP_TRUNCATE,
    ROW_INDEX,
    ROW_LAST,
    ROW_LSN,
    ROW_OP,
    ROW_START,
    ROW_TABLE,
    ROW_TX,
    TABLE_FIRST,
    TX_TS_US,
    TX_XID,
)
from deltaforge_dagster.sources.postgres.decode.pgoutput import truncate_payload
from deltaforge_dagster.sources.postgres.decode.rows import (
    BAD_TUPLE,
    BAD_VALUE,
    BINARY_VALUE,
    CODE,
    COLUMN,
    MAX_COLUMNS,
    MAX_ROOM,
    NO_KEY_VALUE,
    NO_ROOM,
    REPORT_WIDTH,
    RESELECT,
    TOO_DEEP_VALUE,
    write_changes,
    write_event_ids,
)
from deltaforge_dagster.sources.postgres.decode.toast_reselect import (
    NOTHING,
    Reselect,
    ReselectedValues,
    ToastReselector,
)
from deltaforge_dagster.sources.postgres.decode.versions import PostgresTableVersions
from deltaforge_dagster.sources.rows.arrays import (
    RowTexts,
    StampNames,
    coded,
    id_column,
    record_batch,
)
from deltaforge_dagster.sources.rows.event_ids import ID_SIZE
from deltaforge_dagster.sources.rows.hiding import Shown

_IMAGES = ("before", "after", "key")

_UNSUPPORTED = {
    TOO_DEEP_VALUE: f"a JSON document nested deeper than {MAX_DEPTH} levels",
    BINARY_VALUE: "a value in binary form, which was not asked for",
    NO_KEY_VALUE: "a change without the value of a key column",
}
_DAMAGED = {
    BAD_VALUE: "a value that is not of its type's form",
    BAD_TUPLE: "a row that does not follow its format",
}


UnchangedToast = Literal[0, 1] | Reselect
"""What replaces an unchanged TOAST value.

`rows.MARK`, `rows.OMIT`, or the current value from a `Reselect`.
"""


class PostgresBatchWriter:
    """Writes the rows of one stream into record batches; reuses its scratch memory for each."""

    def __init__(
        self,
        db: str,
        versions: PostgresTableVersions,
        seed: npt.NDArray[np.uint64],
        max_rows: int,
        unchanged_toast: UnchangedToast,
    ) -> None:
        self._versions = versions
        self._mode = RESELECT if isinstance(unchanged_toast, Reselect) else unchanged_toast
        self._reselector = (
            ToastReselector(versions, unchanged_toast)
            if isinstance(unchanged_toast, Reselect)
            else None
        )
        self._seed = seed
        self._db = pa.array([db])
        self._ops = pa.array(OP_LETTERS)
        self._texts = RowTexts(max_rows)
        self._spans = np.empty((2, MAX_COLUMNS, 2), np.int64)
        self._stack = np.empty(MAX_DEPTH, np.uint8)
        self._report = np.empty(REPORT_WIDTH, np.int64)
        self._names = StampNames()

    def write(
        self, source: Bytes, rows: Longs, first: int, last: int, txs: Longs
    ) -> tuple[pa.RecordBatch | None, int, DeltaforgeError | None]:
        """Write `rows[first:last]`, or as many of them as fit, but at least one.

        Returns:
            The batch (None if the first row fails), the number of the row after it, and the error
            at
            that row, or None.
        """
        reselected = ReselectedValues(NOTHING, source)
        if self._reselector is not None:
            try:
                reselected, last = self._reselector.reselect(source, rows, first, last)
            except DeltaforgeError as failed:
                return None, first, failed
        stop, error = self._write_texts(reselected, rows, first, last, txs)
        if stop == first:
            return None, stop, error
        shown = self._versions.hiding.show(
            self._texts.texts, self._texts.ends, self._texts.valid, rows[first:stop, ROW_TABLE]
        )
        stop = first + shown.rows
        if shown.error is not None:
            error = type(shown.error)(f"{shown.error}: {self._location(rows[stop], txs)}")
            if stop == first:
                return None, stop, error
        event_ids = self._event_ids(rows, first, stop, txs)
        batch = self._batch(source, rows[first:stop], txs, shown, event_ids)
        if not _is_text(batch):
            # Only a database with encoding SQL_ASCII, which the server does not convert, sends
            # anything but UTF-8.
            bad = next(row for row in range(stop - first) if not _is_text(batch.slice(row, 1)))
            error = CorruptLog(f"text that is not UTF-8: {self._location(rows[first + bad], txs)}")
            return (batch.slice(0, bad) if bad else None), first + bad, error
        return batch, stop, error

    def _write_texts(
        self, reselected: ReselectedValues, rows: Longs, first: int, last: int, txs: Longs
    ) -> tuple[int, DeltaforgeError | None]:
        """Write the row images; return the number of the next row, and the error at that row."""
        scratch = self._texts
        while True:
            stop = int(
                write_changes(
                    reselected.source,
                    rows,
                    first,
                    last,
                    self._versions.tables,
                    self._versions.columns,
                    self._versions.names,
                    *scratch.texts,
                    scratch.ends,
                    scratch.valid,
                    self._spans,
                    self._stack,
                    self._report,
                    self._mode,
                    reselected.lines,
                )
            )
            if stop == last:
                return stop, None
            if self._report[CODE] != NO_ROOM:
                return stop, self._row_error(rows[stop], txs)
            if stop > first:
                return stop, None
            room = scratch.texts[0].size
            if room == MAX_ROOM:
                return stop, UnsupportedEvent(
                    f"a row of {self._location(rows[stop], txs)} is larger than 2 GiB as JSON"
                )
            scratch.make_room(min(room * 2, MAX_ROOM))

    def _row_error(self, row: Longs, txs: Longs) -> DeltaforgeError:
        """Return the error for the code that `write_changes` reported at `row`."""
        code, column = int(self._report[CODE]), int(self._report[COLUMN])
        where = self._location(row, txs)
        if column >= 0:
            version = int(row[ROW_TABLE])
            ordinal = column - int(self._versions.tables[version, TABLE_FIRST])
            described = self._versions.schemas[version].columns[ordinal]
            where = f"column {described.name} ({described.data_type}) of {where}"
        if code in _UNSUPPORTED:
            return UnsupportedEvent(f"{_UNSUPPORTED[code]}: {where}")
        return CorruptLog(f"{_DAMAGED[code]}: {where}")

    def _location(self, row: Longs, txs: Longs) -> str:
        table = self._versions.version_name(int(row[ROW_TABLE]))
        xid = int(txs[row[ROW_TX], TX_XID])
        return f"table {table}, transaction {xid}, at {format_lsn(int(row[ROW_LSN]))}"

    def _event_ids(self, rows: Longs, first: int, last: int, txs: Longs) -> pa.StringArray:
        count = last - first
        data = np.empty(count * ID_SIZE, np.uint8)
        write_event_ids(rows, first, last, txs, self._seed, data)
        return id_column(data)

    def _batch(
        self, source: Bytes, rows: Longs, txs: Longs, shown: Shown, event_ids: pa.StringArray
    ) -> pa.RecordBatch:
        count = len(rows)
        names = self._names
        names.update(self._versions.schemas, self._versions.stamps)
        table = rows[:, ROW_TABLE]
        tx = rows[:, ROW_TX]
        first_tx = int(tx[0])
        outside = txs[tx, TX_XID] == 0  # messages outside of transactions
        messages = rows[:, ROW_OP] == OP_MESSAGE  # these have no table version
        xids = pa.array(txs[first_tx : int(tx[-1]) + 1, TX_XID]).cast(pa.string())
        columns = {
            "op": coded(np.where(messages, OP_INSERT, rows[:, ROW_OP]), self._ops),
            "ts_us": pa.array(txs[tx, TX_TS_US]),
            "db": coded(np.zeros(count), self._db),
            "schema": coded(names.schema_codes[table], names.schemas),
            "table": coded(names.table_codes[table], names.tables),
            **self._texts.columns(shown, count),
            "pos": pa.array(np.ascontiguousarray(rows[:, ROW_LSN])),
            "row": pa.array(np.ascontiguousarray(rows[:, ROW_INDEX])),
            "tx_id": coded(tx - first_tx, xids, _nonempty_mask(outside)),
            "tx_end": pa.array(rows[:, ROW_LAST] == 1),
            "schema_version": coded(
                names.version_codes[table], names.versions, _nonempty_mask(messages)
            ),
            "schema_sequence": pa.array(names.sequences[table], mask=_nonempty_mask(messages)),
            "event_id": event_ids,
            **_payloads(source, rows),
            "raw_payload": pa.array(np.zeros(count, np.bool_)),
        }
        return record_batch(columns, count)


def _payloads(source: Bytes, rows: Longs) -> dict[str, pa.Array[Any]]:
    """Return the column `ddl`, if any of the rows is a truncate."""
    truncates = np.flatnonzero(rows[:, ROW_OP] == OP_TRUNCATE)
    if not truncates.size:
        return {}
    payloads: list[str | None] = [None] * len(rows)
    for row in truncates:
        payloads[row] = truncate_payload(int(source[rows[row, ROW_START]]))
    return {"ddl": pa.array(payloads, pa.string())}


def _nonempty_mask(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
    """Return the mask, or None if it masks nothing."""
    return mask if mask.any() else None


def _is_text(batch: pa.RecordBatch) -> bool:
    """Return whether all row images are UTF-8."""
    try:
        for name in _IMAGES:
            batch.column(name).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
