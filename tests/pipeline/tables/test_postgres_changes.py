"""Random changes, typed and folded as Spark's tasks do it, in tables of PostgreSQL: they are what the source has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.types import TARGET_TYPES
from deltaforge_dagster.sinks.postgres.writer import PostgresWriter
from deltaforge_dagster.sinks.tables.staged import StagedStep, StagedTable
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.sources.value_types import INT32, TEXT
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_lab.servers.postgres import PostgresServer
from tests.chance import examples
from tests.pipeline.tables.changes import stager_here
from tests.pipeline.tables.recipes import current_rows, with_all_values
from tests.pipeline.tables.test_fold import (
    COLUMNS,
    OPERATIONS,
    Place,
    Source,
    micros,
    ordered,
    place,
    play,
)
from tests.state.make import held, position

__all__ = ["place"]

pytestmark = pytest.mark.postgres

SCHEMA = TypedSchema(tuple(TypedColumn(name, INT32) for name in ("id", *COLUMNS)))


class Tables:
    """Tables of one database: a current one and a history, new ones for each example."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        owner = TableOwner("uid", "shop", "copy")
        self.writers = {
            mode: PostgresWriter(PostgresSinkConfig(id="copy", dsn=SecretStr(dsn), mode=mode), owner)
            for mode in ("current", "history", "changelog")
        }  # fmt: skip

    def write(
        self,
        steps: Sequence[StagedStep],
        mode: str,
        name: str,
        through: int,
        schema: TypedSchema = SCHEMA,
    ) -> None:
        """Apply steps to a table, twice."""
        names = ("public", name), ("shop", "public", name)
        staged = StagedTable(*names, schema, ("id",), frozenset(COLUMNS), steps, 0)
        for _ in range(2):
            self.writers[mode].commit(staged, through, lambda: None)

    def make(self, statement: str) -> None:
        """Execute a statement."""
        self.connection.execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what the database answers."""
        return self.connection.execute(query).fetchall()

    def close(self) -> None:
        """Disconnect."""
        self.connection.close()
        for writer in self.writers.values():
            writer.close()


@pytest.fixture(scope="module")
def tables(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tables]:
    """A database."""
    made = Tables(postgres_server.create_database())
    made.make(
        "CREATE COLLATION anycase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def spelled_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """Returns where changes of a table are staged whose key has a type."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def place_of(type_: str) -> Place:
            folder = tmp_path_factory.mktemp("spelled")
            store = stack.enter_context(
                contextlib.closing(StateStore.open(f"sqlite:///{folder}/state.db"))
            )
            columns = [Column("id", type_, None, False, 1)]
            columns += [
                Column(name, "integer", None, False, at) for at, name in enumerate(COLUMNS, 2)
            ]
            schema = TableSchema("shop", "public", "orders", tuple(columns), ("id",))
            with store.fenced(held(store)) as writer:
                stamp = writer.schemas.register("acme", schema, position(1))
            journal = Journal((folder / "journal").as_uri())
            stagers = {
                mode: stager_here(folder, journal, store, f"mode: {mode}", TARGET_TYPES)
                for mode in ("current", "history", "changelog")
            }
            return Place(stamp.fingerprint, journal, stagers)

        yield place_of


@settings(max_examples=examples(12))
@given(
    parts=st.lists(st.lists(OPERATIONS, max_size=20), min_size=1, max_size=3),
    size=st.integers(1, 9),
)
def test_tables_are_those_of_the_source(
    place: Place, tables: Tables, parts: list[list[tuple[Any, ...]]], size: int
) -> None:
    """After each commit, with lacking values, changes of keys, truncates and rows of snapshots."""
    source, name = Source(place.version, {}, [], []), f"t{uuid4().hex}"
    for number, part in enumerate(parts):
        source.changes.clear()
        source.time += 1
        play(source, part)
        for mode in ("current", "history"):
            table = f"{name}_{mode}"
            tables.write(place.stage(source.changes, mode, size), mode, table, number)
            if mode == "current":
                found = {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in tables.rows(f"SELECT id, a, b FROM {table}")}  # fmt: skip
                assert found == source.rows
            else:
                versions = [
                    [row[0], dict(zip(COLUMNS, row[1:3], strict=True)), micros(row[3]), micros(row[4])]
                    for row in tables.rows(f"SELECT id, a, b, df_valid_from, df_valid_to FROM {table}")
                ]  # fmt: skip
                assert ordered(versions) == ordered(source.versions)


@dataclass(frozen=True)
class Spelling:
    """A type of keys in which different texts are equal.

    Attributes:
        type: The type in the source.
        keys: Groups of equal keys.
        made: The type of the key in a table that is there before the sink; None if the sink makes it.
    """

    type: str
    keys: tuple[tuple[str, ...], ...]
    made: str | None = None

    def same(self, one: str, other: str) -> bool:
        """Whether two keys are equal."""
        return any(one in group and other in group for group in self.keys)


SPELLINGS = {
    "numeric": Spelling("numeric", (("1", "1.0", "1.00"), ("2", "2.0"), ("NaN",))),
    "interval": Spelling("interval", (("1 day", "24:00:00"), ("1 mon", "30 days", "720:00:00"))),
    "case": Spelling("text", (("a", "A"), ("b", "B")), "text COLLATE anycase"),
}


