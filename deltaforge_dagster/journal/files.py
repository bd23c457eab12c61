"""The journal: one immutable Parquet file per segment, durable before anything refers to it.

The path of a file is `<pipeline>/<uid>/<segment>-<epoch>-<random>.parquet`. The file has its final
name from the first byte, because nobody can know the random part before the segment's row is in the
state store. A file without a row is an orphan of a killed run, and is removed later. Files are
never replaced.

This module finds, reads, verifies and removes files; `journal.writer` writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.frame import CAPTURED, FRAME
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.journal.parked_files import ParkedWriter, folders, orphans, read_parked
from deltaforge_dagster.journal.storage import no_space, open_storage, readable
from deltaforge_dagster.journal.writer import ROW_GROUP_BYTES, SegmentWriter

_BATCH_ROWS = 10_000
"""Rows of a share that are decoded at a time.

A whole row group, decoded by several threads, takes a Spark worker 50 MB more.
"""

_COLUMN_BYTES = 256 << 10
"""Bytes of a column that are read from a local file at a time.

The columns of a whole row group take a Spark worker 10 MB more.
"""

_READ_BYTES = 4 << 20  # elsewhere than on a disk, each read is a request
_UID = re.compile(r"^[0-9a-f]{32}$")
_NAME = re.compile(r"^[0-9]+-(?P<epoch>[0-9]+)-[0-9a-f]{32}\.parquet$")


class SegmentFile(Protocol):
    """What the journal needs to read a segment: its row in the state store."""

    @property
    def segment(self) -> int:
        """Number of the segment."""
        ...

    @property
    def path(self) -> str:
        """Path of the file, relative to the journal's root."""
        ...

    @property
    def checksum(self) -> str:
        """SHA-256 of the file."""
        ...

    @property
    def content_hash(self) -> str:
        """Hash of its rows, see `journal.hashing`."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        ...

    @property
    def bytes(self) -> int:
        """Its size."""
        ...


class Journal:
    """The segment files of every pipeline below one URL.

    Thread-safe. Paths are relative to the URL, as in the segment's row.

    Args:
        url: `file:///absolute/path`, `memory://name`, or any URL that fsspec knows.

    Attributes:
        url: The URL, with which another process can open the same journal.

    Raises:
        SettingsError: The URL cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._storage = open_storage(url)
        # Content hash and Parquet encoding take about equally long and release the GIL, so they run
        # in threads and do not delay the thread that reads the source.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="journal-encode")
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="journal-hash")

    def writer(self, pipeline: str, uid: str, segment: int, epoch: int) -> SegmentWriter:
        """Create the file of a segment, and return its writer.

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
            JournalDamaged: The file is missing, or not a Parquet file.
            StoreUnavailable: The storage cannot be read now.
        """
        with readable(path):
            file, local = self._storage.open(path), self._storage.local
            if local:
                return pq.ParquetFile(file, buffer_size=_COLUMN_BYTES, pre_buffer=False)
            # Over a network, read all columns of a row group together, not one by one.
            return pq.ParquetFile(file, pre_buffer=True)

    def batches(
        self, row: SegmentFile, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a segment's rows in order, with one row group in memory at a time.

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
        """Yield every `of`-th row group of a segment in order, starting with row group `part`.

        Each batch has a few rows.

        Args:
            path: The segment's file, as in its row.
            columns: The columns to read; a column that is newer than the file is null.
            ordinals: Count and read only row groups that contain some of these rows; None for all.
            part: The index of the share, from 0.
            of: The number of shares.

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
                        for batch in file.iter_batches(
                            _BATCH_ROWS,
                            row_groups=[group],
                            columns=list(columns),
                            use_threads=False,
                        ):
                            yield _with_newer_columns(batch, columns)
                counted += 1

    def row_groups(self, path: str) -> list[int]:
        """Return the number of rows of each row group of a segment, in order of their ordinals.

        Raises:
            JournalDamaged: The file is missing or cannot be decoded.
            StoreUnavailable: The storage cannot be read now.
        """
        with self.open(path) as file:
            metadata = file.metadata
            return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def verify(self, row: SegmentFile) -> None:
        """Verify a segment's file: its size, checksum, ordinals, rows and content hash.

        Raises:
            JournalDamaged: The file is missing or differs; the message names the file and the
                difference.
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
        """Create the staging file of a snapshot chunk; return its writer.

        The file has the format of a segment. The rows get their final segment and ordinals when the
        chunk is captured.

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
        """Verify that a staging file is unchanged.

        Raises:
            JournalDamaged: The file is missing, or differs from its checksum.
            StoreUnavailable: The storage cannot be read now.
        """
        if self._checksum(path)[0] != checksum:
            raise JournalDamaged(f"journal file {path}: checksum differs from when it was written")

    def staged(self, path: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a staging file with the columns of `frame.CAPTURED`, by row group.

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
        self, pipeline: str, referenced: Collection[str], *, older_than: float
    ) -> list[str]:
        """Remove staging files that are not in `referenced` and older than `older_than` seconds.

        Returns:
            The paths of the removed files.
        """
        paths = self._storage.list(_staged(pipeline))
        return self._sweep((path for path in paths if path not in referenced), older_than)

    def parked_writer(self, pipeline: str, epoch: int) -> ParkedWriter:
        """Create a file of parked events, and return its writer.

        Raises:
            StoreUnavailable: The file cannot be created.
        """
        held, _ = folders(pipeline)
        return ParkedWriter(self._storage, held, epoch)

    def dead_writer(self, pipeline: str, epoch: int) -> ParkedWriter:
        """Create a file of dead letters, and return its writer.

        Raises:
            StoreUnavailable: The file cannot be created.
        """
        _, dead = folders(pipeline)
        return ParkedWriter(self._storage, dead, epoch)

    def read_parked(self, path: str, checksum: str) -> Iterator[bytes]:
        """Yield the events of a file of parked events or dead letters in order.

        Raises:
            JournalDamaged: The file is missing, or differs from its checksum.
            StoreUnavailable: The storage cannot be read now.
        """
        return read_parked(self._storage, path, checksum)

    def sweep_parked(
        self, pipeline: str, referenced: Collection[str], *, epoch: int, older_than: float
    ) -> list[str]:
        """Remove orphaned files of parked events and dead letters; see `sweep`.

        Return their paths.
        """
        paths = [path for folder in folders(pipeline) for path in self._storage.list(folder)]
        return self._sweep(orphans(paths, referenced, epoch), older_than)

    def exists(self, path: str) -> bool:
        """Return whether a file exists."""
        return self._storage.exists(path)

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""
        self._storage.delete(path)

    def sweep(
        self, pipeline: str, uid: str, referenced: Collection[str], *, epoch: int, older_than: float
    ) -> list[str]:
        """Remove the orphaned files of killed runs; return their paths.

        The caller must read the lease's epoch before the known paths: then every file of an older
        epoch that will ever have a row already has it, because the store refuses rows of older
        epochs.

        Args:
            pipeline: Name of the pipeline.
            uid: Its uid.
            referenced: Paths that have a row.
            epoch: The lease's epoch; files of this epoch or a newer one may still be written.
            older_than: Files written less than this many seconds ago are kept, too.
        """
        orphaned = []
        for path in self._storage.list(f"{pipeline}/{uid}"):
            name = _NAME.match(path.rpartition("/")[2])
            if name is not None and path not in referenced and int(name["epoch"]) < epoch:
                orphaned.append(path)
        return self._sweep(orphaned, older_than)

    def written_by_others(self, pipeline: str, uid: str) -> list[str]:
        """Return the folders of a pipeline that contain segments of a uid other than its own.

        Raises:
            StoreUnavailable: The storage cannot be read now.
        """
        return [
            folder
            for folder in sorted(self._storage.list(pipeline))
            if _UID.match(name := folder.rpartition("/")[2])
            and name != uid
            and any(_NAME.match(path.rpartition("/")[2]) for path in self._storage.list(folder))
        ]

    def _sweep(self, paths: Iterable[str], older_than: float) -> list[str]:
        """Remove the paths written more than `older_than` seconds ago; return those removed."""
        swept = []
        for path in paths:
            with contextlib.suppress(JournalDamaged):  # another process has just removed it
                if self._storage.age(path) > older_than:
                    self._storage.delete(path)
                    swept.append(path)
        return swept

    @property
    def local(self) -> bool:
        """Whether the files have local paths.

        If not, all readers, even Spark executors, use this class.
        """
        return self._storage.local

    def spark_path(self, path: str) -> str:
        """Return the path with which Spark itself reads a file of a local journal."""
        return self._storage.locate(path)

    def check_writable(self, pipeline: str, uid: str, segment_bytes: int) -> None:
        """Check that the next segment of a pipeline can be written.

        The check is as thorough as a few seconds allow. On a disk, it looks at permissions and free
        space. Elsewhere it writes and deletes a probe, at most once a minute.

        Args:
            pipeline: Name of the pipeline.
            uid: Its uid.
            segment_bytes: The largest size of its segments in memory. A larger segment than a row
                group is written in parts, and quiet sources have small ones, so a disk with room
                for one row group is not called full.

        Raises:
            StoreUnavailable: It cannot be written.
        """
        folder = f"{pipeline}/{uid}"
        self._storage.check_writable(folder)
        free, needed = self._storage.free_bytes(folder), min(segment_bytes, ROW_GROUP_BYTES)
        if free is not None and free < needed:
            raise no_space(
                f"in {self._storage.locate(folder)}",
                f"less than {needed / (1 << 20):.3g} MiB are free",
            )

    def encoded_dir(self, pipeline: str) -> str:
        """Create the folder for encoded messages; return its absolute path or its URL."""
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
    """Return the folder of a pipeline's staging files, which is next to those of segments."""
    return f"{pipeline}/staged"


def _with_newer_columns(rows: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Return these columns of the frame; columns that the file does not have are null."""
    if rows.num_columns == len(columns):
        return rows
    for name in columns:
        if name not in rows.schema.names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, FRAME.field(name).type))
    return rows.select(columns)


def _damaged(row: SegmentFile, what: str) -> JournalDamaged:
    return JournalDamaged(f"journal file {row.path} (segment {row.segment}): {what}")


def _compare(row: SegmentFile, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise _damaged(row, f"{what} {actual}, but {expected} when it was written")
