"""Divide PostgreSQL's tables into chunks: by primary key, by blocks, or not at all.

Chunks by key are found by walking the key's index, `chunk_rows` rows at a step: the server does all
comparisons, whatever the type, and the chunks have equal sizes. Rows may come and go meanwhile:
since each chunk ends where the next begins, and the last one has no end, every row is in exactly
one chunk.

A table without a primary key is divided by blocks (`ctid`) if the server can read a range of blocks
without reading the whole table, from PostgreSQL 14 on. A partitioned table has no blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import sql

from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.snapshot import MAX_CHUNKS, Chunk

_BLOCK_RANGES_VERSION = 140000  # before 14 a condition on ctid ranges reads the whole table
_ROWS_PER_BLOCK = 100
"""Assumed number of rows per block in a table that was never analyzed."""


@dataclass(frozen=True, slots=True)
class PostgresSnapshotTable:
    """A table that a snapshot reads.

    Attributes:
        table: The table in the catalog.
        key: The primary key's columns.
        operators: The schema of the comparison operators for the key; None if the table cannot be
            divided by its key.
    """

    table: catalog.PublishableTable
    key: tuple[str, ...]
    operators: str | None

    @property
    def source(self) -> sql.Composed:
        """The table for FROM and LOCK TABLE.

        It includes its partitions, but not tables that inherit from it.
        """
        only = sql.SQL("") if self.table.partitioned else sql.SQL("ONLY ")
        return only + self.table.identifier

    def bound(self, operator: str, literals: str) -> sql.Composed:
        """Return the SQL condition that compares the key with a JSON array of SQL literals."""
        values = sql.SQL(", ").join(sql.SQL(literal) for literal in json.loads(literals))
        columns = sql.SQL(", ").join(map(sql.Identifier, self.key))
        assert self.operators is not None
        compare = sql.SQL("OPERATOR({}.{})").format(
            sql.Identifier(self.operators), sql.SQL(operator)
        )
        return sql.SQL("ROW({}) {} ROW({})").format(columns, compare, values)


def target(
    connection: psycopg.Connection, table: catalog.PublishableTable
) -> PostgresSnapshotTable:
    """Return a table with its key and the key's operators."""
    key = catalog.primary_key(connection, table.oid)
    current = catalog.columns_now(connection, table.oid, table.schema, table.name)
    schemas = {current.columns[name].operators for name in key}
    if schemas == {"pg_catalog"} or (len(key) == 1 and schemas):
        return PostgresSnapshotTable(table, key, schemas.pop())
    return PostgresSnapshotTable(table, key, None)


def plan(
    connection: psycopg.Connection,
    target: PostgresSnapshotTable,
    chunk_rows: int,
    where: str | None,
) -> Iterator[Chunk]:
    """Yield the chunks of one table.

    Args:
        connection: A connection to the server.
        target: The table.
        chunk_rows: How many rows a chunk should have.
        where: An SQL condition that rows must satisfy; None for all rows.
    """
    name = target.table.full_name
    version = connection.info.server_version
    if target.key and target.operators is not None:
        yield from _by_key(connection, target, chunk_rows, where)
    elif target.key or target.table.partitioned or version < _BLOCK_RANGES_VERSION:
        rows, _ = _size(connection, target.table)
        yield Chunk(name, 1, "whole", where=where, rows=rows)
    else:
        yield from _by_block(connection, target, chunk_rows, where)


def _by_key(
    connection: psycopg.Connection,
    target: PostgresSnapshotTable,
    chunk_rows: int,
    where: str | None,
) -> Iterator[Chunk]:
    rows, _ = _size(connection, target.table)
    step = max(chunk_rows, rows // MAX_CHUNKS)
    number, after = 1, None
    while (upto := _walk(connection, target, after, step)) is not None:
        yield Chunk(target.table.full_name, number, "key", after, upto, where, step)
        after = upto
        number += 1
        if number % MAX_CHUNKS == 0:  # the table is much larger than its statistics say
            step *= 2
    yield Chunk(target.table.full_name, number, "key", after, None, where, step)


def _walk(
    connection: psycopg.Connection, target: PostgresSnapshotTable, after: str | None, step: int
) -> str | None:
    """Return the key `step` rows after a key, as SQL literals; None if there are fewer rows."""
    begin = sql.SQL("") if after is None else sql.SQL("WHERE ") + target.bound(">", after)
    columns = [sql.Identifier(name) for name in target.key]
    literals = [
        sql.SQL("quote_literal({0}::text) || '::' || format_type(pg_typeof({0}), -1)").format(
            column
        )
        for column in columns
    ]
    query = sql.SQL("SELECT {} FROM {} {} ORDER BY {} OFFSET {} LIMIT 1").format(
        sql.SQL(", ").join(literals),
        target.source,
        begin,
        sql.SQL(", ").join(columns),
        sql.Literal(step - 1),
    )
    with connection.transaction():
        # The index provides the order; without statistics the planner may prefer to sort.
        connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        row = connection.execute(query).fetchone()
    return None if row is None else json.dumps(row, ensure_ascii=False)


def _by_block(
    connection: psycopg.Connection,
    target: PostgresSnapshotTable,
    chunk_rows: int,
    where: str | None,
) -> Iterator[Chunk]:
    rows, blocks = _size(connection, target.table)
    per_block = max(rows // blocks, 1) if blocks and rows else _ROWS_PER_BLOCK
    step = max(chunk_rows // per_block, -(-blocks // MAX_CHUNKS), 1)
    name = target.table.full_name
    starts = range(0, max(blocks, 1), step)
    for number, start in enumerate(starts, start=1):
        end = str(start + step) if number < len(starts) else None
        yield Chunk(name, number, "ctid", str(start), end, where, step * per_block)


def _size(connection: psycopg.Connection, table: catalog.PublishableTable) -> tuple[int, int]:
    """Return the estimated number of rows of a table, and its current number of blocks."""
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
