"""Since when something lasts that no column dates: rows of the table of `primitives.Kv`.

Each row is written in the transaction that begins what it dates, and read only while that lasts. So it need not be
deleted at the end: whatever begins the next time replaces it.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from deltaforge_dagster.state.primitives import put_value
from deltaforge_dagster.state.tables import kv

FILE_BROKEN = "file broken"
CAPTURE_PAUSED = "capture paused"


def notice_of(sink: str) -> str:
    """Return what dates the notice of a sink."""
    return f"notice/{sink}"


def begin(connection: Connection, pipeline: str, what: str) -> None:
    """Note that something begins now."""
    put_value(connection, _namespace(pipeline), what, b"")


def read_since(connection: Connection, pipeline: str, what: str) -> float | None:
    """Return when something began last; None if nobody noted that."""
    query = select(kv.c.updated_at).where(kv.c.ns == _namespace(pipeline), kv.c.key == what)
    since: float | None = connection.execute(query).scalar()
    return since


def _namespace(pipeline: str) -> str:
    return f"since/{pipeline}"
