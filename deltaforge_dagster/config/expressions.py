"""SQL expressions of a pipeline file, as far as they can be judged without Spark.

Spark's own analysis says whether an expression is right, at the beginning of a run. Here it is
only cut into tokens, which is enough to find what could never be one: quotes and brackets that
do not end, several statements, and everything that reads more than the one row, which Spark would
accept (subqueries, window functions). And it tells which columns an expression may read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator

from deltaforge_dagster.config.blocks import resolved

_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | --[^\n]* | /\*.*?\*/ )
  | (?P<text> [rR]'[^']*' | [rR]"[^"]*" | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" )
  | (?P<quoted> `(?:[^`]|``)*` )
  | (?P<word> [^\W\d]\w* )
  | (?P<number> \d[\w.]* )
  | (?P<mark> :: | /\* | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {")": "(", "]": "[", "}": "{"}
_QUERY = frozenset({"select", "values", "with", "using", "lateral"})
"""Words of queries that no expression over one row has."""
_OPERATORS = frozenset(
    {"and", "between", "collate", "ilike", "in", "is", "like", "not", "or", "regexp", "rlike"}
)
"""What may follow a column that is named `table`, which is no query then."""
_STATEMENTS = frozenset(
    {
        "alter", "analyze", "begin", "cache", "call", "clear", "create", "declare", "delete", "describe",
        "drop", "execute", "explain", "grant", "insert", "load", "merge", "refresh", "reset", "revoke",
        "set", "show", "truncate", "uncache", "update", "use",
    }
)  # fmt: skip


def words(expression: str) -> set[str]:
    """Return the names that an expression may mean columns by, in lower case."""
    return {
        text.strip("`").lower() for kind, text in _tokens(expression) if kind in {"word", "quoted"}
    }


def problem(expression: str) -> str | None:
    """Return why a text can be no expression over one row, None where only Spark can tell."""
    tokens = list(_tokens(expression))
    return _form_problem(tokens) or _meaning_problem(tokens)


def _form_problem(tokens: list[tuple[str, str]]) -> str | None:
    """Find quotes and brackets that do not match, and ends of statements."""
    if not tokens:
        return "is empty"
    open_brackets = []
    for kind, text in tokens:
        if kind != "mark":
            continue
        if text in {"'", '"', "`", "/*"}:
            return f"has {text} without its end"
        if text == ";":
            return "holds `;` (one expression is wanted)"
        if text in _CLOSING.values():
            open_brackets.append(text)
        elif text in _CLOSING and (not open_brackets or open_brackets.pop() != _CLOSING[text]):
            return f"has {text} without its beginning"
    return f"has {open_brackets[-1]} without its end" if open_brackets else None


def _meaning_problem(tokens: list[tuple[str, str]]) -> str | None:
    """Find what reads more than one row, or does more than compute."""
    before = ("", "")
    for place, (kind, text) in enumerate(tokens):
        word = text.lower() if kind == "word" and before[1] not in {":", "."} else ""
        following = tokens[place + 1] if place + 1 < len(tokens) else ("", "")
        if not place and word in _STATEMENTS and following[0] in {"word", "quoted"}:
            return f"is a statement ({text}), no expression"
        opens = (
            before[1] == "("
            and following[0] in {"word", "quoted"}
            and following[1].lower() not in _OPERATORS
        )
        if word in _QUERY or (word in {"from", "table"} and opens):
            return f"holds a subquery ({text}), but only the row itself can be read"
        if word == "over":
            return "holds a window function (over), but only the row itself can be read"
        before = (kind, text)
    return None


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(expression):
        if match.lastgroup != "space":
            yield str(match.lastgroup), match.group()


def _expression(text: str) -> str:
    found = problem(resolved(text))
    if found is not None:
        raise ValueError(found)
    return text


Expression = Annotated[str, AfterValidator(_expression)]
"""A SQL expression over one row."""
