"""The values that Spark computed are written into rows: fields, routes, and which rows pass."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deltaforge_dagster.config.processors import SqlProcessor
from deltaforge_dagster.processors.sql import Sql, columns_read
from tests.chance import examples
from tests.processors import rows as frames
from tests.processors.rows import Row, batch, row


def sql(**block: Any) -> SqlProcessor:
    """Return the block of an `sql` processor."""
    return SqlProcessor.model_validate({"type": "sql", **block})


def made(block: SqlProcessor, rows: list[Row], **computed: pa.Array[Any]) -> pa.RecordBatch:
    """Return the result for rows, given the columns that Spark computed."""
    frame = batch(rows)
    for name, column in computed.items():
        frame = frame.append_column(name, column)
    return Sql(block).process(frame)


@settings(max_examples=examples(30))
@given(
    st.lists(
        st.tuples(frames.rows, st.none() | st.booleans(), st.integers()), min_size=1, max_size=5
    )
)
def test_only_named_fields_differ(found: list[tuple[Row, bool | None, int]]) -> None:
    """Rows pass where the condition is true; every column except the set field is unchanged."""
    block = sql(where="a", set={"after.new field": "b"})
    rows = [one for one, _, _ in found]
    values = pa.array([str(number) for _, _, number in found])

    frame = made(
        block, rows, value_0=pa.array([one for _, one, _ in found], pa.bool_()), json_1=values
    )

    kept = [(one, number) for one, passes, number in found if passes]
    assert frame.num_rows == len(kept)
    for new, (old, number) in zip(frame.to_pylist(), kept, strict=True):
        after = new.pop("after")
        assert new == {name: one for name, one in old.items() if name != "after"}
        if old["after"] is None:
            assert after is None
        else:
            comma = "" if old["after"] == "{}" else ","
            assert after == f'{old["after"][:-1]}{comma}"new field":{number}}}'


def test_values_have_the_forms_of_captured_ones() -> None:
    """A decimal becomes a string with its scale, null becomes null; both images can be set."""
    block = sql(set={"after.total": "a", "before.total": "b"})
    rows = [row(after='{"total":"1","x":1.10}', before='{"total":"1"}'), row(before=None)]

    frame = made(
        block,
        rows,
        value_0=pa.array([Decimal("2.50"), None], pa.decimal128(10, 2)),
        value_1=pa.array(['é"', "x"]),
    )

    assert frame.column("after").to_pylist() == [
        '{"total":"2.50","x":1.10}',
        '{"id":1,"total":null}',
    ]
    assert frame.column("before").to_pylist() == ['{"total":"é\\""}', None]


def test_fields_are_dropped_from_both_images() -> None:
    """Dropping a field removes it from the old row image, too."""
    frame = made(
        sql(drop=("email", "x")), [row(after='{"email":1,"y":2}', before='{"y":1,"email":3}')]
    )

    assert frame.column("after").to_pylist() == ['{"y":2}']
    assert frame.column("before").to_pylist() == ['{"y":1}']


def test_routes() -> None:
    """A part that is null leaves the row's own value; headers are added to the existing ones."""
    block = sql(route={"topic": "a", "key": "b", "headers": {"h": "c", "i": "d"}})
    rows = [row(topic="old", route_key="k", headers='{"h":"0","z":"1"}'), row()]

    frame = made(
        block,
        rows,
        value_0=pa.array([None, "new"]),
        value_1=pa.array(["n", None]),
        value_2=pa.array(["1", None]),
        value_3=pa.array([None, None], pa.string()),
    )

    assert frame.column("topic").to_pylist() == ["old", "new"]
    assert frame.column("route_key").to_pylist() == ["n", None]
    assert frame.column("headers").to_pylist() == ['{"h":"1","z":"1"}', None]


def test_columns_that_may_be_read() -> None:
    """Only columns that an expression names are passed to Spark."""
    block = sql(where="Op = 'c'", set={"after.x": "after:y"}, route={"topic": "'t.' || table"})

    assert columns_read(block) == ("after", "op", "table")
    assert columns_read(sql(drop=("x",))) == ()


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({}, "does nothing"),
        ({"set": {"topic": "'x'"}}, "set names topic; `after.<field>` and `before.<field>`"),
        ({"set": {"after.x": "1"}, "drop": ("x",)}, "sets after.x and drops it"),
        ({"where": "exists(select 1)"}, "holds a subquery"),
    ],
)
def test_blocks_that_are_refused(block: dict[str, Any], said: str) -> None:
    """Blocks that can never work are rejected when the file is read."""
    with pytest.raises(ValidationError, match=said):
        sql(**block)
