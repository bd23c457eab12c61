from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.engine import Engine
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.rows.hiding import HiddenTable
from deltaforge_dagster.sources.value_types import ValueType, decimal, list_of, parse_value_type
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.schema import (
    SOURCE_TYPE,
    TargetTypes,
    arrow_type,
    fitted,
    typed_schema,
)
from deltaforge_dagster.typed_rows.tables import typed_rows
from tests.sources.hidden import SALT, base64_of

MYSQL = source_types()["mysql"]


def table(**columns: str) -> TableSchema:
    """Return the table `shop.users`."""
    described = (Column(name, type_, None, True, n) for n, (name, type_) in enumerate(columns.items(), 1))  # fmt: skip
    return TableSchema("shop", None, "users", tuple(described), ("id",))


def test_columns_of_a_version() -> None:
    """The columns are the table's, in its order, with the types of the source; each may be null."""
    found = typed_schema(table(id="bigint unsigned", amount="decimal(10,2)", big="decimal(39,2)"), MYSQL, Engine())  # fmt: skip

    types = [("id", pa.uint64()), ("amount", pa.decimal128(10, 2)), ("big", pa.string())]
    assert [(field.name, field.type) for field in found.arrow] == types
    assert found.arrow.field("amount").metadata == {SOURCE_TYPE: b"decimal(10,2)"}
    assert all(field.nullable for field in found.arrow)


def test_declared_types_come_first() -> None:
    """A type of the file is used instead of the source's, and declared fields that are no columns stand at the end."""
    declared = {name: parse_value_type(type_) for name, type_ in {"added": "int32", "at": "text"}.items()}  # fmt: skip
    found = typed_schema(table(id="int", at="time"), MYSQL, Engine(), declared)

    assert [(one.name, one.type.name, one.source_type) for one in found.columns] == [
        ("id", "int32", "int"),
        ("at", "text", "time"),
        ("added", "int32", None),
    ]
    assert found.arrow.field("added").metadata is None


def test_types_describe_rows_as_delivered() -> None:
    """What column rules hash, mask, exclude or truncate has a type that its values fit."""
    whole = table(id="int", mail="varchar(9)", card="int", gone="int", day="date", note="varchar(90)", data="blob")  # fmt: skip
    options: dict[str, Any] = {
        "exclude": ("users.gone",),
        "mask": {"users.card": "****"},
        "hash": {"columns": ("users.id", "users.mail"), "salt": SALT},
        "truncate": {"users.day": 7, "users.note": 3, "users.data": 1},
    }
    engine = Engine(columns=ColumnOptions(**options))
    hidden = HiddenTable(ColumnRules(engine.columns), whole)
    image = '{"id":1,"mail":"a@b","card":5,"gone":6,"day":"2026-03-01","note":"abcdef","data":{"_base64":"AP8Q"}}'  # fmt: skip

    found = typed_schema(hidden.visible, MYSQL, engine)

    assert [(one.name, one.type.name) for one in found.columns] == [
        ("id", "text"), ("mail", "text"), ("card", "text"), ("day", "text"), ("note", "text"), ("data", "binary"),
    ]  # fmt: skip
    rows = typed_rows(hidden.column(pa.array([image])), found)  # type: ignore[arg-type]
    (row,) = rows.batch.to_pylist()
    assert rows.misfits == ()
    assert (len(row["id"]), row["card"], row["day"]) == (64, "****", "2026-03")
    assert (row["note"], row["data"]) == ("abc", b"\0")


@pytest.mark.parametrize(
    ("type_", "replaced"),
    [
        ("uint8", "int16"),
        ("uint16", "int32"),
        ("uint32", "int64"),
        ("uint64", "decimal(20,0)"),
        ("int64", "int64"),
        ("time", "text"),
        ("uuid", "text"),
        ("list<uint64>", "list<decimal(20,0)>"),
        ("timestamptz", "timestamptz"),
    ],
)
def test_what_a_destination_lacks(type_: str, replaced: str) -> None:
    """A type that a destination does not have is replaced by one that holds the same values."""
    lacking = TargetTypes(unsigned=False, time=False, uuid=False, not_finite=False)

    assert fitted(parse_value_type(type_), lacking).name == replaced
    assert fitted(parse_value_type(type_), TargetTypes()).name == type_


def test_floats_without_nan() -> None:
    """Where a destination has no NaN, it does not fit."""
    lacking = TargetTypes(not_finite=False)
    found = typed_schema(table(id="double"), MYSQL, Engine(), target=lacking)
    rows = typed_rows(pa.array(['{"id":"NaN"}', '{"id":1.5}']), found)

    assert rows.batch.column("id").to_pylist() == [None, 1.5]
    assert [one.row for one in rows.misfits] == [0]


@pytest.mark.parametrize(
    ("type_", "arrow"),
    [
        (parse_value_type("timestamp"), pa.timestamp("us")),
        (parse_value_type("timestamptz"), pa.timestamp("us", "UTC")),
        (parse_value_type("time"), pa.time64("us")),
        (parse_value_type("date"), pa.date32()),
        (parse_value_type("uuid"), pa.uuid()),
        (decimal(38, 10), pa.decimal128(38, 10)),
        (list_of(ValueType("float", 32)), pa.list_(pa.float32())),
    ],
)
def test_types_of_arrow(type_: ValueType, arrow: pa.DataType) -> None:
    """Times are microseconds, UUIDs are Arrow's, and lists have their elements' types."""
    assert arrow_type(type_) == arrow


def test_forms_of_mysql() -> None:
    """A TIMESTAMP may be a number, BINARY a string, and a geometry has its SRID in front, as the file asks for."""
    columns = table(
        at="timestamp(6)", zero="timestamp", bytes="binary(2)", data="blob", place="point"
    )
    wkb = struct.pack("<BIdd", 1, 1, 1.0, 2.0)
    image = f'{{"at":1772366400000001,"zero":0,"bytes":"ab","data":"ab","place":{base64_of(bytes(4) + wkb)}}}'

    rows = typed_rows(pa.array([image]), typed_schema(columns, MYSQL, Engine()))

    (row,) = rows.batch.to_pylist()
    assert row["at"] == datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC)
    assert (row["bytes"], row["place"]) == (b"ab", wkb)
    assert [one.column for one in rows.misfits] == ["zero", "data"]


def test_a_geometry_of_postgis() -> None:
    """PostGIS's geometries are hexadecimal digits."""
    columns = table(place="public.geometry")
    schema = typed_schema(columns, source_types()["postgres"], Engine())
    rows = typed_rows(pa.array(['{"place":"0101000000000000000000F03F0000000000000040"}']), schema)

    assert rows.batch.to_pylist() == [{"place": struct.pack("<BIdd", 1, 1, 1.0, 2.0)}]
