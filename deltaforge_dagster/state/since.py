"""When lasting conditions began, such as a capture pause, for which no column has a time.

Each start is a row of the key-value table (`primitives.Kv`), written in the transaction that begins
the condition, and read only while the condition lasts. It need not be deleted at the end: the next
start replaces it.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from deltaforge_dagster.state.database.primitives import put_value
from deltaforge_dagster.state.database.tables import kv

FILE_BROKEN = "file broken"
CAPTURE_PAUSED = "capture paused"
WATCHED = "watched"
"""Not a condition: when Dagster was last seen working."""
RETENTION = "retention"
"""Since when the retention job is awaited: its last end, or the last start of Dagster."""


def notice_of(sink: str) -> str:
    """Return the key of the start of a sink's notice."""
    return f"notice/{sink}"


def begin(connection: Connection, pipeline: str, condition: str) -> None:
    """Record that a condition begins now."""
    put_value(connection, _namespace(pipeline), condition, b"")


def read_since(connection: Connection, pipeline: str, condition: str) -> float | None:
    """Return when a condition last began; None if that was not recorded."""
    query = select(kv.c.updated_at).where(kv.c.ns == _namespace(pipeline), kv.c.key == condition)
    since: float | None = connection.execute(query).scalar()
    return since


def _namespace(pipeline: str) -> str:
    return f"since/{pipeline}"
