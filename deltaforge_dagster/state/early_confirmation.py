"""Stores since when and why a source's log is confirmed before its changes are delivered.

This happens with `engine.journal.confirm: auto`. Each pipeline whose log is confirmed early has one
row in the key-value table.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from sqlalchemy import Connection, delete

from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import kv
from deltaforge_dagster.state.records import EarlyConfirmation

_KEY = "confirmed early"


def read_early(connection: Connection, pipeline: str) -> EarlyConfirmation | None:
    """Return since when and why; None if the log is confirmed only as changes are delivered."""
    text = get_value(connection, _namespace(pipeline), _KEY)
    return None if text is None else EarlyConfirmation(**json.loads(text))


def write_early(connection: Connection, pipeline: str, early: EarlyConfirmation | None) -> None:
    """Store since when and why the log is confirmed early; None once it is not any more."""
    if early is None:
        this = (kv.c.ns == _namespace(pipeline)) & (kv.c.key == _KEY)
        connection.execute(delete(kv).where(this))
    else:
        put_value(connection, _namespace(pipeline), _KEY, json.dumps(asdict(early)).encode())


def _namespace(pipeline: str) -> str:
    return f"source/{pipeline}"
