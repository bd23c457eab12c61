"""The values that columns may have, by the names of their types in both databases."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sensing.drift import ANYTHING, declared
from deltaforge_dagster.sensing.scan import BOOLEAN, INTEGER, NUMBER, STRING


@pytest.mark.parametrize(
    ("data_type", "least", "greatest"),
    [
        ("tinyint", -128, 127),
        ("tinyint unsigned", 0, 255),
        ("smallint", -32768, 32767),
        ("mediumint unsigned", 0, 16_777_215),
        ("integer", -(2**31), 2**31 - 1),
        ("bigint unsigned", 0, 2**64 - 1),
    ],
)
def test_whole_numbers(data_type: str, least: int, greatest: int) -> None:
    """Each integer type has its range, signed and unsigned."""
    column = declared("c", data_type, nullable=False)
    assert (column.least, column.greatest) == (least, greatest)
    assert {INTEGER, STRING} <= column.kinds
    assert (BOOLEAN in column.kinds) == data_type.startswith("tinyint")


@pytest.mark.parametrize(
    ("data_type", "digits"),
    [("numeric(5,2)", 3), ("decimal(10,0) unsigned", 10), ("numeric(3,-2)", 5), ("numeric", None)],
)
def test_exact_numbers(data_type: str, digits: int | None) -> None:
    """Precision minus scale is the number of digits before the decimal point."""
    column = declared("c", data_type, nullable=False)
    assert (column.digits, column.kinds) == (digits, frozenset({INTEGER, NUMBER, STRING}))


@pytest.mark.parametrize(
    ("data_type", "length", "document"),
    [("character varying(20)", 20, False), ("char(3)", 3, False), ("text", None, True)],
)
def test_texts(data_type: str, length: int | None, document: bool) -> None:
    """Texts have a length if one is declared; those without one may contain documents."""
    column = declared("c", data_type, nullable=False)
    assert (column.length, column.document, column.kinds) == (length, document, frozenset({STRING}))


@pytest.mark.parametrize(
    "data_type",
    ["timestamp(3) without time zone", "enum('a','b')", "integer[]", "geometry", "acme.colour", ""],
)
def test_what_is_not_compared(data_type: str) -> None:
    """Types with several possible forms, and unknown types, may have any value."""
    assert declared("c", data_type, nullable=False).kinds == ANYTHING
