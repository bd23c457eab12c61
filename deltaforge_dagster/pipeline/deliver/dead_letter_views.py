"""What a dead letter shows of its change: the event, and its place in the source's log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.processors.messages.envelope import EventOrigin, native_envelope

_LARGE_COLUMNS = ("before", "after", "ddl")
_CURSOR_COLUMNS = ("file", "pos", "row", "tx_id")


@dataclass(frozen=True, slots=True)
class View:
    """What is shown of one change.

    Attributes:
        event: The native event, JSON text.
        truncated: Whether the row images were too large, and were left out.
        cursor: Its place in the source's log, a JSON object as text.
    """

    event: str
    truncated: bool
    cursor: str


def views(origin: EventOrigin, changes: pa.RecordBatch, max_event_bytes: int) -> list[View]:
    """Return what is shown of each change.

    Args:
        origin: Where the events come from.
        changes: Rows of the change frame.
        max_event_bytes: A larger event shows a note instead of each of its row images.
    """
    return [
        _view(origin, changes.slice(index, 1), max_event_bytes) for index in range(changes.num_rows)
    ]


def _view(origin: EventOrigin, change: pa.RecordBatch, limit: int) -> View:
    cursor = _cursor(change)
    if sum(change.column(name).nbytes for name in _LARGE_COLUMNS) <= limit:
        event = _event(origin, change)
        if event is not None and len(event.encode()) <= limit:
            return View(event, False, cursor)
    (row,) = change.to_pylist()
    note = f'"<truncated: original payload exceeded {limit} bytes>"'
    row |= {name: note for name in _LARGE_COLUMNS if row[name] is not None}
    short = pa.RecordBatch.from_pylist([row], schema=change.schema)
    return View(_event(origin, short) or "{}", True, cursor)


def _cursor(change: pa.RecordBatch) -> str:
    row: dict[str, Any] = {name: change.column(name)[0].as_py() for name in _CURSOR_COLUMNS}
    cursor = (
        {"file": row["file"], "pos": row["pos"], "gtid": row["tx_id"]}
        if row["file"] is not None
        else {"lsn": None if row["pos"] is None else format_lsn(row["pos"]), "tx_id": row["tx_id"]}
    )
    return orjson.dumps(cursor | {"row": row["row"]}).decode()


def _event(origin: EventOrigin, change: pa.RecordBatch) -> str | None:
    """Return the native event; None when it cannot become text."""
    try:
        return native_envelope(origin, change)[0].as_py()
    except UnsupportedEvent:
        return None
