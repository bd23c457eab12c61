"""The options that every sink that keeps tables has under `config`."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from deltaforge_dagster.config.blocks import Block, Count, Seconds, TemplateText, Text
from deltaforge_dagster.config.sinks import SinkConfig
from deltaforge_dagster.config.templates import Variable, compile_template
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sources.value_types import ValueType, parse_value_type

_DB, _SCHEMA, _TABLE = "source.db", "source.schema", "source.table"
_VARIABLES = (_DB, _SCHEMA, _TABLE)

_LITERAL = re.compile(r"[A-Za-z0-9_-]*")
_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f]|^\.*$")
"""Matches what part of a table's name cannot contain, because it may become a folder's name."""


def _table(text: str) -> str:
    template = compile_template(text)
    for variable in template.variables:
        name = ".".join(variable.path)
        if name not in _VARIABLES:
            raise ValueError(
                f"names ${{{name}}}, which differs between the changes of one table (only "
                "${source.db}, ${source.schema} and ${source.table} are allowed)"
            )
    if template.variables and Variable(("source", "table")) not in template.variables:
        raise ValueError(
            "has a variable, but not ${source.table}, so tables would be mixed (add it, or write "
            "the name of one table)"
        )
    if not all(
        all(_LITERAL.fullmatch(piece) for piece in part if isinstance(piece, str)) and any(part)
        for part in _parts(text)
    ):
        raise ValueError(
            "is not the name of a table: parts of letters, digits, `_`, `-` and variables, with a "
            "dot between them, such as ${source.schema}.${source.table}"
        )
    return text


def _parts(template: str) -> list[list[str | Variable]]:
    """Return the parts of a table's name, each as a list of literals and variables."""
    parts: list[list[str | Variable]] = [[]]
    for piece in compile_template(template).parts:
        if isinstance(piece, Variable):
            parts[-1].append(piece)
            continue
        first, *others = piece.split(".")
        parts[-1].append(first)
        parts += [[other] for other in others]
    return parts


def _source_table(name: str) -> str:
    schema, dot, table = name.partition(".")
    if not (schema and dot and table):
        raise ValueError(
            f"names the table {name!r} (write schema.table, or database.table if the source has no "
            "schemas)"
        )
    return name


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names a column twice")
    return names


def _type_name(name: str) -> str:
    parse_value_type(name)
    return name


SourceTable = Annotated[str, AfterValidator(_source_table)]
"""The full name of a table of the source."""

Columns = Annotated[tuple[Text, ...], Field(min_length=1), AfterValidator(_distinct)]
"""Names of columns of a table."""

TableTemplate = Annotated[TemplateText, AfterValidator(_table)]
"""Template of the tables' names."""

_TypeName = Annotated[Text, AfterValidator(_type_name)]


def may_be_folder(name: str) -> bool:
    """Return whether a part of a name can be the name of a folder."""
    return _FORBIDDEN.search(name) is None


@dataclass(frozen=True, slots=True)
class CommitWhen:
    """When a commit is due: at the first of these limits.

    Attributes:
        seconds: A commit is due when its oldest segment is this many seconds old.
        changes: A commit is due when there are this many changes; one of several segments has no
            more.
        bytes: A commit is due when the files of its segments have this many bytes; one of several
            segments has no more. None for any number.
        idle_seconds: A commit is due when its newest segment is this many seconds old; None for
            never.
    """

    seconds: float
    changes: int
    bytes: int | None = None
    idle_seconds: float | None = None


class PendingChanges(Block):
    """When changes that are kept beside a table are folded into it."""

    fold_changes: Count = 100_000
    """They are folded when there are so many. A commit with as many goes into the table at once."""
    fold_seconds: Seconds = 3600.0
    """They are folded when the oldest of them has been there for this long."""

    def due(self, changes: int, age: float) -> bool:
        """Return whether to fold so many pending changes, the first added `age` seconds ago."""
        return changes >= self.fold_changes or age >= self.fold_seconds


