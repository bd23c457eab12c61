"""Classify statements in the log (QUERY events) for a reader of rows.

With row format, the server logs row changes as rows, and everything else as the statement that was run. This
module decides by a statement's words whether it controls a transaction, defines or empties tables, can
be ignored, or changes rows that are not in the log. Unknown statements are refused, because they
may change rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from deltaforge_dagster.sources.mysql.events.binlog import QueryEvent, first_words


class StatementKind(Enum):
    """The kinds of statements."""

    PASSED = auto()
    """Can be ignored, because it changes no row and no table: accounts, statistics, temporary tables."""
    ROLLBACK = auto()
    """Takes back everything that the transaction has logged so far, or a part of it."""
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
"""Kinds of statements that lead to changes, or to an error that somebody should see."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement's kind, and its first words in capitals for messages."""

    kind: StatementKind
    words: str


_PASSED = (
    "", "ANALYZE", "BEGIN", "COMMIT", "FLUSH", "GRANT", "INSTALL", "OPTIMIZE", "RELEASE", "REPAIR", "REVOKE",
    "SAVEPOINT", "SET", "UNINSTALL",
)  # fmt: skip
_DEFINES = {"ALTER", "CREATE", "DROP", "RENAME"}
_ELSEWHERE = {"INSTANCE", "ROLE", "SERVER", "TEMPORARY", "USER"}
"""Second words of DDL that can be ignored: accounts, servers, and temporary tables, which only one session sees."""
_CHANGES = (
    "CALL", "DELETE", "DO", "HANDLER", "IMPORT", "INSERT", "LOAD", "REPLACE", "SELECT", "TABLE",
    "UPDATE", "VALUES", "WITH",
)  # fmt: skip
_VERBS = {
    **dict.fromkeys(_PASSED, StatementKind.PASSED),
    **dict.fromkeys(_CHANGES, StatementKind.CHANGES),
    "TRUNCATE": StatementKind.EMPTIES,
    "ROLLBACK": StatementKind.ROLLBACK,
}
_XA = {
    "XA BEGIN": StatementKind.XA_START,
    "XA START": StatementKind.XA_START,
    "XA END": StatementKind.XA_END,
    "XA COMMIT": StatementKind.XA_COMMIT,
    "XA ROLLBACK": StatementKind.XA_ROLLBACK,
}


def statement(query: QueryEvent) -> Statement:
    """Return the kind of a statement, and its first words."""
    words = first_words(query.statement)
    return Statement(_kind(words, query.statement), words)


def _kind(words: str, text: str) -> StatementKind:
    verb, _, what = words.partition(" ")
    if verb in _DEFINES:
        if what in _ELSEWHERE:
            return StatementKind.PASSED
        return (
            StatementKind.CHANGES
            if words == "CREATE TABLE" and _fills(text)
            else StatementKind.DEFINES
        )
    return _XA.get(words) or _VERBS.get(verb, StatementKind.UNKNOWN)


_QUOTED = re.compile(
    r"""`(?:[^`]|``)*` | "(?:[^"\\]|""|\\.)*" | '(?:[^'\\]|''|\\.)*'
    | /\*(?!!).*?\*/ | \#[^\n]* | --\s[^\n]*""",
    re.DOTALL | re.VERBOSE,
)
_PARENTHESES = re.compile(r"\([^()]*\)")


def _fills(text: str) -> bool:
    """Return whether a CREATE TABLE has a query that fills it: `... SELECT`, `... TABLE`, `... VALUES`.

    With row format the server logs such a statement without the query, followed by the rows.
    """
    bare = _QUOTED.sub(" ", text).upper()
    if re.search(r"\bSELECT\b|\bVALUES\s+ROW\b", bare):
        return True
    inner = 1
    while inner:
        bare, inner = _PARENTHESES.subn(" ", bare)
    return len(re.findall(r"\bTABLE\b", bare)) > 1


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
    """Return the xid in an XA statement, as the server logs it (`X'6162',X'',1`); None if there is none."""
    match = _XID.search(text)
    if match is None or len(match[1]) % 2 or len(match[2]) % 2:
        return None
    return Xid(int(match[3]), bytes.fromhex(match[1]), bytes.fromhex(match[2]))
