"""What statements in the log (QUERY events) mean to a reader of row changes.

With row format, the server logs row changes as rows, and everything else as the statement that was
run. This module decides by a statement's words whether it controls a transaction, defines or
empties tables, can be ignored, or changes rows that are not in the log, and of which tables. An
unknown statement may change every table that it names. `table_changes` finds the tables that a
statement makes, redefines, drops or empties, without their definitions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from deltaforge_dagster.sources.mysql.events.binlog import QueryEvent, first_words
from deltaforge_dagster.sources.mysql.events.sql_text import (
    Name,
    NotUnderstoodError,
    TokenKind,
    TokenReader,
    fills,
    read_tokens,
)
from deltaforge_dagster.sources.mysql.schema.altered_table import actions
from deltaforge_dagster.sources.mysql.schema.definitions import renamed_tables, renamed_to


class StatementKind(Enum):
    """The kinds of statements."""

    PASSED = auto()
    """Can be ignored; it changes no row and no table: accounts, statistics, temporary tables."""
    ROLLBACK = auto()
    """Rolls back everything that the transaction has logged so far, or a part of it."""
    DEFINES = auto()
    """DDL: creates, alters, renames or drops tables, views, routines or databases."""
    EMPTIES = auto()
    """TRUNCATE TABLE."""
    XA_START = auto()
    XA_END = auto()
    XA_COMMIT = auto()
    XA_ROLLBACK = auto()
    CHANGES = auto()
    """Changes rows that are not in the log, as with `binlog_format = STATEMENT`."""
    UNKNOWN = auto()


WORTH_A_RUN = frozenset(StatementKind) - {
    StatementKind.PASSED,
    StatementKind.ROLLBACK,
    StatementKind.XA_START,
    StatementKind.XA_END,
}
"""Kinds of statements that lead to changes, or to an error that an operator should see."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a statement does.

    Attributes:
        kind: Its kind.
        words: Its first words in capitals, for messages.
        tables: For `CHANGES` and `UNKNOWN`, the tables that it may concern, as far as their names
            are in it; None if any table may be concerned.
    """

    kind: StatementKind
    words: str
    tables: frozenset[Name] | None = None


_PASSED = (
    "ANALYZE", "BEGIN", "COMMIT", "FLUSH", "GRANT", "INSTALL", "OPTIMIZE", "RELEASE", "REPAIR",
    "REVOKE", "SAVEPOINT", "SET", "UNINSTALL",
)  # fmt: skip
_DEFINES = {"ALTER", "CREATE", "DROP", "RENAME"}
_IGNORED_OBJECTS = {"INSTANCE", "ROLE", "SERVER", "TEMPORARY", "USER"}
"""Second words of DDL that can be ignored: accounts, servers, and temporary tables.

