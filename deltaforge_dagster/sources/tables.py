"""Which tables a pipeline captures: the patterns of `source.config.tables`.

====================  =====================================================================
`shop.orders`         that table (the first part is a MySQL database or a PostgreSQL schema)
`shop.*`, `shop.%`    every table of `shop`
`shop.order_%`        every table of `shop` whose name begins with `order_`
`*.orders`            `orders` in any database or schema
`orders`              PostgreSQL: `public.orders`; MySQL: `orders` in any database
no pattern at all     every user table
====================  =====================================================================

Names compare case-sensitively, `_` is an ordinary character, and a wildcard is allowed only at the
end of a part. System schemas are never captured, whatever the patterns say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.findings import Finding, listed

_WILDCARDS = ("*", "%")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """One part of a table pattern: an exact name, or a prefix."""

    text: str
    prefix: bool

    @classmethod
    def parse(cls, text: str, pattern: str) -> NamePattern:
        """Parse one part of a pattern.

        Args:
            text: The part.
            pattern: The whole pattern, for the error.

        Raises:
            SpecError: The part is empty, or has a wildcard that is not at its end.
        """
        prefix = text.endswith(_WILDCARDS)
        literal = text[:-1] if prefix else text
        if not text or any(wildcard in literal for wildcard in _WILDCARDS):
            raise SpecError(
                f"source.config.tables: {pattern!r} is not a table pattern; write schema.table, "
                "where a part may end in * or % (any rest) and has no other wildcard"
            )
        return cls(literal, prefix)

    def matches(self, name: str) -> bool:
        """Return whether `name` matches."""
        return name.startswith(self.text) if self.prefix else name == self.text


class TablePatterns:
    """The table patterns of one pipeline.

    Args:
        patterns: As in the pipeline file; if empty, every user table is captured.
        unqualified: The first part for patterns that have only a table: a schema, or `*` for any.
        system: Databases or schemas that are never captured; each may end in a wildcard.

    Raises:
        SpecError: A pattern is not of a form that the module's docstring lists.
    """

    def __init__(self, patterns: Iterable[str], *, unqualified: str, system: Iterable[str]) -> None:
        self._texts = tuple(patterns)
        self._system = tuple(NamePattern.parse(name, name) for name in system)
        self._patterns = tuple(_split(pattern, unqualified) for pattern in self._texts) or (
            _split("*.*", unqualified),
        )

    def __str__(self) -> str:
        """Return the first ten patterns as the pipeline file has them; `*` if there are none."""
        return listed(self._texts) or "*"

    def matches(self, schema: str, table: str) -> bool:
        """Return whether `schema.table` is captured; for MySQL, `schema` is the database."""
        return not any(part.matches(schema) for part in self._system) and any(
            first.matches(schema) and second.matches(table) for first, second in self._patterns
        )

    @property
    def parts(self) -> tuple[tuple[NamePattern, NamePattern], ...]:
        """(first part, second part) of every pattern, in the file's order."""
        return self._patterns

    @property
    def exact(self) -> tuple[tuple[str, str], ...]:
        """(schema, table) of every pattern without wildcards, in the file's order."""
        return tuple(
            (first.text, second.text)
            for first, second in self._patterns
            if not first.prefix and not second.prefix
        )

    def unmatched(self, tables: Collection[tuple[str, str]]) -> list[Finding]:
        """Return a finding about the patterns with wildcards that match no table, if there are any.

        Args:
            tables: (schema, name) of every captured table; if there is none, there is more to say
                than this.
        """
        texts = [
            text
            for text, (first, second) in zip(self._texts, self._patterns, strict=False)
            if (first.prefix or second.prefix)
            and not any(first.matches(schema) and second.matches(name) for schema, name in tables)
        ]
        if not texts or not tables:
            return []
        text = (
            f"no table matches {listed(texts)} of source.config.tables, "
            "which may be meant for later ones"
        )
        return [Finding("tables", "warning", text)]


def _split(pattern: str, unqualified: str) -> tuple[NamePattern, NamePattern]:
    first, dot, second = pattern.partition(".")
    if not dot:
        first, second = unqualified, pattern
    return NamePattern.parse(first, pattern), NamePattern.parse(second, pattern)
