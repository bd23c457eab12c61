"""Rows are decoded with the table that held when they were written, whatever became of it since."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from deltaforge_dagster.positions import Position
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Taken,
    Versions,
    add,
)
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_postgres import POSTGRES_VERSIONS
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres

TYPES = (
    "int", "bigint", "smallint", "text", "varchar(7)", "varchar(9)", "char(3)", "numeric(8,2)",
    "numeric(9,4)", "numeric", "boolean", "real", "date", "json", "uuid", "int[]", "text[]",
    "int4range", "mood", "mood[]", "count", "count[]", "words", "pair", "pair[]",
)  # fmt: skip
NAMES = ("a", "b", "C c", 'd"d', "ü", "select", "oid")
TABLES = ("t", "u", "v w")
OWN_TYPES = {
    "mood": "CREATE TYPE {} AS ENUM ('m0', 'm1')",
    "count": "CREATE DOMAIN {} AS int",
    "words": "CREATE DOMAIN {} AS text[]",
    "pair": "CREATE TYPE {} AS (x int, y text)",
}


def quoted(name: str) -> str:
    """Return a name in double quotes."""
    return '"' + name.replace('"', '""') + '"'


class Tables:
    """Tables that are altered at random, and what each change was when it was made."""

    def __init__(self, bench: PostgresBench, chance: random.Random) -> None:
        self.bench = bench
        self.chance = chance
        self.expected: list[tuple[Any, ...]] = []
        self.statements: list[str] = []
        self.number = 0
        for made in ("SCHEMA IF EXISTS s", "SCHEMA public"):
            self.must(f"DROP {made} CASCADE")
        self.must("CREATE SCHEMA public", "CREATE SCHEMA s")
        for name, statement in OWN_TYPES.items():
            self.must(statement.format(name))
        for table in TABLES:
            self.must(f"CREATE TABLE {quoted(table)} (id int PRIMARY KEY, {self.column()})")

    def draw(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return self.chance.choice(choices)

    def must(self, *statements: str) -> None:
        """Run statements that the server takes."""
        for statement in statements:
            assert self.run(statement), statement

    def run(self, statement: str) -> bool:
        """Run a statement, undone alone if the server refuses it."""
        try:
            if self.bench.connection.info.transaction_status == TransactionStatus.IDLE:
                self.bench.connection.execute(statement)
            elif "ADD VALUE" in statement:
                return False  # such a label cannot be used in the same transaction
            else:
                with self.bench.connection.transaction():
                    self.bench.connection.execute(statement)
        except psycopg.Error:
            return False
        self.statements.append(statement)
        return True

    def rows(self, query: str, *parameters: object) -> list[Any]:
        """Return what a query finds."""
        return self.bench.connection.execute(query, parameters or None).fetchall()

    def oid(self, table: str) -> int:
        """Return the table's OID."""
        return int(
            self.rows(f"SELECT {self.literal(self.place(table))}::regclass::oid::int8")[0][0]
        )

    @staticmethod
    def literal(text: str) -> str:
        """Return a string of SQL."""
        return "'" + text.replace("'", "''") + "'"

    def place(self, table: str) -> str:
        """Return the quoted name with its schema."""
        found = self.rows(
            "SELECT relnamespace::regnamespace::text FROM pg_class"
            f" WHERE relname = {self.literal(table)} AND relkind = 'r'"
        )
        return f"{found[0][0] if found else 'public'}.{quoted(table)}"

    def columns(self, table: str) -> list[tuple[str, str, str]]:
        """Return name, type and generation of each column."""
        return self.rows(
            "SELECT attname, format_type(atttypid, NULL), attgenerated::text FROM pg_attribute"
            f" WHERE attrelid = {self.oid(table)} AND attnum > 0 AND NOT attisdropped"
            " ORDER BY attnum"
        )

    def key(self, table: str) -> list[str]:
        """Return the columns of the key that the log says: that of the replica identity."""
        found = self.rows(
            "SELECT a.attname FROM pg_class c JOIN pg_index i ON i.indrelid = c.oid"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey)"
            f" WHERE c.oid = {self.oid(table)} AND i.indnkeyatts > 0"
            " AND CASE relreplident WHEN 'i' THEN indisreplident ELSE indisprimary END"
            " ORDER BY a.attnum"
        )
        return [row[0] for row in found]

    def full(self, table: str) -> bool:
        """Say whether the log has whole old rows."""
        return bool(
            self.rows(f"SELECT relreplident = 'f' FROM pg_class WHERE oid = {self.oid(table)}")[0][
                0
            ]
        )

    def column(self) -> str:
        """Return a new column."""
        return f"{quoted(self.draw(*NAMES))} {self.draw(*TYPES)}"

    def action(self, table: str) -> str:
        """Return an action of ALTER TABLE."""
        there = [name for name, *_ in self.columns(table) if name != "id"]
        old = quoted(self.draw(*there)) if there else '"none"'
        type_, column = self.draw(*TYPES), self.column()
        return str(self.draw(
            f"ADD COLUMN {column}",
            f"ADD COLUMN {quoted(self.draw(*NAMES))} text DEFAULT 'filled'",
            f"ADD COLUMN {quoted(self.draw(*NAMES))} int GENERATED ALWAYS AS (id * 2) STORED",
            f"DROP COLUMN {old}",
            f"ALTER COLUMN {old} TYPE {type_} USING NULL",
            f"ALTER COLUMN {old} TYPE text",
            f"ALTER COLUMN {old} TYPE varchar({self.draw(30, 40)})",
            f"ALTER COLUMN {old} SET DEFAULT NULL",
            "DROP CONSTRAINT IF EXISTS k, ADD CONSTRAINT k CHECK (id > 0)",
            f"ADD UNIQUE (id, {old})",
            "REPLICA IDENTITY FULL",
            "REPLICA IDENTITY DEFAULT",
        ))  # fmt: skip

    def change(self) -> None:
        """Run one random statement that defines tables or types."""
        table, other = self.draw(*TABLES), self.draw(*TABLES)
        place = self.place(table)
        there = [name for name, *_ in self.columns(table) if name != "id"]
        old = quoted(self.draw(*there)) if there else '"none"'
        enum = self.rows("SELECT enum_range(NULL::mood)::text[]")[0][0]
        own = self.draw(*OWN_TYPES)
        for statement in self.draw(
            *[[f"ALTER TABLE {place} {self.action(table)}"]] * 4,
            [f"ALTER TABLE {place} {self.action(table)}, {self.action(table)}"],
            [f"ALTER TABLE {place} RENAME COLUMN {old} TO {quoted(self.draw(*NAMES))}"],
            [
                f"ALTER TABLE {place} RENAME TO x",
                f"ALTER TABLE {self.place(other)} RENAME TO {quoted(table)}",
                f"ALTER TABLE {place.split('.')[0]}.x RENAME TO {quoted(other)}",
            ],
            [f"ALTER TABLE {place} SET SCHEMA {self.draw('s', 'public')}"],
            [
                f"DROP TABLE {place}",
                f"CREATE TABLE {quoted(table)} (id int PRIMARY KEY, {self.column()})",
                f"CREATE TABLE {quoted(table)} (id int PRIMARY KEY)",
            ],
            [f"ALTER TYPE mood ADD VALUE 'm{self.next()}' {self.draw('', 'BEFORE ' + repr(enum[0]))}"],
            [f"ALTER TYPE mood RENAME VALUE {enum[0]!r} TO 'm{self.next()}'"],
            [f"ALTER TYPE {own} RENAME TO n", f"ALTER TYPE n RENAME TO {own}"],
            ["ALTER DOMAIN count ADD CONSTRAINT positive CHECK (VALUE >= 0)"],
            ["ALTER DOMAIN count DROP CONSTRAINT positive"],
            [f"ALTER TYPE pair ADD ATTRIBUTE z{self.next()} int"],
            [f"ALTER TYPE pair RENAME ATTRIBUTE x TO x{self.next()}"],
            self.recreated(own),
            [f"VACUUM FULL {place}", f"ANALYZE {place}"],
        ):  # fmt: skip
            self.run(statement)

    def recreated(self, own: str) -> list[str]:
        """Return statements that drop a type and make one of its name."""
        if any(f"{own}[]" in one for one in self.statements):
            return []  # such arrays cannot be read once the type is gone
        return [f"DROP TYPE {own} CASCADE", OWN_TYPES[own].format(own)]

    def next(self) -> int:
        """Return a number that no row has."""
        self.number += 1
        return self.number

    def write(self, table: str) -> None:
        """Insert a row and change it, or remove all; remember it as SELECT shows it."""
        id_, place = self.next(), self.place(table)
        written = [
            (n, self.value(t, id_)) for n, t, generated in self.columns(table) if not generated
        ]
        names = ", ".join(quoted(name) for name, _ in written)
        values = ", ".join(str(id_) if name == "id" else value for name, value in written)
        self.must(f"INSERT INTO {place} ({names}) VALUES ({values})")
        first = self.shown(table, id_)
        self.expect(table, "c", None, first)
        match self.draw("", "update", "key", "delete", "truncate"):
            case "update":
                if self.run(f"UPDATE {place} SET id = id WHERE id = {id_}"):
                    self.expect(table, "u", first, first)
            case "key":
                new = self.next()
                if self.run(f"UPDATE {place} SET id = {new} WHERE id = {id_}"):
                    self.expect(table, "u", first, self.shown(table, new))
            case "delete":
                if self.run(f"DELETE FROM {place} WHERE id = {id_}"):
                    self.expect(table, "d", first, None)
            case "truncate":
                self.must(f"TRUNCATE {place}")
                self.expect(table, "t", None, None)

    def value(self, type_: str, number: int) -> str:
        """Return a value that tells most columns of a type apart."""
        some = self.chance.randrange(100)
        base = type_.removesuffix("[]")
        if some < 10:
            return "NULL"
        text = str(some)
        if base == "mood":
            labels = self.rows("SELECT enum_range(NULL::mood)::text[]")[0][0]
            text = labels[some % len(labels)]
        elif base == "pair":
            count = self.rows("SELECT relnatts FROM pg_class WHERE relname = 'pair'")[0][0]
            text = "(" + ",".join([text] * count) + ")"
            text = f'"{text}"' if type_ != base else text
        elif base == "words":
            text = f"{{{text},NULL}}"
        elif base == "boolean":
            text = "t" if some % 2 else "f"
        elif base == "uuid":
            text = f"{number:032x}"
        elif base == "int4range":
            text = f"[{some},{some + number})"
        elif base == "date":
            text = f"2024-01-{1 + some % 28:02}"
        elif base == "json":
            text = f'{{"k":[{some}.50]}}'
        return self.literal(f"{{{text},NULL}}" if type_ != base else text)

    def shown(self, table: str, id_: int) -> dict[str, Any]:
        """Return a row as the server writes it in JSON, composites as text."""
        columns = ", ".join(
            f"{quoted(name)}::{'text[]' if type_.endswith('[]') else 'text'} AS {quoted(name)}"
            if type_.startswith("pair")
            else quoted(name)
            for name, type_, generated in self.columns(table)
            if not generated
        )
        (row,) = self.rows(
            f"SELECT row_to_json(t)::text FROM (SELECT {columns} FROM {self.place(table)}"
            f" WHERE id = {id_}) t"
        )
        shown: dict[str, Any] = normal(row[0])
        return shown

    def expect(
        self, table: str, op: str, before: dict[str, Any] | None, after: dict[str, Any] | None
    ) -> None:
        """Remember a change."""
        schema = self.place(table).split(".")[0]
        image, key = after or before, None
        names = self.key(table)
        if image is not None and names:
            key = {name: image[name] for name in image if name in names}
        if self.full(table):
            key = ANY  # the log does not say it, so it is today's
        if not self.full(table) and before is not None:
            moved = after is None or any(before[name] != after[name] for name in names)
            before = {n: v if n in names else None for n, v in before.items()} if moved else None
        self.expected.append((op, schema, table, before, after, key))


