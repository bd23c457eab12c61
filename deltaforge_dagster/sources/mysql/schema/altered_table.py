"""Apply the actions of one statement to one table: columns are added, dropped, renamed or moved.

The rules are those by which the server builds the new list of columns (manual: "ALTER TABLE
Statement"). `definitions` finds the tables that a statement affects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltaforge_dagster.sources.mysql.events.table_map import (
    CatalogColumn,
    CatalogTable,
    ColumnDefault,
)
from deltaforge_dagster.sources.mysql.schema.column_types import (
    ANY_TEXT,
    TEXTS,
    column_type,
    is_binary,
    is_text,
    labels,
)
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import (
    NotUnderstoodError,
    TokenKind,
    TokenReader,
    items,
)
from deltaforge_dagster.sources.mysql.schema.defaults import NULL, implicit_default
from deltaforge_dagster.sources.mysql.values.charsets import any_collation


@dataclass(slots=True)
class _Column:
    """A column definition in a statement.

    Attributes:
        column: The column's new name and type.
        in_key: Whether the definition contains PRIMARY KEY.
        after: The column after which it is placed; "" for the first place, None if no place is given.
    """

    column: CatalogColumn
    in_key: bool
    after: str | None


@dataclass(slots=True)
class AlteredTable:
    """A table while a statement is applied to it, action by action (`act`, `add`).

    All actions of a statement refer to the columns before the statement, so that two columns can swap their
    names. So the actions are collected here, and `made` applies them.

    Attributes:
        columns: Name and definition of each column before the statement.
        key: The primary key before the statement.
        placed: Columns that are added, or moved, in the statement's order; with the old name of a moved one.
        dropped: Old names of dropped columns.
        changed: New definitions of columns, by old name.
        new_key: The new primary key, if the statement defines one.
        loses_key: Whether the statement drops the primary key.
    """

    columns: list[tuple[str, CatalogColumn]]
    key: list[str]
    placed: list[tuple[str | None, _Column]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    changed: dict[str, CatalogColumn] = field(default_factory=dict)
    new_key: list[str] | None = None
    loses_key: bool = False

    @classmethod
    def of(cls, table: CatalogTable) -> AlteredTable:
        """Return a table to which no action has been applied yet."""
        return cls([(one.name, one) for one in table.columns], list(table.primary_key))

    def old(self, name: str) -> str | None:
        """Return a column's name as the table spells it, ignoring case; None if there is no such column.

        Raises:
            NotUnderstoodError: MySQL's collation may find a column where this comparison does not.
        """
        for known, _ in self.columns:
            if known == name:
                return known
        found = [known for known, _ in self.columns if known.lower() == name.lower()]
        if len(found) == 1:
            return found[0]
        if not name.isascii() or any(not known.isascii() for known, _ in self.columns):
            raise NotUnderstoodError  # MySQL also ignores accents
        return None

    def must(self, name: str) -> str:
        """Return the column's name as `old` does; raise `NotUnderstoodError` if there is no such column."""
        known = self.old(name)
        if known is None:
            raise NotUnderstoodError
        return known

    def made(self) -> CatalogTable:
        """Return the table after all actions.

        Raises:
            NotUnderstoodError: The result is not a valid table.
        """
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
        key = self._key_of(made)
        return CatalogTable(tuple(_as_key(column, key) for _, column in made), key)

    def _key_of(self, made: list[tuple[str | None, CatalogColumn]]) -> tuple[str, ...]:
        if self.new_key is not None:
            return tuple(made[_index(made, name)][1].name for name in self.new_key)
        if self.loses_key:
            return ()
        now = {origin: column.name for origin, column in made if origin is not None}
        return tuple(now[name] for name in self.key if name in now)


def _as_key(column: CatalogColumn, key: Sequence[str]) -> CatalogColumn:
    """Return a column; one of the key is NOT NULL, whatever its definition says, so that NULL is not its default."""
    if column.name not in key or column.default != NULL:
        return column
    return replace(column, default=None)


