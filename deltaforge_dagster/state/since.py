"""When lasting conditions began, such as a capture pause, for which no column has a time.

Each start is a row of the key-value table (`primitives.Kv`), written in the transaction that begins
the condition, and read only while the condition lasts. It need not be deleted at the end: the next
start replaces it.

A pipeline whose source's log is confirmed before its changes are delivered, as may happen with
`engine.journal.confirm: auto`, has one row with since when and why.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from sqlalchemy import Connection, delete, select

from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import kv
from deltaforge_dagster.state.records import EarlyConfirmation

_EARLY_KEY = "confirmed early"


FILE_BROKEN = "file broken"
CAPTURE_PAUSED = "capture paused"
WATCHED = "watched"
"""Not a condition: when Dagster was last seen working."""
UNREPORTED = "unreported"
"""Not a condition: when a range last counted as published although no event was to be written."""
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


def read_early(connection: Connection, pipeline: str) -> EarlyConfirmation | None:
    """Return since when and why; None if the log is confirmed only as changes are delivered."""
    text = get_value(connection, _early_namespace(pipeline), _EARLY_KEY)
    return None if text is None else EarlyConfirmation(**json.loads(text))


def write_early(connection: Connection, pipeline: str, early: EarlyConfirmation | None) -> None:
    """Store since when and why the log is confirmed early; None once it is not any more."""
    if early is None:
        this = (kv.c.ns == _early_namespace(pipeline)) & (kv.c.key == _EARLY_KEY)
        connection.execute(delete(kv).where(this))
    else:
        put_value(
            connection, _early_namespace(pipeline), _EARLY_KEY, json.dumps(asdict(early)).encode()
        )


def _namespace(pipeline: str) -> str:
    return f"since/{pipeline}"


def _early_namespace(pipeline: str) -> str:
    return f"source/{pipeline}"
