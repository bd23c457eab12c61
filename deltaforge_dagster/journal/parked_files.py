"""Files of parked events and dead letters, which are kept in order until they are released.

The path of a file is `<pipeline>/held/<epoch>-<random>.arrow`, or the same in the folder `dead`,
next to the folders of segments: it does not belong to one uid of the journal. It is an Arrow IPC
stream with one binary column `event`, compressed with Zstandard. Parked events are raw, and only
the source understands them; dead letters are rows of the change frame. As with a segment, a file is
durable before the state store refers to it, is never replaced, and is an orphan if no row names it.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection, Iterator
from typing import Any, cast

import pyarrow as pa

from deltaforge_dagster.errors import JournalDamaged
from deltaforge_dagster.journal.storage import Checksummed, JournalStorage, readable

_SCHEMA = pa.schema([pa.field("event", pa.large_binary(), nullable=False)])
_BATCH_BYTES = 4 << 20  # each read is a request elsewhere than on a disk
_NAME = re.compile(r"^(?P<epoch>[0-9]+)-[0-9a-f]{32}\.arrow$")


class ParkedWriter:
    """Writes one file of parked events; finished by `close` or `abort`.

    Attributes:
        path: Relative to the journal's root.
        events: Events written so far.
        bytes: Their size, before compression.
    """

    def __init__(self, storage: JournalStorage, folder: str, epoch: int) -> None:
        self.path = f"{folder}/{epoch:06d}-{uuid.uuid4().hex}.arrow"
        self.events = 0
        self.bytes = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._file = Checksummed(storage.create(self.path))
        sink: Any = self._file  # Arrow only calls write and tell
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream = pa.ipc.new_stream(sink, _SCHEMA, options=options)

    def write(self, event: bytes) -> None:
        """Append an event.

        Raises:
            StoreUnavailable: The storage cannot be written.
        """
        self._waiting.append(event)
        self._waiting_bytes += len(event)
        self.events += 1
        self.bytes += len(event)
        if self._waiting_bytes >= _BATCH_BYTES:
            self._flush()

    def close(self) -> tuple[str, int]:
        """Finish the file and make it durable; return its checksum and size.

        Raises:
            StoreUnavailable: The storage cannot be written.
        """
        self._flush()
        self._stream.close()
        self._file.commit()
        return self._file.checksum(), self._file.tell()

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._file.discard()

    def _flush(self) -> None:
        if self._waiting:
            events = pa.array(self._waiting, pa.large_binary())
            self._stream.write_batch(pa.record_batch([events], schema=_SCHEMA))
            self._waiting.clear()
            self._waiting_bytes = 0


def folders(pipeline: str) -> list[str]:
    """Return the folders of a pipeline's parked events and of its dead letters."""
    return [f"{pipeline}/held", f"{pipeline}/dead"]


def read_parked(storage: JournalStorage, path: str, checksum: str) -> Iterator[bytes]:
    """Verify a file's checksum, then yield its events in order.

    Raises:
        JournalDamaged: The file is missing, or differs from its checksum.
        StoreUnavailable: The storage cannot be read now.
    """
    digest = hashlib.sha256()
    with readable(path), storage.open(path) as file:
        while piece := file.read(_BATCH_BYTES):
            digest.update(piece)
    if digest.hexdigest() != checksum:
        raise JournalDamaged(f"journal file {path}: checksum differs from when it was written")
    with readable(path), storage.open(path) as file:
        for batch in pa.ipc.open_stream(cast("pa.NativeFile", file)):
            for event in batch.column(0):
                yield event.as_py()


def orphans(paths: Collection[str], referenced: Collection[str], epoch: int) -> list[str]:
    """Return those of `paths` that no row names and that no live run is writing."""
    orphaned = []
    for path in paths:
        name = _NAME.match(path.rpartition("/")[2])
        if name is not None and path not in referenced and int(name["epoch"]) < epoch:
            orphaned.append(path)
    return orphaned
