"""Definitions of tables, from their `CREATE TABLE` statements, as SQLite itself interprets them.

The statement of every table is in `sqlite_schema`, and in Turso's change table whenever it changes.
It is run in an empty in-memory database, which is then queried for the columns.
"""

from __future__ import annotations

import functools
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import turso

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.tables import NamePattern, TablePatterns
from deltaforge_dagster.sources.turso.connection.files import FEATURES
from deltaforge_dagster.sources.turso.connection.sessions import TursoSession, Value, identifier
from deltaforge_dagster.tables import Column, ColumnDetails, TableDetails, TableSchema

DB = "main"
"""The database name in every event."""

_INTERNAL = ("sqlite_*", "libsql_*", "_df_*", "_litestream*", "_turso*", "__turso_internal*")
_INTERNAL_PATTERNS = tuple(NamePattern.parse(name, name) for name in (*_INTERNAL, "turso_cdc*"))
_REAL = ("REAL", "FLOA", "DOUB")
_NOT_REAL = ("INT", "CHAR", "CLOB", "TEXT", "BLOB")
_VISIBLE = 0


@dataclass(frozen=True, slots=True)
class Definition:
    """A table as its statement defines it.

    Attributes:
        sql: The statement.
        table: Its columns and key, as events have them.
        reals: For each column, whether it has REAL affinity, so that integers in it are REAL
            values.
        rowid: The column that is an alias of the rowid; None if there is none.
        has_rowid: Whether the table has rowids (is not WITHOUT ROWID).
        nullable_key: Whether key columns may be NULL.
        computed: Whether it has generated columns (`GENERATED ALWAYS`).
        details: Other properties of the columns.
    """

    sql: str
    table: TableSchema
    reals: tuple[bool, ...]
    rowid: str | None
    has_rowid: bool
    nullable_key: bool
    computed: bool
    details: TableDetails

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.table

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(column.name for column in self.table.columns)

    def row(self, values: list[Value]) -> dict[str, Value]:
        """Return a row by column name, with integers in REAL columns as floats.

        `values` has one value for each column.
        """
        return {
            name: float(value) if real and isinstance(value, int) else value
            for name, value, real in zip(self.columns, values, self.reals, strict=True)
        }

    def selected(self) -> str:
        """Return its columns as the list of a SELECT."""
        return ", ".join(map(identifier, self.columns))


_INTEGER = re.compile(r"[+-]?\d{1,18}")
_PLAIN_TEXT = re.compile(r"'[ !#-&(-\[\]-~]*'")
"""A text of ASCII characters that JSON has as they are."""


@functools.lru_cache(maxsize=4096)
def definition(sql: str) -> Definition:
    """Interpret a `CREATE TABLE` statement.

    Raises:
        UnsupportedEvent: Neither SQLite nor Turso's engine accepts it.
    """
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
            return _read(memory, sql)
    except sqlite3.Error:
        pass
    try:
        with closing(
            turso.connect(":memory:", isolation_level=None, experimental_features=FEATURES)
        ) as engine:
            return _read(engine, sql)
    except turso.Error as error:
        raise UnsupportedEvent(f"a table definition that cannot be read: {error}") from error


def _read(memory: sqlite3.Connection | turso.Connection, sql: str) -> Definition:
    memory.execute(sql)
    ((name,),) = memory.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table'"
        " AND name NOT LIKE 'sqlite!_%' ESCAPE '!'"
    ).fetchall()
    quoted = identifier(name)
    # Columns of table_xinfo: cid, name, type, notnull, dflt_value, pk (from 1 on, or 0), hidden.
    infos = memory.execute(f"PRAGMA table_xinfo({quoted})").fetchall()
    visible = [info for info in infos if info[6] == _VISIBLE]
    # Columns of table_list: schema, name, type, ncol, wr (WITHOUT ROWID), strict.
    without_rowid = any(
        row[1] == name and row[4] for row in memory.execute("PRAGMA table_list").fetchall()
    )
    key = tuple(
        info[1] for info in sorted((info for info in visible if info[5]), key=lambda info: info[5])
    )
    # SQLite creates `sqlite_sequence` with the first table that has AUTOINCREMENT.
    autoincrement = bool(
        memory.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sqlite_sequence'").fetchall()
    )
    # Columns of index_list: seq, name, unique, origin ("pk": made for the PRIMARY KEY), partial.
    # A key of one column without such an index is an alias of the rowid.
    indexes = memory.execute(f"PRAGMA index_list({quoted})").fetchall()
    is_rowid = (
        len(key) == 1 and not without_rowid and not any(index[3] == "pk" for index in indexes)
    )
    columns = tuple(
        Column(
            info[1],
            info[2] or "",
            None,
            not info[3] and not (info[5] and is_rowid),
            number,
            fill=_fill(info[2] or "", info[4]),
        )
        for number, info in enumerate(visible, 1)
    )
    nullable = {column.name for column in columns if column.nullable}
    return Definition(
        sql=sql,
        table=TableSchema(DB, None, name, columns, key),
        reals=tuple(_is_real(column.data_type) for column in columns),
        rowid=key[0] if is_rowid else None,
        has_rowid=not without_rowid,
        nullable_key=not without_rowid and not nullable.isdisjoint(key),
        computed=len(visible) < len(infos),
        details=TableDetails(
            {
                column.name: ColumnDetails(
                    column.nullable, info[4], "auto_increment" if info[5] and autoincrement else ""
                )
                for column, info in zip(columns, visible, strict=True)
            }
        ),
    )


def _fill(data_type: str, default: str | None) -> str | None:
    """Return what older rows have in a column that is added with a default, as JSON.

    None if the stored value may differ from the default as it is written.
    """
    kind = data_type.upper()
    if default is None or default.upper() == "NULL":
        return "null"
    if "INT" in kind and _INTEGER.fullmatch(default):
        return str(int(default))
    if ("CHAR" in kind or "TEXT" in kind) and _PLAIN_TEXT.fullmatch(default):
        return json.dumps(default[1:-1])
    return None


def _is_real(data_type: str) -> bool:
    """Return whether a declared type has REAL affinity ("Datatypes In SQLite", section 3.1)."""
    upper = data_type.upper()
    return not any(word in upper for word in _NOT_REAL) and any(word in upper for word in _REAL)


def is_captured(patterns: TablePatterns, name: str) -> bool:
    """Return whether a table with this name is captured.

    Our own and the database's internal tables never are.
    """
    return not any(pattern.matches(name) for pattern in _INTERNAL_PATTERNS) and patterns.matches(
        DB, name
    )


def statements(session: TursoSession) -> dict[str, str]:
    """Return the `CREATE TABLE` statement of every ordinary table, by name."""
    ordinary = {
        str(row[1])
        for row in session.query("PRAGMA table_list")
        if row[0] == DB and row[2] == "table"
    }
    rows = session.query("SELECT name, sql FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    return {str(name): str(sql) for name, sql in rows if name in ordinary and sql is not None}


def captured(session: TursoSession, captures: Callable[[str], bool]) -> dict[str, Definition]:
    """Return the current definitions of the captured tables, by name."""
    return {name: definition(sql) for name, sql in statements(session).items() if captures(name)}
