"""Names, literals and types in Spark's SQL."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sinks.lake.statements import holds, literal, quoted, sql_type
from deltaforge_dagster.sources.value_types import INT8, TIME, TIMESTAMP, decimal, list_of


def test_names_and_literals_are_quoted() -> None:
    """Whatever characters they have."""
    assert quoted("a", "b`c.d") == "`a`.`b``c.d`"
    assert literal("it's \\n") == r"'it\'s \\n'"


def test_types() -> None:
    """Lists have elements, and what a lake has no type for is text."""
    types = [list_of(INT8), TIME, TIMESTAMP, decimal(38, 10)]
    assert [sql_type(one) for one in types] == [
        "array<tinyint>", "string", "timestamp_ntz", "decimal(38,10)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("bigint", "int", True),
        ("int", "bigint", False),
        ("double", "int", True),
        ("double", "bigint", False),
        ("float", "int", False),
        ("decimal(12,2)", "decimal(10,2)", True),
        ("decimal(12,4)", "decimal(10,2)", True),
        ("decimal(12,4)", "decimal(12,2)", False),
        ("decimal(19,0)", "bigint", True),
        ("decimal(18,0)", "bigint", False),
        ("string", "decimal(5,2)", True),
        ("string", "double", False),
        ("string", "timestamp", False),
        ("timestamp", "timestamp_ntz", False),
    ],
)
def test_which_types_hold_which(wide: str, narrow: str, *, expected: bool) -> None:
    """A type holds another if each value can be converted exactly."""
    assert holds(wide, narrow) is expected
