"""Three readings of the same rows agree: the log's, a snapshot's, the server's own."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Generator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.kernels.json_text import BOOLEAN, BYTEA, FLOAT, INTEGER, JSON
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.chance import examples
from tests.fix_postgres import POSTGRES_VERSIONS, PostgresVersion
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.reference import Registry
from tests.sources.postgres.strategies import CUSTOM_TYPES, Column, columns

pytestmark = pytest.mark.postgres

ROWS = 3
ODD = {
    "TimeZone": "'Asia/Kathmandu'",
    "DateStyle": "German, DMY",
    "IntervalStyle": "iso_8601",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "search_path": "public",
    "quote_all_identifiers": "on",
    "client_encoding": "latin1",
}
"""Settings of role and database, of which no session of ours may show anything."""


class Readings:
    """A database with odd settings, of which everything written is read three times.

    Args:
        server: Where.
        iso: Whether timestamps have the form of ISO 8601.
    """

    def __init__(self, server: PostgresServer, *, iso: bool = False) -> None:
        self._iso = iso
        self._bench = PostgresBench(server.create_database())
        self._stack = ExitStack()
        ours = PostgresSourceServer.from_dsn(self._bench.dsn, "test")
        self.version = int(server.version.split(".")[0])
        self._bench.execute(*CUSTOM_TYPES, "CREATE PUBLICATION p FOR ALL TABLES")
        database = ours.database
        for name, value in ODD.items():
            self._bench.execute(
                f"ALTER DATABASE {database} SET {name} = {value}",
                f"ALTER ROLE CURRENT_USER IN DATABASE {database} SET {name} = {value}",
            )
        values = ValueOptions(postgres_timestamp="iso" if iso else "text")
        self._source = self._bench.source(tables=("public.*",), values=values)
        self._registry = Registry()
        start = self._source.ensure_start()
        self._rows = _rows(self._source.read(start, ReadLimits(), self._registry))
        self._query = self._stack.enter_context(ours.query(3600))
        self._tables = (f"t{number}" for number in itertools.count())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._rows.close()
        self._stack.close()
        self._bench.__exit__(kind, error, traceback)

    def compare(self, drawn: list[Column]) -> None:
        """Write rows into a new table and compare the readings."""
        table = next(self._tables)
        names = [f"c{number}" for number in range(len(drawn))]
        described = ", ".join(f"{n} {c.declared}" for n, c in zip(names, drawn, strict=True))
        cast = ", ".join(f"%s::{column.declared}" for column in drawn)
        connection = self._bench.connection
        with connection.transaction():
            connection.execute("SET LOCAL synchronous_commit = on")
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, {described})")
            for row in range(ROWS):
                values = [column.values[row] for column in drawn]
                connection.execute(f"INSERT INTO {table} VALUES ({row}, {cast})", values)

        logged = [next(self._rows) for _ in range(ROWS)]

        images, keys = self._selected(table)
        assert [row["after"] for row in logged] == images
        assert [row["key"] for row in logged] == keys
        own = self._own(table, names, drawn)
        for change, (whole, *parts) in zip(logged, own, strict=True):
            found, theirs = dict(parse(change["after"]).pairs), dict(parse(whole).pairs)
            for name, column, (dimensions, texts) in zip(names, drawn, parts, strict=True):
                iso = self._iso and column.type.name.startswith("timestamp")
                said = [expected(column.type.kind, text) for text in texts or ()]
                assert iso or scalars(found[name], dimensions) == said, column
                if iso or column.type.as_json:
                    assert without_quotes(found[name]) == without_quotes(theirs[name]), column

    def _selected(self, table: str) -> tuple[list[str | None], list[str | None]]:
        """Return images and keys as a snapshot reads them, with the table version of the stream."""
        snapshots = self._source.snapshots()
        (chunk,) = snapshots.plan([f"public.{table}"], 1000)
        with snapshots.reader() as reader:
            read = reader.read(chunk, snapshots.watermark())
            found = pa.Table.from_batches(read.batches).select(["after", "key"]).to_pydict()
        assert read.table == self._registry.registered[-1][0]
        return found["after"], found["key"]

    def _own(self, table: str, names: list[str], drawn: list[Column]) -> list[tuple[Any, ...]]:
        """Return for each row the server's JSON, then for each value its dimensions and texts.

        A value has one text, an array one for each element, null has None.
        """
        text = "CASE WHEN e IS DISTINCT FROM NULL THEN format('%s', e) END"
        asked = []
        for name, column in zip(names, drawn, strict=True):
            null = f"{name} IS NOT DISTINCT FROM NULL"
            dimensions = f"coalesce(array_ndims({name}), 1)" if column.is_array else "0"
            elements = f"unnest({name})" if column.is_array else f"(SELECT {name} AS e)"
            asked += [
                f"CASE WHEN {null} THEN 0 ELSE {dimensions} END",
                f"CASE WHEN {null} THEN ARRAY[NULL] ELSE (SELECT array_agg({text}) FROM {elements} AS e) END",
            ]
        rows = self._query.execute(
            f"SELECT row_to_json(t)::text, {', '.join(asked)} FROM public.{table} t ORDER BY id"
        ).fetchall()
        return [(row[0], *zip(row[1::2], row[2::2], strict=True)) for row in rows]


def _rows(batches: Any) -> Generator[dict[str, Any]]:
    try:
        for batch in batches:
            yield from batch.rows.to_pylist() if batch.rows else []
    finally:
        batches.close()


class Number(str):
    """A number as it is spelled, which equals no string."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and str(self) == str(other)

    __hash__ = str.__hash__


