"""Storage of journal files: a local directory, or any file system that fsspec knows by URL.

Both kinds give the same guarantees: creating a file fails if its name exists, an incomplete file
may be visible but nothing refers to its name yet, and a file is durable when `commit` returns. On a
local disk that means fsync of the file and of every directory above it; on object storage, a
completed put. Local files are readable only by their owner (0600, directories 0700); on object
storage the bucket's policy decides.

Paths are relative to the journal's root, so a journal can be moved. Errors of the file system
become `StoreUnavailable`, a missing file becomes `JournalDamaged`. Arrow writes through
`Checksummed`, which hashes the bytes, and reads within `readable`, which translates its errors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Protocol, cast
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa

from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    SettingsError,
    StoreUnavailable,
)
from deltaforge_dagster.folders import make_folder, sync_folder

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"}
"""Schemes of storage without folders; only the bucket must exist, and it is never created here."""
_PROBE_NAME = "writable.probe"
_PROBE_SECONDS = 60.0
"""Seconds between two probes of a folder: each is a put and a delete, which cost money."""
_PROBE_PATIENCE = 5.0
"""Seconds that a check waits for a probe."""
_SPARK_GLOB = re.compile(r"[\[\]{}*?\\]")
_ESCAPED = re.compile(r"\\(.)")


class NewFile(Protocol):
    """A file being written; finished by `commit` or `discard`. Only a committed file remains."""

    def write(self, data: pa.Buffer | bytes) -> None:
        """Append `data`."""
        ...

    def commit(self) -> None:
        """Make the file durable."""
        ...

    def discard(self) -> None:
        """Remove the file.

        Never raises: a file that cannot be removed is an orphan, which is swept later.
        """
        ...


class JournalStorage(Protocol):
    """A file system for immutable files."""

    @property
    def local(self) -> bool:
        """Whether the files have paths that any program on this machine can open."""
        ...

    def create(self, path: str) -> NewFile:
        """Create a new file and its folders. It is an error if the name exists."""
        ...

    def open(self, path: str) -> pa.NativeFile | IO[bytes]:
        """Open a file for random reads."""
        ...

    def folder(self, path: str) -> str:
        """Create a folder; return the path or URL with which other programs find it."""
        ...

    def list(self, folder: str) -> list[str]:
        """Return the paths of a folder's files; empty if it does not exist."""
        ...

    def age(self, path: str) -> float:
        """Return the seconds since the file was last written."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""
        ...

    def locate(self, path: str) -> str:
        """Return the path or URL with which other programs find the file."""
        ...

    def check_writable(self, folder: str) -> None:
        """Raise an error if files cannot be created in a folder.

        The check is as thorough as a few seconds allow.
        """
        ...

    def free_bytes(self, folder: str) -> int | None:
        """Return the free bytes for files in a folder; None if the storage has no known limit."""
        ...


def open_storage(url: str) -> JournalStorage:
    """Return the storage at `url`: `file:///path`, `memory://name`, `s3://bucket/prefix` ...

    Raises:
        SettingsError: The URL is not absolute, or its fsspec package is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise SettingsError(f"journal URL {url!r}: expected file:///absolute/path")
        return LocalStorage(Path(unquote(parts.path)))
    if not parts.scheme:
        raise SettingsError(f"journal URL {url!r}: expected a URL such as file:///absolute/path")
    return RemoteStorage(url)


def open_located(name: str) -> pa.NativeFile | IO[bytes]:
    """Open a file for random reads, by the path or URL that `JournalStorage.locate` returned.

    Raises:
        JournalDamaged: It is gone.
        StoreUnavailable: It cannot be read now.
    """
    folder, _, file = name.rpartition("/")
    if "://" in name:
        return open_storage(folder).open(file)
    return LocalStorage(Path(_ESCAPED.sub(r"\1", folder) or "/")).open(_ESCAPED.sub(r"\1", file))


