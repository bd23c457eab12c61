"""Keep the definitions of all tables up to date by applying the log's DDL statements in order.

With MySQL's default settings the log has only the types of a table's columns; names, labels, the
order of the names and the key must come from elsewhere. Here each statement is applied to the
definitions before it (manual: "CREATE TABLE Statement", "ALTER TABLE Statement"), by the rules by
which the server builds the new list of columns. The result is either certain or *unknown*: anything
that is not understood exactly (an action that `altered_table` does not know, a label with a
backslash, a name that is not found) makes the tables that the statement names unknown. Types are
kept only for comparison with those in the log, which take precedence.

Where the log or the catalog has the columns before and after an ALTER TABLE, only the statement
itself says which new column was which old one: `column_changes` returns what it renames, adds and
drops, and the values of older rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import replace

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.sql_text import (
    Name,
    NotUnderstoodError,
    TokenReader,
    fills,
    items,
)
from deltaforge_dagster.sources.mysql.events.table_map import (
    CatalogColumn,
    CatalogTable,
    ColumnDefault,
)
from deltaforge_dagster.sources.mysql.schema.altered_table import (
    AlteredTable,
    act,
    actions,
    add,
    charset_of_options,
    defined_column,
    names_charset,
)
from deltaforge_dagster.sources.mysql.schema.columns import (
    ANY_TEXT,
    NULL,
    default_json,
    described_type,
    fits,
    is_text,
    labels,
)
from deltaforge_dagster.sources.mysql.values.types import LABEL_FORMS, ValueForms
from deltaforge_dagster.tables import ColumnChanges

_UNKNOWN = "null"

Definitions = MutableMapping[Name, CatalogTable | None]
"""Tables by name; None for a table that exists, but whose columns are unknown."""


def apply(tables: Definitions, statement: str, database: str, *, fold: bool = False) -> set[Name]:
    """Apply a statement to `tables`, and return the names of the affected tables.

    Args:
        tables: The definitions of all known tables; changed in place.
        statement: Its text.
        database: The database of names without one.
        fold: Whether the server stores table names in lower case (`lower_case_table_names` is not
            0).
    """
    reader = TokenReader(statement, database, fold=fold)
    touched: set[Name] = set()
    try:
        _statement(tables, reader, touched)
    except NotUnderstoodError:
        touched = touched or set(tables)  # no name was read: any table may be affected
        for name in touched:
            tables[name] = None
    return touched


def key_of(name: Name) -> str:
    """Return the key under which a table's definition is stored (`SourceNotes.define`)."""
    return json.dumps(name, ensure_ascii=False)


def is_table(key: str) -> bool:
    """Return whether a stored definition is a table's.

    Earlier versions also stored renamed columns, under longer keys.
    """
    database_and_table = 2
    return len(json.loads(key)) == database_and_table


def name_of(key: str) -> Name:
    """Return the table name from a key that `key_of` made."""
    database, table = json.loads(key)
    return str(database), str(table)


def text_of(tables: Definitions, name: Name) -> str | None:
    """Return a table's definition as JSON text; None if the table does not exist."""
    if name not in tables:
        return None
    table = tables[name]
    if table is None:
        return _UNKNOWN
    columns = [[column.name, column.type, column.charset] for column in table.columns]
    defaults = {
        column.name: column.default.text for column in table.columns if column.default is not None
    }
    definition = {
        "columns": columns,
        "primary_key": list(table.primary_key),
        "defaults": defaults,
        "charset": table.charset,
    }
    return json.dumps(definition, ensure_ascii=False)


def parse_definition(text: str) -> CatalogTable | None:
    """Parse a definition that `text_of` wrote; return None if the table's columns are unknown."""
    if text == _UNKNOWN:
        return None
    fields = json.loads(text)
    defaults = {
        name: ColumnDefault(default) for name, default in fields.get("defaults", {}).items()
    }
    columns = tuple(
        CatalogColumn(name, labels(type_), type_, "".join(charset), defaults.get(name))
        for name, type_, *charset in fields["columns"]
    )
    return CatalogTable(columns, tuple(fields["primary_key"]), fields.get("charset", ""))


def fit(table: CatalogTable, types: Sequence[str]) -> bool:
    """Return whether a definition is compatible with the columns' types in the log."""
    return len(table.columns) == len(types) and all(
        fits(column.type, type_) for column, type_ in zip(table.columns, types, strict=True)
    )


def lacks_charsets(table: CatalogTable) -> bool:
    """Return whether the character set of any text column is unknown."""
    return any(is_text(column.type) and not column.charset for column in table.columns)


def lacks_defaults(table: CatalogTable, columns: Collection[str]) -> bool:
    """Return whether the default of any of these columns is unknown."""
    defaults = {column.name: column.default for column in table.columns}
    return any(defaults.get(name) is None for name in columns)


def table_of_statement(statement: str, database: str) -> CatalogTable | None:
    """Return the table that a CREATE TABLE statement creates; None if that is not certain."""
    tables: dict[Name, CatalogTable | None] = {}
    touched = apply(tables, statement, database)
    return tables.get(next(iter(touched))) if len(touched) == 1 else None


