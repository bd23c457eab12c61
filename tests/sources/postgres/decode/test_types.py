"""Values: what the decoder makes of them, compared with what a real server says they are."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels.json_text import (
    BOOLEAN,
    BYTEA,
    FLOAT,
    INTEGER,
    JSON,
    STRING,
    TIMESTAMP,
)
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.decode.pgoutput import SentType
from deltaforge_dagster.sources.postgres.decode.types import (
    BUILT_IN,
    ISO_TIMESTAMPS,
    CatalogType,
    PostgresValueType,
    modified_name,
    value_type,
)
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.reference import Catalog, Registry
from tests.strategies import DOMAIN, DOMAIN_ARRAY, ENUM, ENUM_ARRAY


def test_types_of_the_catalog() -> None:
    """An enum is a string, a domain what it is made of, an array an array of its elements."""
    catalog = Catalog()

    assert value_type(ENUM, catalog) == PostgresValueType("mood", STRING)
    assert value_type(DOMAIN, catalog) == PostgresValueType("positive", INTEGER)
    assert value_type(ENUM_ARRAY, catalog) == PostgresValueType("mood[]", STRING, ",")
    assert value_type(DOMAIN_ARRAY, catalog) == PostgresValueType("positive[]", INTEGER, ",")
    assert value_type(1020, catalog) == PostgresValueType("box[]", STRING, ";")
    with pytest.raises(UnsupportedEvent):
        value_type(77_777, catalog)


def test_types_that_were_dropped_are_known_by_their_names() -> None:
    """A domain by what it was made of, any other but arrays, of whose elements nothing is known."""
    catalog = Catalog()

    def gone(schema: str, name: str) -> PostgresValueType:
        return value_type(77_777, catalog, SentType(77_777, schema, name))

    assert gone("pg_catalog", "int4") == PostgresValueType("integer", INTEGER)
    assert gone("pg_catalog", "_text") == PostgresValueType("text[]", STRING, ",")
    assert gone("shop", "mood") == PostgresValueType("shop.mood", STRING)
    for schema in ("shop", "pg_catalog"):
        with pytest.raises(UnsupportedEvent, match=rf"{schema}\._mood \(77777\).*an array"):
            gone(schema, "_mood")


def test_domains_are_what_they_are_made_of() -> None:
    """Through domains of domains, over arrays, and in arrays; an array in an array stays text."""
    types = {
        1: CatalogType("small", "d", 0, base=23),
        2: CatalogType("smaller", "d", 0, base=1),
        3: CatalogType("grid", "d", 0, base=1007),
        4: CatalogType("smaller[]", "b", 2),
        5: CatalogType("grid[]", "b", 3),
        6: CatalogType("blob", "d", 0, base=17),
    }

    class Types(Catalog):
        def type(self, oid: int) -> CatalogType | None:
            return types.get(oid)

    assert {oid: value_type(oid, Types()) for oid in types} == {
        1: PostgresValueType("small", INTEGER),
        2: PostgresValueType("smaller", INTEGER),
        3: PostgresValueType("grid", INTEGER, ","),
        4: PostgresValueType("smaller[]", INTEGER, ","),
        5: PostgresValueType("grid[]", STRING, ","),
        6: PostgresValueType("blob", BYTEA),
    }


def test_timestamps_have_a_form_of_their_own_where_it_is_asked_for() -> None:
    """Of both types, through domains and in arrays, also of types that are gone; nothing else has it."""
    types = {1: CatalogType("moment", "d", 0, base=1184), 2: CatalogType("moment[]", "b", 1)}

    class Types(Catalog):
        def type(self, oid: int) -> CatalogType | None:
            return types.get(oid)

        def system_type(self, name: str) -> int | None:
            return 1114 if name == "timestamp" else None

    def of(oid: int) -> tuple[int, str]:
        gone = SentType(oid, "pg_catalog", "timestamp")
        found = value_type(oid, Types(), gone, ISO_TIMESTAMPS)
        return found.kind, found.delimiter

    for oid in (1114, 1184, 1, 77_777):
        assert of(oid) == (TIMESTAMP, "")
    for oid in (1115, 1185, 2):
        assert of(oid) == (TIMESTAMP, ",")
    changed = {oid for oid, known in BUILT_IN.items() if ISO_TIMESTAMPS[oid] != known}
    assert changed == {1114, 1115, 1184, 1185}
    assert TIMESTAMP not in {known.kind for known in BUILT_IN.values()}


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with tables, of which this module makes its own."""
    with PostgresBench(postgres_dsn) as made:
        yield made


