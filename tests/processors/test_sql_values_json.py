"""Computed values as JSON text."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.sql_values import json_texts

MOMENT = datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, -(2**63)]), ["1", "-9223372036854775808"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([0.1, 1e20, float("nan"), float("-inf")]), ["0.1", "1e+20", '"NaN"', '"-Infinity"']),
        (pa.array([0.1], pa.float32()), ["0.1"]),
        (pa.array([Decimal("1.10"), Decimal(0)], pa.decimal128(30, 9)), ['"1.100000000"', '"0.000000000"']),
        (pa.array(['a"\n\x01é😀']), ['"a\\"\\n\\u0001é😀"']),
        (pa.array([date(1, 3, 1)]), ['"0001-03-01"']),
        (pa.array([MOMENT], pa.timestamp("us", "Asia/Tokyo")), ['"2026-03-01T12:00:00.000001Z"']),
        (pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("us")), ['"2026-03-01T12:00:00.000001"']),
        (pa.array([b"\x00\xff"]), ['{"_base64":"AP8="}']),
        (pa.array([[1, None], []]), ["[1,null]", "[]"]),
        (pa.array([{"a": Decimal("1.10"), "b": [True]}]), ['{"a":"1.10","b":[true]}']),
        (pa.array([[("k", 1), ('"', None)]], pa.map_(pa.string(), pa.int64())), ['{"k":1,"\\"":null}']),
    ],
)  # fmt: skip
def test_forms(column: pa.Array[Any], expected: list[str]) -> None:
    """Each type has its form, null is null, and a slice is read from its offset."""
    whole = pa.concat_arrays([column, pa.nulls(1, column.type)])

    assert json_texts(whole).to_pylist() == [*expected, "null"]
    assert json_texts(whole.slice(1)).to_pylist() == [*expected[1:], "null"]


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=10, min_value=-(10**27), max_value=10**27
    )
)
def test_decimals_are_exact(value: Decimal) -> None:
    """The text has all digits and the scale, and no exponent."""
    (text,) = json_texts(pa.array([value], pa.decimal128(38, 10))).to_pylist()

    assert text == f'"{value:.10f}"'


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back(value: float) -> None:
    """A number is read back from JSON as the same double."""
    (text,) = json_texts(pa.array([value])).to_pylist()

    assert float(json.loads(text or "")) == value


def test_other_types() -> None:
    """A type without a JSON form is rejected with its name."""
    with pytest.raises(ProcessorFailed, match=r"duration\[us\] have no JSON form"):
        json_texts(pa.array([timedelta(1)]))
