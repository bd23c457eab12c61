"""The columns of several table versions, and what rows have in columns that were added or changed."""

from __future__ import annotations

import pytest

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.tables.columns import added_columns, keeps_values, union, wider
from deltaforge_dagster.sinks.tables.writer import check_names
from deltaforge_dagster.sources.registry import parse_position, source_types
from deltaforge_dagster.sources.value_types import ValueType, parse_value_type
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from tests.state.make import NAME, held, position


@pytest.mark.parametrize(
    ("names", "start", "converted"),
    [
        (["c", "c", "c"], 0, {"c"}),
        (["c", "c", "c"], 3, set()),
        (["c", "d", "d"], 0, {"d"}),
        (["c", "c"], 0, set()),
    ],
    ids=["in the commit", "before it", "renamed too", "only widened"],
)
def test_types_that_convert_rows(
    sqlite_store: StateStore, names: list[str], start: int, converted: set[str]
) -> None:
    """A column is unfilled in the commit in which it gets a type that has not all of its values, under any name."""
    types = ["integer", "bigint", "smallint"][: len(names)]
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        for number, (name, type_) in enumerate(zip(names, types, strict=True), 1):
            columns = (
                Column("id", "bigint", None, False, 1, number=1),
                Column(name, type_, None, True, 2, number=2),
            )
            table = TableSchema("shop", "public", "orders", columns, ("id",), relation=7)
            writer.schemas.register("acme", table, position(number))
    history = sqlite_store.schemas.history(NAME, "public.orders")

    added = added_columns(
        history,
        history.newest,
        history.newest.columns.identities,
        TypedSchema(()),
        parse_position(position(start)),
        keeps_values=lambda old, new: (old.data_type, new.data_type) != ("bigint", "smallint"),
        processed=False,
    )
    assert added.unfilled == converted


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
