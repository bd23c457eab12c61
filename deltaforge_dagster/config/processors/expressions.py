"""Checks of the SQL expressions in a pipeline file that are possible without Spark.

Spark's analyzer decides whether an expression is valid when a run starts. This module only splits
it into tokens. That is enough to find quotes and brackets that are not closed, several statements,
and whatever reads more than the current row, which Spark would accept (subqueries, window
functions). It also finds the columns that an expression may read.
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
"""Keywords of queries that cannot occur in an expression over one row."""
_OPERATORS = frozenset(
    {"and", "between", "collate", "ilike", "in", "is", "like", "not", "or", "regexp", "rlike"}
)
"""What may follow a column named `table` or `from`, in contrast to a query."""
_STATEMENTS = frozenset(
    {
        "alter", "analyze", "begin", "cache", "call", "clear", "create", "declare", "delete",
        "describe", "drop", "execute", "explain", "grant", "insert", "load", "merge", "refresh",
        "reset", "revoke", "set", "show", "truncate", "uncache", "update", "use",
    }
)  # fmt: skip


def words(expression: str) -> set[str]:
    """Return all words of an expression that may be names of columns, in lower case."""
    return {
        text.strip("`").lower() for kind, text in _tokens(expression) if kind in {"word", "quoted"}
    }


def problem(expression: str) -> str | None:
    """Return why text cannot be an expression over one row, or None if only Spark can decide."""
    tokens = list(_tokens(expression))
    return _form_problem(tokens) or _meaning_problem(tokens)


def _form_problem(tokens: list[tuple[str, str]]) -> str | None:
    """Find unbalanced quotes and brackets, and semicolons."""
    if not tokens:
        return "is empty"
    open_brackets = []
    for kind, text in tokens:
        if kind != "mark":
            continue
        if text in {"'", '"', "`", "/*"}:
            return f"has an unclosed {text}"
        if text == ";":
            return "contains `;` (only one expression is allowed)"
        if text in _CLOSING.values():
            open_brackets.append(text)
        elif text in _CLOSING and (not open_brackets or open_brackets.pop() != _CLOSING[text]):
            return f"has {text} without an opening bracket"
    return f"has an unclosed {open_brackets[-1]}" if open_brackets else None


def _meaning_problem(tokens: list[tuple[str, str]]) -> str | None:
    """Find statements, subqueries and window functions."""
    before = ("", "")
    for index, (kind, text) in enumerate(tokens):
        word = text.lower() if kind == "word" and before[1] not in {":", "."} else ""
        following = tokens[index + 1] if index + 1 < len(tokens) else ("", "")
        if not index and word in _STATEMENTS and following[0] in {"word", "quoted"}:
            return f"is a statement ({text}), not an expression"
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
    reason = problem(resolved(text))
    if reason is not None:
        raise ValueError(reason)
    return text


Expression = Annotated[str, AfterValidator(_expression)]
"""A SQL expression over one row."""
