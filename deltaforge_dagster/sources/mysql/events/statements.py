"""What a statement in the log (a QUERY event) means for a reader of rows.

The server logs rows as rows, and everything else as the statement that was run. Here, and nowhere
else, its words decide: is it a part of a transaction, does it define or empty tables, is it of no
concern, or does it change rows that nobody listed. What is none of these is refused, too: a statement
that is not known may change rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from deltaforge_dagster.sources.mysql.events.binlog import QueryEvent, first_words


class StatementKind(Enum):
    """What a statement is."""

    PASSED = auto()
    """No row and no table changes: accounts, statistics, temporary tables."""
    ROLLBACK = auto()
    """Takes back what the transaction has logged so far."""
    DEFINES = auto()
    """DDL: tables, views, routines or databases are made, altered, renamed or dropped."""
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
"""Statements that lead to changes, or to an error that somebody should see."""


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
"""After a verb of `_DEFINES`: passwords, in part, and what only one session sees."""
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
    """Return what a statement is."""
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
    """Say whether a CREATE TABLE takes rows from a query: `... SELECT`, `... TABLE`, `... VALUES`.

    Logged for rows, the query is left out, and the rows follow.
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
    """The name of an XA transaction (manual: "XA Transaction SQL Statements")."""

    format_id: int
    gtrid: bytes
    bqual: bytes

    def __str__(self) -> str:
        return f"X'{self.gtrid.hex()}',X'{self.bqual.hex()}',{self.format_id}"


def xid_of(text: str) -> Xid | None:
    """Return the name in an XA statement, as the server writes it: `X'6162',X'',1`."""
    match = _XID.search(text)
    if match is None or len(match[1]) % 2 or len(match[2]) % 2:
        return None
    return Xid(int(match[3]), bytes.fromhex(match[1]), bytes.fromhex(match[2]))
