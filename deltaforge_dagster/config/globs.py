"""Patterns of names: `*` and `%` stand for any text, everything else, `_` too, for itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable

_WILDCARDS = re.compile(r"[*%]+")


class Globs:
    """Patterns, one of which has to fit; case counts."""

    def __init__(self, patterns: Iterable[str]) -> None:
        parts = [
            ".*".join(re.escape(one) for one in _WILDCARDS.split(pattern)) for pattern in patterns
        ]
        whole = "|".join(f"(?:{one})" for one in parts)
        self._pattern = re.compile(whole, re.DOTALL) if parts else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def match(self, names: Collection[str]) -> bool:
        """Say whether a pattern fits one of several names of the same thing."""
        return self._pattern is not None and any(map(self._pattern.fullmatch, names))


def table_parts(pattern: str) -> tuple[str, str]:
    """Return the patterns of database and table in one of a table, which may name any database."""
    database, dot, table = pattern.partition(".")
    return (database, table) if dot else ("*", pattern)


def overlap(one: str, other: str) -> bool:
    """Say whether there is a name that both patterns fit."""

    @functools.cache
    def from_here(at: int, there: int) -> bool:
        if at == len(first) or there == len(second):
            return first[at:].strip("*") == second[there:].strip("*") == ""
        if first[at] == "*" and (from_here(at + 1, there) or from_here(at, there + 1)):
            return True
        if second[there] == "*" and (from_here(at, there + 1) or from_here(at + 1, there)):
            return True
        return first[at] == second[there] and from_here(at + 1, there + 1)

    first, second = (_WILDCARDS.sub("*", pattern) for pattern in (one, other))
    return from_here(0, 0)
