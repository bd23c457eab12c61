"""The columns of several table versions."""

from __future__ import annotations

import pytest

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.tables.columns import keeps_values, union, wider
from deltaforge_dagster.sinks.tables.writer import check_names
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.sources.value_types import ValueType, parse_value_type
from deltaforge_dagster.tables import Column
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema


def schema(**types: str) -> TypedSchema:
    """Return columns with types of these names."""
    return TypedSchema(
        tuple(TypedColumn(name, parse_value_type(one)) for name, one in types.items())
    )


def test_order_of_columns() -> None:
    """The newest version's columns come first, then those that are gone, the latest first."""
    made = union([schema(a="text", b="text"), schema(c="text", b="text"), schema(b="text")], "s.t")
    assert [column.name for column in made.columns] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("int16", "int64", "int64"),
        ("float32", "float64", "float64"),
        ("decimal(10,2)", "decimal(9,4)", "decimal(12,4)"),
        ("decimal(38,0)", "decimal(10,2)", None),
        ("int32", "uint32", None),
        ("int32", "float64", None),
        ("int32", "text", None),
        ("timestamp", "timestamptz", None),
        ("list<int16>", "list<int32>", "list<int32>"),
        ("list<int16>", "list<text>", None),
        ("date", "date", "date"),
    ],
)
def test_wider_types(one: str, other: str, both: str | None) -> None:
    """The type of both versions has the values of both exactly, in either order, or there is none."""
    expected = None if both is None else parse_value_type(both)
    assert wider(parse_value_type(one), parse_value_type(other)) == expected
    assert wider(parse_value_type(other), parse_value_type(one)) == expected


@pytest.mark.parametrize(
    ("source", "old", "new", "kept"),
    [
        ("postgres", "integer", "bigint", True),
        ("postgres", "bigint", "integer", False),
        ("postgres", "integer", "numeric(10,0)", True),
        ("postgres", "integer", "numeric(10,2)", False),
        ("postgres", "integer", "double precision", True),
        ("postgres", "integer", "real", False),
        ("postgres", "bigint", "double precision", False),
        ("postgres", "integer", "text", True),
        ("postgres", "text", "integer", False),
        ("postgres", "numeric(10,4)", "numeric(10,2)", False),
        ("postgres", "numeric(10,2)", "numeric(12,4)", True),
        ("postgres", "double precision", "real", False),
        ("postgres", "character varying(9)", "character varying(5)", True),
        ("postgres", "character(9)", "text", False),
        ("postgres", "timestamp without time zone", "timestamp(0) without time zone", False),
        ("postgres", "timestamp(0) without time zone", "timestamp without time zone", True),
        ("postgres", "timestamp without time zone", "timestamp with time zone", False),
        ("postgres", "timestamp without time zone", "date", False),
        ("mysql", "datetime", "datetime(6)", True),
        ("mysql", "datetime(6)", "datetime", False),
        ("mysql", "time(3)", "time(1)", False),
        ("mysql", "datetime", "timestamp", False),
        ("mysql", "int", "int unsigned", False),
        ("mysql", "decimal(10,2)", "decimal(8,2)", False),
        ("mysql", "varbinary(4)", "binary(8)", False),
        ("mysql", "varchar(10)", "text", True),
    ],
)
def test_types_that_keep_values(source: str, old: str, new: str, kept: bool) -> None:
    """Values stay as they are where the new type has all of them in the same form; otherwise they may be others."""
    before, after = (Column("c", type_, None, True, 1) for type_ in (old, new))
    assert keeps_values(before, after, source_types()[source], ValueOptions()) is kept


def test_forms() -> None:
    """A form that is read beside the usual one has the values of both; geometries have no usual form."""
    plain, micros = (
        ValueType("timestamp", zone=True),
        ValueType("timestamp", zone=True, form="micros"),
    )
    assert wider(plain, micros) == wider(micros, plain) == micros
    assert wider(ValueType("geometry", form="hex"), ValueType("geometry", form="srid")) is None


def test_incompatible_versions() -> None:
    """The error names the table, the column, both types and the remedy."""
    with pytest.raises(TableRejected, match=r"s\.t: column a was int32 and became text.*`types`"):
        union([schema(a="int32"), schema(a="text")], "s.t")


@pytest.mark.parametrize("names", [("a", "A"), ("DF_op",)])
def test_names_that_clash(names: tuple[str, ...]) -> None:
    """Spark tells no names apart that differ only in case, and names with our prefix are ours."""
    with pytest.raises(TableRejected, match=names[-1]):
        check_names(names, "table s.t")
