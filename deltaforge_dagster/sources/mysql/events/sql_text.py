"""The text of a statement in the log, as its server and session have read it, and its tokens.

What a text means depends on the server and the session: its bytes are in the client's character
set, in some of which a backslash may be a byte of another character; `ANSI_QUOTES` and
`NO_BACKSLASH_ESCAPES` change the meaning of quotes; MySQL and MariaDB do not execute the same
comments. A QUERY event has the session's state, and its file names the server. `plain` applies them
once, so that the code that parses statements need not know any of this: it gets a text without
comments, whose strings are in single quotes. `read_tokens` splits it as MySQL does (manual:
"Lexical Structure"), and `TokenReader` reads the tokens.

Comments that a server executes begin as follows. A server that skips such a comment logs it with a
blank instead of `!`, so a comment that still has its `!` was executed::

    /*!  and 5 or 6 digits, a version     both; before 6 digits were allowed, the sixth was code
    /*!  and no version                   both
    /*M! with or without a version        MariaDB; a comment for MySQL

Other SQL modes (`HIGH_NOT_PRECEDENCE`, `PIPES_AS_CONCAT`) change what expressions mean, but neither
how a text is divided into tokens nor which columns a table has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS, Charset

_UTF_8 = 45  # the collation utf8mb4_general_ci
_ANSI_QUOTES, _NO_BACKSLASH_ESCAPES = 1 << 2, 1 << 20  # bits of sql_mode

_SHIFT_JIS = rb"[\x81-\x9f\xe0-\xfc][\x40-\x7e\x80-\xfc]"
_GBK = rb"[\x81-\xfe][\x40-\x7e\x80-\xfe]"
_CHARACTERS = {
    "sjis": _SHIFT_JIS,
    "cp932": _SHIFT_JIS,
    "big5": rb"[\xa1-\xf9][\x40-\x7e\xa1-\xfe]",
    "gbk": _GBK,
    "gb18030": rb"[\x81-\xfe][0-9][\x81-\xfe][0-9]|" + _GBK,
}
"""Patterns of the characters of several bytes, for each character set in which a backslash or a
backtick may be one of these bytes."""


@dataclass(frozen=True, slots=True)
class SqlSession:
    """The server and session state on which the meaning of a statement's text depends.

    Attributes:
        is_mariadb: Whether the server is MariaDB.
        collation: The collation of the client, whose character set the text is in; 0 if it is
            unknown.
        sql_mode: The bits of `@@sql_mode`.
    """

    is_mariadb: bool = False
    collation: int = 0
    sql_mode: int = 0


def decoded(content: bytes, session: SqlSession) -> str:
    """Return the text of a statement.

    U+FFFD stands for bytes that are no character, as they occur in binary literals.
    """
    charset = CHARSETS.get(session.collation) or CHARSETS[_UTF_8]
    try:
        return charset.decode(content)
    except ValueError:
        return _decoded_by_character(content, charset)


def _decoded_by_character(content: bytes, charset: Charset) -> str:
    if charset.codec in {"utf-8", "ascii"}:
        return content.decode(charset.codec, errors="replace")
    pattern = _CHARACTERS.get(charset.name, rb"[\x80-\xff]+")
    text = ""
    for part in re.finditer(rb"[\x00-\x7f]+|" + pattern + rb"|.", content, re.DOTALL):
        try:
            text += charset.decode(part[0])
        except ValueError:
            text += "\ufffd"
    return text


_SPACE = r"[\x00-\x20]+ | \#[^\n]* | --(?=[\x00-\x20\x7f]|\Z)[^\n]*"
_BACKTICKED = r"`(?:[^`]|``)*`"
_CODE_OF_MYSQL = r"/\*!(?:0\d{5}|\d{5})?"
_CODE_OF_MARIADB = r"/\*M?!(?:\d{5,6})?"
_COMMENT = r"/\*.*?\*/"
_SKIPPED_CODE = r"/\*M?\ \d{5,6}(?:(?!/\*|\*/).|/\*.*?\*/)*\*/"
"""A comment that the server logs instead of code that it skipped; it may contain comments."""


def plain(text: str, session: SqlSession) -> str:
    r"""Return an equivalent statement without comments, in the spelling that `read_tokens` reads.

    Names are unchanged or in backticks. Strings are in single quotes; the only escapes in them are
    `''` and `\\`.
    """
    escapes = not session.sql_mode & _NO_BACKSLASH_ESCAPES
    ansi = bool(session.sql_mode & _ANSI_QUOTES)
    sql = _plain(text, session, _COMMENT, escapes=escapes, ansi=ansi)
    if sql is None:  # a comment ended too early: skipped code may contain comments
        nested = f"{_SKIPPED_CODE}|{_COMMENT}"
        sql = _plain(text, session, nested, escapes=escapes, ansi=ansi)
    if sql is None:
        return text
    return _inner_statement(sql) if session.is_mariadb else sql


_SETTING = re.compile(
    r"\s*SET\s+STATEMENT\b"
    r" (?P<settings> (?:[^`'\w]|`(?:[^`]|``)*`|'(?:[^'\\]|''|\\.)*'|(?!FOR\b)\w+)* )"
    r"\bFOR\b\s*",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def _inner_statement(sql: str) -> str:
    """Return the statement after `FOR` in MariaDB's `SET STATEMENT ... FOR statement`.

    Any other statement is returned unchanged. So is one whose settings include a SQL mode or a
    character set, because it is not certain how the server has read it.
    """
    match = _SETTING.match(sql)
    if match is None or re.search(r"(?i)sql_mode|character_set|collation", match["settings"]):
        return sql
    return sql[match.end() :]


def _plain(
    text: str, session: SqlSession, comment: str, *, escapes: bool, ansi: bool
) -> str | None:
    """Return the plain text (`plain`); None if a comment ends that has not begun."""
    begins = _CODE_OF_MARIADB if session.is_mariadb else _CODE_OF_MYSQL
    single, double = _quoted("'", escapes=escapes), _quoted('"', escapes=escapes and not ansi)
    pattern = re.compile(
        f"(?xs) (?P<space> {_SPACE} ) | (?P<begin> {begins} ) | (?P<comment> {comment} )"
        rf" | (?P<end> \*/ ) | {_BACKTICKED} | (?P<single> {single} ) | (?P<double> {double} )"
    )
    depth = 0
    unbalanced = False

    def rewritten(match: re.Match[str]) -> str:
        nonlocal depth, unbalanced
        kind = match.lastgroup
        if kind == "begin":
            depth += 1
        elif kind == "end":
            depth -= 1
            unbalanced = unbalanced or depth < 0
        elif kind == "double" and ansi:
            name = match[0][1:-1].replace('""', '"')
            return "`" + name.replace("`", "``") + "`"
        elif kind in {"single", "double"}:
            return _string(match[0], escapes=escapes)
        return match[0] if kind is None else " "

    sql = pattern.sub(rewritten, text)
    return None if unbalanced else sql


def _quoted(quote: str, *, escapes: bool) -> str:
    """Return the pattern of a text in quotes."""
    if escapes:
        return rf"{quote}(?:[^{quote}\\]|{quote}{quote}|\\.)*{quote}"
    return f"{quote}(?:[^{quote}]|{quote}{quote})*{quote}"


_ESCAPES = {
    "0": "\0",
    "b": "\b",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "Z": "\x1a",
    "%": "\\%",
    "_": "\\_",
}


def _string(literal: str, *, escapes: bool) -> str:
    quote, value = literal[0], literal[1:-1]
    pattern = f"{quote}{quote}|\\\\(.)" if escapes else f"{quote}{quote}"

    def meant(match: re.Match[str]) -> str:
        escaped = match[1] if escapes else None
        return quote if escaped is None else _ESCAPES.get(escaped, escaped)

    value = re.sub(pattern, meant, value, flags=re.DOTALL)
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


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