class LocalStorage:
    """A directory on a local disk, or on a shared file system that honours fsync."""

    local = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str) -> NewFile:
        """Create a new file and its folders. It is an error if the name exists."""
        target = self._root / path
        with _translated(str(target)):
            make_folder(target.parent)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            return _LocalFile(target, os.fdopen(descriptor, "wb"))

    def open(self, path: str) -> pa.NativeFile | IO[bytes]:
        """Open a file for random reads."""
        target = str(self._root / path)
        with _translated(target):
            # Not a memory map: reading past the end of a truncated file would kill the process.
            return pa.OSFile(target, "rb")

    def folder(self, path: str) -> str:
        """Create a folder and return its absolute path."""
        target = self._root / path
        with _translated(str(target)):
            make_folder(target)
        return str(target)

    def list(self, folder: str) -> list[str]:
        """Return the paths of a folder's files; empty if it does not exist."""
        target = self._root / folder
        with _translated(str(target)), contextlib.suppress(FileNotFoundError):
            return [f"{folder}/{file.name}" for file in target.iterdir()]
        return []

    def age(self, path: str) -> float:
        """Return the seconds since the file was last written."""
        target = self._root / path
        with _translated(str(target)):
            return time.time() - target.stat().st_mtime

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""
        target = self._root / path
        with _translated(str(target)):
            return target.exists()

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""
        target = self._root / path
        with _translated(str(target)):
            target.unlink(missing_ok=True)

    def locate(self, path: str) -> str:
        """Return the absolute path, escaped so that Spark does not expand wildcards in it."""
        return _SPARK_GLOB.sub(r"\\\g<0>", str(self._root / path))

    def check_writable(self, folder: str) -> None:
        """Raise an error if this process may not create a folder, or files in it."""
        existing = self._existing(folder)
        if not existing.is_dir():
            raise StoreUnavailable(f"journal folder {existing}: not a directory")
        if os.access(existing, os.W_OK | os.X_OK):
            return
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            raise StoreUnavailable(f"journal folder {existing}: its file system is read-only")
        user = os.geteuid()
        command = "chmod u+rwx" if existing.stat().st_uid == user else f"chown {user}"
        raise StoreUnavailable(
            f"journal folder {existing}: user {user} may not create files in it",
            remedy=f"{command} {existing}",
        )

    def free_bytes(self, folder: str) -> int | None:
        """Return the free space on the folder's disk that is available to this user, in bytes."""
        existing = self._existing(folder)
        with _translated(str(existing)):
            disk = os.statvfs(existing)
            return disk.f_bavail * disk.f_frsize

    def _existing(self, folder: str) -> Path:
        """Return the folder, or the nearest one above it that exists."""
        wanted = self._root / folder
        return next(path for path in (wanted, *wanted.parents) if path.exists())


