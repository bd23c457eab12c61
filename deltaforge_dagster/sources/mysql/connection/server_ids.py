"""Replication server ids: how a MySQL server tells its readers apart.

The server bears no two readers with one id and ends the older of them. So every purpose of a
source has its own: looking at the log for a moment must not end the reader of a run.
"""

from __future__ import annotations

import zlib

_IDS = 4_000_000_000


def server_id(source_id: str, purpose: str = "read") -> int:
    """Return the id for a purpose of a source: 1 + CRC32 of the source's id, for reading.

    The others are `peek`, `look ahead`, `prepared`, `again`, `outline`, and `lane` with a number.
    """
    text = source_id if purpose == "read" else f"{source_id}/{purpose}"
    return 1 + zlib.crc32(text.encode()) % _IDS
