"""Content hashes: they identify the rows of a segment, independently of file and batches.

Two segments with the same changes in the same order have the same content hash, however the rows
are divided into batches and row groups, compressed or dictionary-encoded. The position in the
journal (`segment`, `ordinal`) is not part of it. The canonical form consists of a few SHA-256
streams per column:

* a column's nulls: where validity changes, as row numbers (int64, little endian);
* numbers: the valid values, int64 little endian; booleans: one byte each;
* text: the lengths in bytes of the valid values (int32, little endian), and their UTF-8 bytes;
* names (dictionary columns): the rows at which a different value starts, and those values as text,
  which is very cheap for columns that rarely change.

The hash of the rows is SHA-256 over the row count and each column's name and stream digests.
Everything works on whole Arrow buffers; Python does not loop over rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_JOURNAL_POSITION = ("segment", "ordinal")
_NULL = -1  # no index of a dictionary is negative


class _Stream(Protocol):
    """The canonical form of one column."""

    def update(self, column: pa.ChunkedArray[Any]) -> None: ...

    def digest(self) -> bytes: ...


class _Changes:
    """Hashes the rows at which a sequence changes its value, independently of batch boundaries."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._rows = 0
        self._last: object = self  # equal to no value

    def update(
        self, codes: npt.NDArray[np.integer], first: object, last: object
    ) -> npt.NDArray[np.intp]:
        """Add the next codes; return where runs start.

        `first` and `last` are the values of the first and the last code.
        """
        starts = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        if first != self._last:
            starts = np.concatenate(([0], starts))
        self._hash.update((starts + self._rows).astype("<i8").data)
        self._rows += len(codes)
        self._last = last
        return starts

    def constant(self, value: object, rows: int) -> None:
        """Add the same value `rows` times."""
        if value != self._last:
            self._hash.update(self._rows.to_bytes(8, "little"))
        self._rows += rows
        self._last = value

    def digest(self) -> bytes:
        return self._hash.digest()


class _Validity(_Changes):
    """Hashes which values of a column are null.

    The initial state is valid, so no values are needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = True

    def keep_valid(self, array: pa.Array[Any]) -> pa.Array[Any]:
        """Add the nulls of `array`; return the array without them."""
        nulls = array.null_count
        if not len(array):
            return array
        if nulls in {0, len(array)}:
            self.constant(not nulls, len(array))
            return array.slice(0, 0) if nulls else array
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        self.update(valid, bool(valid[0]), bool(valid[-1]))
        return array.drop_null()


class _Numbers:
    """int64 and boolean columns."""

    def __init__(self) -> None:
        self._validity = _Validity()
        self._values = hashlib.sha256()

    def update(self, column: pa.ChunkedArray[Any]) -> None:
        for chunk in column.chunks:
            values = self._validity.keep_valid(chunk).to_numpy(zero_copy_only=False)
            kind = np.uint8 if values.dtype == np.bool_ else np.dtype("<i8")
            self._values.update(values.astype(kind, copy=False).data)

    def digest(self) -> bytes:
        return self._validity.digest() + self._values.digest()


class _Text:
    """Text columns."""

    def __init__(self) -> None:
        self._validity = _Validity()
        self._lengths = hashlib.sha256()
        self._bytes = hashlib.sha256()

    def update(self, column: pa.ChunkedArray[Any]) -> None:
        for chunk in column.chunks:
            self.update_array(chunk)

    def update_array(self, array: pa.Array[Any]) -> None:
        valid = self._validity.keep_valid(array)
        if not len(valid):
            return
        _, ends, values = valid.buffers()
        assert ends is not None
        offsets = np.frombuffer(memoryview(ends), np.int32)[valid.offset :][: len(valid) + 1]
        self._lengths.update(np.diff(offsets).astype("<i4", copy=False).data)
        if values is not None:
            self._bytes.update(memoryview(values)[offsets[0] : offsets[-1]])

    def digest(self) -> bytes:
        return self._validity.digest() + self._lengths.digest() + self._bytes.digest()


class _Dictionary:
    """Dictionary columns: few values, mostly in long runs."""

    def __init__(self) -> None:
        self._changes = _Changes()
        self._values = _Text()

    def update(self, column: pa.ChunkedArray[Any]) -> None:
        array = cast("pa.DictionaryArray[Any, Any]", column.combine_chunks())
        # A dictionary may contain duplicates or a null, so the distinct values are numbered, not
        # the entries.
        entries = array.dictionary.dictionary_encode()
        codes = entries.indices.take(array.indices).fill_null(_NULL).to_numpy()
        values = entries.dictionary

        def value_of(code: np.integer) -> object:
            return None if code == _NULL else values[int(code)].as_py()

        starts = self._changes.update(codes, value_of(codes[0]), value_of(codes[-1]))
        started = pa.array(codes[starts], mask=codes[starts] == _NULL)
        self._values.update_array(values.take(started))

    def digest(self) -> bytes:
        return self._changes.digest() + self._values.digest()


def _stream(data_type: pa.DataType) -> _Stream:
    if pa.types.is_dictionary(data_type):
        return _Dictionary()
    return _Text() if pa.types.is_string(data_type) else _Numbers()


class ContentHash:
    """The content hash of rows that are added in order, table by table."""

    def __init__(self, schema: pa.Schema) -> None:
        self._streams = {f.name: _stream(f.type) for f in schema if f.name not in _JOURNAL_POSITION}
        self._rows = 0

    def update(self, rows: pa.Table) -> None:
        """Add the next rows; columns of the schema are found by name."""
        if not rows.num_rows:
            return
        self._rows += rows.num_rows
        for name, stream in self._streams.items():
            stream.update(rows.column(name))

    def hexdigest(self) -> str:
        """Return the hash of all rows so far, 64 hexadecimal digits."""
        total = hashlib.sha256(f"{self._rows}\n".encode())
        for name, stream in self._streams.items():
            total.update(f"{name}\n".encode() + stream.digest())
        return total.hexdigest()


def range_hash(segment_hashes: Iterable[str]) -> str:
    """Return the content hash of a range: SHA-256 over its segments' hashes, in order."""
    return hashlib.sha256("\n".join(segment_hashes).encode()).hexdigest()
