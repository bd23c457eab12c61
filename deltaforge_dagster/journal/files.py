"""The journal: one immutable Parquet file per segment, durable before anything knows of it.

A file lies at `<pipeline>/<uid>/<segment>-<epoch>-<random>.parquet`. Its name is final from the
first byte, since nobody can know the random part before the segment's row is in the state
store; a file without a row is an orphan of a killed run, and swept later. Nothing is ever
replaced.

How a file is written is in `journal.writer`; here it is found, read, proved and removed.
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
from deltaforge_dagster.journal.checksummed import readable
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.journal.held import HeldWriter, folders, orphans, read_held
from deltaforge_dagster.journal.storage import open_storage
from deltaforge_dagster.journal.writer import SegmentWriter

_READ_BYTES = 4 << 20
_UID = re.compile(r"^[0-9a-f]{32}$")
_NAME = re.compile(r"^[0-9]+-(?P<epoch>[0-9]+)-[0-9a-f]{32}\.parquet$")


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
        paths = self._storage.list(_staged(pipeline))
        return self._sweep((path for path in paths if path not in known), older_than)

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
        paths = [path for folder in folders(pipeline) for path in self._storage.list(folder)]
        return self._sweep(orphans(paths, known, epoch), older_than)

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
        orphaned = []
        for path in self._storage.list(f"{pipeline}/{uid}"):
            name = _NAME.match(path.rpartition("/")[2])
            if name is not None and path not in known and int(name["epoch"]) < epoch:
                orphaned.append(path)
        return self._sweep(orphaned, older_than)

    def written_by_others(self, pipeline: str, uid: str) -> list[str]:
        """Return the folders of a pipeline that hold segments of other uids than its own.

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
        """Remove files that were last written so many seconds ago; return their paths."""
        swept = []
        for path in paths:
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


def _damaged(row: SegmentFile, what: str) -> JournalDamaged:
    return JournalDamaged(f"journal file {row.path} (segment {row.segment}): {what}")


def _compare(row: SegmentFile, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise _damaged(row, f"{what} {found}, but {expected} when it was written")
