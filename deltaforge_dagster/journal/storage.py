"""Where journal files lie: a local directory, or anything fsspec knows by URL.

Both kinds make the same promise: a file is new or the write fails, it is readable under its name
only whole or while nobody knows that name, and it is durable when `commit` returns. On a local
disk that means fsync of the file and of every directory on the way; on object storage a
completed put. Files are readable by their owner only (0600, directories 0700); on object storage
the bucket's policy decides.

Paths are relative to the journal's root, so a journal can be moved. Errors of the file system
become `StoreUnavailable`, a missing file becomes `JournalDamaged`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol
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
_SPARK_SCHEMES = {"s3": "s3a", "gcs": "gs"}
"""Hadoop's names of the schemes that fsspec calls otherwise."""
_SPARK_GLOB = re.compile(r"[\[\]{}*?\\]")


class NewFile(Protocol):
    """A file being written; `commit` or `discard` ends it, and only a committed one remains."""

    def write(self, data: pa.Buffer | bytes) -> None:
        """Append `data`."""
        ...

    def commit(self) -> None:
        """Make the file durable."""
        ...

    def discard(self) -> None:
        """Remove the file; never raises, what cannot be removed is an orphan for the sweep."""
        ...


class Storage(Protocol):
    """A place for files that never change."""

    def create(self, path: str) -> NewFile:
        """Begin a new file, with its folders. A name that exists already is an error."""
        ...

    def open(self, path: str) -> pa.NativeFile | IO[bytes]:
        """Open a file for random reads."""
        ...

    def folder(self, path: str) -> str:
        """Create a folder and return where other programs find it."""
        ...

    def list(self, folder: str) -> list[str]:
        """Return the paths of a folder's files; none when it does not exist."""
        ...

    def age(self, path: str) -> float:
        """Return the seconds since the file was last written."""
        ...

    def exists(self, path: str) -> bool:
        """Say whether the file is there."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""
        ...

    def locate(self, path: str) -> str:
        """Return the URL under which Spark reads the file."""
        ...


def open_storage(url: str) -> Storage:
    """Return the storage at `url`: `file:///path`, `memory://name`, `s3://bucket/prefix` ...

    Raises:
        SettingsError: Not an absolute URL, or its fsspec package is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise SettingsError(f"journal URL {url!r}: expected file:///absolute/path")
        return LocalStorage(Path(unquote(parts.path)))
    if not parts.scheme:
        raise SettingsError(f"journal URL {url!r}: expected a URL such as file:///absolute/path")
    return RemoteStorage(url)


class LocalStorage:
    """A directory on a local disk, or on a shared one that honours fsync."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str) -> NewFile:
        """Begin a new file, with its folders. A name that exists already is an error."""
        target = self._root / path
        with _translated(str(target)):
            make_folder(target.parent)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            return _LocalFile(target, os.fdopen(descriptor, "wb"))

    def open(self, path: str) -> pa.NativeFile | IO[bytes]:
        """Open a file for random reads."""
        target = str(self._root / path)
        with _translated(target):
            # Not a memory map: reading one past the end of a cut file kills the process.
            return pa.OSFile(target, "rb")

    def folder(self, path: str) -> str:
        """Create a folder and return its absolute path."""
        target = self._root / path
        with _translated(str(target)):
            make_folder(target)
        return str(target)

    def list(self, folder: str) -> list[str]:
        """Return the paths of a folder's files; none when it does not exist."""
        target = self._root / folder
        with _translated(str(target)), contextlib.suppress(FileNotFoundError):
            return [f"{folder}/{entry.name}" for entry in target.iterdir()]
        return []

    def age(self, path: str) -> float:
        """Return the seconds since the file was last written."""
        target = self._root / path
        with _translated(str(target)):
            return time.time() - target.stat().st_mtime

    def exists(self, path: str) -> bool:
        """Say whether the file is there."""
        target = self._root / path
        with _translated(str(target)):
            return target.exists()

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""
        target = self._root / path
        with _translated(str(target)):
            target.unlink(missing_ok=True)

    def locate(self, path: str) -> str:
        """Return the absolute path, in which Spark expands nothing."""
        return _SPARK_GLOB.sub(r"\\\g<0>", str(self._root / path))


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
    """Object storage, or any other file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        scheme = urlsplit(url).scheme
        try:
            # Another process writes here too: a listing remembered is a listing out of date.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise SettingsError(f"journal URL of scheme {scheme!r}: {error}") from error
        self._root = root.rstrip("/")
        self._scheme = _SPARK_SCHEMES.get(scheme, scheme)

    def create(self, path: str) -> NewFile:
        """Begin a new file; it becomes visible when it is committed."""
        target = f"{self._root}/{path}"
        with _remote(target):
            if self._fs.exists(target):
                raise FileExistsError(errno.EEXIST, "exists already", target)
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            return _RemoteFile(self._fs, target)

    def open(self, path: str) -> pa.NativeFile | IO[bytes]:
        """Open a file for random reads."""
        target = f"{self._root}/{path}"
        with _remote(target):
            opened: IO[bytes] = self._fs.open(target, "rb")
            return opened

    def folder(self, path: str) -> str:
        """Create a folder and return its URL."""
        target = f"{self._root}/{path}"
        with _remote(target):
            self._fs.makedirs(target, exist_ok=True)
        return str(self._fs.unstrip_protocol(target))

    def list(self, folder: str) -> list[str]:
        """Return the paths of a folder's files; none when it does not exist."""
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
        """Say whether the file is there."""
        target = f"{self._root}/{path}"
        with _remote(target):
            return bool(self._fs.exists(target))

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""
        target = f"{self._root}/{path}"
        with _remote(target), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(target)

    def locate(self, path: str) -> str:
        """Return the file's URL with Hadoop's name of the scheme."""
        return f"{self._scheme}://{self._root}/{path}"


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
        # Completing the put and deleting it again is the one way that every file system has.
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turn what a file system raises into our errors, naming `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise JournalDamaged(f"journal file {path} is missing") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in _NO_SPACE:
            raise StoreUnavailable(
                f"no space left for the journal file {path} ({reason}): free space there, or "
                "lower engine.journal.max_bytes"
            ) from error
        raise StoreUnavailable(f"journal file {path}: {reason}") from error


@contextlib.contextmanager
def _remote(path: str) -> Iterator[None]:
    """Do the same for fsspec, whose packages also raise classes of their own."""
    try:
        with _translated(path):
            yield
    except DeltaforgeError:
        raise
    except Exception as error:  # noqa: BLE001 - packages of fsspec raise whatever they like
        # The text may hold a signed request: only the class is named, and nothing is chained.
        raise StoreUnavailable(f"journal file {path}: {type(error).__name__}") from None
