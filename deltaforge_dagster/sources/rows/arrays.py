"""Arrow columns of the change frame from arrays that kernels write; for every source.

`RowTexts` is the memory into which kernels write the images and keys of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.kernels.runtime import Bytes, Longs
from deltaforge_dagster.sources.rows.event_ids import ID_SIZE
from deltaforge_dagster.tables import SchemaStamp, TableSchema

if TYPE_CHECKING:  # it makes columns itself
    from deltaforge_dagster.sources.rows.hiding import Shown


_TX_END = CAPTURED.get_field_index("tx_end")
_ROOM = 16 << 20
"""Bytes of JSON per text column and batch; one larger row makes the memory grow for a while."""
_NAMES = ("before", "after", "key")


def with_tx_end(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of one row with `tx_end` set: its change is the last of its transaction."""
    return batch.set_column(_TX_END, CAPTURED.field(_TX_END), pa.array([True]))


def text_column(text: Bytes, row_ends: Longs, valid: Bytes) -> pa.Array[Any]:
    """Copy texts from scratch memory into a string array.

    Args:
        text: The texts of all rows, one after the other.
        row_ends: The offset at which each row's text ends.
        valid: 0 for rows that are null.
    """
    count = len(row_ends)
    ends = np.zeros(count + 1, np.int32)
    ends[1:] = row_ends
    nulls = count - int(np.count_nonzero(valid))
    if nulls == count:
        return pa.nulls(count, pa.string())
    bitmap = _buffer(np.packbits(valid, bitorder="little")) if nulls else None
    data = text[: ends[-1]].copy()
    return pa.StringArray.from_buffers(count, _buffer(ends), _buffer(data), bitmap, nulls)


def id_column(data: Bytes) -> pa.StringArray:
    """Return consecutive event ids as a string array, which takes over the memory."""
    ends = np.arange(0, data.size + 1, ID_SIZE, dtype=np.int32)
    return pa.StringArray.from_buffers(data.size // ID_SIZE, _buffer(ends), _buffer(data))


def coded(
    codes: npt.NDArray[Any], dictionary: pa.Array[Any], nulls: npt.NDArray[np.bool_] | None = None
) -> pa.DictionaryArray[Any, Any]:
    """Return a dictionary array: `dictionary` at `codes`, and null where `nulls` is true."""
    indices = pa.array(codes.astype(np.int32), pa.int32(), mask=nulls)
    return pa.DictionaryArray.from_arrays(indices, dictionary)


def record_batch(columns: Mapping[str, pa.Array[Any]], count: int) -> pa.RecordBatch:
    """Return a batch of `frame.CAPTURED` with these columns; all others are null."""
    return pa.RecordBatch.from_arrays(
        [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in CAPTURED
        ],
        schema=CAPTURED,
    )


class RowTexts:
    """Three text columns: image before, image after, key.

    Each has the texts of all rows one after the other.

    Args:
        max_rows: The largest number of rows in a batch.

    Attributes:
        texts: The memory of each column.
        ends: `ends[column, row]` is the offset at which the row's text ends.
        valid: `valid[column, row]` is 0 if the row's text is null.
    """

    def __init__(self, max_rows: int) -> None:
        self.texts = _texts(_ROOM)
        self.ends = np.empty((3, max_rows), np.int64)
        self.valid = np.empty((3, max_rows), np.uint8)

    def make_room(self, room: int) -> None:
        """Replace the memory by `room` bytes for each column, for a row above the usual size.

        Raises:
            MemoryError: The machine does not have that much memory.
        """
        self.texts = _texts(room)

    def columns(self, shown: Shown, count: int) -> dict[str, pa.Array[Any]]:
        """Copy the first `count` rows, after column rules, into columns of the change frame.

        If the memory has grown for a large row, it is replaced by memory of the usual size.
        """
        columns = {
            name: text_column(shown.texts[text], shown.ends[text, :count], self.valid[text, :count])
            for text, name in enumerate(_NAMES)
        }
        if self.texts[0].size > _ROOM:
            self.texts = _texts(_ROOM)
        return columns


class StampNames:
    """Arrow dictionaries of table versions' names and stamps, with each version's code in them."""

    def __init__(self) -> None:
        self._count = -1

    def update(self, schemas: Sequence[TableSchema], stamps: Sequence[SchemaStamp]) -> None:
        """Rebuild the dictionaries if there are more versions than at the last call."""
        if len(schemas) == self._count:
            return
        self._count = len(schemas)
        self.dbs, self.db_codes = _dictionary([s.db for s in schemas])
        self.schemas, self.schema_codes = _dictionary([s.schema or "" for s in schemas])
        self.tables, self.table_codes = _dictionary([s.table for s in schemas])
        self.versions, self.version_codes = _dictionary([s.fingerprint for s in stamps])
        self.sequences = np.array([s.sequence for s in stamps], np.int64)


def _texts(room: int) -> tuple[Bytes, Bytes, Bytes]:
    """Return memory for the three columns; pages that are never written cost nothing."""
    return np.empty(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint8)


def _dictionary(values: list[str]) -> tuple[pa.StringArray, npt.NDArray[np.int32]]:
    """Return the distinct values, and the index of each value among them."""
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    return pa.array(list(codes), pa.string()), np.array([codes[v] for v in values], np.int32)


def _buffer(array: npt.NDArray[Any]) -> pa.Buffer:
    """Hand an array's memory to Arrow, which keeps it alive."""
    return pa.py_buffer(array.data)
