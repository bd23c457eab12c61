"""Values of every reader have one form, and different values never do."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pytest

from tests.oracle.kinds import (
    ABSENT,
    Kind,
    Name,
    Value,
    elements,
    from_arrow,
    from_json,
    from_text,
    members,
)

LOCAL = "2024-02-29 12:00:00.500000"
MOMENT = dt.datetime(2024, 2, 29, 12, 0, 0, 500000)  # noqa: DTZ001 - a timestamp has no time zone
IST = dt.timezone(dt.timedelta(hours=5, minutes=30))


@pytest.mark.parametrize(
    ("name", "text", "in_arrow", "in_json"),
    [
        ("integer", "18446744073709551615", Decimal(18446744073709551615), "18446744073709551615"),
        ("decimal", "1.50", Decimal("1.5"), '"1.50"'),
        ("float64", "-0", -0.0, "-0.0"),
        ("float64", "NaN", math.nan, '"NaN"'),
        ("float32", "0.1", 0.10000000149011612, "0.1"),
        ("boolean", "t", True, "true"),
        ("text", "null", "null", '"null"'),
        ("json", '{"a": [1.10, null]}', '{"a":[1.10,null]}', '{"a":[1.10,null]}'),
        ("json", "null", "null", None),
        ("binary", "\\x00ff", b"\x00\xff", '{"_base64":"AP8="}'),
        ("geometry", "01", b"\x01", '{"_base64":"AAAAAAE="}'),
        ("date", "0001-01-01", dt.date(1, 1, 1), '"0001-01-01"'),
        ("time", "12:34:56.7", dt.time(12, 34, 56, 700000), '"12:34:56.7"'),
        ("timestamp", "2024-02-29 12:00:00.5", MOMENT, '"2024-02-29 12:00:00.500000"'),
        ("timestamptz", f"{LOCAL}+00", MOMENT.replace(tzinfo=dt.UTC), '"2024-02-29T12:00:00.5Z"'),
        ("timestamptz", LOCAL, MOMENT.replace(tzinfo=dt.UTC).astimezone(IST), f'"{LOCAL}+00:00"'),
    ],
)  # fmt: skip
def test_one_value_has_one_form(name: Name, text: str, in_arrow: Any, in_json: str | None) -> None:
    """Whoever says it."""
    kind = Kind(name)
    said = [from_text(kind, text), from_arrow(kind, in_arrow)]
    if in_json is not None:
        said.append(from_json(kind, in_json))
    assert all(one == said[0] for one in said)


def test_lists() -> None:
    """Elements have the form of their kind; null, a document that is null, and a text are three things."""
    documents = Kind("list", Kind("json"))
    assert from_text(documents, ["null", None, '{"a": 1}']) == ("null", None, '{"a":1}')
    numbers = Kind("list", Kind("integer"))
    same: list[Value] = [
        from_text(numbers, ["1", None]),
        from_arrow(numbers, [1, None]),
        from_json(numbers, "[1,null]"),
    ]
    assert same == [(1, None)] * 3
    assert from_json(Kind("list", Kind("text")), '["null",null]') == ("null", None)


def test_different_values_differ() -> None:
    """-0 and 0, a number and a text, what is no value of its kind and what is."""
    floats = Kind("float64")
    assert from_text(floats, "-0") != from_text(floats, "0")
    assert from_text(Kind("text"), "1.0") != from_text(Kind("text"), "1.00")
    assert from_text(Kind("integer"), "x") != from_text(Kind("integer"), "y")
    assert from_json(floats, ABSENT) is ABSENT


def test_the_parts_of_images_are_as_they_stand() -> None:
    """Duplicate keys, digits and escapes are part of a document."""
    assert members('{"a": {"x": 1e400, "x": [1.10]}, "b c": "\\u00e4", "d": null}') == {
        "a": '{"x":1e400,"x":[1.10]}',
        "b c": '"\\u00e4"',
        "d": "null",
    }
    assert elements('[ "a,b" , {"c": "]"}, [] ]') == ['"a,b"', '{"c":"]"}', "[]"]
    assert members("{}") == {}