class Pairs:
    """An object, in which the order and equal keys count."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs) and self.pairs == other.pairs

    __hash__ = None  # type: ignore[assignment]


def parse(text: str) -> Any:
    """Parse JSON so that spelling and order count."""
    return json.loads(text, parse_float=Number, parse_int=Number, object_pairs_hook=Pairs)


def expected(kind: int, text: str | None) -> Any:
    """Return what stands in JSON for the server's text of a scalar."""
    if text is None:
        return None
    if kind == BOOLEAN:
        return text == "t"
    if kind == BYTEA:
        return Pairs([("_base64", base64.b64encode(bytes.fromhex(text[2:])).decode())])
    special = kind == FLOAT and text in {"NaN", "Infinity", "-Infinity"}
    return parse(text) if kind in {INTEGER, FLOAT, JSON} and not special else text


def scalars(value: Any, dimensions: int) -> list[Any]:
    """Return what an array of so many dimensions holds, in order."""
    if dimensions == 0:
        return [value]
    assert isinstance(value, list)
    return [scalar for part in value for scalar in scalars(part, dimensions - 1)]


def without_quotes(value: Any) -> Any:
    """Return the value with numbers as text: `to_json` writes numerics as numbers."""
    if isinstance(value, list):
        return [without_quotes(part) for part in value]
    return str(value) if isinstance(value, Number) else value


LENIENT = settings(suppress_health_check=list(HealthCheck), max_examples=examples(30))


def test_readings_agree(postgres_server: PostgresServer) -> None:
    """Tables of any types, with values of any kind: all three readings say the same."""
    with Readings(postgres_server) as readings:

        @LENIENT
        @given(columns(readings.version, ROWS))
        def compare(drawn: list[Column]) -> None:
            readings.compare(drawn)

        compare()


@pytest.mark.parametrize("version", POSTGRES_VERSIONS)
def test_every_type_of_every_version(postgres_version: PostgresVersion, version: int) -> None:
    """One table with every type, and one with an array of each, agrees on that version."""
    with Readings(postgres_version(version)) as readings:
        for is_array in (False, True):

            @settings(LENIENT, max_examples=examples(2))
            @given(st.data())
            def compare(data: st.DataObject) -> None:
                readings.compare(data.draw(columns(readings.version, ROWS, every=is_array)))  # noqa: B023

            compare()


def test_iso_timestamps_are_those_of_to_json(postgres_server: PostgresServer) -> None:
    """With timestamps in the form of ISO 8601 they are what `row_to_json` writes, and no other type differs."""
    with Readings(postgres_server, iso=True) as readings:

        @settings(LENIENT, max_examples=examples(4))
        @given(st.booleans(), st.data())
        def compare(is_array: bool, data: st.DataObject) -> None:
            readings.compare(data.draw(columns(readings.version, ROWS, every=is_array)))

        compare()


@pytest.mark.soak("properties")
def test_readings_agree_at_length(postgres_server: PostgresServer) -> None:
    """As above, with thousands of tables."""
    with Readings(postgres_server) as readings:

        @settings(LENIENT, max_examples=5_000)
        @given(columns(readings.version, ROWS))
        def compare(drawn: list[Column]) -> None:
            readings.compare(drawn)

        compare()
