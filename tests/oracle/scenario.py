"""What is tried: tables, changes of them, and runs of the pipeline, as data that can be shown, repeated and made smaller."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Source = Literal["postgres", "mysql"]
OTHER = "@OTHER@"
"""In statements: the name of another database (MySQL) or schema (PostgreSQL) than the captured one."""


class Statement(Protocol):
    """One statement about a table."""

    @property
    def sql(self) -> str:
        """Its text."""
        ...

    def without(self, column: str) -> Statement | None:
        """Return the statement without a column; None if nothing is left of it."""
        ...


@dataclass(frozen=True, slots=True)
class Create:
    """A table, with the definitions of its columns."""

    table: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]
    options: str = ""

    @property
    def sql(self) -> str:
        """Its text."""
        columns = [f"{name} {definition}" for name, definition in self.columns]
        columns.append(f"PRIMARY KEY ({', '.join(self.key)})")
        return f"CREATE TABLE {self.table} ({', '.join(columns)}){self.options}"

    def without(self, column: str) -> Create | None:
        """Leave a column out that is not part of the key."""
        left = tuple(one for one in self.columns if one[0] != column)
        return self if column in self.key else replace(self, columns=left)


@dataclass(frozen=True, slots=True)
class Insert:
    """Rows that are inserted, with a literal for each column."""

    table: str
    values: Mapping[str, str]

    @property
    def sql(self) -> str:
        """Its text."""
        return f"INSERT INTO {self.table} ({', '.join(self.values)}) VALUES ({', '.join(self.values.values())})"

    def without(self, column: str) -> Insert | None:
        """Leave a column out."""
        left = {name: value for name, value in self.values.items() if name != column}
        return replace(self, values=left) if left else None


@dataclass(frozen=True, slots=True)
class Update:
    """Rows that are changed."""

    table: str
    values: Mapping[str, str]
    where: str

    @property
    def sql(self) -> str:
        """Its text."""
        values = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        return f"UPDATE {self.table} SET {values} WHERE {self.where}"

    def without(self, column: str) -> Update | None:
        """Leave a column out."""
        left = {name: value for name, value in self.values.items() if name != column}
        return replace(self, values=left) if left else None


@dataclass(frozen=True, slots=True)
class Plain:
    """Any other statement.

    Attributes:
        sql: Its text.
        changes: What it does to columns, `(what, column)`, for whoever tells differences apart.
    """

    sql: str
    changes: tuple[tuple[str, str], ...] = ()

    def without(self, column: str) -> Plain | None:
        """Drop the statement if it is about the column."""
        return None if any(name == column for _, name in self.changes) else self


@dataclass(frozen=True, slots=True)
class Transaction:
    """Statements of one session, in one transaction unless the server commits in between.

    The whole transaction is without effect if the server refuses a statement: the oracle is the source, so it does not matter.

    Attributes:
        table: The number of the table.
        statements: What is run.
        session: Settings of the session, before the transaction begins.
        ends: How it ends.
    """

    table: int
    statements: tuple[Statement, ...]
    session: tuple[str, ...] = ()
    ends: Literal["COMMIT", "ROLLBACK"] = "COMMIT"

    @property
    def replaces_column(self) -> bool:
        """Whether it changes rows, drops a column and adds one with the same name."""
        texts = [one.sql for one in self.statements]
        dropped = {name for one in texts for name in re.findall(r" DROP COLUMN (\w+)", one)}
        added = {name for one in texts for name in re.findall(r" ADD COLUMN (\w+)", one)}
        rows = any(one.startswith(("INSERT", "UPDATE", "DELETE")) for one in texts)
        return rows and bool(dropped & added)

    @property
    def indexes_expression(self) -> bool:
        """Whether it adds an index of an expression, whose column MySQL 8.0.15 has in its log and nowhere else."""
        return any(re.search(r" ADD INDEX \w+ \(\(", one.sql) for one in self.statements)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the pipeline until it has caught up."""