@pytest.mark.postgres
def test_built_in_types_are_the_server_s(postgres_dsn: str) -> None:
    """Every built-in type has its OID, name, element and delimiter on a real server."""
    with psycopg.connect(postgres_dsn) as connection:
        found = connection.execute(
            """
            SELECT t.oid::int8, format_type(t.oid, NULL),
                   CASE WHEN e.typarray = t.oid THEN e.oid::int8 END, e.typdelim::text
              FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem
             WHERE t.oid = ANY(%s)
            """,
            (list(BUILT_IN),),
        ).fetchall()

    assert {oid for oid, *_ in found} >= {oid for oid in BUILT_IN if oid < 4400 or oid == 5069}
    for oid, name, element, delimiter in found:
        assert BUILT_IN[oid].name == name
        assert BUILT_IN[oid].delimiter == (delimiter if element else "")
        if element is not None:
            assert BUILT_IN[oid].kind == BUILT_IN[element].kind


MODIFIED = [
    "numeric", "numeric(10,2)", "numeric(5)", "numeric(3,1)[]", "varchar(64)", "char(3)", "bit(4)",
    "varbit(9)[]", "timestamp(3)", "timestamptz(0)", "time(6)", "timetz(2)", "text", "int[]",
]  # fmt: skip


@pytest.mark.postgres
def test_modifiers_are_shown_as_the_server_does(postgres_dsn: str) -> None:
    """Lengths and precisions read as `format_type` writes them."""
    with psycopg.connect(postgres_dsn) as connection:
        columns = ", ".join(f"c{number} {name}" for number, name in enumerate(MODIFIED))
        connection.execute(f"CREATE TABLE t ({columns})")
        found = connection.execute(
            """
            SELECT atttypid::int8, atttypmod, format_type(atttypid, atttypmod)
              FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0
            """
        ).fetchall()

    for oid, modifier, name in found:
        assert modified_name(BUILT_IN[oid].name, oid, modifier) == name


# Column type -> values as SQL literals.
ZOO: dict[str, tuple[str, ...]] = {
    "bool": ("true", "false"),
    "int2": ("-32768", "32767"),
    "int4": ("-2147483648", "0"),
    "int8": ("-9223372036854775808", "9223372036854775807"),
    "oid": ("4294967295", "0"),
    "float4": ("'1e20'", "'NaN'", "1.1", "'-0'"),
    "float8": ("'Infinity'", "'-Infinity'", "1e-7", "0.1", "123456789012345680"),
    "numeric": ("99.90", "'NaN'", "12345678901234567890123456789012345678901", "-0.00001"),
    "numeric(10,2)": ("1.1",),
    "money": ("'12.34'",),
    "text": ("''", "E'tab\\t\"quote\" \\\\ \\x01 ü 🦆'", "'NULL'"),
    "varchar(10)": ("'abc'",),
    "char(5)": ("'ab'",),
    '"char"': ("'x'",),
    "name": ("'n'",),
    "bytea": ("'\\x'", "'\\x00ff10'", "'abc\"'"),
    "uuid": ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",),
    "date": ("'2026-03-01'", "'infinity'", "'0044-03-15 BC'"),
    "time": ("'12:34:56.789'",),
    "timetz": ("'12:34:56+02'",),
    "timestamp": ("'2026-03-01 12:34:56.789'", "'-infinity'"),
    "timestamptz": ("'2026-03-01 12:34:56+02'",),
    "interval": ("'1 year 2 days 03:04:05'", "'-1 day'"),
    "json": ("'{\"b\" : 1,\n \"a\":[1.10, \"\\u0000x\"], \"a\": null}'", "'1'"),
    "jsonb": ("'{\"b\": 1, \"a\": [1.10, true, null, \"ü\"]}'", "'[]'"),
    "xml": ("'<a b=\"c\"/>'",),
    "inet": ("'10.0.0.1/8'",),
    "cidr": ("'10.0.0.0/8'",),
    "macaddr": ("'08:00:2b:01:02:03'",),
    "bit(3)": ("B'101'",),
    "point": ("'(1,2)'",),
    "box": ("'(1,2),(3,4)'",),
    "int4range": ("'[1,5)'", "'empty'"),
    "tsvector": ("'a fat cat'",),
    "pg_lsn": ("'16/B374D848'",),
    "mood": ("'sad'", "'it''s \"ok\", {so}'"),
    "positive": ("42",),
    "pair": ("ROW(1, 'a \"b\"')",),
    "bool[]": ("'{t,f,NULL}'",),
    "int4[]": ("'{}'", "'{1,NULL,-3}'", "'{{1,2},{3,4}}'", "'[0:1]={1,2}'"),
    "int8[]": ("'{9223372036854775807}'",),
    "float8[]": ("'{1.5,NaN,-Infinity,1e+100}'",),
    "numeric[]": ("'{1.10,NULL}'",),
    "text[]": ("ARRAY['a', '', 'NULL', NULL, 'with \"quotes\"', 'back\\slash', '{x,y}', 'ü 🦆']",),
    "varchar(9)[]": ("ARRAY['42', 'null', 'true']",),
    "bytea[]": ("ARRAY['\\x00ff'::bytea, '']",),
    "uuid[]": ("'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'",),
    "timestamptz[]": ("ARRAY['2026-03-01 12:34:56+02'::timestamptz]",),
    "jsonb[]": ("ARRAY['{\"a\": \"x\\\\ny\"}'::jsonb, '1', NULL]",),
    "json[]": ("ARRAY['{\"a\" : 1.10}'::json]",),
    "mood[]": ("ARRAY['sad', 'it''s \"ok\", {so}']::mood[]",),
    "positive[]": ("ARRAY[1, 2]::positive[]",),
    "box[]": ("ARRAY['(1,2),(3,4)'::box, NULL]",),
    "pair[]": ("ARRAY[ROW(1, 'a,b')::pair]",),
    "int4range[]": ("ARRAY['[1,5)'::int4range]",),
}  # fmt: skip
KINDS = {
    "bool": BOOLEAN, "int2": INTEGER, "int4": INTEGER, "int8": INTEGER, "oid": INTEGER,
    "float4": FLOAT, "float8": FLOAT, "json": JSON, "jsonb": JSON, "bytea": BYTEA,
    "positive": INTEGER,
}  # fmt: skip


