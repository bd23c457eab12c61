"""Relocated rows: rows that may have moved between a snapshot's chunks so that none has them.

A row may get another key or another physical location after the chunk that it moves into was read,
and before the chunk that it leaves is read. Then neither chunk contains it. This is usually
harmless, because the log contains the row's new state. But an update may omit columns
(`sources.rows.images`), whose values would then be missing. `pipeline.snapshots.chunk_rows` detects
rows to which this may apply. Their current keys are stored here until a chunk is planned that looks
for them in the whole table. A snapshot is not finished before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select

from deltaforge_dagster.state.database.database import Database
from deltaforge_dagster.state.database.tables import chunks, relocated_rows


class RelocatedRowRepository:
    """The relocated rows of all pipelines: `StateStore.relocated_rows`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str, snapshot: int, table: str) -> list[str]:
        """Return the stored keys of a table."""
        query = (
            select(relocated_rows.c.key)
            .where(_of(name, snapshot, table))
            .order_by(relocated_rows.c.key)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def ready_tables(self, name: str, snapshot: int) -> list[str]:
        """Return the tables whose relocated rows can be looked for.

        All their chunks are `complete`.
        """
        open_ = select(chunks.c.number).where(
            chunks.c.pipeline == relocated_rows.c.pipeline,
            chunks.c.snapshot == relocated_rows.c.snapshot,
            chunks.c.table_name == relocated_rows.c.table_name,
            chunks.c.state != "complete",
        )
        query = (
            select(relocated_rows.c.table_name)
            .where(
                relocated_rows.c.pipeline == name,
                relocated_rows.c.snapshot == snapshot,
                ~open_.exists(),
            )
            .distinct()
            .order_by(relocated_rows.c.table_name)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())


class RelocatedRowWrites:
    """Stores the relocated rows that a lease holder has found: `FencedWriter.relocated_rows`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def note(self, snapshot: int, table: str, keys: Collection[str]) -> None:
        """Store keys of rows, JSON text as in the change stream; keys already stored are kept."""
        named = {_digest(key): key for key in keys}
        query = select(relocated_rows.c.digest).where(_of(self._pipeline, snapshot, table))
        stored = set(self._connection.execute(query).scalars())
        rows = [
            {
                "pipeline": self._pipeline,
                "snapshot": snapshot,
                "table_name": table,
                "digest": digest,
                "key": key,
            }
            for digest, key in sorted(named.items())
            if digest not in stored
        ]
        if rows:
            self._connection.execute(insert(relocated_rows), rows)


def drop(
    connection: Connection, pipeline: str, snapshot: int, table: str, keys: Collection[str]
) -> None:
    """Delete keys of a table's rows."""
    for key in keys:
        connection.execute(
            delete(relocated_rows).where(
                _of(pipeline, snapshot, table), relocated_rows.c.digest == _digest(key)
            )
        )


def drop_all(connection: Connection, pipeline: str, snapshot: int) -> None:
    """Delete all keys of a snapshot."""
    connection.execute(
        delete(relocated_rows).where(
            relocated_rows.c.pipeline == pipeline, relocated_rows.c.snapshot == snapshot
        )
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _of(pipeline: str, snapshot: int, table: str) -> ColumnElement[bool]:
    return and_(
        relocated_rows.c.pipeline == pipeline,
        relocated_rows.c.snapshot == snapshot,
        relocated_rows.c.table_name == table,
    )
