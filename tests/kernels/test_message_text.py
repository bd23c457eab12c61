"""Texts built row by row, compared with Python's own formatting."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels import message_text as text
from deltaforge_dagster.kernels.message_text import (
    Optional,
    concat,
    decimals,
    lsns,
    times,
    values_of,
)
from deltaforge_dagster.positions import format_lsn

nullable = st.lists(st.none() | st.text(max_size=40), min_size=1, max_size=50)
longs = st.integers(-(2**63), 2**63 - 1)


@given(nullable, st.data())
def test_pieces(values: list[str | None], data: st.DataObject) -> None:
    """Constants, texts and names, with and without nulls, may be combined in any order."""
    rows = len(values)
    plain = pa.array(values, pa.string())
    filled = pa.array([one or "" for one in values], pa.string())
    same = pa.array(["same"] * rows).dictionary_encode()
    kinds = data.draw(st.lists(st.sampled_from("tncsf"), max_size=6))
    pieces: list[text.Piece] = []
    expected = [""] * rows
    for kind in kinds:
        special: dict[str, pa.Array[Any]] = {"n": plain.dictionary_encode(), "s": same, "f": filled}
        column = special.get(kind, plain)
        pieces += ["constant"] if kind == "c" else [Optional("<", values_of(column), ">", "-")]
        for row, value in enumerate(column.to_pylist()):
            expected[row] += "constant" if kind == "c" else "-" if value is None else f"<{value}>"

    found = concat(rows, pieces)

    found.validate(full=True)
    assert found.to_pylist() == expected


@given(st.lists(st.none() | longs, min_size=1, max_size=20), st.sampled_from([1, 1000]))
def test_decimals(numbers: list[int | None], divisor: int) -> None:
    """Every 64-bit number can be divided and written; null stays null."""
    column = pa.array(numbers, pa.int64())

    found = concat(len(numbers), [Optional("", decimals(column, divisor), "", "null")])

    texts = ["null" if one is None else str(one // divisor) for one in numbers]
    assert found.to_pylist() == texts


@given(st.lists(st.none() | st.datetimes(), min_size=1, max_size=20))
def test_times(moments: list[datetime | None]) -> None:
    """Every time of the calendar is written as by Python, truncated to milliseconds; null stays null."""
    column = pa.array(moments, pa.timestamp("us")).cast(pa.int64())

    found = concat(len(moments), [Optional("", times(column), "", "null")])

    texts = [one and f"{one.isoformat(timespec='milliseconds')}Z" for one in moments]
    assert found.to_pylist() == [one or "null" for one in texts]


@pytest.mark.parametrize(
    ("micros", "expected"),
    [
        (2**63 - 1, "294247-01-10T04:00:54.775Z"),
        (-(2**63), "-290308-12-21T19:59:05.224Z"),
        (253_402_300_800_000_000, "10000-01-01T00:00:00.000Z"),
    ],
)
def test_times_beyond_the_calendar(micros: int, expected: str) -> None:
    """No value of microseconds writes beyond its own range of bytes."""
    found = concat(2, [Optional("", times(pa.array([micros, micros], pa.int64())))])

    assert found.to_pylist() == [expected] * 2


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_positions(numbers: list[int]) -> None:
    """LSNs are written as by PostgreSQL, with eight digits in the lower half."""
    found = concat(len(numbers), [Optional("", lsns(pa.array(numbers, pa.int64())))])

    assert found.to_pylist() == [format_lsn(one) for one in numbers]


@given(nullable, st.data())
def test_where(values: list[str | None], data: st.DataObject) -> None:
    """A mask turns values into null, and never the other way round."""
    mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    found = values_of(pa.array(values, pa.string()))
    chosen = None if found is None else found.where(np.array(mask))

    texts = concat(len(values), [Optional("", chosen, "", "none")]).to_pylist()

    expected = [
        value if wanted and value is not None else "none"
        for value, wanted in zip(values, mask, strict=True)
    ]
    assert texts == expected


def test_too_much() -> None:
    """A text that exceeds Arrow's string arrays is rejected before memory is allocated."""
    rows = pa.array(["x" * 1000, "y" * 1000])
    many = pa.DictionaryArray.from_arrays(np.arange(2_200_000, dtype=np.int32) % 2, rows)

    with pytest.raises(UnsupportedEvent, match="2 GiB"):
        concat(len(many), [Optional("", values_of(many))])
