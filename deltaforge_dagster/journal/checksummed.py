"""Adapters between journal files and Arrow: written bytes are hashed, and errors are translated."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import pyarrow as pa

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.journal.storage import NewFile


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
