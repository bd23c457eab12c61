"""Encoded messages as files: written by Spark's Python workers, mapped into memory by the run.

A task may get rows of several segments, in any order. The writer cuts its batches into *slices*,
rows of one segment with consecutive ordinals, and reports where each slice is; the run puts the
slices in order and checks that they cover every segment exactly. The rows of one change are next to
one another in one batch, and no slice begins or ends between them.

A file is named `<run id>.<job>.<random>.arrow` (or `.parquet` or `.jsonl`, `pipeline.tables`), so
that orphans of a dead run can be recognized. A file is overwritten by a later job of the same run
rather than deleted (`Spares`), because allocating the pages of a new file costs several times as
much as filling them. So a file may be longer than its current content; the slices say where that
ends.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    StoreUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.journal.storage import Checksummed, JournalStorage, open_storage, refused

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_COPY_BYTES = 16 << 20
"""Bytes of a remote file that are read at a time."""

WRITE_BYTES = 256 << 10
"""The most that one system call writes to a local file.

For a write of megabytes, Linux takes memory for the page cache in blocks of 1 MiB and more. A
virtual machine may have returned such blocks to its host (free page reporting), and getting them
back costs 2.4 s of processor time per GB; from small blocks, filling a new file costs 0.2 s.
"""

_ENDINGS = (".arrow", ".parquet", ".jsonl")

_REPORTED: Mapping[str, type[DeltaforgeError]] = {
    error.__name__: error for error in (JournalDamaged, StoreUnavailable, UnsupportedEvent)
}
_NUMBERS = ("end", "batch", "offset", "segment", "ordinal", "ordinals", "rows", "bytes")
_FIELDS: list[pa.Field[Any]] = [
    pa.field("path", pa.string()),
    *(pa.field(name, pa.int64()) for name in _NUMBERS),
]
SLICES = pa.schema([*_FIELDS, pa.field("error", pa.string()), pa.field("text", pa.string())])
"""Columns of a writer's report: those of `BatchSlice`, or the error that stopped it.

An error is reported as its class and text.
"""


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Consecutive rows of one segment inside one record batch.

    Attributes:
        path: The file, or empty for batches that are in memory.
        end: Where the file's content ends, in bytes.
        batch: Number of the record batch.
        offset: First row in the batch.
        segment: The segment.
        ordinal: Ordinal of the first row.
        ordinals: How many ordinals.
        rows: How many rows, at least one for each ordinal.
        bytes: Bytes of the slice, for accounting.
    """

    path: str
    end: int
    batch: int
    offset: int
    segment: int
    ordinal: int
    ordinals: int
    rows: int
    bytes: int


def slices_of(batch: pa.RecordBatch, number: int, path: str) -> list[BatchSlice]:
    """Return the slices of a batch with the columns `segment` and `ordinal`."""
    segments = batch.column("segment").to_numpy()
    ordinals = batch.column("ordinal").to_numpy()
    steps = np.diff(ordinals)
    breaks = np.flatnonzero((np.diff(segments) != 0) | (steps < 0) | (steps > 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], batch.num_rows]
    return [
        BatchSlice(
            path, 0, number, start, int(segments[start]), int(ordinals[start]),
            int(ordinals[end - 1] - ordinals[start]) + 1, end - start,
            batch.nbytes * (end - start) // batch.num_rows,
        )
        for start, end in zip(starts, ends, strict=True)
    ]  # fmt: skip


