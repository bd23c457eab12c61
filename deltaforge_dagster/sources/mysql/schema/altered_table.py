"""Apply the actions of one statement to one table: columns are added, dropped, renamed or moved.

The rules are those by which the server builds the new list of columns (manual: "ALTER TABLE
Statement"). `definitions` finds the tables that a statement affects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltaforge_dagster.sources.mysql.events.sql_text import (
    NotUnderstoodError,
    TokenKind,
    TokenReader,
    items,
)
from deltaforge_dagster.sources.mysql.events.table_map import (
    CatalogColumn,
    CatalogTable,
    ColumnDefault,
)
from deltaforge_dagster.sources.mysql.schema.columns import (
    ANY_TEXT,
    NULL,
    TEXTS,
    column_type,
    implicit_default,
    is_binary,
    is_text,
    labels,
    text_charset,
)


@dataclass(slots=True)
class _Column:
    """A column definition in a statement.

    Attributes:
        column: The column's new name and type.
        in_key: Whether the definition contains PRIMARY KEY.
        after: The column after which it is placed; "" for the first place, None if no place is
            given.
    """

    column: CatalogColumn
    in_key: bool
    after: str | None


@dataclass(slots=True)
class AlteredTable:
    """A table while a statement is applied to it, action by action (`act`, `add`).

    All actions of a statement refer to the columns before the statement, so that two columns can
    swap their names. So the actions are collected here, and `made` applies them.

    Attributes:
        columns: Name and definition of each column before the statement.
        key: The primary key before the statement.
        charset: The character set of text columns whose definition names none; "" if it is not
            known.
        placed: Columns that are added, or moved, in the statement's order; with the old name of a
            moved one.
        dropped: Old names of dropped columns.
        changed: New definitions of columns, by old name.
        new_key: The new primary key, if the statement defines one.
        loses_key: Whether the statement drops the primary key.
        converted: Whether the statement converts the texts of all columns, also of those that it
            adds, to another character set.
    """

    columns: list[tuple[str, CatalogColumn]]
    key: list[str]
    charset: str = ""
    placed: list[tuple[str | None, _Column]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    changed: dict[str, CatalogColumn] = field(default_factory=dict)
    new_key: list[str] | None = None
    loses_key: bool = False
    converted: bool = False

    @classmethod
    def of(cls, table: CatalogTable) -> AlteredTable:
        """Return a table to which no action has been applied yet."""
        columns = [(column.name, column) for column in table.columns]
        return cls(columns, list(table.primary_key), table.charset)

    def old(self, name: str) -> str | None:
        """Return a column's name as the table spells it, ignoring case; None without such a column.

        Raises:
            NotUnderstoodError: MySQL's collation may find a column where this comparison does not.
        """
        for existing, _ in self.columns:
            if existing == name:
                return existing
        matches = [existing for existing, _ in self.columns if existing.lower() == name.lower()]
        if len(matches) == 1:
            return matches[0]
        if not name.isascii() or any(not existing.isascii() for existing, _ in self.columns):
            raise NotUnderstoodError  # MySQL also ignores accents
        return None

    def must(self, name: str) -> str:
        """Return the column's name as `old` does; raise `NotUnderstoodError` if there is none."""
        existing = self.old(name)
        if existing is None:
            raise NotUnderstoodError
        return existing

    def made(self) -> CatalogTable:
        """Return the table after all actions.

        Raises:
            NotUnderstoodError: The result is not a valid table.
        """
        pairs: list[tuple[str | None, CatalogColumn]] = [
            (name, self.changed.get(name, column))
            for name, column in self.columns
            if name not in self.dropped
        ]
        for origin, placed in self.placed:
            if origin is not None:
                pairs = [pair for pair in pairs if pair[0] != origin]
            if placed.after is None:
                pairs.append((origin, placed.column))
            elif not placed.after:
                pairs.insert(0, (origin, placed.column))
            else:
                pairs.insert(_index(pairs, placed.after) + 1, (origin, placed.column))
        names = [column.name.lower() for _, column in pairs]
        if not pairs or len(set(names)) != len(names):
            raise NotUnderstoodError
        key = self._key_of(pairs)
        columns = tuple(_as_key(column, key) for _, column in pairs)
        if self.converted:
            return CatalogTable(tuple(_converted(column) for column in columns), key)
        return CatalogTable(columns, key, self.charset)

    def _key_of(self, pairs: list[tuple[str | None, CatalogColumn]]) -> tuple[str, ...]:
        if self.new_key is not None:
            return tuple(pairs[_index(pairs, name)][1].name for name in self.new_key)
        if self.loses_key:
            return ()
        new_names = {origin: column.name for origin, column in pairs if origin is not None}
        return tuple(new_names[name] for name in self.key if name in new_names)