def _index(made: list[tuple[str | None, CatalogColumn]], name: str) -> int:
    found = [at for at, (_, column) in enumerate(made) if column.name.lower() == name.lower()]
    if len(found) != 1:
        raise NotUnderstoodError
    return found[0]


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
_OF_PARTITIONS = {
    "ADD", "ANALYZE", "CHECK", "COALESCE", "DISCARD", "DROP", "EXCHANGE", "IMPORT", "OPTIMIZE",
    "REBUILD", "REORGANIZE", "REPAIR", "TRUNCATE",
}  # fmt: skip
"""Words before PARTITION in an action about partitions of a table."""


def actions(reader: TokenReader, *, defaults: bool = False) -> list[TokenReader]:
    """Read what follows the name in an ALTER TABLE; return the actions that may concern columns, keys or the name.

    The others are indexes, constraints, partitions, the order of rows, options of the table, and, unless `defaults`, those that
    only change a column's default.
    """
    found: list[TokenReader] = []
    for tokens in items(reader.rest()):
        item = reader.within(tokens)
        if item.word == "ORDER" or (item.word in _OF_PARTITIONS and item.ahead(1) == "PARTITION"):
            break  # it is the last action, and its names are separated by commas, too
        if not _keeps_columns(item) or (defaults and _is_redefault(item)):
            found.append(item)
    return found


def _keeps_columns(item: TokenReader) -> bool:
    """Return whether an action certainly changes neither columns nor the key nor the name of a table."""
    verb, what = item.word, item.ahead(1)
    match verb:
        case "ADD":
            # CONSTRAINT may have a name, which is no word if it is quoted.
            return _is_index(item, 1) or (
                what == "CONSTRAINT" and (_is_index(item, 2) or _is_index(item, 3))
            )
        case "DROP":
            return what in {"FOREIGN", "CHECK"} or _drops_index(item.again())
        case "RENAME":
            return what in {"INDEX", "KEY"}
        case "ALTER":
            return True  # defaults of columns, visibility of indexes and columns
        case "CHANGE" | "MODIFY" | "CONVERT":
            return False
        case _:
            return verb in _OPTIONS or what == "=" or (verb, what) == ("WITH", "VALIDATION")


def _is_redefault(item: TokenReader) -> bool:
    return item.word == "ALTER" and item.ahead(1) not in {"INDEX", "KEY", "CHECK", "CONSTRAINT"}


def _is_index(item: TokenReader, place: int) -> bool:
    """Return whether an index or a constraint begins at a place, which is no primary key."""
    word = item.ahead(place)
    return word in _INDEXES or (word == "VECTOR" and item.ahead(place + 1) in {"INDEX", "KEY"})


def _drops_index(item: TokenReader) -> bool:
    item.next()
    if not item or item.next().word not in {"INDEX", "KEY", "CONSTRAINT"}:
        return False
    item.skip("IF", "EXISTS")
    return bool(item) and item.next().text.upper() != "PRIMARY"


def act(table: AlteredTable, item: TokenReader) -> None:
    """Apply one of the `actions` of ALTER TABLE; one that gives the table another name has no effect here.

    Raises:
        NotUnderstoodError: Its effect is not certain.
    """
    verb = item.next().word
    if verb == "ADD":
        _add_action(table, item)
    elif verb == "DROP":
        _drop(table, item)
    elif verb in {"CHANGE", "MODIFY"}:
        _change(table, item, renames=verb == "CHANGE")
    elif verb == "RENAME":
        if item.skip("COLUMN"):
            _rename(table, item)
    elif verb == "CONVERT" and item.skip("TO"):
        # Text types may become wider or binary; the types in the log are authoritative.
        _loosen(table)
    elif verb == "ALTER":
        item.skip("COLUMN")
        _redefault(table, item)
    else:
        raise NotUnderstoodError


