"""Values that come back from ClickHouse as they were staged."""

# ruff: noqa: DTZ001 - timestamps without a zone are such values

from __future__ import annotations

import datetime as dt
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import clickhouse_connect
import pytest
from clickhouse_connect.driver.client import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sources.value_types import INT64, ValueType, parse_value_type
from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.sinks.clickhouse.tables import World

pytestmark = pytest.mark.clickhouse

_FIRST, _LAST = dt.date(1900, 1, 1), dt.date(2299, 12, 31)
_MOMENTS = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2299, 12, 31, 23, 59, 59, 999_999))
_TEXTS = st.text(st.characters(codec="utf-8"))


def _digits(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    return st.integers(-most, most).map(lambda number: Decimal(f"{number}E-{scale}"))


VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    **{
        f"int{bits}": st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)
    },
    **{f"uint{bits}": st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
    "float32": st.floats(width=32),
    "float64": st.floats(),
    "decimal(5,2)": _digits(5, 2),
    "decimal(18,0)": _digits(18, 0),
    "decimal(38,19)": _digits(38, 19),
    "text": _TEXTS,
    "json": _TEXTS,
    "binary": st.binary(),
    "uuid": st.uuids(),
    "date": st.dates(_FIRST, _LAST),
    "timestamp": _MOMENTS,
    "timestamptz": _MOMENTS.map(lambda one: one.replace(tzinfo=dt.UTC)),
    "list<int32>": st.lists(st.none() | st.integers(-(1 << 31), (1 << 31) - 1)),
    "list<text>": st.lists(st.none() | _TEXTS),
    "list<uuid>": st.lists(st.none() | st.uuids()),
    "list<list<decimal(10,2)>>": st.lists(st.lists(st.none() | _digits(10, 2))),
    "list<timestamp>": st.lists(st.none() | _MOMENTS),
}
TYPES: Mapping[str, ValueType] = {name: parse_value_type(name) for name in VALUES}
ROWS = st.lists(
    st.fixed_dictionaries(
        {name: one if name.startswith("list") else st.none() | one for name, one in VALUES.items()}
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def reader(clickhouse_server: ClickhouseServer) -> Iterator[Client]:
    """A client of ClickHouse's own."""
    server = clickhouse_server
    client = clickhouse_connect.get_client(
        host="127.0.0.1",
        port=server.port,
        username=server.user,
        password=server.password,
        autogenerate_session_id=False,
    )
    yield client
    client.close()


def _plain(value: Any) -> Any:
    """Return a value that can be compared: no NaN, bytes in place of texts that are none, moments without a zone."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None)
    return value


def _staged(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    def stored(value: Any) -> Any:
        if isinstance(value, list):
            return [stored(one) for one in value]
        return value.bytes if isinstance(value, uuid.UUID) else value

    return {"id": number} | {f"c{at}": stored(row[name]) for at, name in enumerate(TYPES)}


@settings(
    max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(rows=ROWS)
@pytest.mark.parametrize(
    "mode", ["current", pytest.param("changelog", marks=pytest.mark.soak("formats"))]
)
def test_values_come_back(  # noqa: PLR0917 - pytest names them
    clickhouse_server: ClickhouseServer,
    clickhouse_database: str,
    tmp_path: Path,
    reader: Client,
    mode: str,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Values of each type, and null: ClickHouse's own client reads what was staged."""
    clickhouse_server.query(f"DROP TABLE IF EXISTS {clickhouse_database}.orders")
    types = {"id": INT64} | {f"c{at}": type_ for at, type_ in enumerate(TYPES.values())}
    world = World(clickhouse_server, clickhouse_database, tmp_path, mode, types)
    world.commit(world.step(*(_staged(row, number) for number, row in enumerate(rows))))
    texts = [f"c{at}" for at, name in enumerate(TYPES) if name == "binary"]
    found = reader.query(
        f"SELECT * FROM {clickhouse_database}.orders ORDER BY id",
        column_formats=dict.fromkeys(texts, "bytes"),
    )
    columns = [found.column_names.index(f"c{at}") for at in range(len(TYPES))]
    read = [[_plain(row[at]) for at in columns] for row in found.result_rows]
    assert read == [[_plain(row[name]) for name in TYPES] for row in rows]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("date", dt.date(1899, 12, 31)),
        ("date", dt.date(2300, 1, 1)),
        ("timestamp", dt.datetime(1899, 12, 31, 23, 59, 59, 999_999)),
        ("timestamptz", dt.datetime(2300, 1, 1, tzinfo=dt.UTC)),
        ("list<date>", [None, dt.date(1800, 1, 1)]),
    ],
)
def test_dates_that_clickhouse_does_not_have(
    clickhouse_server: ClickhouseServer,
    tmp_path: Path,
    clickhouse_database: str,
    type_: str,
    value: object,
) -> None:
    """Nothing is written, and the error names the column and no value."""
    types = {"id": INT64, "day": parse_value_type(type_)}
    world = World(clickhouse_server, clickhouse_database, tmp_path, types=types)
    with pytest.raises(
        TableRejected, match="a value of column day is outside of 1900-01-01 to 2299-12-31"
    ) as failed:
        world.commit(world.step({"id": 1, "day": value}))
    assert "1899" not in str(failed.value)
    assert world.rows("id") == []


def test_an_array_that_is_null(
    clickhouse_server: ClickhouseServer, tmp_path: Path, clickhouse_database: str
) -> None:
    """ClickHouse has no such arrays; rows that lack the value, and deletes, need none."""
    types = {"id": INT64, "tags": parse_value_type("list<text>")}
    world = World(clickhouse_server, clickhouse_database, tmp_path, types=types)
    world.commit(world.step({"id": 1, "tags": ["a"]}, {"id": 2, "df_op": "d"}))
    world.commit(world.step({"id": 1, "df_absent": ["tags"]}, segment=1), absent=["tags"])
    assert world.rows("id", "tags") == [(1, ["a"])]
    with pytest.raises(
        TableRejected, match="a value of column tags is null, which arrays in ClickHouse cannot be"
    ):
        world.commit(world.step({"id": 1}, segment=2))
