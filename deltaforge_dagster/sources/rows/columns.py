"""What becomes of a table's columns: `engine.columns`, applied to one table version at a time.

=============  ==========================================================================
action         what rows have
=============  ==========================================================================
`KEEP`         the value
`EXCLUDE`      no such column
`MASK`         a fixed text
`HASH`         SHA-256 of the salt and the value, as hexadecimal digits
`TRUNCATE`     the first characters of a text
=============  ==========================================================================

A pattern names a table as `sources.tables` does, then a column: `shop.users.ssn`; without a schema
it means that table in any (`users.ssn`, `*.password`), so that it rather hides too much. Names of
columns compare without case, as MySQL's do. Of several actions for one column the one that hides
most counts: the first in the order exclude, mask, hash, truncate. Key columns always stay, since
order is kept by key, and different keys must stay different: they may be hashed, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from deltaforge_dagster.config.engine.columns import ColumnOptions
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.findings import Finding, listed
from deltaforge_dagster.sources.tables import NamePattern, TablePatterns
from deltaforge_dagster.tables import Column, TableDetails, TableSchema

KEEP, EXCLUDE, MASK, HASH, TRUNCATE = range(5)
_NAMES = {EXCLUDE: "exclude", MASK: "mask", HASH: "hash", TRUNCATE: "truncate"}
_TEXT, _TEXT_OID = "text", 25


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a column.

    Attributes:
        action: `KEEP`, `EXCLUDE`, `MASK`, `HASH` or `TRUNCATE`.
        text: Of `MASK`, the text that stands in place of values.
        characters: Of `TRUNCATE`, how many stay.
    """

    action: int
    text: str = ""
    characters: int = 0


_KEEP, _EXCLUDE = Rule(KEEP), Rule(EXCLUDE)


class _ColumnPattern:
    """A pattern of columns."""

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
    """The rules of one pipeline.

    Attributes:
        salt: What is hashed before each value.
    """

    def __init__(self, options: ColumnOptions) -> None:
        self._include = [_ColumnPattern(pattern) for pattern in options.include]
        self._rules = [(_ColumnPattern(pattern), _EXCLUDE) for pattern in options.exclude]
        self._rules += [(_ColumnPattern(p), Rule(MASK, text=t)) for p, t in options.mask.items()]
        self.salt = b""
        if options.hash is not None:
            self.salt = options.hash.salt.get_secret_value().encode()
            self._rules += [(_ColumnPattern(p), Rule(HASH)) for p in options.hash.columns]
        # Of several lengths the shortest.
        for pattern, characters in sorted(options.truncate.items(), key=lambda item: item[1]):
            rule = Rule(TRUNCATE, characters=characters)
            self._rules.append((_ColumnPattern(pattern), rule))

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return bool(self._include or self._rules)

    def touches(self, schema: str, table: str) -> bool:
        """Say whether rules name the table, whatever its columns are (`schema`: MySQL's database)."""
        patterns = [*self._include, *(pattern for pattern, _ in self._rules)]
        return any(pattern.of_table(schema, table) for pattern in patterns)

    def of(self, table: TableSchema) -> tuple[Rule, ...] | None:
        """Return the rule of each column, None where all values stay as they are.

        Raises:
            SourceMisconfigured: A column of the key would not stay.
        """
        schema = table.schema or table.db
        if not self.touches(schema, table.table):
            return None
        chosen = [one for one in self._include if one.of_table(schema, table.table)]
        rules = []
        for column in table.columns:
            place = (schema, table.table, column.name)
            rule = next((rule for pattern, rule in self._rules if pattern.matches(*place)), _KEEP)
            in_key = column.name in table.primary_key
            if chosen and not in_key and not any(one.matches(*place) for one in chosen):
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
        """Say whether values of any of these columns are hidden, so that no note of ours may have them.

        Raises:
            SourceMisconfigured: As `of` does.
        """
        ruled = zip(table.columns, self.of(table) or (), strict=False)
        return any(one.name in columns and rule.action != KEEP for one, rule in ruled)

    def visible(self, table: TableSchema) -> TableSchema:
        """Return a table as rows show it: without excluded columns, hashes and masks being text.

        Raises:
            SourceMisconfigured: As `of` does.
        """
        rules = self.of(table)
        return table if rules is None else visible(table, rules)

    def details(self, table: TableSchema, details: TableDetails) -> TableDetails:
        """Return what may be told of a table's columns: no default of one whose values are hidden.

        Raises:
            SourceMisconfigured: As `of` does.
        """
        columns = {
            name: replace(one, default=None) if self.hides(table, [name]) else one
            for name, one in details.columns.items()
        }
        return replace(details, columns=columns)

    def findings(
        self, tables: Iterable[str], schema: Callable[[str], TableSchema]
    ) -> list[Finding]:
        """Return what the rules mean for these tables, and which patterns find no column.

        Args:
            tables: Full names of the tables that are captured.
            schema: Returns one of them as it is now.

        Raises:
            DeltaforgeError: What `schema` raises.
        """
        found: list[Finding] = []
        hidden = 0
        unused = {one.text: one for one in (*self._include, *(rule for rule, _ in self._rules))}
        for name in tables:
            if not self.touches(*name.split(".", 1)):
                continue
            table = schema(name)
            place = (table.schema or table.db, table.table)
            for text, pattern in list(unused.items()):
                if any(pattern.matches(*place, column.name) for column in table.columns):
                    del unused[text]
            try:
                rules = self.of(table) or ()
            except SourceMisconfigured as error:
                found.append(Finding("columns", "error", str(error)))
            else:
                hidden += sum(rule.action != KEEP for rule in rules)
        if unused:
            text = f"no captured table has a column for {listed(list(unused))} of engine.columns"
            found.append(Finding("columns", "warning", text))
        if not found and hidden:
            found.append(Finding("columns", "ok", f"{hidden} columns are hidden or shortened"))
        return found


NO_RULES = ColumnRules(ColumnOptions())
"""Everything stays as it is."""


def visible(table: TableSchema, rules: tuple[Rule, ...]) -> TableSchema:
    """Return a table as rows show it under these rules."""
    columns = [
        _text(column) if rule.action in {MASK, HASH} else column
        for column, rule in zip(table.columns, rules, strict=True)
        if rule.action != EXCLUDE
    ]
    numbered = (replace(one, ordinal_position=number) for number, one in enumerate(columns, 1))
    return replace(table, columns=tuple(numbered))


def _text(column: Column) -> Column:
    oid = None if column.type_oid is None else _TEXT_OID
    return replace(column, data_type=_TEXT, type_oid=oid)
