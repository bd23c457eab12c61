"""Approval of what waits where nobody is to be asked: `engine.schemas.on_schema_change: continue`."""

from __future__ import annotations

from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.store import StateStore


def waiting_tables(store: StateStore, pipeline: str) -> list[str]:
    """Return the full names of tables whose newest form waits for approval."""
    held = [
        hold.subject
        for hold in store.holds(pipeline)
        if hold.kind == SCHEMA and hold.state == "held"
    ]
    pending = [history.name for history in store.table_histories(pipeline) if history.pending]
    return sorted({*held, *pending})


def approve_everything(store: StateStore, pipeline: str) -> None:
    """Approve every form of every table."""
    for table in waiting_tables(store, pipeline):
        store.approve_table(pipeline, table)
