"""Imports checkpoints from the storage of DeltaForge, the predecessor.

DeltaForge keeps positions in the namespace `checkpoints` of its storage: `{source id}::sink::{sink
id}` is the position that a sink has acknowledged. `{source id}` alone is that of the whole
pipeline, from a time when sinks had no keys of their own. Values are positions as JSON text
(`positions`). `legacy_storage` reads them.

The checkpoints are copied into this state store under the same namespace and keys (`Kv`). The first
start of a pipeline uses them and deletes them.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, or_

from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.database.tables import kv

NAMESPACE = "checkpoints"

_SINK = "::sink::"


def sink_key(source_id: str, sink_id: str) -> str:
    """Return the key of one sink's checkpoint; the key of the whole pipeline is the source's id."""
    return f"{source_id}{_SINK}{sink_id}"


def of_source(checkpoints: dict[str, bytes], source_id: str) -> dict[str, bytes]:
    """Return the checkpoints of one source, including those of sinks that no longer exist."""
    return {
        key: value
        for key, value in checkpoints.items()
        if key == source_id or key.startswith(f"{source_id}{_SINK}")
    }


def stored(checkpoints: Kv, source_id: str) -> dict[str, bytes]:
    """Return the imported checkpoints of one source in this state store."""
    return of_source(checkpoints.items(source_id), source_id)


def forget(connection: Connection, source_id: str) -> None:
    """Delete the imported checkpoints of one source from this state store."""
    prefix = f"{source_id}{_SINK}"
    connection.execute(
        delete(kv).where(
            kv.c.ns == NAMESPACE,
            or_(kv.c.key == source_id, kv.c.key.startswith(prefix, autoescape=True)),
        )
    )
