"""Rows that pass through Spark's own engine in packed form."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.processors.sql import note, packed, transit_schema, unpacked
from tests.chance import examples
from tests.processors import rows as frames
from tests.processors.rows import Row, batch, row

COLUMNS = ("after", "op", "ts_us")


@settings(max_examples=examples(30))
@given(
    st.lists(st.lists(frames.rows, min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_what_is_packed_comes_back(groups: list[list[Row]], cuts: list[int]) -> None:
    """However Spark divides the rows, the same batches come back in order, with notes and values."""
    given_rows = [batch(one) for one in groups]
    sent = [note(COLUMNS, {"segment": 7}), *(packed(COLUMNS, one) for one in given_rows)]
    whole = pa.Table.from_batches([*sent, note(COLUMNS, {"counts": {}})]).combine_chunks()
    values = pa.array(range(whole.num_rows))
    through = whole.select(["_packed", "_note"]).append_column("value_0", values)
    arrived = []
    while through.num_rows:
        arrived.append(through.slice(0, cuts[0]))
        through = through.slice(cuts[0])
        cuts = [*cuts[1:], cuts[0]]
    batches = [part for one in arrived for part in one.to_batches()]

    first, *found, last = unpacked(batches)

    assert (first, last) == ({"segment": 7}, {"counts": {}})
    computed = []
    for one, before in zip(found, given_rows, strict=True):
        assert isinstance(one, pa.RecordBatch)
        back = one.drop_columns(["value_0"])
        assert back.schema == before.schema
        assert back.to_pylist() == before.to_pylist()
        computed += one.column("value_0").to_pylist()
    assert computed == list(range(1, len(computed) + 1))


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        ("12345678901234567890123456789012345678", "12345678901234567890123456789012345678"),
        ("123456789012345678901234567890123456789", '"123456789012345678901234567890123456789"'),
        ("-0." + "1" * 38, '"-0.' + "1" * 38 + '"'),
        ("1.234567890123456e+5", '"1.234567890123456e+5"'),
        ("1e20", "1e20"),
        ("1E400", '"1E400"'),
        ('"5e12"', '"5e12"'),
    ],
)
def test_numbers_that_variant_would_round(number: str, seen: str) -> None:
    """SQL sees such numbers as text with all digits; the row itself is unchanged."""
    one = batch([row(after=f'{{"x":[{number}],"y":{number}}}'), row(after=None)])

    sent = packed(COLUMNS, one)

    assert sent.schema.equals(transit_schema(COLUMNS))
    assert sent.column("after").to_pylist() == [f'{{"x":[{seen}],"y":{seen}}}', None]
    (back,) = unpacked([sent.select(["_packed", "_note"])])
    assert isinstance(back, pa.RecordBatch)
    assert back.to_pylist() == one.to_pylist()


def test_names_that_no_row_has_stay_behind() -> None:
    """A slice of a large batch is packed without the names that only other rows have."""
    whole: Any = batch([row(tx_id=f"transaction {number}") for number in range(1000)])

    sent = packed((), whole.slice(5, 1))

    assert len(sent.column("_packed")[0].as_py()) < 20_000
    assert json.loads(note((), {"a": 1}).column("_note")[0].as_py()) == {"a": 1}
