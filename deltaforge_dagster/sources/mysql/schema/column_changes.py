"""What ALTER TABLE does to the columns of a table: which it renames, adds and drops, and what older rows have in new ones.

The log has a table's columns, or their names are known otherwise, but nothing says which of them is which of the former
ones except the statement.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal

from deltaforge_dagster.sources.mysql.schema.column_types import column_type
from deltaforge_dagster.sources.mysql.schema.ddl_tokens import (
    Name,
    NotUnderstoodError,
    Token,
    TokenKind,
    TokenReader,
    items,
)
from deltaforge_dagster.tables import ColumnChanges

_NO_COLUMNS = {
    "CHECK", "CONSTRAINT", "FOREIGN", "FULLTEXT", "INDEX", "KEY", "PARTITION", "PERIOD", "PRIMARY",
    "SPATIAL", "SYSTEM", "UNIQUE",
}  # fmt: skip
"""Words after ADD or DROP that do not name a column."""

_INTEGERS = re.compile(r"(tiny|small|medium|big)?int(\(\d+\))?( unsigned)?$")
_TEXTS = re.compile(r"(var)?char(\(\d+\))?$|(tiny|medium|long)?text$")
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)( unsigned)?$")
_INTEGER = re.compile(r"[+-]?\d+$")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?$")


def column_changes(sql: str, database: str, *, fold: bool) -> tuple[Name, ColumnChanges] | None:
    """Return the table that a statement alters, and what it does to the columns; None if it alters no table.

    Args:
        sql: The statement.
        database: The database of names without one.
        fold: Whether the server stores table names in lower case.
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
    reader.skip("WAIT") or reader.skip("NOWAIT")
    found = _Changes()
    try:
        for item in items(reader.rest()):
            found.act(reader.within(item))
    except NotUnderstoodError:
        return name, ColumnChanges(certain=False)
    return name, found.changes


class _Changes:
    """Collects what the items of one ALTER TABLE do; all names are those before the statement, except new ones."""

    def __init__(self) -> None:
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
        fill = _fill(item)
        if fill is not None:
            self._fills[name] = fill


_VALUE_IN_ROWS = {"AS", "GENERATED", "AUTO_INCREMENT", "PRIMARY", "SERIAL", "ON"}
"""Words of a definition with which what a row has is its own."""


def _fill(item: TokenReader) -> str | None:
    """Return what older rows have in a column, by its definition after the name: JSON as in row images; None if not certain.

    Only what the server stores as it is written is certain; the rest, such as a number that is rounded or an expression, is
    in the rows.
    """
    try:
        type_, nullable, default = _definition(item)
    except NotUnderstoodError:
        return None
    if default is None:
        return "null" if nullable else _implicit(type_)
    return "null" if default.word == "NULL" else _literal(default, type_)


def _definition(item: TokenReader) -> tuple[str, bool, Token | None]:
    """Return type, whether it may be null, and the default, None without one; an expression is not understood."""
    if item.word == "SERIAL":
        raise NotUnderstoodError
    type_ = column_type(item)
    # Without a word about it, a TIMESTAMP may get the time, depending on explicit_defaults_for_timestamp.
    nullable, default = not type_.startswith("timestamp"), None
    while item:
        if item.word == "(":
            item.group()
            continue
        word = item.next().word
        if word in _VALUE_IN_ROWS:
            raise NotUnderstoodError
        if word in {"UNSIGNED", "ZEROFILL"}:
            type_ = f"{type_.removesuffix(' unsigned')} unsigned"
        elif word == "NOT":
            item.skip("NULL")
            nullable = False
        elif word == "NULL":
            nullable = True
        elif word == "DEFAULT":
            default = _value(item)
        elif word in {"AFTER", "COMMENT"}:
            item.next()
    return type_, nullable, default


def _value(item: TokenReader) -> Token:
    """Read a value after DEFAULT; a number is one token, with its sign and fraction."""
    token = item.next()
    if token.word in {"+", "-"}:
        token = Token(token.text + item.next().text, TokenKind.WORD)
    if token.kind is TokenKind.WORD and item.skip("."):
        token = Token(f"{token.text}.{item.next().text}", TokenKind.WORD)
    if item.word == "(" or token.word == "(":
        raise NotUnderstoodError
    return token


def _implicit(type_: str) -> str | None:
    """Return what rows get in a NOT NULL column without a default (manual: "Data Type Default Values")."""
    if _INTEGERS.match(type_):
        return "0"
    if _TEXTS.match(type_):
        return '""'
    if (decimal := _DECIMAL.match(type_)) is not None:
        return _decimal(Decimal(0), int(decimal[2]))
    return None


def _literal(token: Token, type_: str) -> str | None:
    text = token.text
    if _INTEGERS.match(type_):
        if token.word in {"TRUE", "FALSE"}:
            return str(int(token.word == "TRUE"))
        return str(int(text)) if _INTEGER.match(text) else None
    if (decimal := _DECIMAL.match(type_)) is not None:
        scale = int(decimal[2])
        fraction = text.partition(".")[2]
        fits = _NUMBER.match(text) is not None and len(fraction) <= scale
        return _decimal(Decimal(text), scale) if fits else None
    if _TEXTS.match(type_) and token.kind is TokenKind.TEXT:
        plain = text.isascii() and text.isprintable() and "\\" not in text
        stored = text.rstrip(" ") if type_.startswith("char") else text
        return json.dumps(stored) if plain else None
    return None


def _decimal(value: Decimal, scale: int) -> str:
    return json.dumps(f"{value or abs(value):.{scale}f}")
