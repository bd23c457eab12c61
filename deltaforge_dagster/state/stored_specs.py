"""Documents of pipelines without a file, and the removal of pipelines.

A document is JSON text as a user supplied it, including secrets, so only the code that loads pipelines
reads it. Its version increases with each change, so that of two concurrent changes one fails.
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
"""Namespace of the next segment and range numbers of removed pipelines, should they be created again."""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A pipeline's document; `version` counts its changes from 1."""

    name: str
    document: str
    version: int


def read(connection: Connection, name: str | None = None) -> list[StoredSpec]:
    """Return all stored documents, sorted by name, or the one with this name."""
    query = select(stored_specs.c.name, stored_specs.c.document, stored_specs.c.version)
    if name is not None:
        query = query.where(stored_specs.c.name == name)
    return sorted((StoredSpec(*row) for row in connection.execute(query)), key=lambda one: one.name)


def check_kept(connection: Connection, name: str) -> None:
    """Check that a pipeline's document still exists: it may have been removed since it was loaded.

    Raises:
        NotAllowed: The document was removed.
    """
    if not read(connection, name):
        raise NotAllowed(f"pipeline {name!r} was removed")


def add(connection: Connection, name: str, document: str) -> bool:
    """Store a new document; return False if the name is taken."""
    added = connection.execute(
        upsert(connection, stored_specs)
        .values(name=name, document=document, version=1, created_at=clock(), updated_at=clock())
        .on_conflict_do_nothing()
        .returning(stored_specs.c.name)
    )
    return added.first() is not None


def replace(connection: Connection, name: str, version: int, document: str) -> bool:
    """Replace this version of a document; return False if it no longer exists."""
    changed = connection.execute(
        update(stored_specs)
        .where(stored_specs.c.name == name, stored_specs.c.version == version)
        .values(document=document, version=version + 1, updated_at=clock())
    )
    return changed.rowcount == 1


def remove(connection: Connection, name: str) -> bool:
    """Delete a document; return False if there is none of this name."""
    gone = connection.execute(delete(stored_specs).where(stored_specs.c.name == name))
    return gone.rowcount == 1


def remove_pipeline(connection: Connection, name: str) -> str | None:
    """Delete a document and its pipeline's state except the lease; return the pipeline's uid, if any.

    The epoch and the next numbers are kept: if a pipeline of this name is created again, an old run
    cannot write for it, and Dagster does not show a new range as the old one with the same number.

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
    """Return a new pipeline's first segment and range numbers, beyond any used under its name."""
    value = get_value(connection, _NUMBERS, name)
    if value is None:
        return 1, 1
    segment, number = orjson.loads(value)
    return segment, number