def normal(text: Any) -> Any:
    """Return a row image with numbers as text, which numerics are in events."""
    return None if text is None else json.loads(text, parse_int=str, parse_float=str)


def read(
    bench: PostgresBench, start: Position, end: int, chance: random.Random
) -> list[dict[str, object]]:
    """Read so many rows, beginning again in between where a segment may end."""
    rows: list[dict[str, object]] = []
    position = start
    deadline = time.monotonic() + 60
    while len(rows) < end:
        source = bench.source(tables=("*.*",))
        stop = len(rows) + chance.randint(1, 2 * end)
        taken = Taken([], position, [])
        whole = 0
        for batch in source.read(position, LIMITS, Versions()):
            add(taken, batch)
            if batch.end is not None:
                whole, position = len(taken.rows), batch.end
            if len(rows) + whole >= min(stop, end):
                break
            assert time.monotonic() < deadline, f"only {len(rows) + whole} of {end} rows came"
        source.close()
        rows += taken.rows[:whole]
    return rows


def work(tables: Tables, chance: random.Random) -> None:
    """Write to each table and change some, in one transaction or in several."""
    kind = chance.choice(("single", "one", "undone"))
    connection = tables.bench.connection
    with connection.transaction() if kind != "single" else nullcontext():
        for table in TABLES:
            tables.write(table)
            tables.change()
            if kind == "undone":
                known = len(tables.expected)
                with connection.transaction(force_rollback=True):
                    tables.change()
                    tables.write(table)
                del tables.expected[known:]
    for table in TABLES:
        tables.write(table)


