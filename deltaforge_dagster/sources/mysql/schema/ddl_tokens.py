"""Split a statement into tokens, as MySQL does (manual: "Lexical Structure").

The statement is normalized (`QueryEvent.sql`): it has no comments, and quotes mean the same in
every SQL mode (`sql_text.plain`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

Name = tuple[str, str]
"""Database and table."""

NO_CHARACTER = "\ufffd"
"""Stands for bytes that are no character of the client's character set."""

_TOKEN = re.compile(
    r"""(?x)
    (?P<space> [\x00-\x20]+ )
    | ` (?P<name> (?:[^`]|``)* ) `
    | ' (?P<text> (?:[^'\\]|''|\\.)* ) '
    | (?P<word> [0-9A-Za-z$_\x80-\U0010ffff]+ )
    | (?P<sign> . )
    """,
    re.DOTALL,
)


class TokenKind(Enum):
    """How a token is written."""

    WORD = "word"
    """A keyword, a number, or an unquoted name."""
    NAME = "name"
    """A name in backticks, or behind a dot, where every word is a name."""
    TEXT = "text"
    """A string."""
    SIGN = "sign"


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a statement; its text has no quotes, and escapes in it are resolved."""

    text: str
    kind: TokenKind

    @property
    def word(self) -> str:
        """The word in capitals, or the sign; "" for anything quoted."""
        return self.text.upper() if self.kind in {TokenKind.WORD, TokenKind.SIGN} else ""


def read_tokens(sql: str) -> Iterator[Token]:
    """Yield the tokens of a statement, without spaces."""
    after_dot = False
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup
        if kind == "name":
            yield Token(match["name"].replace("``", "`"), TokenKind.NAME)
        elif kind == "text":
            text = re.sub(r"''|\\\\", lambda pair: pair[0][0], match["text"])
            yield Token(text, TokenKind.TEXT)
        elif kind == "word":
            yield Token(match["word"], TokenKind.NAME if after_dot else TokenKind.WORD)
        elif kind == "sign":
            yield Token(match["sign"], TokenKind.SIGN)
        after_dot = match[0] == "."


class NotUnderstoodError(Exception):
    """The meaning of a statement is not certain; callers in this package catch it."""


class TokenReader:
    """Reads the tokens of a statement one after another.

    Args:
        tokens: A plain statement, or tokens of one.
        database: The database of table names without one.
        fold: Whether the server stores table names in lower case.
    """

    def __init__(self, tokens: str | Sequence[Token], database: str, *, fold: bool) -> None:
        self._tokens = [
            token
            for token in (read_tokens(tokens) if isinstance(tokens, str) else tokens)
            if token.word != ";"
        ]
        self._at = 0
        self._database = database
        self._fold = fold

    def __bool__(self) -> bool:
        return self._at < len(self._tokens)

    @property
    def word(self) -> str:
        """The next token's word in capitals; "" at the end, and for anything quoted."""
        return self._tokens[self._at].word if self else ""

    def peek(self) -> Token | None:
        """Return the next token without moving; None at the end."""
        return self._tokens[self._at] if self else None

    def ahead(self, places: int) -> str:
        """Return the word `places` tokens after the next one, without moving."""
        at = self._at + places
        return self._tokens[at].word if at < len(self._tokens) else ""

    def skip(self, *words: str) -> bool:
        """Skip these words if they come next, in this order; return whether they do."""
        if any(self.ahead(offset) != word for offset, word in enumerate(words)):
            return False
        self._at += len(words)
        return True

    def skip_any(self, *words: str) -> None:
        """Skip any of these words, in any order and number."""
        while self.word and self.word in words:
            self._at += 1

    def skip_wait(self) -> None:
        """Skip MariaDB's `WAIT n` or `NOWAIT`, if it comes next."""
        if self.skip("WAIT"):
            self.next()
        else:
            self.skip("NOWAIT")

    def next(self) -> Token:
        """Return the next token; raise `NotUnderstoodError` at the end."""
        if not self:
            raise NotUnderstoodError
        self._at += 1
        return self._tokens[self._at - 1]

    def name(self) -> str:
        """Read a name."""
        token = self.next()
        if token.kind in {TokenKind.TEXT, TokenKind.SIGN} or NO_CHARACTER in token.text:
            raise NotUnderstoodError
        return token.text

    def table(self) -> Name:
        """Read a table name, with or without its database."""
        first = self.name()
        name = (self._database, first)
        if self.skip("."):
            name = (first, self.name())
        return (name[0].lower(), name[1].lower()) if self._fold else name

    def within(self, tokens: Sequence[Token]) -> TokenReader:
        """Return a reader for a part of the statement, with the same options."""
        return TokenReader(tokens, self._database, fold=self._fold)

    def again(self) -> TokenReader:
        """Return another reader for the tokens that are left."""
        return self.within(self._tokens[self._at :])

    def group(self) -> list[Token]:
        """Read a group in parentheses; return the tokens inside."""
        if not self.skip("("):
            raise NotUnderstoodError
        begin = self._at
        depth = 1
        while depth:
            word = self.next().word
            depth += (word == "(") - (word == ")")
        return self._tokens[begin : self._at - 1]

    def rest(self) -> list[Token]:
        """Read all remaining tokens."""
        left = self._tokens[self._at :]
        self._at = len(self._tokens)
        return left


def items(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Split tokens at the commas that are not in parentheses."""
    part: list[Token] = []
    depth = 0
    for token in tokens:
        depth += (token.word == "(") - (token.word == ")")
        if token.word == "," and depth == 0:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def fills(tokens: Sequence[Token]) -> bool:
    """Return whether the tokens after the name or the columns of a CREATE TABLE contain a query."""
    depth = 0
    for token in tokens:
        depth += (token.word == "(") - (token.word == ")")
        if token.word == "SELECT" or (depth == 0 and token.word in {"TABLE", "VALUES"}):
            return True
    return False