def _redefault(table: AlteredTable, item: TokenReader) -> None:
    """Apply `ALTER [COLUMN] name SET DEFAULT ...` or `DROP DEFAULT`: its default is unknown from then on."""
    name = item.next().text.lower()
    for old, column in table.columns:
        known = table.changed.get(old, column)
        # Names that differ in accents are the same to MySQL; an index is altered by this verb, too.
        if known.default is not None and (old.lower() == name or not (old + name).isascii()):
            table.changed[old] = replace(known, default=None)


def _rename(table: AlteredTable, item: TokenReader) -> None:
    _, old = _old(table, item)
    if not item.skip("TO"):
        raise NotUnderstoodError
    name = item.name()
    if old is not None:
        known = table.changed.get(old) or dict(table.columns)[old]
        table.changed[old] = replace(known, name=name)


def _loosen(table: AlteredTable) -> None:
    for name, column in table.columns:
        known = table.changed.get(name, column)
        if known.type.split("(")[0] in TEXTS:
            known = replace(known, type=ANY_TEXT)
        if is_text(known.type):
            table.changed[name] = replace(known, charset="")


def _add_action(table: AlteredTable, item: TokenReader) -> None:
    if _is_period(item):
        return
    item.skip("COLUMN")
    if item.word == "(":
        for one in items(item.group()):
            add(table, item.within(one))
    elif item.skip("IF", "NOT", "EXISTS"):
        name = item.name()
        if table.old(name) is None:
            _add_column(table, name, item)
    else:
        add(table, item)


def add(table: AlteredTable, item: TokenReader) -> None:
    """Apply one item of CREATE TABLE's list, or after ADD: a column, a key, an index or a constraint.

    Raises:
        NotUnderstoodError: Its effect is not certain.
    """
    if item.skip("CONSTRAINT"):
        item.skip("IF", "NOT", "EXISTS")
        if item.word not in _INDEXES | {"PRIMARY"}:
            item.name()
    if item.word in _INDEXES or (item.word == "VECTOR" and item.ahead(1) in {"INDEX", "KEY"}):
        return
    if _is_period(item):
        return
    if item.skip("PRIMARY"):
        _add_key(table, item)
        return
    _add_column(table, item.name(), item)


def _is_period(item: TokenReader) -> bool:
    """Return whether a period of MariaDB comes next, whose columns are defined apart from it.

    Raises:
        NotUnderstoodError: It is about system versioning, which adds hidden columns.
    """
    if (item.word, item.ahead(1)) == ("SYSTEM", "VERSIONING"):
        raise NotUnderstoodError
    condition = {"IF": 3 if item.ahead(2) == "NOT" else 2}.get(item.ahead(1), 0)
    if item.word != "PERIOD" or item.ahead(1 + condition) != "FOR":
        return False
    if item.ahead(2 + condition) == "SYSTEM_TIME":
        raise NotUnderstoodError
    return True


def _add_key(table: AlteredTable, item: TokenReader) -> None:
    spared = False
    while item.word != "(":
        spared = item.skip("IF", "NOT", "EXISTS") or spared
        if item.word != "(":
            item.next()
    if not (spared and table.key):
        table.new_key = [item.within(one).name() for one in items(item.group())]


def _add_column(table: AlteredTable, name: str, item: TokenReader) -> None:
    column = _column(name, item)
    if column.in_key:
        table.new_key = [name]
    table.placed.append((None, column))


def _drop(table: AlteredTable, item: TokenReader) -> None:
    if item.skip("PRIMARY"):
        table.loses_key = True
    elif item.word in {"INDEX", "KEY", "CONSTRAINT"}:
        item.next()
        item.skip("IF", "EXISTS")
        if item.name().upper() == "PRIMARY":
            table.loses_key = True
    elif not _is_period(item):
        item.skip("COLUMN")
        _, old = _old(table, item)
        if old is not None:
            table.dropped.add(old)