def _statement(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    if reader.skip("CREATE"):
        reader.skip("OR", "REPLACE")
        if reader.skip("TABLE"):
            _create(tables, reader, touched)
    elif reader.skip("DROP"):
        _drop_statement(tables, reader, touched)
    elif reader.skip("RENAME"):
        if reader.skip("TABLE") or reader.skip("TABLES"):
            for old, new in renamed_tables(reader):
                _move(tables, old, new, touched)
    elif reader.skip("ALTER"):
        reader.skip_any("ONLINE", "OFFLINE", "IGNORE")
        if reader.skip("TABLE"):
            reader.skip("IF", "EXISTS")
            _alter(tables, reader, touched)
    elif reader.skip("SET", "STATEMENT"):
        _set_statement(tables, reader, touched)


def _set_statement(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    """Mark the tables of a `SET STATEMENT ... FOR` as touched, because its statement is not parsed.

    `sql_text.plain` removes the prefix, unless a SQL mode or a character set in it makes the
    meaning of the rest uncertain.

    Raises:
        NotUnderstoodError: The statement contains the name of a known table.
    """
    words = {token.text for token in reader.rest()}
    touched.update(name for name in tables if name[1] in words)
    if touched:
        raise NotUnderstoodError


def _drop_statement(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    if reader.skip("TABLE") or reader.skip("TABLES"):
        for name in _names(reader, touched):
            tables.pop(name, None)
    elif reader.skip("DATABASE") or reader.skip("SCHEMA"):
        reader.skip("IF", "EXISTS")
        _drop_database(tables, reader.table()[1], touched)
    elif reader.skip("INDEX"):
        _drop_index(tables, reader, touched)


def _names(reader: TokenReader, touched: set[Name]) -> list[Name]:
    reader.skip("IF", "EXISTS")
    names = [reader.table()]
    while reader.skip(","):
        names.append(reader.table())
    touched.update(names)
    return names


def _drop_database(tables: Definitions, database: str, touched: set[Name]) -> None:
    dropped = [name for name in tables if name[0] == database]
    touched.update(dropped)
    for name in dropped:
        del tables[name]


def _drop_index(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    reader.skip("IF", "EXISTS")
    index = reader.name()
    if index.upper() == "PRIMARY" and reader.skip("ON"):
        name = reader.table()
        touched.add(name)
        table = tables.get(name)
        tables[name] = None if table is None else replace(table, primary_key=())


def renamed_tables(reader: TokenReader) -> Iterator[tuple[Name, Name]]:
    """Read what follows RENAME TABLE; yield the former and the new name of each table, in order.

    Raises:
        NotUnderstoodError: The names from here on are not certain.
    """
    more = True
    while more:
        reader.skip("IF", "EXISTS")
        old = reader.table()
        reader.skip_wait()
        if not reader.skip("TO"):
            raise NotUnderstoodError
        yield old, reader.table()
        more = reader.skip(",")


def _move(tables: Definitions, old: Name, new: Name, touched: set[Name]) -> None:
    touched.update((old, new))
    tables[new] = tables.pop(old, None)


def _create(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    conditional = reader.skip("IF", "NOT", "EXISTS")
    name = reader.table()
    if conditional and tables.get(name) is not None:
        return  # the server logs the statement even if the table existed; then it has no effect
    touched.add(name)
    if conditional:
        raise NotUnderstoodError  # it is not known whether the table existed
    inner = reader.within(reader.group()) if reader.word == "(" else reader
    if inner.skip("LIKE"):
        tables[name] = tables.get(inner.table())
        return
    if inner is reader or fills(reader.again().rest()):
        raise NotUnderstoodError
    table = AlteredTable([], [], charset_of_options(reader))
    for tokens in items(inner.rest()):
        add(table, reader.within(tokens))
    tables[name] = table.made()


def _alter(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    name = reader.table()
    touched.add(name)
    reader.skip_wait()
    if reader.skip("CONVERT", "PARTITION"):  # MariaDB: it becomes a table of its own
        reader.name()
        if not reader.skip("TO", "TABLE"):
            raise NotUnderstoodError
        target = reader.table()
        touched.add(target)
        tables[target] = tables.get(name)
        return
    if reader.skip("CONVERT", "TABLE"):  # the reverse: the table becomes a partition of this one
        source = reader.table()
        touched.add(source)
        tables.pop(source, None)
        return
    other_charset = names_charset(reader.again())
    relevant = actions(reader, defaults=True)
    # Find the new name first: the actions may include one that is not understood.
    new_names = [new for action in relevant if (new := renamed_to(action.again())) is not None]
    touched.update(new_names)
    definition = tables.get(name)
    if definition is not None:
        table = AlteredTable.of(definition)
        if other_charset:
            table.charset = ""
        for action in relevant:
            act(table, action)
        tables[name] = table.made()
    else:
        tables[name] = None
    for new in new_names[-1:]:
        if new != name:
            _move(tables, name, new, touched)


def renamed_to(action: TokenReader) -> Name | None:
    """Return the new name of the table, if an action of ALTER TABLE gives it one."""
    if not action.skip("RENAME") or action.word == "COLUMN":
        return None
    for word in ("TO", "AS", "="):
        if action.skip(word):
            break
    return action.table()


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