def write_partition(
    folder: str, prefix: str, batches: Iterable[pa.RecordBatch], spare: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Write the batches of one task to a file and yield its slices, columns of `SLICES`.

    Args:
        folder: Absolute path, or a URL that fsspec knows.
        prefix: Prefix of the file's name.
        batches: The messages of the task.
        spare: A file to overwrite, which nobody else uses; None for a new one.
    """
    path = spare or f"{folder}/{prefix}.{uuid.uuid4().hex}.arrow"
    report: list[dict[str, Any]] = []
    try:
        with contextlib.ExitStack() as stack:
            file = writer = None
            for number, batch in enumerate(batch for batch in batches if batch.num_rows):
                if writer is None:
                    file = stack.enter_context(_writable(path, new=spare is None))
                    writer = stack.enter_context(pa.ipc.new_file(file, batch.schema))
                writer.write_batch(batch)
                report += [asdict(batch_slice) for batch_slice in slices_of(batch, number, path)]
            if file is not None and writer is not None:
                writer.close()
                report = [{**batch_slice, "end": file.tell()} for batch_slice in report]
    except tuple(_REPORTED.values()) as error:  # Spark would hide a raised error's class
        report = [{"error": type(error).__name__, "text": str(error)}]
    if report:
        yield pa.RecordBatch.from_pylist(report, SLICES)


def reported(report: pa.Table) -> list[BatchSlice]:
    """Return the slices that writers reported.

    Raises:
        JournalDamaged: A segment file that a writer read is damaged.
        StoreUnavailable: A segment file could not be read, or an encoded file not written.
        UnsupportedEvent: A message is too large.
    """
    slices = []
    for row in report.to_pylist():
        error, text = row.pop("error"), row.pop("text")
        if error is not None:
            raise _REPORTED[error](text)
        slices.append(BatchSlice(**row))
    return slices


@contextlib.contextmanager
def _writable(path: str, *, new: bool) -> Iterator[io.BufferedIOBase]:
    if "://" in path:
        storage, name = _storage_and_name(path)
        remote = Checksummed(storage.create(name))
        try:
            yield cast("io.BufferedIOBase", remote)  # Arrow calls write and tell, nothing else
            remote.commit()
        finally:
            remote.discard()  # unless it is committed
        return
    # Never truncated: ext4 flushes a truncated file to the disk when it is closed.
    create = os.O_CREAT | os.O_EXCL if new else 0
    try:
        descriptor = os.open(path, os.O_WRONLY | create, 0o600)
        with io.BufferedWriter(SmallWrites(descriptor, "wb")) as file:
            yield file
    except OSError as error:
        raise refused(path, error) from error


class SmallWrites(io.FileIO):
    """A file that writes at most `WRITE_BYTES` per call; `io.BufferedWriter` repeats the call."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the beginning of `data`; return how many bytes that was."""
        return super().write(memoryview(data)[:WRITE_BYTES])


def _storage_and_name(path: str) -> tuple[JournalStorage, str]:
    """Return the storage of a file's or folder's parent, and its name there."""
    parent, _, name = path.rpartition("/")
    return open_storage(parent if "://" in parent else Path(parent).absolute().as_uri()), name


def new_file(path: str) -> contextlib.AbstractContextManager[io.BufferedIOBase]:
    """Return a new file for writing, with the mode of encoded files.

    A remote file appears when it is complete.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    return _writable(path, new=True)


def write_bytes(path: str, content: bytes) -> None:
    """Write a small new file, with the mode of encoded files."""
    with new_file(path) as file:
        file.write(content)


def write_probe(path: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a file as encoded messages are written, and yield this worker's version."""
    for _ in batches:
        write_bytes(path, __version__.encode())
        yield pa.RecordBatch.from_pydict({"version": [__version__]})


def open_file(path: str) -> pa.NativeFile | IO[bytes]:
    """Open a file for random reads.

    Raises:
        JournalDamaged: The file does not exist.
        StoreUnavailable: The file cannot be read now.
    """
    storage, name = _storage_and_name(path)
    return storage.open(name)


def spark_path(path: str) -> str:
    """Return the path with which Spark itself reads a file."""
    storage, name = _storage_and_name(path)
    return storage.locate(name)


def exists(path: str) -> bool:
    """Return whether a file exists."""
    storage, name = _storage_and_name(path)
    return storage.exists(name)


class MappedBatches:
    """The record batches of an encoded file, which is mapped into memory.

    Used by one thread at a time. Batches stay valid after the file is deleted, but not after it is
    overwritten.
    """

    def __init__(self, file: IO[bytes], end: int) -> None:
        self._map = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        content = pa.py_buffer(self._map)
        self._address = content.address
        self._reader = pa.ipc.open_file(content)

    @classmethod
    def open(cls, path: str, end: int) -> Self:
        """Map a file into memory; a remote one is copied to an unnamed local file first.

        Args:
            path: The file.
            end: Where its content ends; `BatchSlice.end`.

        Raises:
            StoreUnavailable: The file is gone or cannot be read; encode again.
        """
        try:
            if "://" not in path:
                with Path(path).open("rb") as file:
                    return cls(file, end)
            storage, name = _storage_and_name(path)
            with tempfile.TemporaryFile() as local:
                with storage.open(name) as remote:
                    shutil.copyfileobj(remote, local, _COPY_BYTES)
                local.flush()
                return cls(local, end)
        except (OSError, JournalDamaged) as error:
            raise StoreUnavailable(f"the encoded file {path} cannot be read") from error

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch, a view of the file."""
        return self._reader.get_batch(number)

    def let_go(self, number: int) -> None:
        """Release the memory of a record batch; the next read gets it from the page cache."""
        columns = self._reader.get_batch(number).columns
        buffers = [buffer for column in columns for buffer in column.buffers() if buffer]
        # Both ends are rounded down to a page, so that the page where the next batch begins stays.
        start = (min(buffer.address for buffer in buffers) - self._address) & -mmap.PAGESIZE
        end = (
            max(buffer.address + buffer.size for buffer in buffers) - self._address
        ) & -mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def remove(*paths: str) -> None:
    """Delete files; those that cannot be deleted now are swept later.

    Mapped files stay readable.
    """
    for path in paths:
        storage, name = _storage_and_name(path)
        with contextlib.suppress(StoreUnavailable):
            storage.delete(name)


class Spares:
    """Files that nobody reads any more and that later jobs overwrite; thread-safe.

    Only files of jobs that have succeeded may be added, since a task of a failed job may still be
    writing.

    Args:
        most: How many files are kept; further ones are deleted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._paths: list[str] = []

    def reuse(self, most: int) -> list[str]:
        """Return up to `most` files, which then belong to the caller."""
        with self._lock:
            taken, self._paths = self._paths[:most], self._paths[most:]
        return taken

    def add(self, paths: Iterable[str]) -> None:
        """Add files, which the caller must not use any more."""
        with self._lock:
            self._paths += paths
            spare, self._paths = self._paths[self._most :], self._paths[: self._most]
        remove(*spare)

    def clear(self) -> None:
        """Delete all spare files."""
        remove(*self.reuse(self._most))


def remove_job(folder: str, prefix: str) -> None:
    """Delete the files that the tasks of one job have created."""
    for path, _ in _listed(folder):
        if path.rpartition("/")[2].startswith(f"{prefix}."):
            remove(path)


def sweep_encoded(folder: str, keep_run_ids: Collection[str], older_than: float) -> list[str]:
    """Delete the files of runs that are gone, and return their paths.

    Args:
        folder: Where a pipeline's encoded files are.
        keep_run_ids: Runs that may still use theirs.
        older_than: Files that were written less than this many seconds ago stay as well.
    """
    swept = []
    for path, age in _listed(folder):
        run_id = path.rpartition("/")[2].rsplit(".", 3)[0]
        if run_id not in keep_run_ids and age > older_than:
            remove(path)
            swept.append(path)
    return swept


def _listed(folder: str) -> Iterator[tuple[str, float]]:
    """Yield path and age (seconds since the last write) of the encoded files in a folder."""
    storage, name = _storage_and_name(folder)
    parent = folder.rpartition("/")[0]
    for path in storage.list(name):
        if path.endswith(_ENDINGS):
            with contextlib.suppress(JournalDamaged):  # removed by someone else meanwhile
                yield f"{parent}/{path}", storage.age(path)