def _old(table: AlteredTable, item: TokenReader) -> tuple[str, str | None]:
    """Read the name of an existing column; return it as written, and as the table spells it.

    The second is None if the column does not exist and `IF EXISTS` allows that.
    """
    if item.skip("IF", "EXISTS"):
        written = item.name()
        return written, table.old(written)
    written = item.name()
    return written, table.must(written)


def _change(table: AlteredTable, item: TokenReader, *, renames: bool) -> None:
    item.skip("COLUMN")
    written, old = _old(table, item)
    if old is None:
        return
    # MODIFY also changes the name's case to that in the statement.
    column = _column(item.name() if renames else written, item)
    if column.in_key:
        table.new_key = [column.column.name]
    table.changed[old] = column.column
    if column.after is not None:
        table.placed.append((old, column))


def defined_column(name: str, item: TokenReader) -> CatalogColumn:
    """Read the rest of a column definition, after the name; return the column.

    Raises:
        NotUnderstoodError: Its type is not known.
    """
    return _column(name, item).column


def _column(name: str, item: TokenReader) -> _Column:
    """Read the rest of a column definition, after the name."""
    type_ = column_type(item)
    in_key = False
    after: str | None = None
    charset = ""
    constants: dict[str, ColumnDefault | None] = {}
    while item and item.word not in {"PARTITION", "REMOVE"}:
        if item.word == "(":
            item.group()
            continue
        word = item.next().word
        constants[word] = _constant(item)
        charset = charset or _named_charset(word, item)
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
        elif word == "REFERENCES":
            item.table()
        elif word in _WITH_VALUE and item and item.word != "(":
            item.next()
    charset = "binary" if is_binary(type_) else charset
    default = _default(type_, constants)
    return _Column(CatalogColumn(name, labels(type_), type_, charset, default), in_key, after)


def _named_charset(word: str, item: TokenReader) -> str:
    """Return the character set that an attribute of a column names, and read its value.

    "" if it names none: then it is the default of table, database or server, which a statement does not say.
    """
    if word == "CHARSET" or (word == "CHARACTER" and item.skip("SET")):
        name = item.next().text.lower()
    elif word == "COLLATE":
        name = item.next().text.lower().partition("_")[0]  # a prefix of its name
    else:
        return ""
    # Texts of the set `binary` are another type.
    return name if name != "binary" and any_collation(name) is not None else ""


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
    """Return whether the server may have another value than a statement says: it rounds fractions, and completes years."""
    name = type_.partition("(")[0].partition(" ")[0]
    if text is None:
        return False
    if name == "year":
        return len(text) != len("2026")
    return "." in text and name in {"datetime", "timestamp", "time", "float", "double", "real"}


def _constant(item: TokenReader) -> ColumnDefault | None:
    """Return the constant that comes next, without reading it; None if it is something else, or its meaning is not certain."""
    if item.word == "NULL":
        return NULL
    if item.word in {"TRUE", "FALSE"}:
        return ColumnDefault(str(int(item.word == "TRUE")))
    if item.word.isdigit() or (item.word in {"+", "-"} and item.ahead(1).isdigit()):
        number = item.again()
        text = number.next().text.strip("+")
        text += number.next().text if not text.isdigit() else ""
        if number.skip("."):
            text += f".{number.next().text}" if number else "."
        return ColumnDefault(text) if _NUMBER.fullmatch(text) else None
    token = item.peek()
    if token is not None and token.kind is TokenKind.TEXT:
        plain = token.text.isascii() and "\\" not in token.text
        return ColumnDefault(token.text) if plain else None
    return None


_NUMBER = re.compile(r"-?\d+(\.\d+)?")

_COMPUTED = {"AUTO_INCREMENT", "AS", "GENERATED", "SERIAL"}
"""Attributes of columns whose values the server computes."""

_WITH_VALUE = {"COLUMN_FORMAT", "COMMENT", "CONSTRAINT", "DEFAULT", "STORAGE"}
"""Attributes of a column that are followed by a value, which may look like another attribute."""
