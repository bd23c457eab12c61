"""Definitions of tables, from their `CREATE TABLE` statements, as SQLite itself interprets them.

The statement of every table is in `sqlite_schema`, and in Turso's change table whenever it changes.
It is run in an empty in-memory database, which is then queried for the columns.

Turso records changes of `sqlite_schema`: CREATE, DROP, ADD COLUMN and DROP COLUMN of the
connections that capture, but not RENAME, and nothing that other connections do. So these records
are verified (`known`): the stored definitions (`SourceNotes`), with the recorded changes applied up
to the position at which the catalog was read, must be equal to the catalog. If they are not, it is
not known which columns the table's rows in between have.
"""

from __future__ import annotations

import functools
import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

import turso

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.tables import NamePattern, TablePatterns
from deltaforge_dagster.sources.turso.connection import FEATURES, TursoSession, Value, identifier
from deltaforge_dagster.sources.turso.values import decode_record
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


SCHEMA_TABLE = "sqlite_schema"
"""The name of the schema table in the change table."""

_TYPE, _NAME, _SQL = 0, 1, 4

Statements = Mapping[str, str]
"""`CREATE TABLE` statements by table."""


@dataclass(frozen=True, slots=True)
class TursoTableChange:
    """A change of a table's definition: it was created, altered or dropped.

    Attributes:
        before, after: Name and statement before and after; None if there was, or is, no table.
    """

    before: tuple[str, str] | None
    after: tuple[str, str] | None

    @property
    def sql(self) -> str:
        """The SQL statement for the DDL event."""
        if self.after is not None:
            return self.after[1]
        assert self.before is not None
        return f'DROP TABLE "{self.before[0]}"'


def table_change(kind: int, before: bytes | None, after: bytes | None) -> TursoTableChange | None:
    """Return the table change that a change of `sqlite_schema` means; None if it is of no table.

    Args:
        kind: 1 insert, 0 update, -1 delete.
        before: The record of the row before the change.
        after: The record of the row after it.

    Raises:
        UnsupportedEvent: The connection does not capture the needed record.
        CorruptLog: The bytes are not a record.
    """
    if (kind >= 0 and after is None) or (kind <= 0 and before is None):
        raise UnsupportedEvent(
            "a table was altered by a connection that captures less than `full` rows"
        )
    old = None if kind > 0 or before is None else _table(before)
    new = None if kind < 0 or after is None else _table(after)
    return None if old is None and new is None else TursoTableChange(old, new)


def _table(record: bytes) -> tuple[str, str] | None:
    values = decode_record(record)
    if len(values) <= _SQL or values[_TYPE] != "table" or values[_SQL] is None:
        return None
    return str(values[_NAME]), str(values[_SQL])


def forward(
    tables: Statements, changes: Iterable[TursoTableChange]
) -> tuple[dict[str, str], set[str]]:
    """Apply changes to definitions, in log order.

    Returns:
        The definitions after the changes, and the tables that differed from a change's `before`.
    """
    later, surprising = dict(tables), set()
    for change in changes:
        if change.before is not None:
            name, sql = change.before
            if later.pop(name, sql) != sql:
                surprising.add(name)
        if change.after is not None:
            later[change.after[0]] = change.after[1]
    return later, surprising


def backward(tables: Statements, changes: Iterable[TursoTableChange]) -> dict[str, str]:
    """Undo changes, given in log order; return the definitions before the first of them."""
    earlier = dict(tables)
    for change in reversed(list(changes)):
        if change.after is not None:
            earlier.pop(change.after[0], None)
        if change.before is not None:
            earlier[change.before[0]] = change.before[1]
    return earlier


@dataclass(frozen=True, slots=True)
class Known:
    """The definitions of tables at the beginning of a part of the log.

    Attributes:
        tables: Their statements.
        doubtful: Names of tables whose definitions are not certain in this part.
    """

    tables: dict[str, str]
    doubtful: frozenset[str]


def known(noted: Statements, changes: list[TursoTableChange], catalog: Statements) -> Known:
    """Return the definitions before a part of the log, and which of them are uncertain in it.

    A new table, without stored definition, gets the catalog's definition with the changes undone.

    Args:
        noted: The stored definitions at the beginning.
        changes: The changes of tables in the part.
        catalog: The definitions in the catalog at its end.
    """
    earlier = {**backward(catalog, changes), **noted}
    later, surprising = forward(earlier, changes)
    different = {name for name in {*later, *catalog} if later.get(name) != catalog.get(name)}
    return Known(earlier, frozenset(surprising | different))
