"""Column rules: which columns are excluded, masked, hashed or truncated (`engine.columns`).

=============  ==========================================================================
action         what rows contain
=============  ==========================================================================
`KEEP`         the value
`EXCLUDE`      no such column
`MASK`         a fixed text
`HASH`         SHA-256 of the salt and the value, as hexadecimal digits
`TRUNCATE`     the first characters of a text
=============  ==========================================================================

A pattern is a table pattern as in `sources.tables`, then a column: `shop.users.ssn`. Without a
schema it matches that table in any schema (`users.ssn`, `*.password`), to hide too much rather than
too little. Column names compare case-insensitively, as MySQL's do. If several actions match a
column, the one that hides most applies: the first of exclude, mask, hash, truncate. Key columns may
only be hashed, because changes are ordered by key, and different keys must remain different.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.findings import Finding, listed
from deltaforge_dagster.sources.tables import NamePattern, TablePatterns
from deltaforge_dagster.tables import Column, TableDetails, TableSchema

KEEP, EXCLUDE, MASK, HASH, TRUNCATE = range(5)
_NAMES = {EXCLUDE: "exclude", MASK: "mask", HASH: "hash", TRUNCATE: "truncate"}
_TEXT, _TEXT_OID = "text", 25


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for one column.

    Attributes:
        action: `KEEP`, `EXCLUDE`, `MASK`, `HASH` or `TRUNCATE`.
        text: For `MASK`: the text that replaces values.
        characters: For `TRUNCATE`: how many characters remain.
    """

    action: int
    text: str = ""
    characters: int = 0


_KEEP, _EXCLUDE = Rule(KEEP), Rule(EXCLUDE)


class _ColumnPattern:
    """A pattern that matches columns of tables."""

    def __init__(self, pattern: str) -> None:
        table, _, column = pattern.rpartition(".")
        self.text = pattern
        self._tables = TablePatterns((table,), unqualified="*", system=())
        self._column = NamePattern.parse(column.casefold(), pattern)

    def of_table(self, schema: str, table: str) -> bool:
        return self._tables.matches(schema, table)

    def matches(self, schema: str, table: str, column: str) -> bool:
        return self._column.matches(column.casefold()) and self.of_table(schema, table)