def exact(text: str) -> Any:
    """Parse JSON so that digits, equal keys and their order count, and numbers are no strings."""
    number = "number".__add__
    return json.loads(text, parse_float=number, parse_int=number, object_pairs_hook=list)


def expected(kind: int, text: Any) -> Any:
    """Return what `exact` should find for a text, or nested texts, that SELECT returned."""
    if text is None:
        return None
    if isinstance(text, list):
        return [expected(kind, element) for element in text]
    if kind == BOOLEAN:
        return text in {"t", "true"}
    if kind == BYTEA:
        return [("_base64", base64.b64encode(bytes.fromhex(text[2:])).decode())]
    special = kind == FLOAT and text in {"NaN", "Infinity", "-Infinity"}
    return exact(text) if kind in {INTEGER, FLOAT, JSON} and not special else text


@pytest.mark.postgres
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_values_are_those_of_select(bench: PostgresBench, identity: str) -> None:
    """Each common type, through a real log, is in JSON what SELECT says it is."""
    columns = [f"c{number}" for number in range(len(ZOO))]
    bench.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'it''s \"ok\", {so}')",
        "CREATE DOMAIN positive AS int CHECK (value > 0)",
        "CREATE TYPE pair AS (n int, t text)",
        f"CREATE TABLE zoo (id int PRIMARY KEY, {', '.join(map(' '.join, zip(columns, ZOO, strict=True)))})",
        f"ALTER TABLE zoo REPLICA IDENTITY {identity}",
    )
    source = bench.source(tables=("public.zoo",))
    start = source.ensure_start()
    rows = max(map(len, ZOO.values())) + 1  # the last one is null but for its id
    for row in range(rows):
        values = ", ".join(v[row] if row < len(v) else "NULL" for v in ZOO.values())
        bench.execute(f"INSERT INTO zoo VALUES ({row}, {values})")
    images = selected(bench, columns)
    bench.execute("UPDATE zoo SET id = id + 100")
    bench.execute("DELETE FROM zoo")
    captured: list[dict[str, Any]] = []
    for batch in source.read(start, ReadLimits(), Registry()):
        captured += batch.rows.to_pylist() if batch.rows else []
        if len(captured) >= 3 * rows:
            break

    inserted, updated, deleted = (captured[at : at + rows] for at in range(0, 3 * rows, rows))
    for row in range(rows):
        old, new = ([("id", f"number{number}"), *images[row]] for number in (row, row + 100))
        null = [(column, None) for column in columns]
        full = identity == "FULL"
        old_image = old if full else [old[0], *null]
        new_image = new if full else [new[0], *null]
        assert exact(inserted[row]["after"]) == old
        assert exact(updated[row]["before"]) == old_image
        assert exact(updated[row]["after"]) == new
        assert exact(deleted[row]["before"]) == new_image
        keys = [changes[row]["key"] for changes in (inserted, updated, deleted)]
        assert keys == [f'{{"id":{row}}}', *[f'{{"id":{row + 100}}}'] * 2]


def selected(bench: PostgresBench, columns: list[str]) -> list[list[tuple[str, Any]]]:
    """Return the table's rows as SELECT sees them, in the form of `exact`."""
    asked = ", ".join(
        f"{column}::text[]" if name.endswith("]") else f"format('%s', {column})"
        for column, name in zip(columns, ZOO, strict=True)
    )
    nulls = ", ".join(f"{column} IS NULL" for column in columns)
    bench.connection.execute("SET timezone = 'UTC'")
    found = bench.connection.execute(
        f"SELECT ARRAY[{nulls}], {asked} FROM zoo ORDER BY id"
    ).fetchall()
    kinds = [KINDS.get(name.removesuffix("[]"), STRING) for name in ZOO]
    return [
        [
            (column, None if null else expected(kind, text))
            for column, kind, null, text in zip(columns, kinds, nulls, texts, strict=True)
        ]
        for nulls, *texts in found
    ]
