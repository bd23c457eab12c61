"""Make record batches of the change frame from rows of a snapshot; shared by every source."""

# ruff: noqa: PLR0917 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel, read_only
from deltaforge_dagster.sources.rows.arrays import coded, id_column, record_batch
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.rows.event_ids import ID_SIZE, mix_a, mix_b, write_event_id
from deltaforge_dagster.sources.rows.hiding import HiddenTable
from deltaforge_dagster.sources.snapshot import Chunk, ReadView
from deltaforge_dagster.tables import TableSchema


class SnapshotRows:
    """Makes record batches of the rows of one chunk.

    An event id is a function of the source, the chunk, the read view, and the row's key (in a table
    without a key, the row's number). So the same row gets another id when it is read again.

    Args:
        source_id: `id` of the source in the pipeline file.
        chunk: The chunk.
        read_view: The read view of the read.
        table: The table's current schema.
        rules: The column rules.
        ts_us: When the chunk was read, in microseconds since 1970.

    Attributes:
        table: The table as its rows appear under the column rules.
    """

    def __init__(
        self,
        source_id: str,
        chunk: Chunk,
        read_view: ReadView,
        *,
        table: TableSchema,
        rules: ColumnRules,
        ts_us: int,
    ) -> None:
        read = f"{source_id}\0{chunk.to_json()}\0{read_view.to_json()}".encode()
        digest = hashlib.blake2b(read, digest_size=16, person=b"snapshot").digest()
        self._seed = np.frombuffer(digest, "<u8").astype(np.uint64)
        self._hidden = HiddenTable(rules, table)
        self.table = self._hidden.visible
        self._ts_us = ts_us
        self._count = 0

    def batch(self, images: pa.Array[Any], keys: pa.Array[Any]) -> pa.RecordBatch:
        """Return a batch of the next rows of the chunk.

        Args:
            images: The rows' images, before column rules.
            keys: Their keys in the same form; null in a table without a key.

        Raises:
            CorruptLog: An image is not UTF-8.
            SourceMisconfigured: A value that should be truncated is neither text nor binary.
        """
        try:
            images.validate(full=True)
        except pa.ArrowInvalid:
            raise CorruptLog(f"a row of table {self.table.full_name} that is not UTF-8") from None
        count = len(images)
        first = np.zeros(count, np.int32)
        rows = np.arange(self._count, self._count + count)
        self._count += count
        table = self.table
        shown = self._hidden.column(keys)
        columns = {
            "op": coded(first, pa.array(["r"])),
            "ts_us": pa.array(np.full(count, self._ts_us)),
            "db": coded(first, pa.array([table.db])),
            "table": coded(first, pa.array([table.table])),
            "after": self._hidden.column(images),
            "key": shown,
            "row": pa.array(rows),
            "tx_end": pa.array(np.ones(count, np.bool_)),
            "event_id": self._ids(shown, rows),
            "raw_payload": pa.array(np.zeros(count, np.bool_)),
        }
        if table.schema is not None:
            columns["schema"] = coded(first, pa.array([table.schema]))
        return record_batch(columns, count)

    def _ids(self, keys: pa.Array[Any], rows: Longs) -> pa.StringArray:
        out = np.empty(len(rows) * ID_SIZE, np.uint8)
        if keys.null_count:
            texts, ends = np.empty(0, np.uint8), np.zeros(len(rows) + 1, np.int32)
        else:
            _, offsets, data = keys.buffers()
            assert offsets is not None
            ends = np.frombuffer(memoryview(offsets), np.int32)[
                keys.offset : keys.offset + len(keys) + 1
            ]
            texts = np.frombuffer(memoryview(data or b""), np.uint8)
        write_row_ids(read_only(texts), ends.astype(np.int64), rows, self._ts_us, self._seed, out)
        return id_column(out)


_EIGHT = np.uint64(8)


@kernel
def write_row_ids(
    keys: Bytes,
    ends: Longs,
    rows: Longs,
    ts_us: int,
    seed: npt.NDArray[np.uint64],
    out: Bytes,
) -> None:
    """Write the event ids of rows, 36 bytes each, from their keys, or else from their numbers."""
    at = 0
    for row in range(rows.size):
        start, end = ends[row], ends[row + 1]
        a, b = seed[0], seed[1]
        word, filled = np.uint64(0), 0
        for position in range(start, end):
            word = (word << _EIGHT) | np.uint64(keys[position])
            filled += 1
            if filled == 8:
                a, b = mix_a(a ^ word), mix_b(b ^ word)
                word, filled = np.uint64(0), 0
        length = np.uint64(end - start)
        if start == end:
            word = np.uint64(rows[row])
        a, b = mix_a(mix_a(a ^ word) ^ length), mix_b(mix_b(b ^ word) ^ length)
        at = write_event_id(ts_us, a, b, out, at)


def warm() -> None:
    """Compile the kernel, or load it from the cache."""
    keys, out = read_only(b"1"), np.empty(ID_SIZE, np.uint8)
    seed = np.zeros(2, np.uint64)
    write_row_ids(keys, np.array([0, 1]), np.array([0]), 0, seed, out)
