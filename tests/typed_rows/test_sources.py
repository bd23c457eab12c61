"""Typed rows of what the decoders of each source write: random types, values and changes."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.engine import Engine, ValueOptions
from deltaforge_dagster.sources.base import ChangeBatch
from deltaforge_dagster.sources.mysql.values.types import ValueForms
from deltaforge_dagster.sources.postgres.decode.pgoutput import xlog
from deltaforge_dagster.sources.postgres.decode.types import ISO_TIMESTAMPS
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.sources.turso.decode.values import row_image
from deltaforge_dagster.sources.turso.schema.definitions import definition
from deltaforge_dagster.tables import TableSchema
from deltaforge_dagster.typed_rows.rows import typed_rows
from deltaforge_dagster.typed_rows.schema import TargetTypes, TypedSchema, typed_schema
from deltaforge_dagster.typed_rows.tables import VersionName, typed_tables
from deltaforge_lab.synthetic import postgres_messages
from deltaforge_lab.synthetic.mysql_events import SyntheticLog, bitmap, description, packed
from deltaforge_lab.synthetic.postgres_messages import Cell
from tests.chance import examples
from tests.sources.mysql import reference as mysql_reference
from tests.sources.mysql import strategies as mysql
from tests.sources.mysql.decode import test_decoder as mysql_decoder
from tests.sources.postgres import reference as postgres_reference
from tests.sources.postgres.decode import test_decoder as postgres_decoder
from tests.strategies import ARRAYS, SCALARS, array_element
from tests.strategies import streams as postgres_streams
from tests.typed_rows.forms import agree
from tests.typed_rows.json_forms import JsonForms

_TARGETS = st.sampled_from(
    [TargetTypes(), TargetTypes(unsigned=False, time=False, uuid=False, not_finite=False)]
)


def check(
    batches: Iterable[ChangeBatch],
    versions: Mapping[str, TableSchema],
    kind: str,
    target: TargetTypes,
    options: ValueOptions,
    *,
    forms: JsonForms | None = None,
) -> int:
    """Compare the typed rows of decoded changes with their images; return how many there were.

    Without `forms` values may have forms that the server does not send.
    """
    written = None if forms is None else forms.text

    def schema_of(version: VersionName) -> TypedSchema:
        table = versions.get(
            version.schema_version or "", TableSchema(version.db, None, version.table, (), ())
        )
        return typed_schema(table, source_types()[kind], Engine(values=options), target=target)

    count = 0
    for batch in batches:
        if batch.rows is None:
            continue
        changes = batch.rows.to_pylist()
        seen = []
        for table in typed_tables(batch.rows, schema_of):
            of_table = [changes[place] for place in table.places]
            assert {(one["table"], one["schema_version"]) for one in of_table} == {
                (table.version.table, table.version.schema_version)
            }
            if table.version.schema != "__wal_message":  # may be no object
                images = [one["after"] or one["before"] or one["key"] for one in of_table]
                agree(images, table.rows, written)
            seen += table.places.tolist()
        rows = [n for n, one in enumerate(changes) if one["after"] or one["before"] or one["key"]]
        assert sorted(seen) == rows
        count += len(seen)
    return count


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(60))
@given(postgres_streams(), _TARGETS)
def test_changes_of_postgresql(stream: bytes, target: TargetTypes) -> None:
    """Inserts, updates, deletes, unchanged and absent values of any PostgreSQL stream are what their images say."""
    registry = postgres_reference.Registry()
    batches, error = postgres_decoder.decode(stream, registry=registry)
    assert error is None
    versions = _versions(table for table, _ in registry.registered)
    check(batches, versions, "postgres", target, ValueOptions())


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(60))
@given(mysql.streams(), _TARGETS)
def test_changes_of_mysql(made: mysql.Made, target: TargetTypes) -> None:
    """Changes of any MySQL log, with all columns or some, are what their images say."""
    registry = mysql_reference.Registry()
    batches, error = mysql_decoder.decode(
        made.stream, registry=registry, captures=lambda db, _table: db == "shop"
    )
    assert error is None
    versions = _versions(table for table, _ in registry.registered)
    check(batches, versions, "mysql", target, ValueOptions(), forms=JsonForms("mysql"))


def _versions(registered: Iterable[TableSchema]) -> dict[str, TableSchema]:
    """Return table versions by the fingerprints that the registries of the references give them."""
    return {f"sha256:{n}": table for n, table in enumerate(dict.fromkeys(registered), 1)}


_DAYS = st.dates().map(str) | st.sampled_from(
    [
        "infinity",
        "-infinity",
        "0044-03-15 BC",
        "10000-01-01",
        "0001-01-01",
        "9999-12-31",
        "2024-02-29",
    ]
)
_CLOCKS = st.times().map(lambda at: _trimmed(str(at))) | st.sampled_from(
    ["24:00:00", "00:00:00", "23:59:59.999999"]
)
_FLOATS = st.floats(width=32).map(
    lambda value: (
        str(np.float32(value)).removesuffix(".0").replace("nan", "NaN").replace("inf", "Infinity")
    )
)


def _trimmed(text: str) -> str:
    """Return a time as the server prints it, without zeros at the end of its fraction."""
    return re.sub(r"(\.\d*[1-9])0+", r"\1", text)


_LOCAL = SCALARS[1114].map(_trimmed)
_ZONED = SCALARS[1184].filter(lambda text: not text.endswith((":45", ":15"))).map(_trimmed)
"""As a session in UTC shows moments."""
_SCALARS = {**SCALARS, 1114: _LOCAL, 1184: _ZONED}


def _numeric(precision: int, scale: int) -> tuple[int, int, st.SearchStrategy[str]]:
    """Return a column `numeric(precision, scale)` with values as the server prints them."""
    most = 10**precision - 1
    numbers = st.integers(-most, most) | st.sampled_from([0, most, -most])
    shown = numbers.map(lambda number: f"{number}E{-scale}").map(_plain)
    return 1700, ((precision << 16) | (scale & 0x7FF)) + 4, shown | st.just("NaN")


def _plain(number: str) -> str:
    with localcontext(prec=2000):
        exact = Decimal(number)
        return f"{exact.quantize(Decimal(1)) if exact.as_tuple().exponent > 0 else exact:f}"  # type: ignore[operator] # finite


_POSTGRES = st.one_of(
    st.sampled_from(sorted(_SCALARS)).map(lambda oid: (oid, -1, _SCALARS[oid])),
    st.sampled_from(
        [
            (23, -1, st.integers(-(2**31), 2**31 - 1).map(str)),
            (700, -1, _FLOATS),
            (1082, -1, _DAYS),
            (1083, -1, _CLOCKS),
            (1083, 3, st.times().map(lambda at: _trimmed(f"{at.replace(microsecond=120_000)}"))),
            (1266, -1, _CLOCKS.map("{}+02".format)),
            (1114, 3, _LOCAL),
            (1184, 0, _ZONED),
            (790, -1, st.just("-$1,234.56")),
            (1043, 13, st.just("größe")),
            (1560, 4, st.just("101")),
            (3904, -1, st.just("[1,5)")),
        ]
    ),
    st.builds(_numeric, st.integers(1, 60), st.integers(-5, 60)),
)
_LISTS = {
    **ARRAYS,
    1115: _LOCAL,
    1185: _ZONED,
    1182: _DAYS,
    1183: _CLOCKS,
    1021: _FLOATS,
    2951: SCALARS[2950],
}


@st.composite
def _postgres_columns(draw: st.DrawFn) -> list[tuple[int, int, list[Cell]]]:
    """Return columns of any types, each with three values."""
    columns: list[tuple[int, int, list[Cell]]] = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            oid, modifier, texts = draw(_POSTGRES)
        else:
            oid, modifier = draw(st.sampled_from(sorted(_LISTS))), -1
            elements = st.lists(st.none() | _LISTS[oid], max_size=4)
            texts = elements.map(lambda some: "{" + ",".join(map(array_element, some)) + "}")
        columns.append((oid, modifier, [draw(st.none() | texts.map(str.encode)) for _ in range(3)]))
    return columns


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(100))
@given(_postgres_columns(), st.booleans(), _TARGETS)
@example(
    [
        (
            1700,
            ((38 << 16) | 10) + 4,
            [b"-1234567890123456789012345678.0123456789", b"0.0000000000", None],
        )
    ],
    False,
    TargetTypes(),
)
def test_types_of_postgresql(
    columns: list[tuple[int, int, list[Cell]]],
    iso: bool,
    target: TargetTypes,
) -> None:
    """Values of every type, as the server prints them, arrive exactly and give the same JSON again, or are reported."""
    described = [(f"c{n}", oid, modifier, False) for n, (oid, modifier, _) in enumerate(columns)]
    stream = xlog(1000, postgres_messages.begin(2000, 0, 7))
    stream += xlog(0, postgres_messages.relation(16_400, "public", "t", described))
    for row in range(3):
        cells = [values[row] for _, _, values in columns]
        stream += xlog(1008 + row, postgres_messages.insert(16_400, cells))
    stream += xlog(2008, postgres_messages.commit(2000, 2008, 0))
    registry = postgres_reference.Registry()
    changed: dict[str, Any] = {"built_in": ISO_TIMESTAMPS} if iso else {}
    batches, error = postgres_decoder.decode(stream, registry=registry, **changed)
    assert error is None
    versions = _versions(table for table, _ in registry.registered)
    forms = JsonForms("postgres", iso)
    assert check(batches, versions, "postgres", target, ValueOptions(), forms=forms) == 3


@st.composite
def _mysql_columns(draw: st.DrawFn) -> list[tuple[Any, list[bytes | None]]]:
    """Return columns of any types, each with three values."""
    drawn = draw(st.lists(mysql.columns, min_size=1, max_size=6))
    return [(column, [draw(st.none() | values) for _ in range(3)]) for column, values in drawn]


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(100))
@given(_mysql_columns(), st.booleans(), _TARGETS)
def test_types_of_mysql(
    columns: list[tuple[Any, list[bytes | None]]],
    other_forms: bool,
    target: TargetTypes,
) -> None:
    """Values of every type, as they stand in the log and in every form, arrive exactly and give the same JSON again, or are reported."""
    fields = [replace(column, name=f"c{n}") for n, (column, _) in enumerate(columns)]
    log = SyntheticLog().start().begin(1).table(108, description("shop", "t", fields, ()))
    content = packed(len(fields)) + bitmap([True] * len(fields))
    for row in range(3):
        values = [column[row] for _, column in columns]
        content += bitmap([value is None for value in values])
        content += b"".join(value for value in values if value is not None)
    log.rows(30, 108, content, extra=b"").commit()
    registry = mysql_reference.Registry()
    changed: dict[str, Any] = {}
    options = ValueOptions()
    if other_forms:
        changed["forms"] = ValueForms(
            enum_index=True, set_bits=True, timestamp_micros=True, binary_text=True
        )
        options = ValueOptions(
            mysql_enum="index", mysql_set="bits", mysql_timestamp="micros", mysql_binary="text"
        )
    batches, error = mysql_decoder.decode(log.stream(), registry=registry, **changed)
    assert error is None
    versions = _versions(table for table, _ in registry.registered)
    assert check(batches, versions, "mysql", target, options, forms=JsonForms("mysql")) == 3


_SQLITE_TYPES = (
    "", "INTEGER", "INT", "BIGINT UNSIGNED", "REAL", "DOUBLE PRECISION", "FLOAT", "TEXT", "VARCHAR(9)", "BLOB",
    "DECIMAL(10,2)", "NUMERIC", "BOOLEAN", "DATE", "DATETIME", "ANY", "JSON",
)  # fmt: skip
_SQLITE_VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    | st.binary(max_size=9)
)


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from(_SQLITE_TYPES), st.lists(_SQLITE_VALUES, min_size=3, max_size=3)),
        min_size=1,
        max_size=6,
    ),
    _TARGETS,
)
def test_types_of_turso(columns: list[tuple[str, list[Any]]], target: TargetTypes) -> None:
    """Values of any SQLite type in columns of any declared type arrive exactly and give the same JSON again, or are reported."""
    declared = ", ".join(f"c{n} {type_}" for n, (type_, _) in enumerate(columns))
    statement = f"CREATE TABLE t ({declared})"
    table = definition(statement)
    with closing(sqlite3.connect(":memory:")) as memory:  # converts values by the columns' affinity
        memory.execute(statement)
        places = ", ".join("?" * len(columns))
        rows_in = [[values[row] for _, values in columns] for row in range(3)]
        memory.executemany(f"INSERT INTO t VALUES ({places})", rows_in)
        stored = memory.execute("SELECT * FROM t").fetchall()
    images = [row_image(table.row(list(row))) for row in stored]
    schema = typed_schema(table.table, source_types()["turso"], Engine(), target=target)

    rows = typed_rows(pa.array(images, pa.string()), schema)

    agree(list(images), rows, JsonForms("turso").text)
    by_affinity = {"INTEGER": "int64", "REAL": "float64", "TEXT": "text", "BLOB": "binary"}
    for column, (type_, _) in zip(rows.schema.columns, columns, strict=True):
        if type_ in by_affinity:
            assert column.type.name == by_affinity[type_]
