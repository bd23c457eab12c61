"""Find the tables that a statement in the log makes, redefines, drops or empties.

It does without their definitions.
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
    """Alters it, or gives it this name: earlier rows may have had other columns or another key."""
    DROPS = "drops"
    """Drops it, or gives it another name: earlier rows belong to another table than later ones."""
    MAKES = "makes"
    """Creates it, unless it exists: earlier rows are of a table that another statement dropped."""
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
    changes: list[TableChange] = []
    with contextlib.suppress(NotUnderstoodError):
        changes.extend(_changes(reader))
    return changes


def _changes(reader: TokenReader) -> Iterator[TableChange]:
    """Yield the effects of a statement.

    Raises:
        NotUnderstoodError: A name is not understood; what follows it has no certain effect.
    """
    if reader.skip("TRUNCATE"):
        reader.skip("TABLE")
        yield TableChange(DdlEffect.EMPTIES, *reader.table())
    elif reader.skip("CREATE", "OR", "REPLACE", "TABLE"):
        name = reader.table()
        yield TableChange(DdlEffect.DROPS, *name)
        yield TableChange(DdlEffect.MAKES, *name)
    elif reader.skip("CREATE", "TABLE"):
        reader.skip("IF", "NOT", "EXISTS")
        yield TableChange(DdlEffect.MAKES, *reader.table())
    elif reader.skip("DROP"):
        yield from _dropped(reader)
    elif reader.skip("RENAME", "TABLE") or reader.skip("RENAME", "TABLES"):
        for old, new in renamed_tables(reader):
            yield TableChange(DdlEffect.DROPS, *old)
            yield _defined(new)
    elif reader.skip("ALTER"):
        reader.skip_any("ONLINE", "OFFLINE", "IGNORE")
        if reader.skip("TABLE"):
            reader.skip("IF", "EXISTS")
            yield from _altered(reader)


def _defined(name: Name) -> TableChange:
    return TableChange(DdlEffect.DEFINES, *name)


def _dropped(reader: TokenReader) -> Iterator[TableChange]:
    if reader.skip("TABLE") or reader.skip("TABLES"):
        reader.skip("IF", "EXISTS")
        yield TableChange(DdlEffect.DROPS, *reader.table())
        while reader.skip(","):
            yield TableChange(DdlEffect.DROPS, *reader.table())
    elif reader.skip("DATABASE") or reader.skip("SCHEMA"):
        reader.skip("IF", "EXISTS")
        yield TableChange(DdlEffect.DROPS, reader.table()[1], None)
    elif reader.skip("INDEX"):
        reader.skip("IF", "EXISTS")
        if reader.name().upper() == "PRIMARY" and reader.skip("ON"):
            yield _defined(reader.table())


def _altered(reader: TokenReader) -> Iterator[TableChange]:
    """Yield the tables whose columns, key or name an ALTER TABLE changes."""
    name = reader.table()
    reader.skip_wait()
    if reader.skip("CONVERT", "PARTITION"):
        return
    if reader.skip("CONVERT", "TABLE"):
        yield TableChange(DdlEffect.DROPS, *reader.table())
        return
    relevant = actions(reader)
    new = next((name for name in map(renamed_to, relevant) if name is not None), None)
    if new is not None:
        yield TableChange(DdlEffect.DROPS, *name)
        yield _defined(new)
    elif relevant:
        yield _defined(name)
