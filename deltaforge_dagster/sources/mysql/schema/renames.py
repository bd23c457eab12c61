"""Which columns statements have renamed since the log described their table.

The log has a table's columns, or their names are known otherwise, but nothing says which of them is which of the former
ones except the statement. It is read when it occurs, and what it renames is stored with its position until the next version
of the table is registered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SourceNotes
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import (
    Name,
    NotUnderstoodError,
    TokenReader,
    items,
)

_MARK = "renamed"


class StatementRenames:
    """Collects renames, for one reader of the log.

    Args:
        notes: Where they are stored.
        defined: What is stored where the reader begins (`SourceNotes.defined`).
    """

    def __init__(self, notes: SourceNotes, defined: Mapping[str, str]) -> None:
        self._notes = notes
        self._renamed: dict[Name, dict[str, str]] = {}
        for key, text in defined.items():
            if (name := _table_of(key)) is not None:
                self._renamed[name] = json.loads(text)

    def statement(
        self, database: str, sql: str, position: Position, touched: set[Name], *, fold: bool
    ) -> None:
        """Apply a statement; what it does to a table in other ways ends what is known of it.

        Args:
            database: The database of names without one.
            sql: The statement.
            position: Its position.
            touched: The tables that it defines, alters, renames or drops.
            fold: Whether the server stores table names in lower case.
        """
        altered, changes = _changes(sql, database, fold=fold)
        for name in touched:
            before = self._renamed.get(name, {})
            now = changes.applied(before) if name == altered and changes is not None else {}
            if now != before:
                self._note(name, now, position)

    def former(self, table: Name) -> Mapping[str, str]:
        """Return the columns of a table that were renamed since it was described last, and their names then."""
        return self._renamed.get(table, {})

    def described(self, table: Name, position: Position) -> None:
        """Forget what was renamed: the version of the table that has it is registered, from a position on."""
        if table in self._renamed:
            self._note(table, {}, position)

    def _note(self, table: Name, renamed: dict[str, str], position: Position) -> None:
        text = json.dumps(renamed, ensure_ascii=False) if renamed else None
        self._notes.define({json.dumps([*table, _MARK], ensure_ascii=False): text}, position)
        self._renamed.pop(table, None)
        if renamed:
            self._renamed[table] = renamed


class _AlteredNames:
    """What one ALTER TABLE does to names: columns renamed, by new name, and columns dropped."""

    def __init__(self) -> None:
        self.renamed: dict[str, str] = {}
        self.dropped: list[str] = []

    def applied(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return what was renamed with these changes, by what was before; names are equal whatever their case."""
        known = {new.lower(): old for new, old in before.items()}
        gone = {name.lower() for name in (*self.dropped, *self.renamed.values())}
        kept = {new: old for new, old in before.items() if new.lower() not in gone}
        added = {new: known.get(old.lower(), old) for new, old in self.renamed.items()}
        return {new: old for new, old in (kept | added).items() if new != old}


def is_rename(key: str) -> bool:
    """Return whether a stored definition says which columns were renamed, and is no table's definition."""
    return _table_of(key) is not None


def _table_of(key: str) -> Name | None:
    database, table, *rest = json.loads(key)
    return (database, table) if rest == [_MARK] else None


def _changes(sql: str, database: str, *, fold: bool) -> tuple[Name | None, _AlteredNames | None]:
    """Return the table that a statement alters, and what it does to the names of columns; None if that is not certain."""
    reader = TokenReader(sql, database, fold=fold)
    if not reader.skip("ALTER"):
        return None, None
    reader.skip_any("ONLINE", "OFFLINE", "IGNORE")
    if not reader.skip("TABLE"):
        return None, None
    reader.skip("IF", "EXISTS")
    name: Name | None = None
    try:
        name = reader.table()
        reader.skip("WAIT") or reader.skip("NOWAIT")
        found = _AlteredNames()
        for item in items(reader.rest()):
            _act(found, reader.within(item))
    except NotUnderstoodError:
        return name, None
    return name, found


def _act(found: _AlteredNames, item: TokenReader) -> None:
    if item.skip("RENAME", "COLUMN"):
        old = item.name()
        if not item.skip("TO"):
            raise NotUnderstoodError
        found.renamed[item.name()] = old
    elif item.skip("RENAME"):
        if item.word not in {"INDEX", "KEY"}:
            raise NotUnderstoodError  # the table has another name from here on
    elif item.skip("CHANGE"):
        item.skip("COLUMN")
        item.skip("IF", "EXISTS")
        old, new = item.name(), item.name()
        found.renamed[new] = old
    elif item.skip("DROP") and item.word not in {
        "PRIMARY",
        "INDEX",
        "KEY",
        "FOREIGN",
        "CHECK",
        "CONSTRAINT",
        "PARTITION",
    }:
        item.skip("COLUMN")
        item.skip("IF", "EXISTS")
        found.dropped.append(item.name())