def _as_key(column: CatalogColumn, key: Sequence[str]) -> CatalogColumn:
    """Return a column; if it belongs to the key, without the default NULL.

    Key columns are NOT NULL, whatever their definition says.
    """
    if column.name not in key or column.default != NULL:
        return column
    return replace(column, default=None)


def _index(pairs: list[tuple[str | None, CatalogColumn]], name: str) -> int:
    indexes = [
        index for index, (_, column) in enumerate(pairs) if column.name.lower() == name.lower()
    ]
    if len(indexes) != 1:
        raise NotUnderstoodError
    return indexes[0]


_INDEXES = {"INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "FOREIGN", "CHECK"}
_OPTIONS = {
    "ALGORITHM", "AUTOEXTEND_SIZE", "AUTO_INCREMENT", "AVG_ROW_LENGTH", "CHARACTER", "CHARSET",
    "CHECKSUM", "COLLATE", "COMMENT", "COMPRESSION", "CONNECTION", "DATA", "DEFAULT",
    "DELAY_KEY_WRITE", "DISABLE", "DISCARD", "ENABLE", "ENCRYPTED", "ENCRYPTION",
    "ENCRYPTION_KEY_ID", "ENGINE", "ENGINE_ATTRIBUTE", "FORCE", "IETF_QUOTES", "IMPORT", "INDEX",
    "INSERT_METHOD", "KEY_BLOCK_SIZE", "LOCK", "MAX_ROWS", "MIN_ROWS", "PACK_KEYS",
    "PAGE_CHECKSUM", "PAGE_COMPRESSED", "PAGE_COMPRESSION_LEVEL", "PARTITION", "PASSWORD",
    "REMOVE", "ROW_FORMAT", "SECONDARY_ENGINE", "SECONDARY_ENGINE_ATTRIBUTE", "SECONDARY_LOAD",
    "SECONDARY_UNLOAD", "SEQUENCE", "STATS_AUTO_RECALC", "STATS_PERSISTENT",
    "STATS_SAMPLE_PAGES", "STORAGE", "TABLESPACE", "TABLE_CHECKSUM", "TRANSACTIONAL", "TYPE",
    "UNION", "UPGRADE", "WITHOUT",
}  # fmt: skip
"""First words of actions and options that change neither columns nor the key of a table."""
_PARTITION_ACTIONS = {
    "ADD", "ANALYZE", "CHECK", "COALESCE", "DISCARD", "DROP", "EXCHANGE", "IMPORT", "OPTIMIZE",
    "REBUILD", "REORGANIZE", "REPAIR", "TRUNCATE",
}  # fmt: skip
"""Words before PARTITION in an action about partitions of a table."""


def actions(reader: TokenReader, *, defaults: bool = False) -> list[TokenReader]:
    """Return the actions of an ALTER TABLE that may concern columns, keys or the table's name.

    Reads everything that follows the table's name. The other actions are indexes, constraints,
    partitions, the order of rows, options of the table, and, unless `defaults`, those that only
    change a column's default.
    """
    relevant: list[TokenReader] = []
    for tokens in items(reader.rest()):
        action = reader.within(tokens)
        if action.word == "ORDER" or (
            action.word in _PARTITION_ACTIONS and action.ahead(1) == "PARTITION"
        ):
            break  # it comes last, and the names in it are separated by commas, too
        if not _keeps_columns(action) or (defaults and _is_default_change(action)):
            relevant.append(action)
    return relevant


def _keeps_columns(action: TokenReader) -> bool:
    """Return whether an action certainly changes neither columns nor the key nor a table's name."""
    verb, noun = action.word, action.ahead(1)
    match verb:
        case "ADD":
            # CONSTRAINT may have a name, which is no word if it is quoted.
            return _is_index(action, 1) or (
                noun == "CONSTRAINT" and (_is_index(action, 2) or _is_index(action, 3))
            )
        case "DROP":
            return noun in {"FOREIGN", "CHECK"} or _drops_index(action.again())
        case "RENAME":
            return noun in {"INDEX", "KEY"}
        case "ALTER":
            return True  # defaults of columns, visibility of indexes and columns
        case "CHANGE" | "MODIFY" | "CONVERT":
            return False
        case _:
            return verb in _OPTIONS or noun == "=" or (verb, noun) == ("WITH", "VALIDATION")


def _is_default_change(action: TokenReader) -> bool:
    return action.word == "ALTER" and action.ahead(1) not in {"INDEX", "KEY", "CHECK", "CONSTRAINT"}


def _is_index(action: TokenReader, offset: int) -> bool:
    """Return whether an index or a constraint, but no primary key, begins `offset` tokens ahead."""
    word = action.ahead(offset)
    return word in _INDEXES or (word == "VECTOR" and action.ahead(offset + 1) in {"INDEX", "KEY"})


def _drops_index(action: TokenReader) -> bool:
    action.next()
    if not action or action.next().word not in {"INDEX", "KEY", "CONSTRAINT"}:
        return False
    action.skip("IF", "EXISTS")
    return bool(action) and action.next().text.upper() != "PRIMARY"


def act(table: AlteredTable, action: TokenReader) -> None:
    """Apply one of the `actions` of ALTER TABLE; a new name of the table itself is ignored here.

    Raises:
        NotUnderstoodError: Its effect is not certain.
    """
    verb = action.next().word
    if verb == "ADD":
        _add_action(table, action)
    elif verb == "DROP":
        _drop(table, action)
    elif verb in {"CHANGE", "MODIFY"}:
        _change(table, action, renames=verb == "CHANGE")
    elif verb == "RENAME":
        if action.skip("COLUMN"):
            _rename(table, action)
    elif verb == "CONVERT" and action.skip("TO"):
        table.converted = True
    elif verb == "ALTER":
        action.skip("COLUMN")
        _change_default(table, action)
    else:
        raise NotUnderstoodError


def _change_default(table: AlteredTable, action: TokenReader) -> None:
    """Apply `ALTER [COLUMN] name SET DEFAULT` or `DROP DEFAULT`; the default becomes unknown."""
    name = action.next().text.lower()
    for old, column in table.columns:
        current = table.changed.get(old, column)
        # Names that differ in accents are the same to MySQL; an index is altered by this verb, too.
        if current.default is not None and (old.lower() == name or not (old + name).isascii()):
            table.changed[old] = replace(current, default=None)


def _rename(table: AlteredTable, action: TokenReader) -> None:
    _, old = _existing_column(table, action)
    if not action.skip("TO"):
        raise NotUnderstoodError
    name = action.name()
    if old is not None:
        current = table.changed.get(old) or dict(table.columns)[old]
        table.changed[old] = replace(current, name=name)


def _converted(column: CatalogColumn) -> CatalogColumn:
    """Return a column after `CONVERT TO CHARACTER SET`, with its character set unknown.

    Text types may become wider or binary; the types in the log are authoritative.
    """
    if column.type.split("(")[0] in TEXTS:
        column = replace(column, type=ANY_TEXT)
    return replace(column, charset="") if is_text(column.type) else column


def _add_action(table: AlteredTable, action: TokenReader) -> None:
    if _is_period(action):
        return
    action.skip("COLUMN")
    if action.word == "(":
        for tokens in items(action.group()):
            add(table, action.within(tokens))
    elif action.skip("IF", "NOT", "EXISTS"):
        name = action.name()
        if table.old(name) is None:
            _add_column(table, name, action)
    else:
        add(table, action)


def add(table: AlteredTable, definition: TokenReader) -> None:
    """Apply an item of CREATE TABLE's list, or of ADD: a column, a key, an index or a constraint.

    Raises:
        NotUnderstoodError: Its effect is not certain.
    """
    if definition.skip("CONSTRAINT"):
        definition.skip("IF", "NOT", "EXISTS")
        if definition.word not in _INDEXES | {"PRIMARY"}:
            definition.name()
    if definition.word in _INDEXES or (
        definition.word == "VECTOR" and definition.ahead(1) in {"INDEX", "KEY"}
    ):
        return
    if _is_period(definition):
        return
    if definition.skip("PRIMARY"):
        _add_key(table, definition)
        return
    _add_column(table, definition.name(), definition)


def _is_period(reader: TokenReader) -> bool:
    """Return whether a PERIOD clause of MariaDB comes next; it defines no columns itself.

    Raises:
        NotUnderstoodError: The clause is about system versioning, which adds hidden columns.
    """
    if (reader.word, reader.ahead(1)) == ("SYSTEM", "VERSIONING"):
        raise NotUnderstoodError
    condition = {"IF": 3 if reader.ahead(2) == "NOT" else 2}.get(reader.ahead(1), 0)
    if reader.word != "PERIOD" or reader.ahead(1 + condition) != "FOR":
        return False
    if reader.ahead(2 + condition) == "SYSTEM_TIME":
        raise NotUnderstoodError
    return True


def _add_key(table: AlteredTable, definition: TokenReader) -> None:
    conditional = False
    while definition.word != "(":
        conditional = definition.skip("IF", "NOT", "EXISTS") or conditional
        if definition.word != "(":
            definition.next()
    if not (conditional and table.key):
        table.new_key = [definition.within(tokens).name() for tokens in items(definition.group())]


def _add_column(table: AlteredTable, name: str, definition: TokenReader) -> None:
    column = _column(name, definition, table.charset)
    if column.in_key:
        table.new_key = [name]
    table.placed.append((None, column))


def _drop(table: AlteredTable, action: TokenReader) -> None:
    if action.skip("PRIMARY"):
        table.loses_key = True
    elif action.word in {"INDEX", "KEY", "CONSTRAINT"}:
        action.next()
        action.skip("IF", "EXISTS")
        if action.name().upper() == "PRIMARY":
            table.loses_key = True
    elif not _is_period(action):
        action.skip("COLUMN")
        _, old = _existing_column(table, action)
        if old is not None:
            table.dropped.add(old)


def _existing_column(table: AlteredTable, action: TokenReader) -> tuple[str, str | None]:
    """Read the name of an existing column; return it as written, and as the table spells it.

    The second is None if the column does not exist and `IF EXISTS` allows that.
    """
    if action.skip("IF", "EXISTS"):
        written = action.name()
        return written, table.old(written)
    written = action.name()
    return written, table.must(written)


def _change(table: AlteredTable, action: TokenReader, *, renames: bool) -> None:
    action.skip("COLUMN")
    written, old = _existing_column(table, action)
    if old is None:
        return
    # MODIFY also changes the name's case to that in the statement.
    column = _column(action.name() if renames else written, action, table.charset)
    if column.in_key:
        table.new_key = [column.column.name]
    table.changed[old] = column.column
    if column.after is not None:
        table.placed.append((old, column))


def defined_column(name: str, definition: TokenReader) -> CatalogColumn:
    """Read the rest of a column definition, after the name; return the column.

    Raises:
        NotUnderstoodError: Its type is not known.
    """
    return _column(name, definition).column


def _column(name: str, definition: TokenReader, table_charset: str = "") -> _Column:
    """Read the rest of a column definition, after the name.

    Args:
        name: The column's name.
        definition: What follows it.
        table_charset: The character set of texts that name none; "" if it is not known.
    """
    is_national = definition.word in _NATIONAL
    type_ = column_type(definition)
    in_key = False
    after: str | None = None
    charset = ""
    constants: dict[str, ColumnDefault | None] = {}
    while definition and definition.word not in {"PARTITION", "REMOVE"}:
        if definition.word == "(":
            definition.group()
            continue
        word = definition.next().word
        constants[word] = _constant(definition)
        charset = charset or _named_charset(word, definition)
        if word in {"UNSIGNED", "ZEROFILL"}:
            type_ = f"{type_.removesuffix(' unsigned')} unsigned"
        elif word in {"PRIMARY", "KEY"}:
            in_key = True
            definition.skip("KEY")
        elif word == "UNIQUE":
            definition.skip("KEY")
        elif word == "FIRST":
            after = ""
        elif word == "AFTER":
            after = definition.name()
        elif word == "REFERENCES":
            definition.table()
        elif word in _WITH_VALUE and definition and definition.word != "(":
            definition.next()
    has_own = is_national or not _CHARSETS.isdisjoint(constants)
    charset = _charset(type_, charset, "" if has_own else table_charset)
    default = _default(type_, constants)
    return _Column(CatalogColumn(name, labels(type_), type_, charset, default), in_key, after)


def _charset(type_: str, named: str, table_charset: str) -> str:
    """Return the character set of a column; "" if it has none, or is not known."""
    if is_binary(type_):
        return "binary"
    return named or (table_charset if is_text(type_) and type_ != ANY_TEXT else "")


def _named_charset(word: str, definition: TokenReader) -> str:
    """Return the character set that an attribute of a column, or a table's option, names.

    Reads its value, too. "" if it names none: then it is the default of table, database or server.
    """
    if word == "CHARSET" or (word == "CHARACTER" and definition.skip("SET")):
        definition.skip("=")
        name = definition.next().text.lower()
    elif word == "COLLATE":
        definition.skip("=")
        name = definition.next().text.lower().partition("_")[0]  # a prefix of its name
    else:
        return ""
    return text_charset(name)


def charset_of_options(options: TokenReader) -> str:
    """Return the character set that a table's options name as that of its columns; "" if none."""
    charset = ""
    while not charset and options and options.word != "PARTITION":
        charset = _named_charset(options.next().word, options)
    return charset


def names_charset(reader: TokenReader) -> bool:
    """Return whether options in an ALTER TABLE change the character set of later columns.

    Reads everything that follows the table's name.
    """
    return any(
        tokens[0].word in _OPTIONS and any(token.word in _CHARSETS for token in tokens)
        for tokens in items(reader.rest())
    )


def _default(type_: str, constants: Mapping[str, ColumnDefault | None]) -> ColumnDefault | None:
    """Return the default of a column; None if it is not certain.

    Args:
        type_: The column's type.
        constants: The words of its definition, each with the constant that follows it.
    """
    words = constants.keys()
    if _COMPUTED & words:
        return None
    if "DEFAULT" in words:
        constant = constants["DEFAULT"]
        return None if constant is None or _is_rounded(type_, constant.text) else constant
    if type_.startswith("timestamp") and ("NULL" not in words or "NOT" in words):
        return None  # it depends on a setting of the server
    return implicit_default(type_) if {"NOT", "KEY", "PRIMARY"} & words else NULL


def _is_rounded(type_: str, text: str | None) -> bool:
    """Return whether the server may store another default than the statement contains.

    The server rounds fractions of seconds and of numbers, and makes `26` the year 2026.
    """
    name = type_.partition("(")[0].partition(" ")[0]
    if text is None:
        return False
    if name == "year":
        return len(text) != len("2026")
    return "." in text and name in {"datetime", "timestamp", "time", "float", "double", "real"}


def _constant(definition: TokenReader) -> ColumnDefault | None:
    """Return the constant that comes next, without reading it.

    None if something else comes next, or the meaning of the constant is not certain.
    """
    if definition.word == "NULL":
        return NULL
    if definition.word in {"TRUE", "FALSE"}:
        return ColumnDefault(str(int(definition.word == "TRUE")))
    if definition.word.isdigit() or (
        definition.word in {"+", "-"} and definition.ahead(1).isdigit()
    ):
        number = definition.again()
        text = number.next().text.strip("+")
        text += number.next().text if not text.isdigit() else ""
        if number.skip("."):
            text += f".{number.next().text}" if number else "."
        return ColumnDefault(text) if _NUMBER.fullmatch(text) else None
    token = definition.peek()
    if token is not None and token.kind is TokenKind.TEXT:
        plain = token.text.isascii() and "\\" not in token.text
        return ColumnDefault(token.text) if plain else None
    return None


_NUMBER = re.compile(r"-?\d+(\.\d+)?")

_NATIONAL = {"NATIONAL", "NCHAR", "NVARCHAR"}
"""First words of text types that have a character set of their own."""

_CHARSETS = {"ASCII", "BYTE", "CHARACTER", "CHARSET", "COLLATE", "UNICODE"}
"""Attributes that give a column, or the columns of a table, another character set."""

_COMPUTED = {"AUTO_INCREMENT", "AS", "GENERATED", "SERIAL"}
"""Attributes of columns whose values the server computes."""

_WITH_VALUE = {"COLUMN_FORMAT", "COMMENT", "CONSTRAINT", "DEFAULT", "STORAGE"}
"""Attributes of a column that are followed by a value, which may look like another attribute."""
