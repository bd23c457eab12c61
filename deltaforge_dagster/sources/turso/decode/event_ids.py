"""Event ids of this source: a function of the source and of the change's place in the database.

UUIDs of version 7 as elsewhere (`sources.event_ids`), 74 bits of them a hash; the time is that of the
change, and 0 where the database has none.
"""

from __future__ import annotations

import hashlib
import uuid

_VERSION, _VARIANT = 7 << 76, 2 << 62


def event_id(source_id: str, place: str, ts_us: int) -> str:
    """Return the id of a change.

    Args:
        source_id: `id` of the source.
        place: What names the change among all of the source's.
        ts_us: When it was made, in microseconds since 1970.
    """
    digest = hashlib.blake2b(f"{source_id}\0{place}".encode(), digest_size=16, person=b"event_id")
    free = int.from_bytes(digest.digest(), "big")
    high = free >> 64 & 0xFFF
    low = free & (1 << 62) - 1
    millis = (ts_us // 1000) & (1 << 48) - 1
    return str(uuid.UUID(int=millis << 80 | _VERSION | high << 64 | _VARIANT | low))
