"""What ALTER TABLE does to columns: renames, additions, drops, and the values of older rows.

The log or the catalog has the columns before and after the statement, but only the statement itself
says which new column was which old one.
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
    """Return the table that a statement alters, and its effect on columns; None if it alters none.

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
    collected = _ColumnActions(forms)
    try:
        for action in actions(reader):
            collected.act(action)
    except NotUnderstoodError:
        return name, ColumnChanges(certain=False)
    return name, collected.changes


class _ColumnActions:
    """Collects the effects of one ALTER TABLE; names are those before it, except new ones."""

    def __init__(self, forms: ValueForms) -> None:
        self._forms = forms
        self._renamed: dict[str, str] = {}
        self._added: set[str] = set()
        self._dropped: set[str] = set()
        self._fills: dict[str, str] = {}
        self._perhaps: set[str] = set()

    @property
    def changes(self) -> ColumnChanges:
        """All effects that were collected."""
        return ColumnChanges(
            self._renamed,
            frozenset(self._added),
            frozenset(self._dropped),
            self._fills,
            frozenset(self._perhaps),
        )

    def act(self, action: TokenReader) -> None:
        """Collect the effect of one action.

        Raises:
            NotUnderstoodError: Its effect is not certain.
        """
        if action.skip("RENAME", "COLUMN"):
            action.skip("IF", "EXISTS")
            old = action.name()
            if not action.skip("TO"):
                raise NotUnderstoodError
            self._rename(old, action.name())
        elif action.skip("CHANGE"):
            action.skip("COLUMN")
            action.skip("IF", "EXISTS")
            self._rename(action.name(), action.name())
        elif action.skip("ADD"):
            self._add(action)
        elif action.skip("DROP") and action.word not in _NO_COLUMNS:
            action.skip("COLUMN")
            action.skip("IF", "EXISTS")
            self._dropped.add(action.name())

    def _rename(self, old: str, new: str) -> None:
        if old != new:
            self._renamed[new] = old

    def _add(self, action: TokenReader) -> None:
        if not action.skip("COLUMN") and action.word in _NO_COLUMNS:
            return
        if action.word == "(":
            for definition in items(action.group()):
                column = action.within(definition)
                if column.word not in _NO_COLUMNS:
                    self._add_column(column, perhaps=False)
        else:
            self._add_column(action, perhaps=action.skip("IF", "NOT", "EXISTS"))

    def _add_column(self, definition: TokenReader, *, perhaps: bool) -> None:
        name = definition.name()
        (self._perhaps if perhaps else self._added).add(name)
        if definition.word == "SERIAL":  # AUTO_INCREMENT: the server numbers the older rows
            return
        fill = _fill(defined_column(name, definition), self._forms)
        if fill is not None:
            self._fills[name] = fill


def _fill(column: CatalogColumn, forms: ValueForms) -> str | None:
    """Return what older rows have in a new column, JSON as in row images; None if not certain."""
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
