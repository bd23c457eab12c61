"""Write the file of one segment: number, encode, hash and count its rows.

Rows get their `segment` and `ordinal` here, and are written in row groups of about 16 MiB of Arrow
memory. One row group is written while the next is collected, which bounds the writer's memory
however large the segment grows. The format is plain Parquet 2.6 with LZ4_RAW, readable by Spark:
the dictionary columns of the change frame become dictionary-encoded pages of ordinary strings.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deltaforge_dagster.frame import CAPTURED, FRAME, PROCESSED
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.journal.storage import Checksummed, JournalStorage
from deltaforge_dagster.tables import Contained, contained

ROW_GROUP_BYTES = 16 << 20
"""Arrow memory of a row group: large enough to compress well, small enough to split a segment."""

# Typed as Any: the stubs of pyarrow do not know settings per column.
_DICTIONARIES: Any = ["segment", *(f.name for f in FRAME if pa.types.is_dictionary(f.type))]
# Event ids are random: compressing them with LZ4 would take a seventh of the writing time for no
# gain.
_COMPRESSION: Any = {field.name: "none" if field.name == "event_id" else "lz4" for field in FRAME}


@dataclass(frozen=True, slots=True)
class WrittenSegment:
    """A durable segment file; fields as in `state.records.NewSegment`.

    Attributes:
        segment_id: Random, 32 hexadecimal digits; also part of the file's name.
        path: Relative to the journal's root.
        checksum: SHA-256 of the file's bytes.
        content_hash: Hash of the rows, see `journal.hashing`.
        bytes: Size of the file.
        rows: Number of rows.
        counts: Number of changes per table and op.
        schema_versions: The fingerprints of the versions that the rows of each table have.
        first_ts_us: Earliest event time.
        last_ts_us: Latest event time.
        newest: Latest event time of each table.
        memory: Arrow memory of the rows.
    """

    segment_id: str
    path: str
    checksum: str
    content_hash: str
    rows: int
    bytes: int
    counts: Mapping[str, Mapping[str, int]]
    schema_versions: Mapping[str, Contained]
    first_ts_us: int
    last_ts_us: int
    newest: Mapping[str, int]
    memory: int

    @property
    def recorded(self) -> dict[str, Any]:
        """The fields that the state store records, by name; numbers and positions come to them."""
        names = (field.name for field in fields(self) if field.name not in {"newest", "memory"})
        return {name: getattr(self, name) for name in names}


class SegmentWriter:
    """Writes one segment's file; finished by `close`, or by `abort`, which removes it.

    A row group is encoded while the caller collects the next. After an error in `write` or `close`
    the partial file is removed and the writer cannot be used any more. Not thread-safe.

    Attributes:
        rows: Rows written so far.
        bytes: Arrow memory of these rows, before compression.
    """

    def __init__(
        self,
        storage: JournalStorage,
        folder: str,
        segment: int,
        epoch: int,
        *,
        encoder: ThreadPoolExecutor,
        hasher: ThreadPoolExecutor,
    ) -> None:
        self.rows = 0
        self.bytes = 0
        self._segment = segment
        self._segment_id = uuid.uuid4().hex
        self._path = f"{folder}/{segment:010d}-{epoch:06d}-{self._segment_id}.parquet"
        self._encoder = encoder
        self._hasher = hasher
        self._encoding: Future[None] | None = None
        self._content = ContentHash(CAPTURED)
        self._summary = Summary()
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._numbered = 0
        self._file = Checksummed(storage.create(self._path))
        self._parquet = pq.ParquetWriter(
            cast("IO[bytes]", self._file),  # Arrow only calls write and tell
            FRAME,
            version="2.6",
            compression=_COMPRESSION,
            use_dictionary=_DICTIONARIES,
            write_statistics=["ordinal"],  # the only column that readers select by
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Append changes in log order, with the columns of `frame.CAPTURED` or `frame.PROCESSED`.

        Raises:
            StoreUnavailable: The storage cannot be written; the message says so if it is full.
        """
        if batch.schema.equals(CAPTURED):
            synthetic = pa.nulls(batch.num_rows, PROCESSED.field("synthetic").type)
            batch = pa.RecordBatch.from_arrays([*batch.columns, synthetic], schema=PROCESSED)
        if not batch.schema.equals(PROCESSED):
            raise ValueError(f"not the change frame: {batch.schema}")
        if not batch.num_rows:
            return
        with self._aborting():
            for piece in _split(batch):
                self._waiting.append(piece)
                self._waiting_bytes += piece.nbytes
                if self._waiting_bytes >= ROW_GROUP_BYTES:
                    self._write_row_group()
        self.rows += batch.num_rows
        self.bytes += batch.nbytes

    def close(self) -> WrittenSegment:
        """Finish the file; it is durable under its name when this returns.

        Raises:
            StoreUnavailable: The storage cannot be written; the message says so if it is full.
            ValueError: No row was written.
        """
        with self._aborting():
            if not self.rows:
                raise ValueError(f"segment {self._segment} has no rows")
            if self._waiting:
                self._write_row_group()
            self._await_row_group()
            # This writes the footer, so it comes before `commit`, which makes the file durable.
            self._parquet.close()
            self._file.commit()
        return WrittenSegment(
            segment_id=self._segment_id,
            path=self._path,
            checksum=self._file.checksum(),
            content_hash=self._content.hexdigest(),
            rows=self.rows,
            bytes=self._file.tell(),
            counts=self._summary.counts,
            schema_versions=self._summary.schema_versions,
            first_ts_us=self._summary.first_ts_us,
            last_ts_us=self._summary.last_ts_us,
            newest=self._summary.newest,
            memory=self.bytes,
        )

    def abort(self) -> None:
        """Remove the unfinished file; does nothing after `close`, or when called again."""
        self._waiting.clear()
        # An error of the row group that is being written does not matter any more.
        with contextlib.suppress(Exception):
            self._await_row_group()
        self._file.discard()
        with contextlib.suppress(pa.ArrowException, OSError):
            self._parquet.close()

    def _write_row_group(self) -> None:
        self._await_row_group()
        # One dictionary per row group: if it changed within a group, Parquet would write plain
        # pages.
        rows = pa.Table.from_batches(self._waiting, PROCESSED).unify_dictionaries()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._encoding = self._encoder.submit(self._encode, rows, self._numbered)
        self._numbered += rows.num_rows

    def _encode(self, rows: pa.Table, first: int) -> None:
        hashed = self._hasher.submit(self._content.update, rows)
        segment = pa.array(np.full(rows.num_rows, self._segment))
        ordinal = pa.array(np.arange(first, first + rows.num_rows))
        numbered = pa.Table.from_arrays([segment, ordinal, *rows.columns], schema=FRAME)
        try:
            self._parquet.write_table(numbered, row_group_size=rows.num_rows)
            self._summary.add(numbered)
        finally:
            hashed.result()

    def _await_row_group(self) -> None:
        """Wait until the current row group is written; raise its error, if any."""
        encoding, self._encoding = self._encoding, None
        if encoding is not None:
            encoding.result()

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch so that no part is much larger than a row group."""
    parts = -(-batch.nbytes // ROW_GROUP_BYTES)
    rows = -(-batch.num_rows // parts)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


_GROUPED = ["db", "schema", "table", "op", "schema_version"]


class Summary:
    """Summarizes a segment from its row groups, so that it can be described without reading it.

    A table's full name is `schema.table`, or `db.table` if the source has no schemas.

    Attributes:
        counts: Number of changes per full table name and op.
        schema_versions: By full table name the fingerprint of its rows' table version, or of
            several versions, ordered by their last rows.
        first_ts_us: Earliest event time, microseconds since 1970 UTC.
        last_ts_us: Latest event time.
        newest: Latest event time by full table name.
    """

    def __init__(self) -> None:
        self.newest: dict[str, int] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.schema_versions: dict[str, Contained] = {}
        self.first_ts_us = 0
        self.last_ts_us = 0

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of the change frame; each column must have a single dictionary."""
        groups = rows.group_by(_GROUPED, use_threads=False).aggregate(
            [("ordinal", "count"), ("ordinal", "max"), ("ts_us", "max")]
        )
        for group in groups.sort_by("ordinal_max").to_pylist():
            name = f"{group['schema'] or group['db']}.{group['table']}"
            ops = self.counts.setdefault(name, {})
            ops[group["op"]] = ops.get(group["op"], 0) + group["ordinal_count"]
            self.newest[name] = max(self.newest.get(name, 0), group["ts_us_max"])
            if group["schema_version"] is not None:
                versions = self.schema_versions
                versions[name] = contained(versions.get(name), group["schema_version"])
        times = cast("dict[str, int]", pc.min_max(rows.column("ts_us")).as_py())
        if rows.column("ordinal")[0].as_py() == 0:
            self.first_ts_us, self.last_ts_us = times["min"], times["max"]
        else:
            self.first_ts_us = min(self.first_ts_us, times["min"])
            self.last_ts_us = max(self.last_ts_us, times["max"])