def compare(bench: PostgresBench, seed: int) -> None:
    """Write, alter and write again, then read all of it and compare."""
    chance = random.Random(seed)
    tables = Tables(bench, chance)
    bench.drop_slot()
    start = bench.source(tables=("*.*",)).ensure_start()
    for _ in range(chance.randint(1, 6)):
        work(tables, chance)
    rows = read(bench, start, len(tables.expected), chance)
    for row, expected in zip(rows, tables.expected, strict=True):
        images = [normal(row[name]) for name in ("before", "after", "key")]
        found = (row["op"], row["schema"], row["table"], *images)
        assert found == expected, (seed, "\n".join(tables.statements))
        assert list(images[1] or ()) == list(expected[4] or ()), (seed, tables.statements)


@pytest.fixture
def bench(
    postgres_version: Callable[[int], PostgresServer], version: int
) -> Iterator[PostgresBench]:
    """A database all of whose tables are published, those made later, too."""
    with PostgresBench(postgres_version(version).create_database()) as made:
        made.execute("CREATE PUBLICATION p FOR ALL TABLES")
        made.connection.execute("SET synchronous_commit = on")
        yield made


@pytest.mark.parametrize("version", POSTGRES_VERSIONS)
def test_rows_between_random_statements_decode_as_they_were(bench: PostgresBench) -> None:
    """Written, altered and written again, captured afterwards in one go or in several runs."""
    for seed in range(5):
        compare(bench, seed)