class StagedSinkConfig(SinkConfig):
    """The options of every sink for which Spark's tasks type the changes, by table."""

    types: Mapping[SourceTable, Mapping[Text, _TypeName]] = {}
    """Types of columns, in place of those that the source's types give: `schema.table` to a mapping
    of columns to [types](typed-rows.md).
    """

    @abstractmethod
    def name_of(self, database: str, schema: str | None, table: str) -> tuple[str, ...]:
        """Return the sink's name for a table of the source, outermost part first.

        Raises:
            TableRejected: The source's name cannot be part of such a name.
        """

    def types_of(self, database: str, schema: str | None, table: str) -> dict[str, ValueType]:
        """Return the declared types of columns of a table of the source."""
        declared = self.types.get(full_name(database, schema, table), {})
        return {column: parse_value_type(name) for column, name in declared.items()}

    @property
    def full_destination(self) -> str:
        """The template of the destination, with everything that names it except its server."""
        return self.destination

    @property
    @abstractmethod
    def commit_when(self) -> CommitWhen:
        """When a commit is due."""

    @property
    def pending_changes(self) -> PendingChanges | None:
        """When changes that are kept beside a table are folded into it; None if none are kept."""
        return None


class TableSinkConfig(StagedSinkConfig):
    """The options of every sink that keeps tables."""

    destination_field = "table"

    table: TableTemplate = "${source.schema}.${source.table}"
    """Template of the tables' names, with dots between their parts.

    Only `${source.db}`, `${source.schema}` and `${source.table}` are allowed; in sources without
    schemas `${source.schema}` is the database. Each captured table needs a name of its own.
    """
    mode: Literal["changelog", "current", "history"] = "current"
    """What a table has: a row for every change (`changelog`), the source's rows as they are now
    (`current`), or every version of each row with the time from which and until which it was valid
    (`history`) ([tables](tables.md#modes)).
    """
    keys: Mapping[SourceTable, Columns] = {}
    """The key columns of tables that have no primary key, or are to have another one here:
    `schema.table` to a list of columns. They must identify a row.
    """
    commit_seconds: Seconds = 60.0
    """A commit is made when its oldest change has waited for this long,
    or `commit_changes` wait.
    """
    commit_changes: Count = 1_000_000
    """A commit is made when so many changes wait. It has no more, unless a single segment has."""

    @property
    def commit_when(self) -> CommitWhen:
        """When a commit is due."""
        return CommitWhen(self.commit_seconds, self.commit_changes)

    @property
    def name_parts(self) -> int:
        """Number of parts of the tables' names."""
        return len(_parts(self.table))

    def variables(self, known: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of a table, with the database as schema for sources without."""
        return {_SCHEMA: known[_DB], **known} if _DB in known else known

    def name_of(self, database: str, schema: str | None, table: str) -> tuple[str, ...]:
        """Return the name of the sink's table for a table of the source, outermost part first.

        Raises:
            TableRejected: The source's name cannot be part of the name of a table here.
        """
        variables = {_DB: database, _SCHEMA: schema or database, _TABLE: table}
        name = tuple(
            "".join(
                piece if isinstance(piece, str) else variables[".".join(piece.path)]
                for piece in part
            )
            for part in _parts(self.table)
        )
        for part in name:
            if not may_be_folder(part):
                raise TableRejected(
                    f"sink {self.id}: {part!r} cannot be part of a table's name there; give the "
                    "sink a `table` without it, or do not capture the table"
                )
        return name

    def keys_of(self, database: str, schema: str | None, table: str) -> tuple[str, ...] | None:
        """Return the declared key of a table of the source; None if its primary key applies."""
        return self.keys.get(full_name(database, schema, table))


def full_name(database: str, schema: str | None, table: str) -> str:
    """Return the name of a table of the source, as in `keys`, `types` and `partition_by`."""
    return f"{schema or database}.{table}"
