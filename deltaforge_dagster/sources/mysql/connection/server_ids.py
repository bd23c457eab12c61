"""Replication server ids, by which a MySQL server distinguishes its readers.

If two readers have the same id, the server ends the older one. So a source uses a different id for
each purpose: a short look at the log must not end the reader of a run.
"""

from __future__ import annotations

import zlib

_IDS = 4_000_000_000


def server_id(source_id: str, purpose: str = "read") -> int:
    """Return the server id of a source for a purpose.

    For `read` it is 1 + CRC32 of the source's id. The other purposes are `peek`, `look ahead`,
    `prepared`, `again`, `outline`, `rights`, and `lane` with a number.
    """
    text = source_id if purpose == "read" else f"{source_id}/{purpose}"
    return 1 + zlib.crc32(text.encode()) % _IDS
