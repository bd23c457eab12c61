"""What other readers see in tables that we write: the same rows and types as Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.table import StaticTable

from deltaforge_dagster.sources.value_types import (
    BINARY,
    BOOLEAN,
    DATE,
    FLOAT32,
    FLOAT64,
    GEOMETRY,
    INT8,
    INT16,
    INT32,
    INT64,
    JSON,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    ValueType,
    decimal,
    list_of,
)
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import FORMATS, Lake, Staging

pytestmark = pytest.mark.spark

TYPES: Mapping[str, ValueType] = {
    "id": INT64, "flag": BOOLEAN, "tiny": INT8, "small": INT16, "int": INT32, "real": FLOAT32, "double": FLOAT64,
    "money": decimal(12, 2), "huge": decimal(38, 10), "text": TEXT, "json": JSON, "raw": BINARY, "shape": GEOMETRY,
    "day": DATE, "local": TIMESTAMP, "moment": TIMESTAMPTZ, "list": list_of(INT32), "texts": list_of(TEXT),
}  # fmt: skip
ROW: Mapping[str, Any] = {
    "flag": True, "tiny": -128, "small": 2**15 - 1, "int": -(2**31), "real": 1.5, "double": 1e300,
    "money": Decimal("-1234567890.12"), "huge": Decimal("1234567890123456789012345678.0123456789"),
    "text": "ä€😀'\\", "json": '{"a":1.10}', "raw": b"\x00\xff", "shape": b"\x01", "day": dt.date(1, 1, 1),
    "local": dt.datetime(2024, 2, 29, 23, 59, 59, 999999), "list": [1, None, -3], "texts": ["a", None],  # noqa: DTZ001
    "moment": dt.datetime(2024, 2, 29, 23, 59, 59, 999999, dt.UTC),
}  # fmt: skip


DUCKDB_DELTA = next(
    Path(str(distribution("duckdb-ext-delta").locate_file("duckdb_ext"))).rglob(
        "*.duckdb_extension"
    )
)
"""DuckDB's extension for Delta, which the package has."""


@pytest.fixture(params=FORMATS)
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, spark_server: SparkAddress
) -> Iterator[Lake]:
    """An empty folder for tables of each format."""
    made = Lake(request.param, tmp_path, spark_server.remote)
    yield made
    made.close()


@pytest.mark.parametrize(
    "mode",
    [
        "current",
        pytest.param("changelog", marks=pytest.mark.soak("formats")),
        pytest.param("history", marks=pytest.mark.soak("formats")),
    ],
)
def test_readers_agree_about_every_type(lake: Lake, mode: str) -> None:
    """Each reader returns what Spark returns, also where rows of files are marked as deleted."""
    staging = Staging(lake, mode, TYPES)
    writer = lake.writer(mode=mode)
    rows = [dict(ROW, id=1), dict(ROW, id=2), {"id": 3}, {"id": 4}]
    writer.commit(staging.table(staging.step(*rows)), 0, lambda: None)
    changed = {"id": 2, "text": "changed", "df_absent": sorted(set(TYPES) - {"id", "text"})}
    changes = staging.step(changed, {"id": 4, "df_op": "d", "df_absent": ["text"]}, segment=1)
    writer.commit(staging.table(changes, absent=sorted(set(TYPES) - {"id"})), 1, lambda: None)
    expected = lake.rows(*TYPES)
    if mode == "current":
        whole = [ROW[name] for name in TYPES if name != "id"]
        updated = [dict(ROW, text="changed")[name] for name in TYPES if name != "id"]
        assert sorted(expected) == [(1, *whole), (2, *updated), (3, *[None] * len(whole))]
    folder = lake.folder / "lake" / "public" / "orders"
    order = f"SELECT {', '.join(TYPES)} FROM t ORDER BY df_position, df_ordinal"
    for reader, table in _readers(lake, folder, order, list(TYPES)).items():
        assert [tuple(row.values()) for row in table.to_pylist()] == expected, reader
        assert [_plain(one.type) for one in table.schema] == [
            _plain(one.type) for one in lake.arrow(*TYPES).schema
        ], reader


