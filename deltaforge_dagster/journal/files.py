"""The journal: one immutable Parquet file per segment, durable before anything knows of it.

A file lies at `<pipeline>/<uid>/<segment>-<epoch>-<random>.parquet`. Its name is final from the
first byte, since nobody can know the random part before the segment's row is in the state
store; a file without a row is an orphan of a killed run, and swept later. Nothing is ever
replaced.

Rows are numbered here (`segment`, `ordinal`), and written in row groups of about 16 MiB of Arrow
memory, one while the next is collected, which bounds what a writer holds however large the segment
grows. The format is plain Parquet 2.6 with LZ4_RAW, readable by Spark: the dictionary columns of the change frame are
dictionary-encoded pages of ordinary strings there.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.frame import CAPTURED, FRAME, PROCESSED
from deltaforge_dagster.journal.checksummed import Checksummed, readable
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.journal.held import HeldWriter, folders, orphans, read_held
from deltaforge_dagster.journal.storage import Storage, open_storage
from deltaforge_dagster.journal.summary import Summary
from deltaforge_dagster.tables import Contained

ROW_GROUP_BYTES = 16 << 20
"""Arrow memory of a row group. Large enough to compress well, small enough to split a segment."""

_READ_BYTES = 4 << 20
_NAME = re.compile(r"^[0-9]+-(?P<epoch>[0-9]+)-[0-9a-f]{32}\.parquet$")
# Typed loosely: the stubs of pyarrow do not know settings per column.
_DICTIONARIES: Any = ["segment", *(f.name for f in FRAME if pa.types.is_dictionary(f.type))]
# Event ids are random: LZ4 spends a seventh of the whole writing time on them and gains nothing.
_COMPRESSION: Any = {field.name: "none" if field.name == "event_id" else "lz4" for field in FRAME}


class SegmentFile(Protocol):
    """What the journal needs to know of a segment to read it: its row in the state store."""

    @property
    def segment(self) -> int:
        """Number of the segment."""
        ...

    @property
    def path(self) -> str:
        """Where the file lies, below the journal's root."""
        ...

    @property
    def checksum(self) -> str:
        """SHA-256 of the file."""
        ...

    @property
    def content_hash(self) -> str:
        """Hash of its rows."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        ...

    @property
    def bytes(self) -> int:
        """Its size."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenSegment:
    """A durable segment file; fields as in `state.records.NewSegment`.

    Attributes:
        segment_id: Random, 32 hexadecimal digits; also part of the file's name.
        path: Relative to the journal's root.
        checksum: SHA-256 of the file's bytes.
        content_hash: Hash of the rows, see `journal.hashing`.
        bytes: Size of the file.
        counts: Changes per table and op.
        schema_versions: The versions that rows of each table have, by fingerprint.
        first_ts_us: Earliest event time.
        last_ts_us: Latest event time.
        newest: The same for each table.
        memory: Size of the rows before they were written.
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


class Journal:
    """The segment files of every pipeline below one URL.

    Safe to use from several threads. A path is relative to the URL, as in the segment's row.

    Args:
        url: `file:///absolute/path`, `memory://name`, or any URL that fsspec knows.

    Attributes:
        url: The same, for another process to open the same journal.

    Raises:
        SettingsError: The URL is not usable.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._storage = open_storage(url)
        # The content hash takes as long as the Parquet encoding, both release the GIL, and neither
        # has to hold up the thread that reads the source.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="journal-encode")
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="journal-hash")

    def writer(self, pipeline: str, uid: str, segment: int, epoch: int) -> SegmentWriter:
        """Begin the file of a segment.

        Raises:
            StoreUnavailable: The file cannot be created.
        """
        return SegmentWriter(
            self._storage,
            f"{pipeline}/{uid}",
            segment,
            epoch,
            encoder=self._encoder,
            hasher=self._hasher,
        )

    def open(self, path: str) -> pq.ParquetFile:
        """Open a segment file for reading; use it as a context manager.

        Raises:
            JournalDamaged: Missing, or not Parquet.
            StoreUnavailable: The storage cannot be read now.
        """
        with readable(path):
            # Over a network the columns of a row group are one read, not one each.
            return pq.ParquetFile(self._storage.open(path), pre_buffer=not self._storage.local)

    def batches(
        self, row: SegmentFile, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a segment's rows in order, a row group in memory at a time.

        Raises:
            JournalDamaged: The file is missing or cannot be decoded.
            StoreUnavailable: The storage cannot be read now.
        """
        with self.open(row.path) as file:
            names = None if columns is None else list(columns)
            for group in range(file.num_row_groups):
                with readable(row.path):
                    rows = file.read_row_group(group, columns=names)
                yield from rows.to_batches()

    def share(
        self, path: str, columns: Sequence[str], *, ordinals: range | None, part: int, of: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield every `of`-th row group of a segment, from the `part`-th on, in order.

        Args:
            path: The segment's file, as in its row.
            columns: Which columns to read; one that is younger than the file is null.
            ordinals: Count and read only row groups that hold some of these rows; None for all.
            part: Where to begin, from 0.
            of: How many such shares there are.

        Raises:
            JournalDamaged: The file is missing or cannot be decoded.
            StoreUnavailable: The storage cannot be read now.
        """
        with self.open(path) as file:
            start = counted = 0
            for group in range(file.num_row_groups):
                rows = range(start, start + file.metadata.row_group(group).num_rows)
                start = rows.stop
                if ordinals and not (rows.start < ordinals.stop and ordinals.start < rows.stop):
                    continue
                if counted % of == part:
                    with readable(path):
                        table = file.read_row_group(group, columns=list(columns))
                    yield from _with_younger(table, columns).to_batches()
                counted += 1

    def row_groups(self, path: str) -> list[int]:
        """Return how many rows each row group of a segment has, in order of their ordinals.

        Raises:
            JournalDamaged: The file is missing or cannot be decoded.
            StoreUnavailable: The storage cannot be read now.
        """
        with self.open(path) as file:
            metadata = file.metadata
            return [metadata.row_group(one).num_rows for one in range(metadata.num_row_groups)]

    def verify(self, row: SegmentFile) -> None:
        """Prove that a segment's file is what was written: size, checksum, rows, content hash.

        Raises:
            JournalDamaged: The file is missing or differs; the message names it and what differs.
            StoreUnavailable: The storage cannot be read now.
        """
        checksum, size = self._checksum(row.path)
        _compare(row, "bytes", size, row.bytes)
        _compare(row, "checksum", checksum, row.checksum)
        content = ContentHash(CAPTURED)
        rows = 0
        for batch in self.batches(row):
            ordinals = np.arange(rows, rows + batch.num_rows)
            if not np.array_equal(batch.column("ordinal").to_numpy(), ordinals):
                raise _damaged(row, f"ordinals are not contiguous in rows from {rows} on")
            if not (batch.column("segment").to_numpy() == row.segment).all():
                raise _damaged(row, f"rows of another segment from row {rows} on")
            content.update(pa.Table.from_batches([batch]))
            rows += batch.num_rows
        _compare(row, "rows", rows, row.rows)
        _compare(row, "content hash", content.hexdigest(), row.content_hash)

    def stager(self, pipeline: str, snapshot: int, chunk: int) -> SegmentWriter:
        """Begin the staging file of a snapshot's chunk: rows like a segment's, not yet numbered.

        Raises:
            StoreUnavailable: The file cannot be created.
        """
        return SegmentWriter(
            self._storage,
            _staged(pipeline),
            chunk,
            snapshot,
            encoder=self._encoder,
            hasher=self._hasher,
        )

    def check_staged(self, path: str, checksum: str) -> None:
        """Prove that a staging file is what was written.

        Raises:
            JournalDamaged: It is missing, or differs from its checksum.
            StoreUnavailable: The storage cannot be read now.
        """
        if self._checksum(path)[0] != checksum:
            raise JournalDamaged(f"journal file {path}: checksum differs from when it was written")

    def staged(self, path: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a staging file, columns of `frame.CAPTURED`; a row group in memory at a time.

        Raises:
            JournalDamaged: The file is missing or cannot be decoded.
            StoreUnavailable: The storage cannot be read now.
        """
        with self.open(path) as file:
            for group in range(file.num_row_groups):
                with readable(path):
                    rows = file.read_row_group(group, columns=CAPTURED.names)
                yield from rows.select(CAPTURED.names).combine_chunks().cast(CAPTURED).to_batches()

    def sweep_staged(
        self, pipeline: str, known: Collection[str], *, older_than: float
    ) -> list[str]:
        """Remove staging files that nobody needs, last written so many seconds ago; return their paths."""
        swept = []
        for path in self._storage.list(_staged(pipeline)):
            if path in known:
                continue
            with contextlib.suppress(JournalDamaged):  # removed by someone else meanwhile
                if self._storage.age(path) > older_than:
                    self._storage.delete(path)
                    swept.append(path)
        return swept

    def held_writer(self, pipeline: str, epoch: int) -> HeldWriter:
        """Begin a file of held events.

        Raises:
            StoreUnavailable: The file cannot be created.
        """
        held, _ = folders(pipeline)
        return HeldWriter(self._storage, held, epoch)

    def dead_writer(self, pipeline: str, epoch: int) -> HeldWriter:
        """Begin a file of dead letters.

        Raises:
            StoreUnavailable: The file cannot be created.
        """
        _, dead = folders(pipeline)
        return HeldWriter(self._storage, dead, epoch)

    def read_held(self, path: str, checksum: str) -> Iterator[bytes]:
        """Yield the events of such a file in order.

        Raises:
            JournalDamaged: The file is missing, or differs from its checksum.
            StoreUnavailable: The storage cannot be read now.
        """
        return read_held(self._storage, path, checksum)

    def sweep_held(
        self, pipeline: str, known: Collection[str], *, epoch: int, older_than: float
    ) -> list[str]:
        """Remove files of events kept back that no row names, as `sweep` does; return their paths."""
        swept = []
        paths = [path for folder in folders(pipeline) for path in self._storage.list(folder)]
        for path in orphans(paths, known, epoch):
            with contextlib.suppress(JournalDamaged):  # removed by someone else meanwhile
                if self._storage.age(path) > older_than:
                    self._storage.delete(path)
                    swept.append(path)
        return swept

    def exists(self, path: str) -> bool:
        """Say whether a file is there."""
        return self._storage.exists(path)

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""
        self._storage.delete(path)

    def sweep(
        self, pipeline: str, uid: str, known: Collection[str], *, epoch: int, older_than: float
    ) -> list[str]:
        """Remove the orphans of killed runs and return their paths.

        Read the lease's epoch first and the known paths after it: then every file of an older
        epoch that will ever have a row has it, since the store refuses rows of older epochs.

        Args:
            pipeline: Name of the pipeline.
            uid: Its uid.
            known: Paths that have a row.
            epoch: The lease's epoch; files of this epoch or a newer one may be in the making.
            older_than: Seconds since the last write below which a file stays, too.
        """
        swept = []
        for path in self._storage.list(f"{pipeline}/{uid}"):
            name = _NAME.match(path.rpartition("/")[2])
            if name is None or path in known or int(name["epoch"]) >= epoch:
                continue
            with contextlib.suppress(JournalDamaged):  # removed by someone else meanwhile
                if self._storage.age(path) > older_than:
                    self._storage.delete(path)
                    swept.append(path)
        return swept

    @property
    def local(self) -> bool:
        """Whether the files have paths; else only this class reads them, on Spark's executors too."""
        return self._storage.local

    def spark_path(self, path: str) -> str:
        """Return where Spark itself reads the file of a local journal."""
        return self._storage.locate(path)

    def prepared_dir(self, pipeline: str) -> str:
        """Create the folder for prepared messages; return its absolute path, or its URL."""
        return self._storage.folder(f"{pipeline}/prepared")

    def _checksum(self, path: str) -> tuple[str, int]:
        digest = hashlib.sha256()
        size = 0
        with readable(path), self._storage.open(path) as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                size += len(piece)
        return digest.hexdigest(), size


def _staged(pipeline: str) -> str:
    """Return the folder of a pipeline's staging files, beside those of segments."""
    return f"{pipeline}/staged"


def _with_younger(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return these columns of the frame; those that the file was written without are null."""
    if rows.num_columns == len(columns):
        return rows
    missing = [name for name in columns if name not in rows.column_names]
    for name in missing:
        rows = rows.append_column(name, pa.nulls(rows.num_rows, FRAME.field(name).type))
    return rows.select(columns)


class SegmentWriter:
    """Writes one segment's file; ends with `close`, or with `abort` when it shall not be.

    A row group is encoded while the caller collects the next. After an error of `write` or `close`
    the partial file is gone and the writer is done. Not for use by two threads at a time.

    Attributes:
        rows: Rows written so far.
        bytes: Arrow memory of these rows, before compression.
    """

    def __init__(
        self,
        storage: Storage,
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
            cast("IO[bytes]", self._file),  # Arrow calls write and tell, nothing else
            FRAME,
            version="2.6",
            compression=_COMPRESSION,
            use_dictionary=_DICTIONARIES,
            write_statistics=["ordinal"],  # the only column that readers select by
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Append changes, columns of `frame.CAPTURED` or `frame.PROCESSED`, in log order.

        Raises:
            StoreUnavailable: The storage refuses; a full disk is named as such.
        """
        if batch.schema.equals(CAPTURED):
            nobody = pa.nulls(batch.num_rows, PROCESSED.field("synthetic").type)
            batch = pa.RecordBatch.from_arrays([*batch.columns, nobody], schema=PROCESSED)
        if not batch.schema.equals(PROCESSED):
            raise ValueError(f"not the change frame: {batch.schema}")
        if not batch.num_rows:
            return
        with self._aborting():
            for piece in _pieces(batch):
                self._waiting.append(piece)
                self._waiting_bytes += piece.nbytes
                if self._waiting_bytes >= ROW_GROUP_BYTES:
                    self._write_row_group()
        self.rows += batch.num_rows
        self.bytes += batch.nbytes

    def close(self) -> WrittenSegment:
        """Finish the file; it is durable under its name when this returns.

        Raises:
            StoreUnavailable: The storage refuses; a full disk is named as such.
            ValueError: No row was written.
        """
        with self._aborting():
            if not self.rows:
                raise ValueError(f"segment {self._segment} has no rows")
            if self._waiting:
                self._write_row_group()
            self._settle()
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
        """Remove what was written; does nothing after `close` or a second time."""
        self._waiting.clear()
        # Why the row group in the making failed, if it did, is no matter any more.
        with contextlib.suppress(Exception):
            self._settle()
        self._file.discard()
        with contextlib.suppress(pa.ArrowException, OSError):
            self._parquet.close()

    def _write_row_group(self) -> None:
        self._settle()
        # One dictionary per row group: Parquet falls back to plain pages when it changes inside.
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

    def _settle(self) -> None:
        """Wait until the row group in the making is written; raise what kept it from that."""
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


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch so that no piece is much larger than a row group."""
    parts = -(-batch.nbytes // ROW_GROUP_BYTES)
    rows = -(-batch.num_rows // parts)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _damaged(row: SegmentFile, what: str) -> JournalDamaged:
    return JournalDamaged(f"journal file {row.path} (segment {row.segment}): {what}")


def _compare(row: SegmentFile, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise _damaged(row, f"{what} {found}, but {expected} when it was written")
