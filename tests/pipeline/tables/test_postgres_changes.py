"""Random changes, typed and folded as Spark's tasks do it, in tables of PostgreSQL: they are what the source has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from deltaforge_dagster.sinks.postgres.config import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.writer import PostgresWriter
from deltaforge_dagster.sinks.tables.staged import StagedStep, StagedTable
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.sources.value_types import INT32
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_lab.servers.postgres import PostgresServer
from tests.chance import examples
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
            for mode in ("current", "history")
        }  # fmt: skip

    def write(self, steps: Sequence[StagedStep], mode: str, name: str, through: int) -> None:
        """Apply steps to a table, twice."""
        names = ("public", name), ("shop", "public", name)
        staged = StagedTable(*names, SCHEMA, ("id",), frozenset(COLUMNS), steps, 0)
        for _ in range(2):
            self.writers[mode].commit(staged, through, lambda: None)

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
    yield made
    made.close()


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