EXTREMES = (
    dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    dt.datetime(1582, 10, 4, 12, tzinfo=dt.UTC),
    dt.datetime(1677, 9, 21, tzinfo=dt.UTC),
    dt.datetime(2262, 4, 11, 23, 47, 16, 854776, tzinfo=dt.UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
)
"""Timestamps beyond what 64 bits of nanoseconds hold, and beyond the change of calendars."""


@pytest.mark.parametrize("pending", [False, True])
def test_readers_agree_about_the_first_and_the_last_time(lake: Lake, *, pending: bool) -> None:
    """Every reader returns the times that were written: by a merge, by an append, by compaction, and pending ones."""
    staging = Staging(lake, "current", {"id": INT32, "moment": TIMESTAMPTZ, "moments": list_of(TIMESTAMPTZ), "local": TIMESTAMP})  # fmt: skip
    writer = lake.writer(mode="current", pending=pending)
    rows = [
        {"id": number, "moment": at, "moments": [at, None], "local": at.replace(tzinfo=None)}
        for number, at in enumerate(EXTREMES)
    ]
    writer.commit(staging.table(staging.step(*rows[:2])), 0, lambda: None)
    later = staging.table(staging.step(*rows[1:], segment=1))
    if pending:
        writer.append(later, 1, lambda: None)
        writer.fold(later, 1, lambda: None, "later")
    else:
        writer.commit(later, 1, lambda: None)
    expected = [tuple(row.values()) for row in rows]
    names = ["id", "moment", "moments", "local"]
    assert lake.rows(*names) == expected
    folder = lake.folder / "lake" / "public" / "orders"
    order = "SELECT id, moment, moments, local FROM t ORDER BY df_position, df_ordinal"
    for reader, table in _readers(lake, folder, order, names).items():
        assert [tuple(row.values()) for row in table.to_pylist()] == expected, reader
    for file in lake.folder.glob("lake/**/*.parquet"):
        if "_delta_log" not in file.parts:
            columns = pq.ParquetFile(file).schema
            physical = {columns.column(at).physical_type for at in range(len(columns))}
            assert "INT96" not in physical, file


def test_readers_agree_about_a_renamed_column(lake: Lake) -> None:
    """Files from before have its values for them, too."""
    writer = lake.writer()
    first, second = (Staging(lake, "current", {"id": INT32, name: TEXT}) for name in "ab")
    before = first.table(first.step({"id": 1, "a": "x"}, {"id": 2, "a": "y"}))
    after = second.table(second.step({"id": 2, "b": "z"}, {"id": 3, "b": "n"}, segment=1))
    writer.commit(replace(before, identities={"id": "id@1", "a": "a@1"}), 0, lambda: None)
    writer.commit(replace(after, identities={"id": "id@1", "b": "a@1"}), 1, lambda: None)
    folder = lake.folder / "lake" / "public" / "orders"
    order = "SELECT id, b FROM t ORDER BY df_position, df_ordinal"
    for reader, table in _readers(lake, folder, order, ["id", "b"]).items():
        rows = [tuple(row.values()) for row in table.to_pylist()]
        assert rows == [(1, "x"), (2, "z"), (3, "n")], reader


def _readers(lake: Lake, folder: Path, order: str, names: list[str]) -> dict[str, pa.Table]:
    """Return the table as each reader of the format has it."""
    if lake.format == "iceberg":
        newest = max(
            (folder / "metadata").glob("v*.metadata.json"),
            key=lambda one: int(one.name[1:].partition(".")[0]),
        )
        found = StaticTable.from_metadata(str(newest)).scan().to_arrow()
        in_order = found.sort_by([("df_position", "ascending"), ("df_ordinal", "ascending")])
        return {"pyiceberg": in_order.select(names)}
    deltars = QueryBuilder().register("t", DeltaTable(str(folder))).execute(order)
    database = duckdb.connect(config={"allow_unsigned_extensions": True})
    try:
        # Without the path, it would be downloaded.
        database.execute(f"LOAD '{DUCKDB_DELTA}'")
        query = order.replace("FROM t", f"FROM delta_scan('{folder}')")
        ducks = database.execute(query).fetch_arrow_table()
    finally:
        database.close()
    return {"delta-rs": pa.table(deltars.read_all()), "duckdb": ducks}


def _plain(type_: pa.DataType) -> str:
    """Return the type without what readers may choose: sizes of offsets, views, names of elements."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"list<{_plain(type_.value_type)}>"
    text = str(type_).removeprefix("large_").removesuffix("_view")
    return text.replace("tz=Etc/UTC", "tz=UTC")
