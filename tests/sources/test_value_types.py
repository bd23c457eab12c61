from __future__ import annotations

from typing import Any

import pytest

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.sources.value_types import TEXT, decimal, parse_value_type
from deltaforge_dagster.tables import Column

FORMS = ValueOptions(mysql_enum="index", mysql_set="bits")


@pytest.mark.parametrize(
    "name",
    ["boolean", "uint8", "int64", "float32", "decimal(38,38)", "timestamptz", "list<list<decimal(1,0)>>"],
)  # fmt: skip
def test_names_are_read_back(name: str) -> None:
    """A type has one name, by which files declare it."""
    assert parse_value_type(name).name == name


def test_spaces_and_case_do_not_count() -> None:
    """Types may be written as SQL is."""
    assert parse_value_type(" LIST< Decimal (10, 2) >") == parse_value_type("list<decimal(10,2)>")
    assert parse_value_type("decimal(10)") == parse_value_type("decimal(10,0)")


@pytest.mark.parametrize(
    "name", ["", "varchar", "int128", "decimal", "decimal(0,0)", "decimal(39,1)", "decimal(2,3)", "list<>", "list<int8"]
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    """What is no type says which types there are."""
    with pytest.raises(
        ValueError, match=r"there is no type .* known are boolean, .*decimal\(P,S\)"
    ):
        parse_value_type(name)


@pytest.mark.parametrize(
    ("precision", "scale", "name"),
    [(10, 2, "decimal(10,2)"), (38, 38, "decimal(38,38)"), (2, -3, "decimal(5,0)"), (3, 5, "decimal(5,5)")],
)  # fmt: skip
def test_any_scale(precision: int, scale: int, name: str) -> None:
    """A negative scale adds zeros, and one above the precision digits: PostgreSQL has both."""
    assert decimal(precision, scale).name == name


@pytest.mark.parametrize(("precision", "scale"), [(39, 0), (30, -9), (5, 39), (65, 30)])
def test_decimals_of_more_than_38_digits_are_text(precision: int, scale: int) -> None:
    """No destination has them."""
    assert decimal(precision, scale) is TEXT


@pytest.mark.parametrize(
    ("kind", "data_type", "name"),
    [
        ("postgres", "smallint", "int16"),
        ("postgres", "oid", "uint32"),
        ("postgres", "numeric", "text"),
        ("postgres", "numeric(10,2)", "decimal(10,2)"),
        ("postgres", "numeric(2,-3)", "decimal(5,0)"),
        ("postgres", "double precision", "float64"),
        ("postgres", "timestamp(3) without time zone", "timestamp"),
        ("postgres", "timestamp with time zone", "timestamptz"),
        ("postgres", "time(3) without time zone", "time"),
        ("postgres", "time with time zone", "text"),
        ("postgres", "interval", "text"),
        ("postgres", "money", "text"),
        ("postgres", "bit(3)", "text"),
        ("postgres", "int4range", "text"),
        ("postgres", "public.mood", "text"),
        ("postgres", "public.mood[]", "list<text>"),
        ("postgres", "numeric(10,2)[]", "list<decimal(10,2)>"),
        ("postgres", "jsonb[]", "list<json>"),
        ("postgres", "public.geometry", "geometry"),
        ("postgres", "tiger.geography", "geometry"),
        ("postgres", "public.integer", "text"),
        ("mysql", "tinyint", "int8"),
        ("mysql", "mediumint unsigned", "uint32"),
        ("mysql", "bigint unsigned", "uint64"),
        ("mysql", "decimal(10,2) unsigned", "decimal(10,2)"),
        ("mysql", "decimal(65,30)", "text"),
        ("mysql", "float unsigned", "float32"),
        ("mysql", "bit(1)", "uint8"),
        ("mysql", "bit(9)", "uint16"),
        ("mysql", "bit(33)", "uint64"),
        ("mysql", "year", "int16"),
        ("mysql", "datetime(6)", "timestamp"),
        ("mysql", "timestamp", "timestamptz"),
        ("mysql", "time(3)", "time"),
        ("mysql", "enum", "text"),
        ("mysql", "set", "text"),
        ("mysql", "varchar(255)", "text"),
        ("mysql", "varbinary(16)", "binary"),
        ("mysql", "mediumblob", "binary"),
        ("mysql", "geometry", "geometry"),
        ("mysql", "vector", "list<float32>"),
        ("mysql", "uuid", "uuid"),
        ("mysql", "inet6", "text"),
        ("turso", "BIGINT", "int64"),
        ("turso", "FLOATING POINT", "int64"),
        ("turso", "VARCHAR(9)", "text"),
        ("turso", "DOUBLE", "float64"),
        ("turso", "BLOB", "binary"),
        ("turso", "DECIMAL(10,2)", "text"),
        ("turso", "", "text"),
    ],
)
def test_types_of_sources(kind: str, data_type: str, name: str) -> None:
    """Each kind says what the values of its types are."""
    column = Column("c", data_type, None, True, 1)
    assert source_types()[kind].value_type(column, ValueOptions()).name == name


@pytest.mark.parametrize(("data_type", "name"), [("enum", "uint16"), ("set", "uint64")])
def test_types_follow_the_forms_of_the_file(data_type: str, name: str) -> None:
    """An ENUM as its index and a SET as bits are integers."""
    kind: Any = source_types()["mysql"]
    assert kind.value_type(Column("c", data_type, None, True, 1), FORMS).name == name