@pytest.mark.parametrize("version", [18])
def test_types_that_were_dropped_since(bench: PostgresBench) -> None:
    """Rows have the forms of their time, also when another type has the name now."""
    bench.execute(
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE DOMAIN few AS int[]",
        "CREATE TABLE k (id int PRIMARY KEY, m mood, f few)",
    )
    start = bench.source(tables=("*.*",)).ensure_start()
    bench.execute("INSERT INTO k VALUES (1, 'sad', '{1,2}')")
    bench.execute(
        "ALTER TABLE k ALTER m TYPE text, ALTER f TYPE text",
        "DROP TYPE mood",
        "DROP DOMAIN few",
        "CREATE DOMAIN mood AS int",
    )
    bench.execute("INSERT INTO k VALUES (2, 'glad', '{3}')")

    rows = read(bench, start, 2, random.Random(1))

    assert [row["after"] for row in rows] == [
        '{"id":1,"m":"sad","f":[1,2]}',
        '{"id":2,"m":"glad","f":"{3}"}',
    ]


@pytest.mark.soak("fuzz")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", POSTGRES_VERSIONS)
def test_more_of_the_same(bench: PostgresBench, seed: int) -> None:
    """As above, five hundred times."""
    for number in range(500):
        compare(bench, seed + number)
