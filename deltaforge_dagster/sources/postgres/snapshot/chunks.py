"""Divide PostgreSQL's tables into chunks: by primary key, by blocks, or not at all.

The chunks of a key are found by walking its index, so many rows at a step: whatever the type, the
server compares, and the chunks are even. Between two steps rows come and go; since each chunk ends
where the next begins, and the last one has no end, every row is in exactly one of them.

A table without a primary key is divided by blocks (`ctid`) where the server can read a range of them
without reading all of the table: from PostgreSQL 14 on. A partitioned table has no blocks of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import sql

from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.snapshot.base import MAX_CHUNKS, Chunk

_BLOCK_RANGES_VERSION = 140000
_ROWS_PER_BLOCK = 100
"""Of a table that was never analyzed."""


@dataclass(frozen=True, slots=True)
class PostgresSnapshotTable:
    """A table as snapshots address it.

    Attributes:
        table: What the catalog says of it.
        key: The primary key's columns.
        operators: In which schema the key's comparisons stand; None if they cannot be named.
    """

    table: catalog.PublishableTable
    key: tuple[str, ...]
    operators: str | None

    @property
    def source(self) -> sql.Composed:
        """What stands behind FROM and LOCK TABLE: a table whose children are tables of their own."""
        only = sql.SQL("") if self.table.partitioned else sql.SQL("ONLY ")
        return only + self.table.identifier

    def bound(self, operator: str, literals: str) -> sql.Composed:
        """Return how the key compares with `literals`, a JSON array."""
        values = sql.SQL(", ").join(sql.SQL(one) for one in json.loads(literals))
        columns = sql.SQL(", ").join(map(sql.Identifier, self.key))
        assert self.operators is not None
        compare = sql.SQL("OPERATOR({}.{})").format(
            sql.Identifier(self.operators), sql.SQL(operator)
        )
        return sql.SQL("ROW({}) {} ROW({})").format(columns, compare, values)


def target(
    connection: psycopg.Connection, table: catalog.PublishableTable
) -> PostgresSnapshotTable:
    """Return how a table is addressed."""
    key = catalog.primary_key(connection, table.oid)
    now = catalog.columns_now(connection, table.oid, table.schema, table.name)
    schemas = {now.columns[name].operators for name in key}
    if schemas == {"pg_catalog"} or (len(key) == 1 and schemas):
        return PostgresSnapshotTable(table, key, schemas.pop())
    return PostgresSnapshotTable(table, key, None)


def plan(
    connection: psycopg.Connection, found: PostgresSnapshotTable, chunk_rows: int, where: str | None
) -> Iterator[Chunk]:
    """Yield the chunks of one table.

    Args:
        connection: Where to ask.
        found: The table.
        chunk_rows: How many rows a chunk should have.
        where: A condition for its rows.
    """
    name = found.table.full_name
    version = connection.info.server_version
    if found.key and found.operators is not None:
        yield from _by_key(connection, found, chunk_rows, where)
    elif found.key or found.table.partitioned or version < _BLOCK_RANGES_VERSION:
        rows, _ = _size(connection, found.table)
        yield Chunk(name, 1, "whole", where=where, rows=rows)
    else:
        yield from _by_block(connection, found, chunk_rows, where)


def _by_key(
    connection: psycopg.Connection, found: PostgresSnapshotTable, chunk_rows: int, where: str | None
) -> Iterator[Chunk]:
    rows, _ = _size(connection, found.table)
    step = max(chunk_rows, rows // MAX_CHUNKS)
    number, after = 1, None
    while (upto := _walk(connection, found, after, step)) is not None:
        yield Chunk(found.table.full_name, number, "key", after, upto, where, step)
        after = upto
        number += 1
        if number % MAX_CHUNKS == 0:  # the table is much larger than its statistics say
            step *= 2
    yield Chunk(found.table.full_name, number, "key", after, None, where, step)


def _walk(
    connection: psycopg.Connection, found: PostgresSnapshotTable, after: str | None, step: int
) -> str | None:
    """Return the key of the row so many rows after a key, as SQL literals; None without one."""
    begin = sql.SQL("") if after is None else sql.SQL("WHERE ") + found.bound(">", after)
    columns = [sql.Identifier(name) for name in found.key]
    literals = [
        sql.SQL("quote_literal({0}::text) || '::' || format_type(pg_typeof({0}), -1)").format(one)
        for one in columns
    ]
    query = sql.SQL("SELECT {} FROM {} {} ORDER BY {} OFFSET {} LIMIT 1").format(
        sql.SQL(", ").join(literals),
        found.source,
        begin,
        sql.SQL(", ").join(columns),
        sql.Literal(step - 1),
    )
    with connection.transaction():
        # The index has the order; without statistics the server may think that sorting is quicker.
        connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        row = connection.execute(query).fetchone()
    return None if row is None else json.dumps(row, ensure_ascii=False)


def _by_block(
    connection: psycopg.Connection, found: PostgresSnapshotTable, chunk_rows: int, where: str | None
) -> Iterator[Chunk]:
    rows, blocks = _size(connection, found.table)
    per_block = max(rows // blocks, 1) if blocks and rows else _ROWS_PER_BLOCK
    step = max(chunk_rows // per_block, -(-blocks // MAX_CHUNKS), 1)
    name = found.table.full_name
    starts = range(0, max(blocks, 1), step)
    for number, start in enumerate(starts, start=1):
        end = str(start + step) if number < len(starts) else None
        yield Chunk(name, number, "ctid", str(start), end, where, step * per_block)


def _size(connection: psycopg.Connection, table: catalog.PublishableTable) -> tuple[int, int]:
    """Return about how many rows a table has, and how many blocks it had just now."""
    row = connection.execute(
        """
        SELECT greatest(sum(CASE WHEN c.reltuples > 0 THEN c.reltuples ELSE 0 END), 0)::int8,
               (pg_relation_size(%(oid)s) / current_setting('block_size')::int)::int8,
               (sum(CASE WHEN c.reltuples > 0 THEN 0 ELSE pg_relation_size(c.oid) END)
                / current_setting('block_size')::int)::int8
          FROM pg_class c
         WHERE c.oid = %(oid)s OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s))
        """,
        {"oid": table.oid},
    ).fetchone()
    rows, blocks, unknown = row if row is not None else (0, 0, 0)
    return rows + unknown * _ROWS_PER_BLOCK, blocks
