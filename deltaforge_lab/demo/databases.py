"""The databases that the demo can write to: a PostgreSQL server, or a SQLite file without a server.

Each one knows the name of its pipeline, its tables, and how to write changes.
"""

# ruff: noqa: S608 - constant names and numbers

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from deltaforge_lab.demo.workload import TABLES, DemoTable, Op, Write

_BUSY_SECONDS = 60.0

_SQLITE_TYPES = {"boolean": "INTEGER", "bigint": "INTEGER", "numeric(12,2)": "REAL"}


def _sqlite_value(kind: str, value: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """Return the function that makes a column's values in the form in which SQLite stores them."""
    convert = {"boolean": int, "numeric(12,2)": float}.get(kind)
    return value if convert is None else lambda key, version: convert(value(key, version))


def _as_it_is(value: Any) -> Any:
    return value


class PostgresDatabase:
    """A database of a PostgreSQL server.

    Args:
        dsn: The connection string of the database.
    """

    title = "PostgreSQL"
    pipeline = "demo"
    tables: tuple[DemoTable, ...] = TABLES
    errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.environment: Mapping[str, str] = {"DEMO_POSTGRES_DSN": dsn}

    def create_tables(self) -> None:
        """Create the tables, empty."""
        with psycopg.connect(self._dsn) as connection:
            for table in self.tables:
                name = sql.Identifier(table.name)
                columns = sql.SQL(", ").join(
                    sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(column.type))
                    for column in table.columns
                )
                connection.execute(
                    sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, version int, {})").format(
                        name, columns
                    )
                )
                if table.full_identity:
                    connection.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(name))

    @contextmanager
    def connected(self) -> Generator[tuple[Write, Callable[[], None]]]:
        """Connect; yield a function that writes changes and one that commits."""
        with psycopg.connect(self._dsn) as connection:

            def write(table: DemoTable, op: Op, changed: Mapping[int, int]) -> None:
                connection.execute(*_postgres_statement(table, op, changed))

            yield write, connection.commit


class SqliteDatabase:
    """A SQLite file whose changes are recorded by triggers.

    Args:
        path: Path of the file, which does not exist yet.
    """

    title = "SQLite"
    pipeline = "demo-turso"
    tables: tuple[DemoTable, ...] = tuple(
        replace(
            table,
            full_identity=True,
            columns=tuple(
                replace(
                    column,
                    type=_SQLITE_TYPES.get(column.type, "TEXT"),
                    value=_sqlite_value(column.type, column.value),
                    shown=_as_it_is,
                )
                for column in table.columns
            ),
        )
        for table in TABLES
    )
    errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environment: Mapping[str, str] = {"DEMO_DATABASE": str(path)}

    def create_tables(self) -> None:
        """Create the tables, empty."""
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            for table in self.tables:
                columns = ", ".join(f"{column.name} {column.type}" for column in table.columns)
                connection.execute(
                    f"CREATE TABLE {table.name} "
                    f"(id INTEGER PRIMARY KEY, version INTEGER, {columns})"
                )

    @contextmanager
    def connected(self) -> Generator[tuple[Write, Callable[[], None]]]:
        """Connect; yield a function that writes changes and one that commits."""
        with closing(sqlite3.connect(self._path, timeout=_BUSY_SECONDS)) as connection:

            def write(table: DemoTable, op: Op, changed: Mapping[int, int]) -> None:
                connection.executemany(*_sqlite_statement(table, op, changed))

            yield write, connection.commit


def _postgres_statement(
    table: DemoTable, op: Op, changed: Mapping[int, int]
) -> tuple[sql.Composed, list[Any]]:
    """Return one statement for all rows, and its parameters, one array per column."""
    name = sql.Identifier(table.name)
    if op == "d":
        return sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(name), [list(changed)]
    columns = ["id", "version", *(column.name for column in table.columns)]
    types = ["bigint", "int", *(column.type.partition("(")[0] for column in table.columns)]
    values = [list(changed), list(changed.values())]
    values += [
        [column.value(key, version) for key, version in changed.items()] for column in table.columns
    ]
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    # The values are sent as text; PostgreSQL casts each one to the column's type.
    arrays = sql.SQL(", ").join(sql.SQL("%s::{}[]").format(sql.SQL(kind)) for kind in types)
    new = sql.SQL("unnest({}) AS new ({})").format(arrays, names)
    if op == "c":
        return sql.SQL("INSERT INTO {} ({}) SELECT * FROM {}").format(name, names, new), values
    assignments = sql.SQL(", ").join(
        sql.SQL("{0} = new.{0}").format(sql.Identifier(column)) for column in columns[1:]
    )
    statement = sql.SQL("UPDATE {0} SET {1} FROM {2} WHERE {0}.id = new.id")
    return statement.format(name, assignments, new), values


def _sqlite_statement(
    table: DemoTable, op: Op, changed: Mapping[int, int]
) -> tuple[str, list[tuple[Any, ...]]]:
    """Return a statement and its parameters for each row."""
    if op == "d":
        return f"DELETE FROM {table.name} WHERE id = ?", [(key,) for key in changed]
    rows = [
        (version, *(column.value(key, version) for column in table.columns), key)
        for key, version in changed.items()
    ]
    columns = ["version", *(column.name for column in table.columns)]
    if op == "c":
        places = ", ".join("?" for _ in (*columns, "id"))
        return f"INSERT INTO {table.name} ({', '.join(columns)}, id) VALUES ({places})", rows
    assignments = ", ".join(f"{column} = ?" for column in columns)
    return f"UPDATE {table.name} SET {assignments} WHERE id = ?", rows
