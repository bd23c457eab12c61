"""Which column has which values."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sinks.postgres.types import holds, is_exact, new_type, takes
from deltaforge_dagster.sources.value_types import JSON, TEXT, parse_value_type
from deltaforge_dagster.typed_rows.schema import TypedColumn


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("numeric", "numeric"), ("interval", "interval"), ("bit varying(3)", "bit varying(3)"), ("inet", "inet"),
        ("time(3) with time zone", "time(3) with time zone"), ("character varying(3)", "text"), ("money", "text"),
        ("public.mood", "text"), ("int4range", "text"), ("NUMERIC", "text"), (None, "text"),
    ],
)  # fmt: skip
def test_types_of_the_source_that_are_kept(source: str | None, kept: str) -> None:
    """Unless the file declares another one."""
    column = TypedColumn("n", TEXT, source)
    assert new_type(column, declared=False) == kept
    assert new_type(column, declared=True) == "text"
    assert new_type(TypedColumn("j", JSON, source), declared=False) == "json"


@pytest.mark.parametrize(
    ("existing", "values", "source", "taken"),
    [
        ("character varying", "text", None, True), ("character varying(3)", "text", None, False),
        ("character varying(3)", "text", "character varying(3)", True), ("interval", "text", None, True),
        ("numeric(3,1)", "text", None, False), ("public.mood", "text", "public.mood", True),
        ("bit(3)", "text", "bit(4)", False), ("bit(4)", "text", "bit(4)", True),
        ("jsonb", "json", "json", True), ("json", "text", None, False), ("numeric", "int64", None, True),
        ("text[]", "list<list<text>>", None, True), ("integer[]", "list<int64>", None, False),
    ],
)  # fmt: skip
def test_what_existing_columns_take(
    existing: str, values: str, source: str | None, *, taken: bool
) -> None:
    """Nothing that the server would round, cut or pad."""
    column = TypedColumn("c", parse_value_type(values), source)
    assert takes(existing, column, enum=False) is taken


@pytest.mark.parametrize(
    ("wide", "narrow", "held"),
    [
        ("bigint", "integer", True), ("integer", "bigint", False), ("double precision", "integer", True),
        ("double precision", "bigint", False), ("numeric(20,0)", "bigint", True), ("numeric(18,0)", "bigint", False),
        ("numeric(5,2)", "numeric(4,2)", True), ("numeric(5,2)", "numeric(5,3)", False), ("text", "bytea", False),
        ("text", "uuid", True), ("date", "timestamp without time zone", False),
    ],
)  # fmt: skip
def test_what_types_hold(wide: str, narrow: str, *, held: bool) -> None:
    """Each value exactly, converted by a cast."""
    assert holds(wide, narrow) is held


@pytest.mark.parametrize(
    ("type_", "exact"),
    [
        *[(name, True) for name in ("bigint", "text", "character varying(9)", "numeric(10,2)", "double precision", "uuid", "date", "timestamp with time zone", "inet")],
        *[(name, False) for name in ("numeric", "interval", "jsonb", "citext", "character(3)", "text[]", "app.mood")],
    ],
)  # fmt: skip
def test_types_in_which_values_may_be_equal(type_: str, exact: bool) -> None:
    """What is not known to have one text for each value counts as if it had several."""
    assert is_exact(type_) == exact