class _LocalFile:
    """A file of `LocalStorage` being written."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file

    def write(self, data: pa.Buffer | bytes) -> None:
        with _translated(str(self._path)):
            self._file.write(data)

    def commit(self) -> None:
        with _translated(str(self._path)):
            # The content, then the name: both must be durable before a row refers to the file.
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            sync_folder(self._path.parent)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class RemoteStorage:
    """Object storage, or any other file system that fsspec supports."""

    local = False

    def __init__(self, url: str) -> None:
        scheme = urlsplit(url).scheme
        try:
            # Other processes write here too, so a cached listing would be out of date.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise SettingsError(f"journal URL of scheme {scheme!r}: {error}") from error
        self._root = root.rstrip("/")
        self._has_folders = scheme not in _OBJECT_STORES
        self._probes: dict[str, _WriteProbe] = {}

    def create(self, path: str) -> NewFile:
        """Create a new file; it becomes visible when it is committed."""
        target = f"{self._root}/{path}"
        with _remote(target):
            # Unlike on a disk, this is not atomic, but names are random: no two writers share one.
            if self._fs.exists(target):
                raise FileExistsError(errno.EEXIST, "exists already", target)
            self._make_folder(target.rpartition("/")[0])
            return _RemoteFile(self._fs, target)

    def open(self, path: str) -> pa.NativeFile | IO[bytes]:
        """Open a file for random reads."""
        target = f"{self._root}/{path}"
        with _remote(target):
            # No read-ahead, each read is one request: Arrow's readers ask for exactly what they
            # need.
            opened = self._fs.open(target, "rb", cache_type="none")
        return cast("IO[bytes]", _RemoteReader(opened, target))

    def folder(self, path: str) -> str:
        """Create a folder and return its URL."""
        target = f"{self._root}/{path}"
        with _remote(target):
            self._make_folder(target)
        return self.locate(path)

    def list(self, folder: str) -> list[str]:
        """Return the paths of a folder's files; empty if it does not exist."""
        target = f"{self._root}/{folder}"
        with _remote(target), contextlib.suppress(FileNotFoundError):
            names = self._fs.ls(target, detail=False)
            return [f"{folder}/{name.rpartition('/')[2]}" for name in names]
        return []

    def age(self, path: str) -> float:
        """Return the seconds since the file was last written."""
        target = f"{self._root}/{path}"
        with _remote(target):
            return time.time() - float(self._fs.modified(target).timestamp())

    def exists(self, path: str) -> bool:
        """Return whether the file exists."""
        target = f"{self._root}/{path}"
        with _remote(target):
            return bool(self._fs.exists(target))

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""
        target = f"{self._root}/{path}"
        with _remote(target), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(target)

    def locate(self, path: str) -> str:
        """Return the file's URL in fsspec's notation."""
        return str(self._fs.unstrip_protocol(f"{self._root}/{path}"))

    def check_writable(self, folder: str) -> None:
        """Check a folder by creating and deleting an object; raise an error if that fails.

        A probe runs at most once a minute; in between, its result is used again. The check waits at
        most five seconds; if the storage does not answer in this time, that is an error, too.
        """
        probe = self._probes.setdefault(folder, _WriteProbe(partial(self._put_probe, folder)))
        probe.check(self.locate(folder))

    def free_bytes(self, folder: str) -> int | None:  # noqa: ARG002 - see the protocol
        """Return None: fsspec cannot query the free space of a storage."""
        return None

    def _put_probe(self, folder: str) -> None:
        path = f"{folder}/{_PROBE_NAME}"
        target = f"{self._root}/{path}"
        with _remote(target):
            try:
                self._make_folder(target.rpartition("/")[0])
                self._fs.pipe_file(target, b"deltaforge")
            except FileNotFoundError:
                raise StoreUnavailable(
                    f"journal folder {self.locate(folder)}: there is no such bucket or folder"
                ) from None
        # Whether it can be deleted does not matter: its name is fixed, so there is never more than
        # one.
        with contextlib.suppress(DeltaforgeError):
            self.delete(path)

    def _make_folder(self, folder: str) -> None:
        if self._has_folders:
            self._fs.makedirs(folder, exist_ok=True)


class _WriteProbe:
    """Writes to a folder at most once a minute.

    It writes in a thread, because storage clients may block for minutes.

    Args:
        put: Writes to the folder; raises a `DeltaforgeError` if it cannot.
    """

    def __init__(self, put: Callable[[], None]) -> None:
        self._put = put
        self._probed_at = 0.0
        self._result: Future[None] | None = None

    def check(self, where: str) -> None:
        """Raise an error if the newest probe has failed, or has not finished in time."""
        now = time.monotonic()
        answer = self._result
        if answer is None or (answer.done() and now - self._probed_at >= _PROBE_SECONDS):
            answer, self._probed_at = Future[None](), now
            self._result = answer
            # A daemon: a pool's thread would keep the process from ending.
            threading.Thread(
                target=self._probe, args=(answer,), name="journal probe", daemon=True
            ).start()
        try:
            error = answer.exception(max(0.0, self._probed_at + _PROBE_PATIENCE - now))
        except TimeoutError:
            raise StoreUnavailable(
                f"journal folder {where}: the storage does not answer within "
                f"{_PROBE_PATIENCE:.0f} s"
            ) from None
        if error is not None:
            raise StoreUnavailable(str(error))

    def _probe(self, answer: Future[None]) -> None:
        try:
            self._put()
        except DeltaforgeError as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)


