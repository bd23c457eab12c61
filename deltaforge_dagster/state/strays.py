"""Strays: rows of a snapshot's table that may have moved between two of its chunks, past both readings.

A row gets another key, or another place, after the chunk that it moves into was read and before the one
that it leaves is. Neither reading has it then. As a rule that does no harm: the stream brings the row as
it became. But an update may leave columns out (`sources.images`), and then nobody would bring these.
`pipeline.strays` tells which rows may be of this kind; here is noted which keys they have now, until a
chunk is planned that looks for them in the whole table. A snapshot is not finished before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select

from deltaforge_dagster.state.tables import chunks, strays


def note(
    connection: Connection, pipeline: str, snapshot: int, table: str, keys: Collection[str]
) -> None:
    """Note keys of rows, JSON text as in the stream; those that are noted already stay."""
    named = {_digest(key): key for key in keys}
    query = select(strays.c.digest).where(_of(pipeline, snapshot, table))
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
        connection.execute(insert(strays), rows)


def read(connection: Connection, pipeline: str, snapshot: int, table: str) -> list[str]:
    """Return the keys of a table that are noted."""
    query = select(strays.c.key).where(_of(pipeline, snapshot, table)).order_by(strays.c.key)
    return list(connection.execute(query).scalars())


def ready(connection: Connection, pipeline: str, snapshot: int) -> list[str]:
    """Return the tables with strays of which every chunk is spliced: now they can be looked for."""
    open_ = select(chunks.c.number).where(
        chunks.c.pipeline == strays.c.pipeline,
        chunks.c.snapshot == strays.c.snapshot,
        chunks.c.table_name == strays.c.table_name,
        chunks.c.state != "spliced",
    )
    query = (
        select(strays.c.table_name)
        .where(strays.c.pipeline == pipeline, strays.c.snapshot == snapshot, ~open_.exists())
        .distinct()
        .order_by(strays.c.table_name)
    )
    return list(connection.execute(query).scalars())


def drop(
    connection: Connection, pipeline: str, snapshot: int, table: str, keys: Collection[str]
) -> None:
    """Forget keys of a table's rows."""
    for key in keys:
        connection.execute(
            delete(strays).where(_of(pipeline, snapshot, table), strays.c.digest == _digest(key))
        )


def drop_all(connection: Connection, pipeline: str, snapshot: int) -> None:
    """Forget all strays of a snapshot."""
    connection.execute(
        delete(strays).where(strays.c.pipeline == pipeline, strays.c.snapshot == snapshot)
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _of(pipeline: str, snapshot: int, table: str) -> ColumnElement[bool]:
    return and_(
        strays.c.pipeline == pipeline,
        strays.c.snapshot == snapshot,
        strays.c.table_name == table,
    )
