"""Patterns of names: `*` and `%` match any text; other characters, even `_`, match themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable

_WILDCARDS = re.compile(r"[*%]+")


class Globs:
    """A set of patterns; a name matches if any of them does. Case-sensitive."""

    def __init__(self, patterns: Iterable[str]) -> None:
        parts = [
            ".*".join(re.escape(literal) for literal in _WILDCARDS.split(pattern))
            for pattern in patterns
        ]
        whole = "|".join(f"(?:{part})" for part in parts)
        self._pattern = re.compile(whole, re.DOTALL) if parts else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def match(self, names: Collection[str]) -> bool:
        """Return whether any pattern matches any of `names`, which all denote the same object."""
        return self._pattern is not None and any(map(self._pattern.fullmatch, names))


def table_parts(pattern: str) -> tuple[str, str]:
    """Split a table pattern into patterns of database and table; without a dot, any database."""
    database, dot, table = pattern.partition(".")
    return (database, table) if dot else ("*", pattern)


def overlap(left: str, right: str) -> bool:
    """Return whether some name matches both patterns."""

    # Each `*` tries two ways, so without the cache the time would grow exponentially with their
    # number.
    @functools.cache
    def from_here(i: int, j: int) -> bool:
        if i == len(first) or j == len(second):
            return first[i:].strip("*") == second[j:].strip("*") == ""
        if first[i] == "*" and (from_here(i + 1, j) or from_here(i, j + 1)):
            return True
        if second[j] == "*" and (from_here(i, j + 1) or from_here(i + 1, j)):
            return True
        return first[i] == second[j] and from_here(i + 1, j + 1)

    first, second = (_WILDCARDS.sub("*", pattern) for pattern in (left, right))
    return from_here(0, 0)
