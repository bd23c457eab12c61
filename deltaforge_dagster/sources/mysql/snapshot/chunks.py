"""Divide MySQL's tables into chunks by primary key.

The planner walks the table in key order, `chunk_rows` rows at a step; the server does all
comparisons. Rows may come and go meanwhile: since each chunk ends where the next begins, and the
last one has no end, every row is in exactly one chunk. Bounds are literals that compare with a
column exactly as its own values do: texts in the column's character set, an ENUM by its number,
which is its sort order.

With two key columns, `(a, b) > (1, 2)` is written as `a >= 1 AND (a > 1 OR b > 2)`, because only
that lets the server use the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession
from deltaforge_dagster.sources.mysql.snapshot.selected import SelectedColumn, expression, quoted
from deltaforge_dagster.sources.mysql.values.types import (
    BIT,
    BLOB,
    BYTES,
    DATE,
    DATETIME,
    DECIMAL,
    ENUM,
    FLOAT,
    INET4,
    INET6,
    MICROS,
    MULTI_TEXT,
    PADDED_BYTES,
    SET,
    SIGNED,
    SINGLE_TEXT,
    TIME,
    TIMESTAMP,
    UNSIGNED,
    UTF_8_TEXT,
    UTF_16_TEXT,
    UTF_32_TEXT,
    UUID,
    YEAR,
)
from deltaforge_dagster.sources.snapshot import MAX_CHUNKS, Chunk
from deltaforge_dagster.tables import TableSchema

_NUMBERS = {SIGNED, UNSIGNED, YEAR, DECIMAL, BIT, ENUM, SET}
_BYTES = {BYTES, PADDED_BYTES, BLOB}
_TEXTS = {UTF_8_TEXT, SINGLE_TEXT, MULTI_TEXT, UTF_16_TEXT, UTF_32_TEXT}
_QUOTED = {DATE, DATETIME, TIMESTAMP, MICROS, TIME, UUID, INET4, INET6}
_PLAIN = re.compile(rb"[-+.:0-9a-fA-F ]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of a primary key; `charset` is its character set if it is text, else empty."""

    column: SelectedColumn
    charset: str

    def literal(self, value: bytes) -> str:
        """Return an SQL literal for a value of the column that the server sent."""
        kind = self.column.type.kind
        if kind in _TEXTS:
            return f"_{self.charset} X'{value.hex()}'"
        if kind in _BYTES:
            return f"X'{value.hex()}'"
        if not _PLAIN.fullmatch(value):
            raise CorruptLog(
                f"a key of column {self.column.name} that is no {self.column.type.name}"
            )
        text = value.decode()
        if kind == FLOAT:
            return text if "e" in text else f"{text}e0"
        return text if kind in _NUMBERS else f"'{text}'"

    @property
    def has_literals(self) -> bool:
        """Whether values of the column can be written as SQL literals."""
        return self.column.type.kind in _NUMBERS | _BYTES | _TEXTS | _QUOTED | {FLOAT}


@dataclass(frozen=True, slots=True)
class MysqlSnapshotTable:
    """A table that a snapshot reads.

    Attributes:
        table: Its current schema.
        columns: Its columns.
        key: The primary key's columns, in the key's order, by which the table is divided; empty if
            it cannot be divided.
        rows: Estimated number of rows.
    """

    table: TableSchema
    columns: tuple[SelectedColumn, ...]
    key: tuple[KeyColumn, ...]
    rows: int

    @property
    def name(self) -> str:
        """The table's name, quoted for a statement."""
        return f"{quoted(self.table.db)}.{quoted(self.table.table)}"


def bounds(names: Sequence[str], chunk: Chunk) -> list[str]:
    """Return the SQL conditions for a chunk's bounds; `names` are the key's columns."""
    columns = [quoted(name) for name in names]
    after = [] if chunk.after is None else [_compare(columns, json.loads(chunk.after), ">", ">")]
    upto = [] if chunk.upto is None else [_compare(columns, json.loads(chunk.upto), "<", "<=")]
    return after + upto


def _compare(columns: Sequence[str], literals: Sequence[str], strict: str, last: str) -> str:
    column, literal = columns[0], literals[0]
    if len(columns) == 1:
        return f"{column} {last} {literal}"
    rest = _compare(columns[1:], literals[1:], strict, last)
    return f"({column} {strict}= {literal} AND ({column} {strict} {literal} OR {rest}))"


def plan(
    session: MysqlSession, target: MysqlSnapshotTable, chunk_rows: int, where: str | None
) -> Iterator[Chunk]:
    """Yield the chunks of one table.

    Args:
        session: A session in which the statements of `selected.SESSION` were run.
        target: The table.
        chunk_rows: How many rows a chunk should have.
        where: An SQL condition that rows must satisfy; None for all rows.
    """
    table = target.table.full_name
    if not target.key:
        yield Chunk(table, 1, "whole", where=where, rows=target.rows)
        return
    step = max(chunk_rows, target.rows // MAX_CHUNKS)
    last = Chunk(table, 1, "key", where=where, rows=step)
    while (upto := _walk(session, target, last, step)) is not None:
        yield Chunk(table, last.number, "key", last.after, upto, where, step)
        if last.number % MAX_CHUNKS == 0:  # the table is much larger than its statistics say
            step *= 2
        last = Chunk(table, last.number + 1, "key", upto, None, where, step)
    yield last


def _walk(session: MysqlSession, target: MysqlSnapshotTable, last: Chunk, step: int) -> str | None:
    """Return the key `step` rows after a chunk's start, as bound; None if there are fewer rows."""
    names = [part.column.name for part in target.key]
    where = " AND ".join(bounds(names, last)) or "TRUE"
    rows = session.texts(
        f"SELECT {', '.join(expression(part.column) for part in target.key)}"  # noqa: S608 - quoted
        f" FROM {target.name} FORCE INDEX (PRIMARY) WHERE {where}"
        f" ORDER BY {', '.join(map(quoted, names))} LIMIT 1 OFFSET {step - 1:d}"
    )
    if not rows:
        return None
    return json.dumps(
        [part.literal(value or b"") for part, value in zip(target.key, rows[0], strict=True)]
    )