class ColumnRules:
    """The column rules of one pipeline.

    Attributes:
        salt: Bytes that are hashed in front of each value.
    """

    def __init__(self, options: ColumnOptions) -> None:
        self._include = [_ColumnPattern(pattern) for pattern in options.include]
        self._rules = [(_ColumnPattern(pattern), _EXCLUDE) for pattern in options.exclude]
        self._rules += [(_ColumnPattern(p), Rule(MASK, text=t)) for p, t in options.mask.items()]
        self.salt = b""
        if options.hash is not None:
            self.salt = options.hash.salt.get_secret_value().encode()
            self._rules += [(_ColumnPattern(p), Rule(HASH)) for p in options.hash.columns]
        # If several lengths match a column, the shortest applies: the first rule wins.
        for pattern, characters in sorted(options.truncate.items(), key=lambda pair: pair[1]):
            rule = Rule(TRUNCATE, characters=characters)
            self._rules.append((_ColumnPattern(pattern), rule))

    def __bool__(self) -> bool:
        """Return whether there are any rules."""
        return bool(self._include or self._rules)

    def touches(self, schema: str, table: str) -> bool:
        """Return whether any rule's table pattern matches; for MySQL, `schema` is the database."""
        patterns = [*self._include, *(pattern for pattern, _ in self._rules)]
        return any(pattern.of_table(schema, table) for pattern in patterns)

    def of(self, table: TableSchema) -> tuple[Rule, ...] | None:
        """Return the rule of each column, or None if no rule changes a value of the table.

        Raises:
            SourceMisconfigured: A rule would exclude, mask or truncate a key column.
        """
        schema = table.schema or table.db
        if not self.touches(schema, table.table):
            return None
        chosen = [included for included in self._include if included.of_table(schema, table.table)]
        rules = []
        for column in table.columns:
            qualified = (schema, table.table, column.name)
            rule = next(
                (rule for pattern, rule in self._rules if pattern.matches(*qualified)), _KEEP
            )
            in_key = column.name in table.primary_key
            if (
                chosen
                and not in_key
                and not any(included.matches(*qualified) for included in chosen)
            ):
                rule = _EXCLUDE
            if in_key and rule.action not in {KEEP, HASH}:
                raise SourceMisconfigured(
                    f"engine.columns.{_NAMES[rule.action]}: column {column.name} of table"
                    f" {table.full_name} is part of the key, by which order is kept and rows are"
                    " told apart; hash it instead, or leave it as it is"
                )
            rules.append(rule)
        return tuple(rules) if any(rule.action != KEEP for rule in rules) else None

    def hides(self, table: TableSchema, columns: Collection[str]) -> bool:
        """Return whether a rule changes values of these columns, which must appear nowhere else.

        Raises:
            SourceMisconfigured: As `of` does.
        """
        ruled = zip(table.columns, self.of(table) or (), strict=False)
        return any(column.name in columns and rule.action != KEEP for column, rule in ruled)

    def visible(self, table: TableSchema) -> TableSchema:
        """Return the table as captured rows have it.

        Excluded columns are missing; hashed and masked ones are text.

        Raises:
            SourceMisconfigured: As `of` does.
        """
        rules = self.of(table)
        return table if rules is None else visible(table, rules)

    def details(self, table: TableSchema, details: TableDetails) -> TableDetails:
        """Return the details without the defaults of columns that have a rule.

        Raises:
            SourceMisconfigured: As `of` does.
        """
        columns = {
            name: replace(column, default=None) if self.hides(table, [name]) else column
            for name, column in details.columns.items()
        }
        return replace(details, columns=columns)

    def findings(
        self, tables: Iterable[str], schema: Callable[[str], TableSchema]
    ) -> list[Finding]:
        """Check the rules against the captured tables, and report patterns that match no column.

        Args:
            tables: Full names of the captured tables.
            schema: Returns a table's current schema by its full name.

        Raises:
            DeltaforgeError: From `schema`.
        """
        findings: list[Finding] = []
        hidden = 0
        unused = {
            pattern.text: pattern
            for pattern in (*self._include, *(pattern for pattern, _ in self._rules))
        }
        for name in tables:
            if not self.touches(*name.split(".", 1)):
                continue
            table = schema(name)
            qualified = (table.schema or table.db, table.table)
            for text, pattern in list(unused.items()):
                if any(pattern.matches(*qualified, column.name) for column in table.columns):
                    del unused[text]
            try:
                rules = self.of(table) or ()
            except SourceMisconfigured as error:
                findings.append(Finding("columns", "error", str(error)))
            else:
                hidden += sum(rule.action != KEEP for rule in rules)
        if unused:
            text = f"no captured table has a column for {listed(list(unused))} of engine.columns"
            findings.append(Finding("columns", "warning", text))
        if not findings and hidden:
            findings.append(Finding("columns", "ok", f"{hidden} columns are hidden or shortened"))
        return findings


NO_RULES = ColumnRules(ColumnOptions())
"""Rules that change nothing."""


def visible(table: TableSchema, rules: tuple[Rule, ...]) -> TableSchema:
    """Return the table as captured rows have it under these rules, one for each column."""
    columns = [
        _text(column) if rule.action in {MASK, HASH} else column
        for column, rule in zip(table.columns, rules, strict=True)
        if rule.action != EXCLUDE
    ]
    numbered = (
        replace(column, ordinal_position=number) for number, column in enumerate(columns, 1)
    )
    return replace(table, columns=tuple(numbered))


def _text(column: Column) -> Column:
    oid = None if column.type_oid is None else _TEXT_OID
    return replace(column, data_type=_TEXT, type_oid=oid, fill=None, hidden=True)
