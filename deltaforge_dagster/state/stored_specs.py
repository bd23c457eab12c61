"""Pipelines that have no file: their documents, kept here, and a pipeline's end.

A document is what somebody gave, as JSON text, secrets included: it is read by nobody but those who
load pipelines. Its version rises with each change, so that of two people who change it at once
one is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from sqlalchemy import Connection, delete, select, update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.database import clock, upsert
from deltaforge_dagster.state.leases import lock_lease
from deltaforge_dagster.state.primitives import get_value, put_value
from deltaforge_dagster.state.rows import find_pipeline
from deltaforge_dagster.state.tables import (
    kv,
    leases,
    log,
    metadata,
    pipelines,
    queue,
    slot,
    stored_specs,
)

_NUMBERS = "numbers"
"""Namespace: with which segment and range a pipeline goes on that was forgotten, if it comes back."""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A pipeline's document; `version` counts its changes from 1."""

    name: str
    document: str
    version: int


def read(connection: Connection, name: str | None = None) -> list[StoredSpec]:
    """Return every stored document by name, or the one of that name."""
    query = select(stored_specs.c.name, stored_specs.c.document, stored_specs.c.version)
    if name is not None:
        query = query.where(stored_specs.c.name == name)
    return sorted((StoredSpec(*row) for row in connection.execute(query)), key=lambda one: one.name)


def check_kept(connection: Connection, name: str) -> None:
    """Prove that the store keeps a pipeline: whoever has loaded it may be slower than its removal.

    Raises:
        NotAllowed: It does not, any more.
    """
    if not read(connection, name):
        raise NotAllowed(f"pipeline {name!r} was removed")


def add(connection: Connection, name: str, document: str) -> bool:
    """Keep a new document; False when there is one of that name."""
    added = connection.execute(
        upsert(connection, stored_specs)
        .values(name=name, document=document, version=1, created_at=clock(), updated_at=clock())
        .on_conflict_do_nothing()
        .returning(stored_specs.c.name)
    )
    return added.first() is not None


def replace(connection: Connection, name: str, version: int, document: str) -> bool:
    """Put a document in the place of that version; False when it is not there any more."""
    changed = connection.execute(
        update(stored_specs)
        .where(stored_specs.c.name == name, stored_specs.c.version == version)
        .values(document=document, version=version + 1, updated_at=clock())
    )
    return changed.rowcount == 1


def remove(connection: Connection, name: str) -> bool:
    """Drop a document; False when there is none of that name."""
    gone = connection.execute(delete(stored_specs).where(stored_specs.c.name == name))
    return gone.rowcount == 1


def remove_pipeline(connection: Connection, name: str) -> str | None:
    """Drop a document, and all that is known of its pipeline but the epoch; return its uid, if any.

    The epoch and the next numbers stay: should the pipeline come back, neither a run of old can write
    for it, nor does Dagster show a new range as the old one of that number.

    Raises:
        NotAllowed: A run holds the lease.
    """
    row = find_pipeline(connection, name)
    if row is None:
        remove(connection, name)
        return None
    held = lock_lease(connection, name)
    if held.live:
        raise NotAllowed(f"pipeline {name!r} is held by run {held.run_id}; stop it first")
    remove(connection, name)
    for table in metadata.sorted_tables:
        if "pipeline" in table.c and table is not leases:
            connection.execute(delete(table).where(table.c.pipeline == name))
    connection.execute(delete(pipelines).where(pipelines.c.name == name))
    for primitive in (kv, log, slot, queue):
        own = primitive.c.ns.endswith(f"/{name}", autoescape=True)
        connection.execute(delete(primitive).where(own))
    numbers = orjson.dumps([row.next_segment, row.next_range])
    put_value(connection, _NUMBERS, name, numbers)
    return row.uid


def first_numbers(connection: Connection, name: str) -> tuple[int, int]:
    """Return the numbers of a new pipeline's first segment and range: after any that it ever had."""
    value = get_value(connection, _NUMBERS, name)
    if value is None:
        return 1, 1
    segment, number = orjson.loads(value)
    return segment, number
