"""Relocated rows: rows of a snapshot's table that may have moved between two of its chunks, past both readings.

A row gets another key, or another place, after the chunk that it moves into was read and before the one
that it leaves is. Neither reading has it then. As a rule that does no harm: the stream brings the row as
it became. But an update may leave columns out (`sources.images`), and then nobody would bring these.
`pipeline.relocated_rows` tells which rows may be of this kind; here is noted which keys they have now, until a
chunk is planned that looks for them in the whole table. A snapshot is not finished before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select

from deltaforge_dagster.state.tables import chunks, relocated_rows


def note(
    connection: Connection, pipeline: str, snapshot: int, table: str, keys: Collection[str]
) -> None:
    """Note keys of rows, JSON text as in the stream; those that are noted already stay."""
    named = {_digest(key): key for key in keys}
    query = select(relocated_rows.c.digest).where(_of(pipeline, snapshot, table))
    known = set(connection.execute(query).scalars())
    rows = [
        {
            "pipeline": pipeline,
            "snapshot": snapshot,
            "table_name": table,
            "digest": digest,
            "key": key,
        }
        for digest, key in sorted(named.items())
        if digest not in known
    ]
    if rows:
        connection.execute(insert(relocated_rows), rows)


def read(connection: Connection, pipeline: str, snapshot: int, table: str) -> list[str]:
    """Return the keys of a table that are noted."""
    query = (
        select(relocated_rows.c.key)
        .where(_of(pipeline, snapshot, table))
        .order_by(relocated_rows.c.key)
    )
    return list(connection.execute(query).scalars())


def ready(connection: Connection, pipeline: str, snapshot: int) -> list[str]:
    """Return the tables with relocated rows of which every chunk is spliced: now they can be looked for."""
    open_ = select(chunks.c.number).where(
        chunks.c.pipeline == relocated_rows.c.pipeline,
        chunks.c.snapshot == relocated_rows.c.snapshot,
        chunks.c.table_name == relocated_rows.c.table_name,
        chunks.c.state != "spliced",
    )
    query = (
        select(relocated_rows.c.table_name)
        .where(
            relocated_rows.c.pipeline == pipeline,
            relocated_rows.c.snapshot == snapshot,
            ~open_.exists(),
        )
        .distinct()
        .order_by(relocated_rows.c.table_name)
    )
    return list(connection.execute(query).scalars())


def drop(
    connection: Connection, pipeline: str, snapshot: int, table: str, keys: Collection[str]
) -> None:
    """Forget keys of a table's rows."""
    for key in keys:
        connection.execute(
            delete(relocated_rows).where(
                _of(pipeline, snapshot, table), relocated_rows.c.digest == _digest(key)
            )
        )


def drop_all(connection: Connection, pipeline: str, snapshot: int) -> None:
    """Forget all relocated rows of a snapshot."""
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