class _RemoteReader(io.BufferedIOBase):
    """A file of `RemoteStorage` being read.

    It translates errors of each read, because a network error must not look like a file that cannot
    be decoded: Arrow passes exceptions of this project on unchanged.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        with _remote(self._path):
            return self._file.read(-1 if size is None else size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        super().close()
        self._file.close()


class _RemoteFile:
    """A file of `RemoteStorage` being written: one put, completed by `commit`."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file = fs.open(path, "wb")

    def write(self, data: pa.Buffer | bytes) -> None:
        with _remote(self._path):
            self._file.write(memoryview(data))

    def commit(self) -> None:
        with _remote(self._path):
            self._file.close()

    def discard(self) -> None:
        # Not every file system can abort a put, so it is completed and the file deleted.
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


def refused(path: str, error: OSError) -> StoreUnavailable:
    """Return the error to raise when a file system rejects a file.

    If the file system is full, the message says so.
    """
    reason = error.strerror or type(error).__name__
    if error.errno in _NO_SPACE:
        return no_space(f"file {path}", reason)
    return StoreUnavailable(f"journal file {path}: {reason}")


def no_space(where: str, reason: str) -> StoreUnavailable:
    """Return the error to raise if the journal's disk is full; `where` names the file or folder."""
    return StoreUnavailable(
        f"no space left for the journal {where} ({reason}): "
        "free space there, or lower engine.journal.max_bytes"
    )


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Translate errors of the file system into errors of this project that name `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise JournalDamaged(f"journal file {path} is missing") from error
    except OSError as error:
        raise refused(path, error) from error


@contextlib.contextmanager
def _remote(path: str) -> Iterator[None]:
    """Translate errors of fsspec, whose implementations also raise their own classes."""
    try:
        with _translated(path):
            yield
    except DeltaforgeError:
        raise
    except Exception as error:  # noqa: BLE001 - fsspec's implementations may raise anything
        # The message may contain a signed request, so only the class is named, and nothing is
        # chained.
        raise StoreUnavailable(f"journal file {path}: {type(error).__name__}") from None


class Checksummed:
    """A file object for Arrow's writers that hashes the bytes it writes."""

    def __init__(self, file: NewFile) -> None:
        self.closed = False
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        """Append and hash `data`; ignored after `commit` or `discard`."""
        # The Parquet writer writes its footer even after an error, when the file is already
        # discarded.
        if not self.closed:
            self._digest.update(data)
            self._size += len(data)
            self._file.write(data)
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: `commit` makes everything durable at once."""

    def close(self) -> None:
        """Do nothing: `commit` or `discard` closes the file."""

    def commit(self) -> None:
        """Make the file durable."""
        self._file.commit()
        self.closed = True

    def discard(self) -> None:
        """Remove the file."""
        if not self.closed:
            self.closed = True
            self._file.discard()

    def checksum(self) -> str:
        """Return the SHA-256 of the bytes written."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise our errors in place of those of Arrow and the file system.

    Raises:
        JournalDamaged: The file cannot be decoded.
        StoreUnavailable: The file cannot be read.
    """
    try:
        yield
    except pa.ArrowException as error:
        raise JournalDamaged(f"journal file {path} cannot be decoded: {error}") from error
    except OSError as error:
        if error.errno is None:  # raised by Arrow itself: the bytes do not follow the format
            raise JournalDamaged(f"journal file {path} cannot be decoded: {error}") from error
        raise StoreUnavailable(f"journal file {path}: {error.strerror}") from error
