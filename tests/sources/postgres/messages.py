"""Messages of a PostgreSQL server, for proxies that answer in its place."""

from __future__ import annotations

import struct


def refusing(sqlstate: str, text: str) -> bytes:
    """Return the messages of a server that refuses a command."""
    fields = b"".join(
        letter + value.encode() + b"\0"
        for letter, value in ((b"S", "ERROR"), (b"C", sqlstate), (b"M", text))
    )
    error = b"E" + struct.pack("!i", len(fields) + 5) + fields + b"\0"
    return error + b"Z" + struct.pack("!i", 5) + b"I"
