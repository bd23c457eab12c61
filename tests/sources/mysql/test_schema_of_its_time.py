"""Rows are decoded with the table that held when they were written, whatever became of it since."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.positions import Position
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Taken,
    Versions,
    add,
)
from tests.chance import examples
from tests.fix_mysql import StartMysql
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

TYPES = (
    "int", "bigint unsigned", "varchar(20)", "varchar(20)", "decimal(8,2)", "enum('a','b','c''d')",
    "enum('b','a')", "set('x','y')", "text", "char(9) CHARACTER SET latin1", "datetime(3)", "double",
    "INTEGER UNSIGNED", "BOOL", "NUMERIC(6)", "text(70)", "bit(9)", "varchar(5) CHARACTER SET binary",
)  # fmt: skip
NAMES = ("a", "b", "c", "d", "E", "f g", "`h", "ü", "key")
TABLES = ("t", "u", "v")
UNKNOWN = "?"


def quoted(name: str) -> str:
    """Return a name in backticks."""
    return "`" + name.replace("`", "``") + "`"


class Tables:
    """Tables that are altered at random, and what each row looked like when it was written."""

    def __init__(self, bench: MysqlBench, data: st.DataObject) -> None:
        self.bench = bench
        self.data = data
        self.expected: list[tuple[str, dict[str, str], list[str]] | None] = []
        self.statements: list[str] = []
        self.number = 0
        self.run("DROP TABLE IF EXISTS t, u, v, w")
        for table in TABLES:
            self.run(f"CREATE TABLE {table} (id int PRIMARY KEY, {self.column()})")

    def draw(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return self.data.draw(st.sampled_from(choices))

    def run(self, statement: str) -> bool:
        """Run a statement; what the server refuses is not in its log either."""
        self.statements.append(statement)
        try:
            self.bench.run(statement)
        except pymysql.err.MySQLError:
            self.statements.pop()
            return False
        return True

    def columns(self, table: str) -> list[str]:
        """Return the names of a table's columns but `id`."""
        return [row[0] for row in self.bench.rows(f"SHOW COLUMNS FROM {table}") if row[0] != "id"]

    def column(self) -> str:
        """Return a new column."""
        extra = self.draw("", " NULL", " COMMENT 'FIRST'", " NOT NULL")
        return f"{quoted(self.draw(*NAMES))} {self.draw(*TYPES)}{extra}"

    def action(self, table: str) -> str:
        """Return an action of ALTER TABLE."""
        there = self.columns(table)
        old = quoted(self.draw(*there)) if there else "`none`"
        other = quoted(self.draw(*there, "id")) if there else "id"
        place = self.draw("", "", " FIRST", f" AFTER {other}")
        new = quoted(self.draw(*NAMES))
        type_ = self.draw(*TYPES)
        return str(self.draw(
            f"ADD COLUMN {self.column()}{place}",
            f"ADD {self.column()}{place}",
            f"ADD COLUMN ({self.column()}, {self.column()})",
            f"DROP COLUMN {old}",
            f"DROP {old}",
            f"RENAME COLUMN {old} TO {new}",
            f"RENAME COLUMN {old} TO {other}, RENAME COLUMN {other} TO {old}",
            f"CHANGE {old} {new} {type_}{place}",
            f"CHANGE COLUMN {old} {other} {type_}, CHANGE COLUMN {other} {old} {type_}",
            f"MODIFY {old.upper()} {type_}{place}",
            f"MODIFY COLUMN {old} {type_} NULL{place}",
            "CONVERT TO CHARACTER SET " + self.draw("utf8mb4", "latin1"),
            f"DROP PRIMARY KEY, ADD PRIMARY KEY (id, {old})",
            "DROP PRIMARY KEY, ADD PRIMARY KEY (id)",
            f"ADD INDEX ({old})",
            "COMMENT 'ADD COLUMN x int', ENGINE=InnoDB",
            f"ALTER COLUMN {old} SET DEFAULT NULL",
            "PARTITION BY HASH (id) PARTITIONS 2",
            "REMOVE PARTITIONING",
        ))  # fmt: skip

    def change(self) -> None:
        """Run one random statement that defines tables."""
        table, other = self.draw(*TABLES), self.draw(*TABLES)
        chosen = [self.action(table) for _ in range(self.draw(1, 1, 2, 3))]
        # MySQL 8.0.15 itself crashes on some statements that convert and do something else, too.
        alone = [one for one in chosen if one.startswith("CONVERT")]
        actions = ", ".join(alone[:1] or chosen)
        kind = self.draw(
            "alter", "alter", "alter", "alter", "swap", "again", "like", "move", "ghost"
        )
        if kind == "alter":
            self.run(f"ALTER TABLE {table} {actions}")
        elif kind == "swap":
            self.run(f"RENAME TABLE {table} TO w, {other} TO {table}, w TO {other}")
        elif kind == "again":
            self.run(f"DROP TABLE {table}")
            body = f"(id int, {self.column()}, PRIMARY KEY (id))"
            if not self.run(f"CREATE TABLE {table} {body} DEFAULT CHARSET=latin1"):
                self.run(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        elif kind == "like" and table != other:
            self.run(f"DROP TABLE {table}")
            self.run(f"CREATE TABLE {table} LIKE {other}")
        elif kind == "move":
            self.run(f"ALTER TABLE {table} {actions}, RENAME TO w")
            self.run(f"RENAME TABLE w TO {table}")
        elif kind == "ghost":
            self.run(f"CREATE TABLE w LIKE {table}")
            self.run(f"ALTER TABLE w {actions}")
            if self.run(f"INSERT INTO w (id) VALUES ({self.next()})"):
                self.expected.append(None)
            self.run(f"RENAME TABLE {table} TO x, w TO {table}")
            self.run("DROP TABLE IF EXISTS x, w")

    def next(self) -> int:
        """Return a number that no row has."""
        self.number += 1
        return self.number

    def write(self, table: str) -> None:
        """Insert a row, and remember it as SELECT shows it."""
        id_ = self.next()
        columns = self.bench.rows(f"SHOW COLUMNS FROM {table}")
        values = {str(name): self.value(str(type_), id_) for name, type_, *_ in columns}
        values["id"] = str(id_)
        listed = ", ".join(quoted(name) for name in values)
        self.bench.run(
            f"INSERT IGNORE INTO {table} ({listed}) VALUES ({', '.join(values.values())})"
        )
        keys = self.bench.rows(f"SHOW KEYS FROM {table} WHERE Key_name = 'PRIMARY'")
        in_key = {str(key[4]) for key in keys}
        names = [str(column[0]) for column in columns]
        (row,) = self.bench.rows(f"SELECT * FROM {table} WHERE id = {id_}")
        shown = {name: self.shown(value) for name, value in zip(names, row, strict=True)}
        self.expected.append((table, shown, [name for name in names if name in in_key]))

    def value(self, type_: str, number: int) -> str:
        """Return a value that tells most columns of a type apart."""
        some = self.data.draw(st.integers(0, 99))
        if type_.startswith(("enum", "set")):
            return str(1 + some % 2)
        if type_.startswith("datetime"):
            return f"'2024-01-01 00:{some % 60:02}:{number % 60:02}.125'"
        if type_.startswith("tinyint"):
            return str(some)
        return (
            f"'{some}'" if type_.startswith("varbinary") else str(some * 1000 + number % 1000)[-5:]
        )

    @staticmethod
    def shown(value: Any) -> str:
        """Return a number or text of SELECT as both sides write it, and others as unknown."""
        return str(value) if isinstance(value, int | str) else UNKNOWN


def normal(value: Any) -> str:
    """Return a value of an event in that form."""
    if isinstance(value, dict):
        return "bytes"
    if isinstance(value, list):
        return ",".join(value)
    return str(value)


def read(
    bench: MysqlBench, start: Position, end: int, notes: Versions, data: st.DataObject
) -> list[dict[str, object]]:
    """Read so many rows, beginning again in between where a segment may end."""
    rows: list[dict[str, object]] = []
    position = start
    deadline = time.monotonic() + 90
    while len(rows) < end:
        source = bench.source(tables=(f"{bench.database}.*",))
        stop = len(rows) + data.draw(st.integers(1, 2 * end))
        taken = Taken([], position, [])
        whole = 0
        for batch in source.read(position, LIMITS, notes):
            for part in batch.split(1):
                add(taken, part)
                if part.end is not None:
                    whole, position = len(taken.rows), part.end
            if len(rows) + whole >= min(stop, end):
                break
            assert time.monotonic() < deadline, f"only {len(rows) + whole} of {end} rows came"
        source.close()
        rows += taken.rows[:whole]
    return rows


@pytest.fixture
def bench(start_mysql: StartMysql) -> Iterator[MysqlBench]:
    """An empty database, on a server that nobody else needs if it should crash."""
    with MysqlBench(start_mysql(None).create_database()) as made:
        made.run("DROP TABLE orders, items, other", "SET SESSION sql_mode = ''")
        yield made


@pytest.mark.parametrize("metadata", ["MINIMAL", "FULL"])
def test_rows_between_random_statements_decode_as_they_were(
    bench: MysqlBench, metadata: str
) -> None:
    """Written, altered and written again, captured afterwards in one go or in several runs."""
    bench.run(f"SET GLOBAL binlog_row_metadata = {metadata}")

    @settings(
        max_examples=examples(6),
        phases=[Phase.generate],  # under `soak` other statements may find other ends of the server
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def example(data: st.DataObject) -> None:
        tables = Tables(bench, data)
        source = bench.source(tables=(f"{bench.database}.*",))
        start = source.ensure_start()
        notes = Versions()
        notes.define(source.definitions(start), start)
        source.close()
        for _ in range(data.draw(st.integers(1, 8))):
            for table in TABLES:
                tables.write(table)
            tables.change()
        for table in TABLES:
            tables.write(table)
        rows = read(bench, start, len(tables.expected), notes, data)
        for row, expected in zip(rows, tables.expected, strict=True):
            if expected is None:
                continue
            table, shown, key = expected
            after = {name: normal(value) for name, value in json.loads(str(row["after"])).items()}
            assert row["table"] == table
            assert list(after) == list(shown), tables.statements
            assert list(json.loads(str(row["key"] or "{}"))) == key, tables.statements
            for name, value in shown.items():
                assert value in {UNKNOWN, after[name]}, tables.statements

    try:
        example()
    finally:
        bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")
