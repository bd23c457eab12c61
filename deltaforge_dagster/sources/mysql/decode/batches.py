"""Build record batches of the change frame from scanned rows."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, Longs
from deltaforge_dagster.sources.mysql.decode.layout import (
    GTID_OF_MARIADB,
    OP_LETTERS,
    ROW_INDEX,
    ROW_LAST,
    ROW_OP,
    ROW_POS,
    ROW_SIZE,
    ROW_TABLE,
    ROW_TX,
    ROW_WIDTH,
    TABLE_FIRST,
    TX_A,
    TX_B,
    TX_HAS_GTID,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
)
from deltaforge_dagster.sources.mysql.decode.rows import (
    CODE,
    COLUMN,
    NO_KEY_VALUE,
    NO_ROOM,
    REPORT_WIDTH,
    write_changes,
    write_event_ids,
)
from deltaforge_dagster.sources.mysql.events.binlog import QueryEvent
from deltaforge_dagster.sources.mysql.events.table_map import MAX_COLUMNS
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableVersions
from deltaforge_dagster.sources.mysql.values.json_binary import FRAME_WIDTH, MAX_DEPTH
from deltaforge_dagster.sources.outbox import SCHEMA, MysqlOutboxTables
from deltaforge_dagster.sources.rows.arrays import (
    RowTexts,
    StampNames,
    coded,
    id_column,
    record_batch,
)
from deltaforge_dagster.sources.rows.event_ids import ID_SIZE
from deltaforge_dagster.sources.rows.hiding import Shown

_MAX_TEXT = (1 << 31) - 1
"""The most bytes that an Arrow string array can contain."""

DDL_TABLE = "_ddl"
"""The table name in rows for DDL statements."""


def gtid_prefix(sid: bytes, tag: str, *, of_mariadb: bool = False) -> str:
    """Return the part of a GTID before its number.

    It is `uuid:` or `uuid:tag:`, and for MariaDB `domain-server-`.
    """
    if of_mariadb:
        return "{}-{}-".format(*struct.unpack(">QQ", sid))
    return f"{uuid.UUID(bytes=sid)}:{tag}:" if tag else f"{uuid.UUID(bytes=sid)}:"


@dataclass(frozen=True, slots=True)
class RowLocation:
    """Operation, table and log position of a row, named as in the change frame."""

    op: str
    db: str
    table: str
    file: str
    pos: int
    row: int


class MysqlBatchWriter:
    """Writes the rows of one stream into record batches; reuses its scratch memory for each."""

    def __init__(
        self,
        versions: MysqlTableVersions,
        seed: npt.NDArray[np.uint64],
        max_rows: int,
        outboxes: MysqlOutboxTables,
    ) -> None:
        self._versions = versions
        self._outboxes = outboxes
        self._in_outbox = np.zeros(0, np.bool_)  # by version
        self._seed = seed
        self._ops = pa.array(OP_LETTERS)
        self._texts = RowTexts(max_rows)
        self._spans = np.empty((2, MAX_COLUMNS, 2), np.int64)
        self._stack = np.empty((MAX_DEPTH, FRAME_WIDTH), np.int64)
        self._report = np.empty(REPORT_WIDTH, np.int64)
        self._names = StampNames()
        self.tags: dict[int, str] = {0: ""}

    def statement(self, query: QueryEvent, location: RowLocation, line: Longs) -> pa.RecordBatch:
        """Return a batch with one row, for a statement.

        Args:
            query: The statement.
            location: Operation, table and position of the row.
            line: The line of its transaction (`layout.TX_*`).
        """
        rows = np.zeros((1, ROW_WIDTH), np.int64)
        rows[0, ROW_INDEX] = location.row
        txs = line.reshape(1, -1)
        ddl = json.dumps({"sql": query.statement, "database": query.database}, ensure_ascii=False)
        columns: dict[str, pa.Array[Any]] = {
            "op": _single(location.op),
            "ts_us": pa.array(txs[:, TX_TS_US]),
            "db": _single(location.db),
            "table": _single(location.table),
            "file": _single(location.file),
            "pos": pa.array([location.pos]),
            "row": pa.array([location.row]),
            "tx_id": _tx_ids(txs, np.zeros(1, np.int64), self.tags),
            "tx_end": pa.array([False]),
            "event_id": self._event_ids(rows, 0, 1, txs),
            "ddl": pa.array([ddl]),
            "raw_payload": pa.array([False]),
        }
        if location.op == "t" and self._outboxes.has(location.db, location.table):
            columns["schema"] = _single(SCHEMA)
        return record_batch(columns, 1)

    def write(  # noqa: PLR0917 - what a kernel reads
        self,
        source: Bytes,
        rows: Longs,
        first: int,
        last: int,
        txs: Longs,
        file: str,
    ) -> tuple[pa.RecordBatch | None, int, DeltaforgeError | None]:
        """Write `rows[first:last]`, or as many of them as fit, but at least one.

        Returns:
            The batch (None if the first row fails), the number of the row after it, and the error
            at that row, or None.
        """
        stop, error = self._write_texts(source, rows, first, last, file)
        if stop == first:
            return None, stop, error
        shown = self._versions.hiding.show(
            self._texts.texts, self._texts.ends, self._texts.valid, rows[first:stop, ROW_TABLE]
        )
        stop = first + shown.rows
        if shown.error is not None:
            error = type(shown.error)(f"{shown.error}: {self._location(rows[stop], file)}")
            if stop == first:
                return None, stop, error
        event_ids = self._event_ids(rows, first, stop, txs)
        batch = self._batch(rows[first:stop], txs, shown, event_ids, file)
        return batch, stop, error

    def _write_texts(
        self, source: Bytes, rows: Longs, first: int, last: int, file: str
    ) -> tuple[int, DeltaforgeError | None]:
        """Write the row images.

        Returns the number of the row after the last one that was written, and the error at that
        row.
        """
        versions, layout, scratch = self._versions, self._versions.layout, self._texts
        while True:
            stop = int(
                write_changes(
                    source,
                    rows,
                    first,
                    last,
                    versions.tables,
                    layout.columns,
                    layout.labels,
                    layout.names,
                    layout.characters,
                    *scratch.texts,
                    scratch.ends,
                    scratch.valid,
                    self._spans,
                    self._stack,
                    self._report,
                )
            )
            if stop > first and scratch.ends[:, stop - first - 1].max() > _MAX_TEXT:
                location = self._location(rows[first], file)
                return first, UnsupportedEvent(
                    f"a change of {location} is larger than 2 GiB as JSON"
                )
            if stop == last:
                return stop, None
            if self._report[CODE] != NO_ROOM:
                return stop, self._stopped_at(rows[stop], file)
            if stop > first:
                return stop, None
            try:
                scratch.make_room(int(rows[first, ROW_SIZE]))
            except MemoryError:
                location = self._location(rows[first], file)
                return stop, UnsupportedEvent(
                    f"a change too large for this machine's memory: {location}"
                )

    def _stopped_at(self, row: Longs, file: str) -> DeltaforgeError:
        """Return the error for the code that `write_changes` reported at `row`."""
        column = int(self._report[COLUMN])
        version = int(row[ROW_TABLE])
        ordinal = column - int(self._versions.tables[version, TABLE_FIRST])
        described = self._versions.schemas[version].columns[ordinal]
        location = f"column {described.name} ({described.data_type}) of {self._location(row, file)}"
        if self._report[CODE] == NO_KEY_VALUE:
            return UnsupportedEvent(f"a change without the value of a key column: {location}")
        return CorruptLog(f"a value that is not of its type's form: {location}")

    def _location(self, row: Longs, file: str) -> str:
        table = self._versions.version_name(int(row[ROW_TABLE]))
        return f"table {table}, in the event that ends at {file}:{int(row[ROW_POS])}"

    def _event_ids(self, rows: Longs, first: int, last: int, txs: Longs) -> pa.Array[Any]:
        data = np.empty((last - first) * ID_SIZE, np.uint8)
        write_event_ids(rows, first, last, txs, self._seed, data)
        return id_column(data)

    def _batch(
        self, rows: Longs, txs: Longs, shown: Shown, event_ids: pa.Array[Any], file: str
    ) -> pa.RecordBatch:
        count = len(rows)
        names = self._names
        names.update(self._versions.schemas, self._versions.stamps)
        table = rows[:, ROW_TABLE]
        tx = rows[:, ROW_TX]
        first_tx = int(tx[0])
        columns = {
            "op": coded(rows[:, ROW_OP], self._ops),
            "ts_us": pa.array(txs[tx, TX_TS_US]),
            "db": coded(names.db_codes[table], names.dbs),
            **self._outbox_schema(table),
            "table": coded(names.table_codes[table], names.tables),
            **self._texts.columns(shown, count),
            "file": coded(np.zeros(count), pa.array([file])),
            "pos": pa.array(np.ascontiguousarray(rows[:, ROW_POS])),
            "row": pa.array(np.ascontiguousarray(rows[:, ROW_INDEX])),
            "tx_id": _tx_ids(txs[first_tx : int(tx[-1]) + 1], tx - first_tx, self.tags),
            "tx_end": pa.array(rows[:, ROW_LAST] == 1),
            "schema_version": coded(names.version_codes[table], names.versions),
            "schema_sequence": pa.array(names.sequences[table]),
            "event_id": event_ids,
            "raw_payload": pa.array(np.zeros(count, np.bool_)),
        }
        return record_batch(columns, count)

    def _outbox_schema(self, table: Longs) -> dict[str, pa.Array[Any]]:
        """Return the column `schema`, which is null except in rows of outbox tables.

        Returns an empty dict if there is no such row.
        """
        if not self._outboxes:
            return {}
        new = self._versions.schemas[len(self._in_outbox) :]
        in_outbox = [self._outboxes.has(schema.db, schema.table) for schema in new]
        self._in_outbox = np.append(self._in_outbox, np.array(in_outbox, np.bool_))
        marked = self._in_outbox[table]
        if not marked.any():
            return {}
        return {"schema": coded(np.zeros(len(table)), pa.array([SCHEMA]), ~marked)}


def _single(text: str) -> pa.DictionaryArray[Any, Any]:
    return coded(np.zeros(1), pa.array([text]))


def _tx_ids(txs: Longs, codes: Longs, tags: Mapping[int, str]) -> pa.DictionaryArray[Any, Any]:
    """Return for each code the GTID of the transaction `txs[code]` as text; null if it has none."""
    sources = txs[:, (TX_A, TX_B, TX_TAG)]
    changed = np.any(sources[1:] != sources[:-1], axis=1)
    prefix_codes = np.concatenate([[0], np.cumsum(changed)])
    firsts = [0, *(np.flatnonzero(changed) + 1)]
    prefixes = [
        gtid_prefix(
            sources[tx, :2].astype(">i8").tobytes(),
            tags[int(sources[tx, 2])],
            of_mariadb=bool(txs[tx, TX_HAS_GTID] == GTID_OF_MARIADB),
        )
        for tx in firsts
    ]
    numbers = pa.array(txs[:, TX_NUMBER]).cast(pa.string())
    texts: pa.Array[Any] = pc.binary_join_element_wise(  # type: ignore[call-overload]
        pa.array(prefixes).take(pa.array(prefix_codes)),
        numbers,
        "",
    )
    without = txs[codes, TX_HAS_GTID] == 0
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), texts, mask=without)