Step = Transaction | Run


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides what is tried.

    Attributes:
        seed: What it was made of.
        source: The kind of database.
        version: The server's version.
        settings: Global variables of a MySQL server.
        snapshot: Whether the rows that exist first are read by a snapshot.
        sinks: The names of sinks.
        tables: What is run for each table before the pipeline begins.
        steps: What follows.
    """

    seed: int
    source: Source
    version: str
    settings: Mapping[str, str]
    snapshot: bool
    sinks: tuple[str, ...]
    tables: Mapping[int, tuple[Statement, ...]]
    steps: tuple[Step, ...] = field(default=())

    def only(self, table: int, sink: str) -> Scenario:
        """Return what is left with one table and one sink."""
        return self.part([table], [sink])

    def part(self, tables: Sequence[int], sinks: Sequence[str]) -> Scenario:
        """Return what is left with some tables and other sinks."""
        kept = {number: self.tables[number] for number in tables}
        steps = [one for one in self.steps if isinstance(one, Run) or one.table in kept]
        return replace(self, sinks=tuple(sinks), tables=kept, steps=_without_idle(steps))

    def with_steps(self, steps: Iterable[Step]) -> Scenario:
        """Return the same with other steps."""
        return replace(self, steps=_without_idle(list(steps)))

    def without_column(self, column: str) -> Scenario:
        """Return the same without a column of any table."""
        tables = {n: _without(ones, column) for n, ones in self.tables.items()}
        steps: list[Step] = []
        for step in self.steps:
            if isinstance(step, Run):
                steps.append(step)
            elif left := _without(step.statements, column):
                steps.append(replace(step, statements=left))
        return replace(self, tables=tables, steps=_without_idle(steps))

    def columns(self) -> list[str]:
        """Return the names of all columns that could be left out."""
        names: dict[str, None] = {}
        keys = {"rev"}
        steps = [one.statements for one in self.steps if isinstance(one, Transaction)]
        for statement in (one for ones in (*self.tables.values(), *steps) for one in ones):
            match statement:
                case Create():
                    keys |= {*statement.key}
                    names |= {name: None for name, _ in statement.columns}
                case Insert() | Update():
                    names |= dict.fromkeys(statement.values)
                case Plain():
                    names |= dict.fromkeys(name for _, name in statement.changes)
        return [name for name in names if name not in keys]

    def column_history(self, table: int, column: str) -> tuple[str, ...]:
        """Return what was done to a column of this name, in order and without repetitions."""
        found: dict[str, None] = {}
        for step in self.steps:
            if isinstance(step, Transaction) and step.table == table and step.ends == "COMMIT":
                for statement in step.statements:
                    if isinstance(statement, Plain):
                        found |= {what: None for what, name in statement.changes if name == column}
        return tuple(found)

    def defined_columns(self, table: int, *, among_rows: bool = False) -> frozenset[str]:
        """Return the names to which something is done; or only those in transactions that change rows as well."""
        steps = [one for one in self.steps if isinstance(one, Transaction) and one.table == table]
        if among_rows:
            steps = [one for one in steps if any(not isinstance(s, Plain) for s in one.statements)]
        plain = [s for one in steps for s in one.statements if isinstance(s, Plain)]
        return frozenset(name for statement in plain for _, name in statement.changes)

    def script(self) -> str:
        """Return the whole as a text to read."""
        lines = [
            f"-- seed {self.seed}, {self.source} {self.version}, sinks {', '.join(self.sinks)}"
            + "".join(f", {name}={value}" for name, value in self.settings.items())
        ]
        lines += [f"{one.sql};" for ones in self.tables.values() for one in ones]
        lines.append("-- the pipeline begins" + (", with a snapshot" if self.snapshot else ""))
        for step in self.steps:
            if isinstance(step, Run):
                lines.append("-- run until caught up")
                continue
            whole = [*step.session, *(one.sql for one in step.statements)]
            if len(step.statements) > 1 or step.ends == "ROLLBACK":
                whole = [*step.session, "BEGIN", *(one.sql for one in step.statements), step.ends]
            lines.append(" ".join(f"{one};" for one in whole))
        return "\n".join([*lines, "-- run until caught up"])


def _without(statements: Sequence[Statement], column: str) -> tuple[Statement, ...]:
    return tuple(left for one in statements if (left := one.without(column)) is not None)


def _without_idle(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Leave out runs before which nothing has happened, and those at the end, where there is always one."""
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, Run) and kept and isinstance(kept[-1], Run):
            continue
        kept.append(step)
    while kept and isinstance(kept[-1], Run):
        kept.pop()
    return tuple(kept)
