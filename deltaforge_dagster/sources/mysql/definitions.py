"""What statements of the log make of tables: the definitions of all tables, followed in log order.

The log tells the types of a table's columns before its rows, and with MySQL's defaults nothing else:
names, labels, order of the names and the key must be known from elsewhere. Here they are carried
from one statement to the next (manual: "CREATE TABLE Statement", "ALTER TABLE Statement"), by the
rules by which the server itself builds the new list of columns. What a statement makes of a table is
either certain or *unknown*: whatever is not understood to the letter (an action that is not listed
here, a label with a backslash, a name that is not found) makes the tables that it names unknown.
Types are carried to be compared with those of the log, which they never overrule.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace

from deltaforge_dagster.sources.mysql.column_types import (
    ANY_TEXT,
    TEXTS,
    column_type,
    fits,
    is_binary,
    is_text,
    labels,
)
from deltaforge_dagster.sources.mysql.ddl_tokens import (
    Name,
    NotUnderstoodError,
    Token,
    TokenReader,
    items,
)
from deltaforge_dagster.sources.mysql.table_map import CatalogColumn, CatalogTable

_UNKNOWN = "null"

Definitions = MutableMapping[Name, CatalogTable | None]
"""Tables by name; None for one that is there, but whose columns are unknown."""


def apply(tables: Definitions, statement: str, database: str, *, fold: bool = False) -> set[Name]:
    """Let a statement of the log act on `tables`, and return the names that it concerns.

    Args:
        tables: All tables that are known; changed in place.
        statement: Its text.
        database: Where names without a database belong.
        fold: Whether the server keeps all names of tables in small letters
            (`lower_case_table_names` is not 0).
    """
    reader = TokenReader(statement, database, fold=fold)
    touched: set[Name] = set()
    try:
        _statement(tables, reader, touched)
    except NotUnderstoodError:
        touched = touched or set(tables)
        for name in touched:
            tables[name] = None
    return touched


def key_of(name: Name) -> str:
    """Return the key under which a table's definition is kept."""
    return json.dumps(name, ensure_ascii=False)


def name_of(key: str) -> Name:
    """Return the table of a key."""
    database, table = json.loads(key)
    return str(database), str(table)


def text_of(tables: Definitions, name: Name) -> str | None:
    """Return a table's definition as JSON text, None for a table that is gone."""
    if name not in tables:
        return None
    table = tables[name]
    if table is None:
        return _UNKNOWN
    columns = [[column.name, column.type, column.charset] for column in table.columns]
    definition = {"columns": columns, "primary_key": list(table.primary_key)}
    return json.dumps(definition, ensure_ascii=False)


def parse_definition(text: str) -> CatalogTable | None:
    """Return the table that `text_of` wrote, None for one that is unknown."""
    if text == _UNKNOWN:
        return None
    fields = json.loads(text)
    columns = tuple(
        CatalogColumn(name, labels(type_), type_, *charset)
        for name, type_, *charset in fields["columns"]
    )
    return CatalogTable(columns, tuple(fields["primary_key"]))


def fit(known: CatalogTable, types: Sequence[str]) -> bool:
    """Say whether a table can be one whose columns the log describes so."""
    return len(known.columns) == len(types) and all(
        fits(column.type, type_) for column, type_ in zip(known.columns, types, strict=True)
    )


def lacks_charsets(known: CatalogTable) -> bool:
    """Say whether it is not known of each text in which character set it is."""
    return any(is_text(column.type) and not column.charset for column in known.columns)


def table_of_statement(statement: str, database: str) -> CatalogTable | None:
    """Return the table that a CREATE TABLE statement makes, None if that is not certain."""
    tables: dict[Name, CatalogTable | None] = {}
    touched = apply(tables, statement, database)
    return tables.get(next(iter(touched))) if len(touched) == 1 else None


