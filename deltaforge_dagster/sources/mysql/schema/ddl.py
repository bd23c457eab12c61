"""Find the tables that a statement in the log redefines or empties, without their definitions.

Statements that create a table are ignored: rows before them belong to an earlier table, which another
statement has dropped, except for MariaDB's CREATE OR REPLACE.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from deltaforge_dagster.sources.mysql.schema.altered_table import actions
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import (
    Name,
    NotUnderstoodError,
    TokenReader,
)
from deltaforge_dagster.sources.mysql.schema.definitions import renamed_tables, renamed_to


class DdlEffect(Enum):
    """The effect of a statement on a table."""

    DEFINES = "defines"
    """Alters, renames or drops it: earlier rows may have had other columns or another key."""
    EMPTIES = "empties"
    """Deletes its rows, without row events in the log."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """A table that a statement changes; `table` is None for every table of a database."""

    change: DdlEffect
    db: str
    table: str | None

    def concerns(self, db: str, table: str) -> bool:
        """Return whether the change affects `db.table`."""
        return self.db == db and self.table in (None, table)


def table_changes(sql: str, database: str, *, fold: bool = False) -> list[TableChange]:
    """Return the effects of a statement on tables.

    Args:
        sql: The statement (`QueryEvent.sql`).
        database: The database of names without one.
        fold: Whether the server stores table names in lower case.
    """
    reader = TokenReader(sql, database, fold=fold)
    found: list[TableChange] = []
    with contextlib.suppress(NotUnderstoodError):
        found.extend(_changes(reader))
    return found


def _changes(reader: TokenReader) -> Iterator[TableChange]:
    """Yield the effects of a statement; what follows a name that is not understood has none for certain."""
    if reader.skip("TRUNCATE"):
        reader.skip("TABLE")
        yield TableChange(DdlEffect.EMPTIES, *reader.table())
    elif reader.skip("CREATE", "OR", "REPLACE", "TABLE"):
        yield _defined(reader.table())
    elif reader.skip("DROP"):
        yield from _dropped(reader)
    elif reader.skip("RENAME", "TABLE") or reader.skip("RENAME", "TABLES"):
        for names in renamed_tables(reader):
            yield from map(_defined, names)
    elif reader.skip("ALTER"):
        reader.skip_any("ONLINE", "OFFLINE", "IGNORE")
        if reader.skip("TABLE"):
            reader.skip("IF", "EXISTS")
            yield from map(_defined, _altered(reader))


def _defined(name: Name) -> TableChange:
    return TableChange(DdlEffect.DEFINES, *name)


def _dropped(reader: TokenReader) -> Iterator[TableChange]:
    if reader.skip("TABLE") or reader.skip("TABLES"):
        reader.skip("IF", "EXISTS")
        yield _defined(reader.table())
        while reader.skip(","):
            yield _defined(reader.table())
    elif reader.skip("DATABASE") or reader.skip("SCHEMA"):
        reader.skip("IF", "EXISTS")
        yield TableChange(DdlEffect.DEFINES, reader.table()[1], None)
    elif reader.skip("INDEX"):
        reader.skip("IF", "EXISTS")
        if reader.name().upper() == "PRIMARY" and reader.skip("ON"):
            yield _defined(reader.table())


def _altered(reader: TokenReader) -> Iterator[Name]:
    """Yield the tables whose columns, key or name an ALTER TABLE changes."""
    name = reader.table()
    reader.skip_wait()
    if reader.skip("CONVERT", "PARTITION"):
        return
    if reader.skip("CONVERT", "TABLE"):
        yield reader.table()
        return
    done = actions(reader)
    if done:
        yield name
    for item in done:
        new = renamed_to(item)
        if new is not None:
            yield new
