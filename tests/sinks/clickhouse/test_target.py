"""Tests of the types of columns."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sinks.clickhouse.target import column_type, holds, nullable
from deltaforge_dagster.sources.value_types import parse_value_type


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uint64", "UInt64"),
        ("int8", "Int8"),
        ("float32", "Float32"),
        ("decimal(38,10)", "Decimal(38, 10)"),
        ("uuid", "UUID"),
        ("date", "Date32"),
        ("timestamptz", "DateTime64(6, 'UTC')"),
        ("geometry", "String"),
        ("list<list<int32>>", "Array(Array(Nullable(Int32)))"),
    ],
)
def test_types(name: str, expected: str) -> None:
    """Each type of the source has one that holds all of its values."""
    assert column_type(parse_value_type(name)) == expected


def test_arrays_cannot_be_null() -> None:
    """All other types can."""
    assert nullable("Array(Int8)") == "Array(Int8)"
    assert nullable("Int8") == "Nullable(Int8)"


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ("LowCardinality(Nullable(String))", "String"),
        ("Int64", "Nullable(Int32)"),
        ("Int64", "UInt32"),
        ("UInt256", "UInt128"),
        ("Float64", "Float32"),
        ("Nullable(Decimal(20, 4))", "Decimal(10, 2)"),
        ("DateTime64(6)", "DateTime64(6, 'UTC')"),
        ("Array(Nullable(Int64))", "Array(Nullable(Int8))"),
    ],
)
def test_what_holds_the_values(known: str, wanted: str) -> None:
    """The same type, a wider one, or one that only differs in null or in how it is stored; never the other way round."""
    assert holds(known, wanted)
    same = "String" in known or "Time" in known
    assert holds(wanted, known) is same


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ("UInt64", "Int32"),
        ("Int32", "UInt32"),
        ("Decimal(10, 4)", "Decimal(10, 2)"),
        ("DateTime64(3)", "DateTime64(6, 'UTC')"),
        ("DateTime64(9)", "DateTime64(6, 'UTC')"),
        ("Date", "Date32"),
        ("FixedString(3)", "String"),
        ("Array(Int64)", "Array(Nullable(Int64))"),
        ("UInt64", "UInt128"),
        ("Float64", "Int32"),
    ],
)
def test_what_does_not(known: str, wanted: str) -> None:
    """Some values, however few, would be others there."""
    assert not holds(known, wanted)
