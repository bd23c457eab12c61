"""Files of the journal as Arrow's readers and writers see them: hashed, with errors of our tree."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import pyarrow as pa

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.journal.storage import NewFile


class Checksummed:
    """What Arrow's writers write into: hashes the bytes on their way to the file."""

    def __init__(self, file: NewFile) -> None:
        self.closed = False
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        """Append and hash; after the end, nothing."""
        # The Parquet writer writes its footer whatever happened: after the end it goes nowhere.
        if not self.closed:
            self._digest.update(data)
            self._size += len(data)
            self._file.write(data)
        return len(data)

    def tell(self) -> int:
        """Return how much was written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: `commit` makes everything durable at once."""

    def close(self) -> None:
        """Do nothing: `commit` or `discard` ends the file."""

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
        """Return the SHA-256 of what was written."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Tell a file that cannot be decoded from storage that cannot be read."""
    try:
        yield
    except pa.ArrowException as error:
        raise JournalDamaged(f"journal file {path} cannot be decoded: {error}") from error
    except OSError as error:
        if error.errno is None:  # Arrow's own: the bytes do not follow the format
            raise JournalDamaged(f"journal file {path} cannot be decoded: {error}") from error
        raise StoreUnavailable(f"journal file {path}: {error.strerror}") from error