def _statement(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    if reader.skip("CREATE"):
        reader.skip("OR", "REPLACE")
        if reader.skip("TABLE"):
            _create(tables, reader, touched)
    elif reader.skip("DROP"):
        _drop_something(tables, reader, touched)
    elif reader.skip("RENAME"):
        if reader.skip("TABLE") or reader.skip("TABLES"):
            _rename(tables, reader, touched)
    elif reader.skip("ALTER"):
        reader.skip_any("ONLINE", "OFFLINE", "IGNORE")
        if reader.skip("TABLE"):
            reader.skip("IF", "EXISTS")
            _alter(tables, reader, touched)


def _drop_something(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
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
    found = [reader.table()]
    while reader.skip(","):
        found.append(reader.table())
    touched.update(found)
    return found


def _drop_database(tables: Definitions, database: str, touched: set[Name]) -> None:
    gone = [name for name in tables if name[0] == database]
    touched.update(gone)
    for name in gone:
        del tables[name]


def _drop_index(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    index = reader.name()
    if index.upper() == "PRIMARY" and reader.skip("ON"):
        name = reader.table()
        touched.add(name)
        known = tables.get(name)
        tables[name] = None if known is None else CatalogTable(known.columns, ())


def _rename(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    while True:
        reader.skip("IF", "EXISTS")
        old = reader.table()
        if not reader.skip("TO"):
            raise NotUnderstoodError
        new = reader.table()
        _move(tables, old, new, touched)
        if not reader.skip(","):
            return


def _move(tables: Definitions, old: Name, new: Name, touched: set[Name]) -> None:
    touched.update((old, new))
    tables[new] = tables.pop(old, None)


def _create(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    spared = reader.skip("IF", "NOT", "EXISTS")
    name = reader.table()
    if spared and tables.get(name) is not None:
        return  # logged even where the table was there, and then without effect
    touched.add(name)
    if spared:
        raise NotUnderstoodError  # whether it was there is not known
    inner = reader.within(reader.group()) if reader.word == "(" else reader
    if inner.skip("LIKE"):
        tables[name] = tables.get(inner.table())
        return
    if inner is reader or _is_filled(reader.rest()):
        raise NotUnderstoodError
    new = _Table([], [])
    for item in items(inner.rest()):
        _add(new, reader.within(item))
    tables[name] = new.made()


def _is_filled(options: Sequence[Token]) -> bool:
    """Say whether a query stands behind the columns, which may add some."""
    depth = 0
    for token in options:
        depth += (token.word == "(") - (token.word == ")")
        if token.word == "SELECT" or (depth == 0 and token.word in {"TABLE", "VALUES"}):
            return True
    return False


@dataclass(slots=True)
class _Column:
    """A column as a statement writes it.

    Attributes:
        column: Its new name and type.
        in_key: Whether PRIMARY KEY stands behind it.
        after: The name it shall stand behind, "" to be the first, None where no place is given.
    """

    column: CatalogColumn
    in_key: bool
    after: str | None


@dataclass(slots=True)
class _Table:
    """A table while a statement is applied to it, action by action.

    `old` names the columns as they were, and stands still: actions of one statement speak of it all
    at once, so that two columns can swap their names. `placed` are columns that are added, or get
    another place, in the order of the statement, after everything else has its name.
    """

    columns: list[tuple[str, CatalogColumn]]
    key: list[str]
    placed: list[tuple[str | None, _Column]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    changed: dict[str, CatalogColumn] = field(default_factory=dict)
    new_key: list[str] | None = None
    loses_key: bool = False

    @classmethod
    def of(cls, table: CatalogTable) -> _Table:
        return cls([(one.name, one) for one in table.columns], list(table.primary_key))

    def old(self, name: str) -> str | None:
        """Return a column's name as the table has it; names are told apart without their case."""
        for known, _ in self.columns:
            if known == name:
                return known
        found = [known for known, _ in self.columns if known.lower() == name.lower()]
        if len(found) == 1:
            return found[0]
        if not name.isascii() or any(not known.isascii() for known, _ in self.columns):
            raise NotUnderstoodError  # MySQL also takes letters with and without accents as equal
        return None

    def must(self, name: str) -> str:
        known = self.old(name)
        if known is None:
            raise NotUnderstoodError
        return known

    def made(self) -> CatalogTable:
        """Return the table when all actions were taken in."""
        made: list[tuple[str | None, CatalogColumn]] = [
            (name, self.changed.get(name, column))
            for name, column in self.columns
            if name not in self.dropped
        ]
        for origin, one in self.placed:
            if origin is not None:
                made = [pair for pair in made if pair[0] != origin]
            if one.after is None:
                made.append((origin, one.column))
            elif not one.after:
                made.insert(0, (origin, one.column))
            else:
                made.insert(_index(made, one.after) + 1, (origin, one.column))
        names = [column.name.lower() for _, column in made]
        if not made or len(set(names)) != len(names):
            raise NotUnderstoodError
        return CatalogTable(tuple(column for _, column in made), self._key_of(made))

    def _key_of(self, made: list[tuple[str | None, CatalogColumn]]) -> tuple[str, ...]:
        if self.new_key is not None:
            return tuple(made[_index(made, name)][1].name for name in self.new_key)
        if self.loses_key:
            return ()
        now = {origin: column.name for origin, column in made if origin is not None}
        return tuple(now[name] for name in self.key if name in now)


def _index(made: list[tuple[str | None, CatalogColumn]], name: str) -> int:
    found = [at for at, (_, column) in enumerate(made) if column.name.lower() == name.lower()]
    if len(found) != 1:
        raise NotUnderstoodError
    return found[0]


def _alter(tables: Definitions, reader: TokenReader, touched: set[Name]) -> None:
    name = reader.table()
    touched.add(name)
    renamed: list[Name] = []
    reader.skip("WAIT") or reader.skip("NOWAIT")
    actions = list(items(reader.rest()))
    # Also what is not understood may hold a new name.
    for item in actions:
        new_name = _renamed_to(reader.within(item))
        if new_name is not None:
            renamed.append(new_name)
            touched.add(new_name)
    known = tables.get(name)
    if known is not None:
        table = _Table.of(known)
        for item in actions:
            _action(table, reader.within(item))
        tables[name] = table.made()
    else:
        tables[name] = None
    for new in renamed[-1:]:
        if new != name:
            _move(tables, name, new, touched)


def _renamed_to(item: TokenReader) -> Name | None:
    if not item.skip("RENAME") or item.word in {"COLUMN", "INDEX", "KEY"}:
        return None
    for word in ("TO", "AS", "="):
        if item.skip(word):
            break
    return item.table()


_VERSIONING = {("SYSTEM", "VERSIONING"), ("PERIOD", "FOR")}
"""MariaDB's words for columns that no statement names."""
_INDEXES = {"INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "FOREIGN", "CHECK"}
_OPTIONS = {
    "ALGORITHM", "ANALYZE", "AUTOEXTEND_SIZE", "AUTO_INCREMENT", "AVG_ROW_LENGTH", "CHARACTER",
    "CHARSET", "CHECK", "CHECKSUM", "COALESCE", "COLLATE", "COMMENT", "COMPRESSION", "CONNECTION",
    "DATA", "DEFAULT", "DELAY_KEY_WRITE", "DISABLE", "DISCARD", "ENABLE", "ENCRYPTION", "ENGINE",
    "ENGINE_ATTRIBUTE", "EXCHANGE", "FORCE", "IMPORT", "INDEX", "INSERT_METHOD", "KEY_BLOCK_SIZE",
    "LOCK", "MAX_ROWS", "MIN_ROWS", "OPTIMIZE", "PACK_KEYS", "PARTITION", "PASSWORD", "REBUILD",
    "REMOVE", "REORGANIZE", "REPAIR", "ROW_FORMAT", "SECONDARY_ENGINE", "SECONDARY_LOAD",
    "SECONDARY_UNLOAD", "STATS_AUTO_RECALC", "STATS_PERSISTENT", "STATS_SAMPLE_PAGES", "STORAGE",
    "TABLESPACE", "TRUNCATE", "UNION", "UPGRADE", "WITH", "WITHOUT",
}  # fmt: skip
"""First words of actions and options that change neither columns nor the key of a table."""


def _action(table: _Table, item: TokenReader) -> None:
    verb = item.take().word
    if verb == "ADD":
        _add_action(table, item)
    elif verb == "DROP":
        _drop(table, item)
    elif verb in {"CHANGE", "MODIFY"}:
        _change(table, item, renames=verb == "CHANGE")
    elif verb == "RENAME":
        if item.skip("COLUMN"):
            old = table.must(item.name())
            if not item.skip("TO"):
                raise NotUnderstoodError
            known = table.changed.get(old) or dict(table.columns)[old]
            table.changed[old] = replace(known, name=item.name())
    elif verb == "CONVERT":
        # Types of text may become wider ones, or binary ones: those of the log count.
        _loosen(table)
    elif verb == "ALTER":
        item.skip("COLUMN")
    elif verb not in _OPTIONS:
        raise NotUnderstoodError


def _loosen(table: _Table) -> None:
    for name, column in table.columns:
        known = table.changed.get(name, column)
        if known.type.split("(")[0] in TEXTS:
            known = replace(known, type=ANY_TEXT)
        if is_text(known.type):
            table.changed[name] = replace(known, charset="")


def _add_action(table: _Table, item: TokenReader) -> None:
    if item.word == "PARTITION":
        return
    if (item.word, item.ahead(1)) in _VERSIONING:
        raise NotUnderstoodError
    item.skip("COLUMN")
    if item.word == "(":
        for one in items(item.group()):
            _add(table, item.within(one))
    elif item.skip("IF", "NOT", "EXISTS"):
        name = item.name()
        if table.old(name) is None:
            _add_column(table, name, item)
    else:
        _add(table, item)


def _add(table: _Table, item: TokenReader) -> None:
    """Take in a column, a key or a constraint, as in CREATE TABLE or behind ADD."""
    if item.skip("CONSTRAINT") and item.word not in _INDEXES | {"PRIMARY"}:
        item.name()
    if item.word in _INDEXES:
        return
    if item.skip("PRIMARY"):
        while item.word != "(":
            item.take()
        table.new_key = [item.within(one).name() for one in items(item.group())]
        return
    _add_column(table, item.name(), item)


def _add_column(table: _Table, name: str, item: TokenReader) -> None:
    column = _column(name, item)
    if column.in_key:
        table.new_key = [name]
    table.placed.append((None, column))


def _drop(table: _Table, item: TokenReader) -> None:
    if item.skip("PRIMARY"):
        table.loses_key = True
    elif item.word in {"INDEX", "KEY", "CONSTRAINT"}:
        item.take()
        item.skip("IF", "EXISTS")
        if item.name().upper() == "PRIMARY":
            table.loses_key = True
    elif (item.word, item.ahead(1)) in _VERSIONING:
        raise NotUnderstoodError
    elif item.word not in {"FOREIGN", "CHECK", "PARTITION"}:
        item.skip("COLUMN")
        _, old = _old(table, item)
        if old is not None:
            table.dropped.add(old)


def _old(table: _Table, item: TokenReader) -> tuple[str, str | None]:
    """Take the name of a column that is there; return it as written, and as the table has it.

    The second is None when the column is not there and need not be.
    """
    if item.skip("IF", "EXISTS"):
        written = item.name()
        return written, table.old(written)
    written = item.name()
    return written, table.must(written)


def _change(table: _Table, item: TokenReader, *, renames: bool) -> None:
    item.skip("COLUMN")
    written, old = _old(table, item)
    if old is None:
        return
    # MODIFY gives a column the name as it is written there, in these letters.
    column = _column(item.name() if renames else written, item)
    if column.in_key:
        table.new_key = [column.column.name]
    table.changed[old] = column.column
    if column.after is not None:
        table.placed.append((old, column))


def _column(name: str, item: TokenReader) -> _Column:
    """Read what follows a column's name."""
    type_ = column_type(item)
    in_key = False
    after: str | None = None
    while item and item.word not in {"PARTITION", "REMOVE"}:
        if item.word == "(":
            item.group()
            continue
        word = item.take().word
        if word in {"UNSIGNED", "ZEROFILL"}:
            type_ = f"{type_.removesuffix(' unsigned')} unsigned"
        elif word in {"PRIMARY", "KEY"}:
            in_key = True
            item.skip("KEY")
        elif word == "UNIQUE":
            item.skip("KEY")
        elif word == "FIRST":
            after = ""
        elif word == "AFTER":
            after = item.name()
        elif word in _WITH_VALUE and item.word != "(":
            item.take()
    # In which character set a text is depends on the table, its database and the server.
    charset = "binary" if is_binary(type_) else ""
    return _Column(CatalogColumn(name, labels(type_), type_, charset), in_key, after)


_WITH_VALUE = {"COLLATE", "COLUMN_FORMAT", "COMMENT", "CONSTRAINT", "DEFAULT", "STORAGE"}
"""What a name, or a word that means something else elsewhere, follows."""