class SpelledSource(Source):
    """A table whose keys are texts, some of which are equal."""

    spelling: Spelling

    def _there(self, key: str) -> str | None:
        """Return the spelling that the row of a key has."""
        return next((one for one in self.rows if self.spelling.same(one, key)), None)

    def insert(self, key: Any, values: Any, *, snapshot: bool) -> None:
        """Insert a row that does not exist, or read one."""
        super().insert(self._there(key) or key, values, snapshot=snapshot)

    def update(self, key: Any, new: Any, values: Any, absent: frozenset[str]) -> None:
        """Update a row, whose key may get another spelling."""
        known, taken = self._there(key), self._there(new)
        if known is not None and taken in {None, known}:
            super().update(known, known if new == key else new, values, absent)

    def delete(self, key: Any) -> None:
        """Delete a row, if it exists."""
        super().delete(self._there(key) or key)


def spelled(operation: tuple[Any, ...], keys: Sequence[str]) -> tuple[Any, ...]:
    """Return an operation whose keys are these texts instead of numbers."""
    count = {"rekey": 2, "truncate": 0}.get(operation[0], 1)
    texts = [keys[key % len(keys)] for key in operation[1 : 1 + count]]
    return (operation[0], *texts, *operation[1 + count :])


_FIRST, _SECOND = {"a": 1, "b": 1}, {"a": 2, "b": 2}


@pytest.mark.parametrize("name", SPELLINGS)
@example(  # there and back, in the commit of the insert and in one of its own
    [
        [("insert", 0, _FIRST, False), ("rekey", 0, 1, _SECOND, frozenset())],
        [("rekey", 1, 0, _FIRST, frozenset()), ("rekey", 0, 1, _SECOND, frozenset())],
    ],
    9,
)
@example(  # with a value that the log lacks, and the key of another row before
    [
        [("insert", 2, _FIRST, False)],
        [("rekey", 2, 0, _FIRST, frozenset("b")), ("rekey", 0, 1, _SECOND, frozenset())],
    ],
    9,
)
@example(  # another row with an equal key, once as an insert and once as what a snapshot has read
    [
        [("insert", 0, _FIRST, False)],
        [("delete", 0), ("insert", 1, _SECOND, False), ("delete", 1), ("insert", 0, _FIRST, True)],
    ],
    9,
)
@settings(max_examples=examples(12))
@given(
    parts=st.lists(st.lists(OPERATIONS, max_size=20), min_size=1, max_size=3),
    size=st.integers(1, 9),
)
def test_keys_that_are_equal_and_spelled_differently(
    tables: Tables,
    spelled_places: Callable[[str], Place],
    name: str,
    parts: list[list[tuple[Any, ...]]],
    size: int,
) -> None:
    """The table takes them for the same key, and has the row that the source has, in its spelling."""
    spelling = SPELLINGS[name]
    place = spelled_places(spelling.type)
    source, made = SpelledSource(place.version, {}, [], []), f"t{uuid4().hex}"
    source.spelling = spelling
    keys = [key for group in spelling.keys for key in group]
    schema = TypedSchema((TypedColumn("id", TEXT, spelling.type), *SCHEMA.columns[1:]))
    if spelling.made is not None:
        fields = f"id {spelling.made}, a integer, b integer"
        tables.make(f"CREATE TABLE {made}_current ({fields}, PRIMARY KEY (id))")
        tables.make(f"CREATE TABLE {made}_history ({fields})")
    for number, part in enumerate(parts):
        source.changes.clear()
        source.time += 1
        play(source, [spelled(one, keys) for one in part])
        for mode in ("current", "history"):
            steps = place.stage(source.changes, mode, size)
            tables.write(steps, mode, f"{made}_{mode}", number, schema)
        found = {
            row[0]: dict(zip(COLUMNS, row[1:], strict=True))
            for row in tables.rows(f"SELECT id::text, a, b FROM {made}_current")
        }
        assert found == source.rows
        versions = [
            [row[0], dict(zip(COLUMNS, row[1:3], strict=True)), micros(row[3]), micros(row[4])]
            for row in tables.rows(f"SELECT id::text, a, b, df_valid_from, df_valid_to FROM {made}_history")
        ]  # fmt: skip
        assert ordered(versions) == ordered(source.versions)


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=examples(20))
@given(operations=st.lists(OPERATIONS, max_size=30), size=st.integers(1, 9))
def test_current_rows_from_a_changelog(
    tables: Tables,
    spelled_places: Callable[[str], Place],
    name: str,
    operations: list[tuple[Any, ...]],
    size: int,
) -> None:
    """The documented query finds the rows of the source: a key that an update has changed is gone, also if it is equal."""
    spelling = SPELLINGS[name]
    place, made = spelled_places(spelling.type), f"t{uuid4().hex}"
    source = SpelledSource(place.version, {}, [], [])
    source.spelling = spelling
    keys = [key for group in spelling.keys for key in group]
    schema = TypedSchema((TypedColumn("id", TEXT, spelling.type), *SCHEMA.columns[1:]))
    if spelling.made is not None:
        tables.make(f"CREATE TABLE {made} (id {spelling.made}, a integer, b integer)")
    play(source, [spelled(with_all_values(one), keys) for one in operations])
    tables.write(place.stage(source.changes, "changelog", size), "changelog", made, 0, schema)
    query = current_rows("postgres-tables.md", "public.orders", made)
    found = tables.rows(f"SELECT id::text, a, b FROM ({query}) AS found")
    assert {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in found} == source.rows
