"""Scenarios by seed: tables, changes, definitions and runs, all of them chosen by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.oracle.columns import Columns, ColumnType
from tests.oracle.dialect import Dialect
from tests.oracle.mysql_dialect import MysqlDialect
from tests.oracle.postgres_dialect import PostgresDialect
from tests.oracle.scenario import (
    Create,
    Insert,
    Run,
    Scenario,
    Source,
    Statement,
    Step,
    Transaction,
    Update,
)

VERSIONS: dict[Source, tuple[str, ...]] = {
    "postgres": ("13", "14", "15", "16", "17", "18"),
    "mysql": ("5.7", "8.0", "9.7", "mariadb", "mariadb 11.8", "mariadb 10.11", "mariadb 10.5"),
}
"""Every server that is tried."""

CHEAP = (
    "messages", "parquet", "postgres-current", "postgres-history", "postgres-changelog", "clickhouse-current",
    "clickhouse-changelog",
)  # fmt: skip
"""Sinks whose commits take parts of a second."""

LAKES = (
    "delta-current", "delta-pending", "delta-history", "delta-changelog", "iceberg-current", "iceberg-pending",
    "iceberg-history", "iceberg-changelog",
)  # fmt: skip
"""Sinks whose commits take seconds for each table, so that a scenario with one has few tables."""

TABLES = 8
LAKE_TABLES = 2
STEPS = 16
_DIALECTS: dict[Source, Dialect] = {"postgres": PostgresDialect(), "mysql": MysqlDialect()}


def scenario(seed: int, source: Source, version: str | None = None) -> Scenario:
    """Return the scenario of a seed."""
    chance = random.Random(f"{seed}-{source}")
    dialect = _DIALECTS[source]
    version = version or chance.choice(VERSIONS[source])
    snapshot = chance.random() < 0.5
    sinks: tuple[str, ...] = CHEAP
    count = TABLES
    if chance.random() < 0.2:
        sinks, count = (chance.choice(LAKES),), LAKE_TABLES
    tables: dict[int, tuple[Statement, ...]] = {}
    written: list[list[Transaction]] = []
    for number in range(count):
        table = _Table(random.Random(f"{seed}-{source}-{number}"), number, dialect, version)
        tables[number] = table.setup(filled=snapshot)
        written.append([table.step() for _ in range(table.chance.randrange(3, STEPS))])
    steps: list[Step] = []
    late = chance.random() < 0.4
    pause = 3 / (count * STEPS / 2)
    while any(written):
        steps.append(chance.choice([ones for ones in written if ones]).pop(0))
        if not late and chance.random() < pause:
            steps.append(Run())
    return Scenario(
        seed,
        source,
        version,
        dialect.settings(chance, version),
        snapshot,
        sinks,
        tables,
        (),
    ).with_steps(steps)


@dataclass(slots=True)
class _Key:
    """The key of a row that the generator has made."""

    values: dict[str, str]

    @property
    def where(self) -> str:
        return " AND ".join(f"{name} = {value}" for name, value in self.values.items())


class _Table:
    """Makes the statements of one table."""

    def __init__(self, chance: random.Random, number: int, dialect: Dialect, version: str) -> None:
        self.chance = chance
        self._number = number
        self._dialect = dialect
        self._version = version
        self._types = dialect.types(version)
        keys = dialect.keys(version)
        key = {"id": keys[0]} if chance.random() < 0.5 else {"k": chance.choice(keys)}
        if chance.random() < 0.3:
            key["k2"] = chance.choice(keys)
        self._key: dict[str, ColumnType] = key
        names = [f"c{n}" for n in range(chance.randrange(2, 9))]
        self.columns = Columns(
            f"t{number}",
            tuple(key),
            self._typed(names),
            far=chance.random() < 0.15,
        )
        self._rows: list[_Key] = []
        self._revision = 0

    def _typed(self, names: Sequence[str]) -> dict[str, ColumnType]:
        """Give columns types: often that of the column before, with which it is confounded most easily."""
        types: dict[str, ColumnType] = {}
        last: ColumnType | None = None
        for name in names:
            last = last if last and self.chance.random() < 0.3 else self.chance.choice(self._types)
            types[name] = last
        return types

    def setup(self, *, filled: bool) -> tuple[Statement, ...]:
        """Return the table and its first rows, if there shall be some."""
        columns = [(name, f"{type_.sql} NOT NULL") for name, type_ in self._key.items()]
        columns.append(("rev", "integer"))
        columns += [(name, type_.sql) for name, type_ in self.columns.types.items()]
        if self.chance.random() < 0.2:
            self.chance.shuffle(columns)
        table = self.columns.table
        options = self._dialect.options(self.chance, self._version)
        created = Create(table, tuple(columns), tuple(self._key), options)
        rows = [self._insert() for _ in range(self.chance.randrange(4) if filled else 0)]
        return (created, *self._dialect.setup(self.chance, table), *rows)

    def step(self) -> Transaction:
        """Return the next transaction."""
        kind = self.chance.random()
        if kind < 0.3:
            defined = self._dialect.definition(self.chance, self.columns, self._version)
            if defined.together and self.chance.random() < 0.3:
                around: list[Statement] = [*self._changes(2), *defined.statements]
                return Transaction(self._number, (*around, *self._changes(2)), defined.session)
            return Transaction(self._number, defined.statements, defined.session)
        if kind < 0.38:
            noise = self._dialect.noise(self.chance, self.columns, self._version)
            return Transaction(self._number, noise.statements, noise.session)
        session = self._dialect.session(self.chance, self._version)
        if kind < 0.41:
            return Transaction(self._number, tuple(self._changes(3)), session, "ROLLBACK")
        if kind < 0.43:
            self._rows.clear()
            return Transaction(self._number, (self._dialect.truncate(self.columns.table),), session)
        return Transaction(self._number, tuple(self._changes(self.chance.randrange(1, 5))), session)

    def _changes(self, count: int) -> Sequence[Statement]:
        return [self._change() for _ in range(count)]

    def _change(self) -> Statement:
        kind = self.chance.random()
        if not self._rows or kind < 0.35:
            return self._insert()
        row = self.chance.choice(self._rows)
        if kind < 0.42:
            self._rows.remove(row)
            return Delete(self.columns.table, row.where)
        values = {"rev": self._next()}
        where = row.where
        if kind < 0.65:
            name, type_ = self.chance.choice(list(self._key.items()))
            row.values = row.values | {name: self.chance.choice(type_.literals)}
            values[name] = row.values[name]
        if kind > 0.55:
            for name in self._some():
                values[name] = self.columns.literal(self.chance, name)
        return Update(self.columns.table, values, where)

    def _insert(self) -> Insert:
        key = self._new_key()
        for _ in range(
            4
        ):  # most keys are new; the others are refused, or equal in another spelling
            if all(row.values != key for row in self._rows):
                break
            key = self._new_key()
        self._rows.append(_Key(key))
        names = list(self.columns.types)
        if self.chance.random() < 0.2:
            names = self._some()
        values = {name: self.columns.literal(self.chance, name) for name in names}
        return Insert(self.columns.table, {**key, "rev": self._next(), **values})

    def _new_key(self) -> dict[str, str]:
        key = {name: self.chance.choice(type_.literals) for name, type_ in self._key.items()}
        if "id" in key and self.chance.random() < 0.7:
            key["id"] = str(self.chance.randrange(2, 12))
        return key

    def _some(self) -> list[str]:
        names = list(self.columns.types)
        return self.chance.sample(names, min(len(names), self.chance.randrange(1, 4)))

    def _next(self) -> str:
        self._revision += 1
        return str(self._revision)


@dataclass(frozen=True, slots=True)
class Delete:
    """Rows that are deleted."""

    table: str
    where: str

    @property
    def sql(self) -> str:
        """Its text."""
        return f"DELETE FROM {self.table} WHERE {self.where}"

    def without(self, column: str) -> Delete:
        """Return the same: a row is known by its key."""
        return self
