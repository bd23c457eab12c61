"""What ALTER TABLE does to the columns of a table: which it renames, adds and drops, and what older rows have in new ones.

The log has a table's columns, or their names are known otherwise, but nothing says which of them is which of the former
ones except the statement.
"""

from __future__ import annotations

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.table_map import CatalogColumn
from deltaforge_dagster.sources.mysql.schema.altered_table import actions, defined_column
from deltaforge_dagster.sources.mysql.schema.column_types import ANY_TEXT, described_type, is_text
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import (
    Name,
    NotUnderstoodError,
    TokenReader,
    items,
)
from deltaforge_dagster.sources.mysql.schema.defaults import NULL, default_json
from deltaforge_dagster.sources.mysql.values.types import LABEL_FORMS, ValueForms
from deltaforge_dagster.tables import ColumnChanges

_NO_COLUMNS = {
    "CHECK", "CONSTRAINT", "FOREIGN", "FULLTEXT", "INDEX", "KEY", "PARTITION", "PERIOD", "PRIMARY",
    "SPATIAL", "SYSTEM", "UNIQUE", "VECTOR",
}  # fmt: skip
"""Words after ADD or DROP that do not name a column."""


def column_changes(
    sql: str, database: str, *, fold: bool, forms: ValueForms = LABEL_FORMS
) -> tuple[Name, ColumnChanges] | None:
    """Return the table that a statement alters, and what it does to the columns; None if it alters no table.

    Args:
        sql: The statement (`QueryEvent.sql`).
        database: The database of names without one.
        fold: Whether the server stores table names in lower case.
        forms: The formats of values where there is a choice.
    """
    reader = TokenReader(sql, database, fold=fold)
    if not reader.skip("ALTER"):
        return None
    reader.skip_any("ONLINE", "OFFLINE", "IGNORE")
    if not reader.skip("TABLE"):
        return None
    reader.skip("IF", "EXISTS")
    try:
        name = reader.table()
    except NotUnderstoodError:
        return None
    reader.skip_wait()
    found = _ColumnActions(forms)
    try:
        for action in actions(reader):
            found.act(action)
    except NotUnderstoodError:
        return name, ColumnChanges(certain=False)
    return name, found.changes


class _ColumnActions:
    """Collects what the items of one ALTER TABLE do; all names are those before the statement, except new ones."""

    def __init__(self, forms: ValueForms) -> None:
        self._forms = forms
        self._renamed: dict[str, str] = {}
        self._added: set[str] = set()
        self._dropped: set[str] = set()
        self._fills: dict[str, str] = {}
        self._perhaps: set[str] = set()

    @property
    def changes(self) -> ColumnChanges:
        """All of it."""
        return ColumnChanges(
            self._renamed,
            frozenset(self._added),
            frozenset(self._dropped),
            self._fills,
            frozenset(self._perhaps),
        )

    def act(self, item: TokenReader) -> None:
        """Apply one item."""
        if item.skip("RENAME", "COLUMN"):
            item.skip("IF", "EXISTS")
            old = item.name()
            if not item.skip("TO"):
                raise NotUnderstoodError
            self._rename(old, item.name())
        elif item.skip("CHANGE"):
            item.skip("COLUMN")
            item.skip("IF", "EXISTS")
            self._rename(item.name(), item.name())
        elif item.skip("ADD"):
            self._add(item)
        elif item.skip("DROP") and item.word not in _NO_COLUMNS:
            item.skip("COLUMN")
            item.skip("IF", "EXISTS")
            self._dropped.add(item.name())

    def _rename(self, old: str, new: str) -> None:
        if old != new:
            self._renamed[new] = old

    def _add(self, item: TokenReader) -> None:
        if not item.skip("COLUMN") and item.word in _NO_COLUMNS:
            return
        if item.word == "(":
            for definition in items(item.group()):
                inner = item.within(definition)
                if inner.word not in _NO_COLUMNS:
                    self._add_column(inner, perhaps=False)
        else:
            self._add_column(item, perhaps=item.skip("IF", "NOT", "EXISTS"))

    def _add_column(self, item: TokenReader, *, perhaps: bool) -> None:
        name = item.name()
        (self._perhaps if perhaps else self._added).add(name)
        if item.word == "SERIAL":  # numbers that the server gives
            return
        fill = _fill(defined_column(name, item), self._forms)
        if fill is not None:
            self._fills[name] = fill


def _fill(column: CatalogColumn, forms: ValueForms) -> str | None:
    """Return what older rows have in a column, JSON as in row images; None if that is not certain."""
    if column.default == NULL:
        return "null"
    if column.default is None or column.type == ANY_TEXT:
        return None
    # Whatever the character set, JSON has the same text.
    charset = "utf8mb4" if is_text(column.type) else None
    try:
        type_ = described_type(column.type, charset, column.labels, forms)
    except UnsupportedEvent:
        return None
    return default_json(column.default, type_, column.labels)