Only one session sees a temporary table.
"""
_CHANGES = (
    "CALL", "DELETE", "DO", "HANDLER", "IMPORT", "INSERT", "LOAD", "REPLACE", "SELECT", "TABLE",
    "UPDATE", "VALUES", "WITH",
)  # fmt: skip
_VERBS = {
    **dict.fromkeys(_PASSED, StatementKind.PASSED),
    **dict.fromkeys(_CHANGES, StatementKind.CHANGES),
    "": StatementKind.CHANGES,  # a query in parentheses, which calls a routine
    "TRUNCATE": StatementKind.EMPTIES,
    "ROLLBACK": StatementKind.ROLLBACK,
}
_TWO_WORDS = {
    "SET STATEMENT": StatementKind.UNKNOWN,  # settings that decide how the rest was read
    "XA BEGIN": StatementKind.XA_START,
    "XA START": StatementKind.XA_START,
    "XA END": StatementKind.XA_END,
    "XA COMMIT": StatementKind.XA_COMMIT,
    "XA ROLLBACK": StatementKind.XA_ROLLBACK,
}


def statement(query: QueryEvent) -> Statement:
    """Return what a statement does."""
    words = first_words(query.sql)
    kind = _kind(words, query)
    tables = None
    if kind is StatementKind.CHANGES:
        tables = _changed_tables(query)
    elif kind is StatementKind.UNKNOWN:
        # Texts may be names as well: it is not certain which quotes enclose names.
        tables = _named_tables(query, TokenKind.WORD, TokenKind.NAME, TokenKind.TEXT)
    return Statement(kind, words, tables)


def _kind(words: str, query: QueryEvent) -> StatementKind:
    verb, _, second = words.partition(" ")
    if not query.sql.strip():
        return StatementKind.PASSED
    if verb in _DEFINES:
        return _kind_of_ddl(second, query)
    if verb == "ANALYZE" and second not in _ANALYZE_TABLE_WORDS:
        return StatementKind.CHANGES  # MariaDB executes a statement in order to analyze it
    return _TWO_WORDS.get(words) or _VERBS.get(verb, StatementKind.UNKNOWN)


def _kind_of_ddl(second: str, query: QueryEvent) -> StatementKind:
    if second == "OR":
        second = first_words(query.sql, 4).removeprefix("CREATE OR REPLACE ")
    if second in _IGNORED_OBJECTS:
        return StatementKind.PASSED
    return StatementKind.DEFINES if _filled_table(query) is None else StatementKind.CHANGES


_ANALYZE_TABLE_WORDS = {"LOCAL", "NO_WRITE_TO_BINLOG", "TABLE", "TABLES"}
"""Second words of the ANALYZE that only makes statistics."""


def _filled_table(query: QueryEvent) -> Name | None:
    """Return the table that a CREATE TABLE fills with a query; None for any other statement.

    The query is `... SELECT`, `... TABLE` or `... VALUES`.

    With row format the server logs such a statement without the query, followed by the rows.
    """
    reader = TokenReader(query.sql, query.database, fold=False)
    reader.skip("CREATE")
    reader.skip("OR", "REPLACE")
    if not reader.skip("TABLE"):
        return None
    reader.skip("IF", "NOT", "EXISTS")
    try:
        name = reader.table()
    except NotUnderstoodError:
        return None
    return name if fills(reader.rest()) else None


def _changed_tables(query: QueryEvent) -> frozenset[Name] | None:
    """Return the tables whose rows a statement may change; None if a routine may change any."""
    created = _filled_table(query)
    if created is not None:
        return frozenset({created})
    reader = TokenReader(query.sql, query.database, fold=False)
    if reader.word in {"UPDATE", "DELETE"}:
        return _named_tables(query, TokenKind.WORD, TokenKind.NAME)
    if not (reader.skip("INSERT") or reader.skip("REPLACE")):
        return None
    reader.skip_any("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE")
    reader.skip("INTO")
    try:
        return frozenset({reader.table()})
    except NotUnderstoodError:
        return None


def _named_tables(query: QueryEvent, *kinds: TokenKind) -> frozenset[Name] | None:
    """Return what may be the name of a table in a statement; None if nothing follows the verb."""
    tokens = list(read_tokens(query.sql))[1:]
    names: set[Name] = set()
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        dots = [near is not None and near.word == "." for near in (before, after)]
        if token.word == "." and before is not None and after is not None:
            names.add((before.text, after.text))
        elif token.kind in kinds and not any(dots):
            names.add((query.database, token.text))
    return frozenset(names) or None


_XID = re.compile(r"X'([0-9A-Fa-f]*)',X'([0-9A-Fa-f]*)',(\d+)")


@dataclass(frozen=True, slots=True)
class Xid:
    """The xid of an XA transaction (manual: "XA Transaction SQL Statements")."""

    format_id: int
    gtrid: bytes
    bqual: bytes

    def __str__(self) -> str:
        return f"X'{self.gtrid.hex()}',X'{self.bqual.hex()}',{self.format_id}"


def xid_of(text: str) -> Xid | None:
    """Return the xid in an XA statement as the server logs it (`X'6162',X'',1`), or None."""
    match = _XID.search(text)
    if match is None or len(match[1]) % 2 or len(match[2]) % 2:
        return None
    return Xid(int(match[3]), bytes.fromhex(match[1]), bytes.fromhex(match[2]))


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
