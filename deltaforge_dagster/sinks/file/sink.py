"""The file sink writes JSON lines: each message's value becomes one line of its destination file.

Files are only appended to, and flushed to disk before the batch is acknowledged. Within a file,
lines are in the order of the log; a batch for several files is written to one after the other.
Delivery is at least once: after an error or a crash the whole batch is written again.

A resumed file never contains partial lines: whatever a crash or a full disk left after the last
line break is cut off before anything is appended. A file is locked (`flock`) while it is written,
so that a stalled writer and its successor cannot mix their lines.

A line has room for the value only, and a replay must not change a byte of it. A replay therefore
marks its messages by their destination: it writes to `<path>.replay-<run>`, next to the file, and
leaves the file itself untouched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.templates import Template
from deltaforge_dagster.errors import PermissionMissing, SinkRejected, SinkUnavailable
from deltaforge_dagster.folders import make_folder, sync_folder
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition

_PIECE_BYTES = 8 << 20
"""Number of bytes written between two calls of the guard."""

_BLOCK_BYTES = 64 << 10
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_IMPOSSIBLE = {
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}


class FileSink:
    """Appends to local files of mode 0600 and creates missing directories.

    Args:
        sink_id: Name of the sink in messages.
        path: Template of the files' paths. A value of a row can only choose a file below the
            directory that the template's literal prefix names.
    """

    exactly_once = False
    takes_parts = False

    def __init__(self, sink_id: str, path: Template) -> None:
        self._sink_id = sink_id
        first = path.parts[0]
        literal = first if isinstance(first, str) else ""
        # `abspath` resolves no links.
        self._folder = Path(os.path.abspath(os.path.dirname(literal)))  # noqa: PTH100, PTH120
        self._closed = threading.Event()
        self._closed.set()

    def open(self) -> None:
        """Create the directory that contains all files.

        Raises:
            SinkUnavailable: Not possible now: no space, an I/O error.
            PermissionMissing: The user may not write there.
            SinkRejected: The path cannot be a directory.
        """
        with self._translated(self._folder):
            make_folder(self._folder)
        self._closed.clear()

    def position(self) -> SinkPosition | None:
        """Return None: the sink keeps no position, so the checkpoint applies."""
        return None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Append the batch's values to their files and return the last ordinal.

        Raises:
            SinkUnavailable: No space, an I/O error, another process is writing the file, or the
                sink is closed.
            PermissionMissing: The user may not write the file.
            SinkRejected: The path cannot be a file, or a value contains a line break.
        """
        suffix = "" if batch.replay is None else f".replay-{batch.replay}"
        for destination, values in _by_destination(batch.messages):
            path = self._path(destination + suffix)
            with self._translated(path), _appending(path) as descriptor:
                for piece in _pieces(values):
                    lines = self._lines(path, piece)
                    guard()
                    if self._closed.is_set():
                        raise SinkUnavailable(f"sink {self._sink_id}: closed")
                    while lines:
                        lines = lines[os.write(descriptor, lines) :]
        return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """Stop writing; a `send` in another thread ends after the part that it is writing."""
        self._closed.set()

    def _path(self, destination: str) -> Path:
        path = Path(os.path.abspath(destination))  # noqa: PTH100 - resolves no links
        if self._folder not in path.parents:
            raise SinkRejected(
                f"sink {self._sink_id}: file {destination!r} is not below {self._folder}, the "
                "directory that the sink's path begins with"
            )
        return path

    def _lines(self, path: Path, values: pa.StringArray) -> memoryview:
        joined = cast("pa.StringArray", pc.binary_join_element_wise(cast("Any", values), "", "\n"))
        _, ends, data = joined.buffers()
        assert ends is not None
        assert data is not None
        offsets = np.frombuffer(memoryview(ends), np.int32)[joined.offset :][: len(joined) + 1]
        lines = memoryview(data)[offsets[0] : offsets[-1]]
        if np.count_nonzero(np.frombuffer(lines, np.uint8) == ord("\n")) != len(values):
            raise SinkRejected(
                f"sink {self._sink_id}: a value for {path} contains a line break; write it to a "
                "sink whose messages are not lines"
            )
        return lines

    @contextlib.contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"sink {self._sink_id}: cannot write {path}: {error.strerror}"
            if error.errno in _REFUSED:
                raise PermissionMissing(
                    f"{message}; let user {os.geteuid()} write there"
                ) from error
            if error.errno in _IMPOSSIBLE:
                raise SinkRejected(f"{message}; correct the sink's path") from error
            raise SinkUnavailable(message) from error


def _by_destination(messages: pa.RecordBatch) -> Iterator[tuple[str, pa.StringArray]]:
    """Yield each destination with its values, both in the order of the messages."""
    values = cast("pa.StringArray", messages.column("value"))
    encoded = messages.column("destination").dictionary_encode()
    destinations = cast("list[str]", encoded.dictionary.to_pylist())
    if len(destinations) == 1:
        yield destinations[0], values
        return
    codes = encoded.indices.to_numpy()
    grouped = values.take(np.argsort(codes, kind="stable"))
    ends = np.cumsum(np.bincount(codes)).tolist()
    for destination, start, end in zip(destinations, [0, *ends[:-1]], ends, strict=True):
        yield destination, grouped.slice(start, end - start)


def _pieces(values: pa.StringArray) -> Iterator[pa.StringArray]:
    rows = max(1, len(values) * _PIECE_BYTES // max(1, values.nbytes))
    for start in range(0, len(values), rows):
        yield values.slice(start, rows)


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[int]:
    """Open a file for appending and cut off a partial last line; on exit, writes are durable."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _cut_partial_line(descriptor) == 0:
            # Its entry in the folder is durable before it has a line, because a file with lines is
            # not looked at again.
            sync_folder(path.parent)
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cut_partial_line(descriptor: int) -> int:
    """Cut the file after its last line break and return its length."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return end
