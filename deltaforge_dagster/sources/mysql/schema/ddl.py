"""Find the tables that a statement in the log redefines or empties, by its words, without parsing it.

That suffices because a statement that alters, drops, renames or empties a table names the table
right after these words (manual: "Data Definition Statements"). Statements that create
a table are ignored: rows before them belong to an earlier table, which another statement has dropped.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from deltaforge_dagster.sources.mysql.schema.ddl_tokens import Token, TokenKind, read_tokens

_OPTIONAL = {"TEMPORARY", "IF", "NOT", "EXISTS", "ONLINE", "OFFLINE", "IGNORE"}
_ELSEWHERE = {"INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "FOREIGN", "CHECK", "PARTITION"}
"""Words after ADD, DROP or RENAME in an ALTER TABLE that affects neither columns nor primary key."""


class DdlEffect(Enum):
    """The effect of a statement on a table."""

    DEFINES = "defines"
    """Alters, renames or drops it: earlier rows may have had other columns or another key."""
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


def table_changes(statement: str, database: str) -> list[TableChange]:
    """Return the effects of a statement on tables; `database` is the database of names without one."""
    tokens = [token for token in read_tokens(statement) if token.kind is not TokenKind.TEXT]
    words = [token.word for token in tokens]
    at = _skip_optional(words, 1)
    verb, what = words[0] if words else "", words[at] if at < len(words) else ""
    if verb == "TRUNCATE":
        begin = at + 1 if what == "TABLE" else at
        return [
            TableChange(DdlEffect.EMPTIES, *name) for name in _names(tokens, begin, database, 1)
        ]
    if verb == "DROP" and what in {"DATABASE", "SCHEMA"}:
        named = tokens[_skip_optional(words, at + 1) :][:1]
        return [TableChange(DdlEffect.DEFINES, token.text, None) for token in named]
    found: list[tuple[str, str]] = []
    if verb == "DROP" and what == "INDEX" and "ON" in words:
        if tokens[at + 1].text.upper() == "PRIMARY":
            found = _names(tokens, words.index("ON") + 1, database, 1)
    elif verb == "ALTER" and what == "TABLE":
        if _alters_columns(words[at + 1 :]):
            found = _names(tokens, at + 1, database, 1) + _renamed_to(tokens, words, database)
    elif verb in {"DROP", "RENAME"} and what in {"TABLE", "TABLES"}:
        found = _names(tokens, at + 1, database, None)
    return [TableChange(DdlEffect.DEFINES, *name) for name in found]


def _alters_columns(words: list[str]) -> bool:
    return any(
        word in {"CHANGE", "MODIFY", "CONVERT"}
        or (word in {"ADD", "DROP", "RENAME"} and follower not in _ELSEWHERE)
        for word, follower in itertools.pairwise([*words, ""])
    )


def _skip_optional(words: list[str], at: int) -> int:
    while at < len(words) and words[at] in _OPTIONAL:
        at += 1
    return at


def _names(tokens: list[Token], at: int, database: str, most: int | None) -> list[tuple[str, str]]:
    """Return the table names from `at` on, separated by commas or TO; at most `most`, None for all."""
    found: list[tuple[str, str]] = []
    words = [token.word for token in tokens]
    at = _skip_optional(words, at)
    while at < len(tokens) and (most is None or len(found) < most):
        first = tokens[at].text
        if at + 2 < len(tokens) and words[at + 1] == ".":
            found.append((first, tokens[at + 2].text))
            at += 3
        else:
            found.append((database, first))
            at += 1
        if at >= len(tokens) or words[at] not in {",", "TO"}:
            break
        at += 1
    return found


def _renamed_to(tokens: list[Token], words: list[str], database: str) -> list[tuple[str, str]]:
    """Return the new name of `ALTER TABLE a ... RENAME [TO | AS | =] b`."""
    for at, word in enumerate(words[:-1]):
        if word == "RENAME" and words[at + 1] not in {"COLUMN", "INDEX", "KEY"}:
            begin = at + 2 if words[at + 1] in {"TO", "AS", "="} else at + 1
            return _names(tokens, begin, database, 1)
    return []
