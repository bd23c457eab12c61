"""Which tables a statement of the log defines anew: a look at its words, not a parser.

Enough for what is asked of it: a statement that alters, drops, renames or empties a table names it
right behind the words that say so (manual: "Data Definition Statements"). A statement that creates
a table is not looked at: rows before it belong to a table that another one has dropped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_TOKEN = re.compile(
    r"""(?x)
    (?P<space> \s+ | /\*(?!!).*?\*/ | /\*!\d* | \*/ | \#[^\n]* | --(?=\s)[^\n]* )
    | ` (?P<back> (?:[^`]|``)* ) `
    | " (?P<double> (?:[^"]|"")* ) "
    | ' (?: [^'\\] | '' | \\. )* '
    | (?P<word> [\w$]+ )
    | (?P<sign> . )
    """,
    re.DOTALL,
)

_OPTIONAL = {"TEMPORARY", "IF", "NOT", "EXISTS", "ONLINE", "OFFLINE", "IGNORE"}
_ELSEWHERE = {"INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "FOREIGN", "CHECK", "PARTITION"}
"""What ALTER TABLE may add, drop or rename without touching a column or the primary key."""


class Change(Enum):
    """What a statement does to a table."""

    DEFINES = "defines"
    """Alters, renames or drops it: earlier rows may have had other columns or another key."""
    EMPTIES = "empties"
    """Deletes its rows, which the log does not list."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """A table that a statement changes; `table` is None for every table of a database."""

    change: Change
    db: str
    table: str | None

    def concerns(self, db: str, table: str) -> bool:
        """Say whether it is about `db.table`."""
        return self.db == db and self.table in (None, table)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    quoted: bool

    @property
    def word(self) -> str:
        """A key word in capitals; "" for a quoted name."""
        return "" if self.quoted else self.text.upper()


def table_changes(statement: str, database: str) -> list[TableChange]:
    """Return what a statement does to tables; `database` is that of names without one."""
    tokens = list(_tokens(statement))
    words = [token.word for token in tokens]
    at = _skip_optional(words, 1)
    verb, what = words[0] if words else "", words[at] if at < len(words) else ""
    if verb == "TRUNCATE":
        begin = at + 1 if what == "TABLE" else at
        return [TableChange(Change.EMPTIES, *name) for name in _names(tokens, begin, database, 1)]
    if verb == "DROP" and what in {"DATABASE", "SCHEMA"}:
        named = tokens[_skip_optional(words, at + 1) :][:1]
        return [TableChange(Change.DEFINES, token.text, None) for token in named]
    found: list[tuple[str, str]] = []
    if verb == "DROP" and what == "INDEX" and "ON" in words:
        if tokens[at + 1].text.upper() == "PRIMARY":
            found = _names(tokens, words.index("ON") + 1, database, 1)
    elif verb == "ALTER" and what == "TABLE":
        if _alters_columns(words[at + 1 :]):
            found = _names(tokens, at + 1, database, 1) + _renamed_to(tokens, words, database)
    elif verb in {"DROP", "RENAME"} and what in {"TABLE", "TABLES"}:
        found = _names(tokens, at + 1, database, None)
    return [TableChange(Change.DEFINES, *name) for name in found]


def _alters_columns(words: list[str]) -> bool:
    return any(
        word in {"CHANGE", "MODIFY", "CONVERT"}
        or (word in {"ADD", "DROP", "RENAME"} and follower not in _ELSEWHERE)
        for word, follower in itertools.pairwise([*words, ""])
    )


def _tokens(statement: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(statement):
        if match["back"] is not None:
            yield _Token(match["back"].replace("``", "`"), quoted=True)
        elif match["double"] is not None:
            yield _Token(match["double"].replace('""', '"'), quoted=True)
        elif match["word"] is not None or match["sign"] is not None:
            yield _Token(match["word"] or match["sign"], quoted=False)


def _skip_optional(words: list[str], at: int) -> int:
    while at < len(words) and words[at] in _OPTIONAL:
        at += 1
    return at


def _names(tokens: list[_Token], at: int, database: str, most: int | None) -> list[tuple[str, str]]:
    """Return the table names from `at` on, separated by commas or TO, `most` of them."""
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


def _renamed_to(tokens: list[_Token], words: list[str], database: str) -> list[tuple[str, str]]:
    """Return the new name of `ALTER TABLE a ... RENAME [TO | AS | =] b`."""
    for at, word in enumerate(words[:-1]):
        if word == "RENAME" and words[at + 1] not in {"COLUMN", "INDEX", "KEY"}:
            begin = at + 2 if words[at + 1] in {"TO", "AS", "="} else at + 1
            return _names(tokens, begin, database, 1)
    return []
