"""Setting and removing one field of an image leaves every other byte unchanged."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.processors.sql_values import with_field, without_field
from tests.processors.rows import dumps, names, texts

ODD = [
    "12345678901234567890123456789012345678901", "1.10", "-0.0", "1E+2", '"\\u0041\\/"', '"}{,:\\""',
    '[ 1,{"a" : null}]', '{"b":{"a":1},"a":[]}', '"é😀"', "true", "null",
]  # fmt: skip
"""Values that a JSON library would spell differently."""

values = st.sampled_from(ODD) | st.builds(dumps, texts)
members = st.lists(st.tuples(names, values), max_size=5, unique_by=lambda one: one[0])
blanks = st.sampled_from(["", "", " ", "\t "])


def image(found: list[tuple[str, str]], blank: str = "") -> str:
    """Return members as an object, with white space between its tokens."""
    one = [f"{blank}{dumps(name)}{blank}:{blank}{value}{blank}" for name, value in found]
    return "{" + ",".join(one) + "}"


def pieces(text: str) -> list[tuple[str, str]]:
    """Return the members of an object, with values as spelled."""
    found: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    at = 1
    while text[at:].lstrip()[0] != "}":
        at += len(text[at:]) - len(text[at:].lstrip(" \t,"))
        name, at = decoder.raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip(" \t:"))
        _, end = decoder.raw_decode(text, at)
        found.append((name, text[at:end]))
        at = end
    return found


@given(st.lists(st.none() | members, max_size=5), names, values, blanks)
def test_only_the_field_is_set(
    images: list[list[tuple[str, str]] | None], name: str, value: str, blank: str
) -> None:
    """The field has its new value, at its position or at the end; other bytes are unchanged."""
    column = pa.array([None if one is None else image(one, blank) for one in images], pa.string())

    made = with_field(column, name, pa.array([value] * len(images), pa.string())).to_pylist()

    for one, text in zip(images, made, strict=True):
        if one is None:
            assert text is None
            continue
        assert text is not None
        known = [key for key, _ in one]
        expected = [(key, value if key == name else old) for key, old in one]
        assert pieces(text) == expected + ([] if name in known else [(name, value)])


@given(st.lists(st.none() | members, max_size=5), names, blanks)
def test_only_the_field_is_dropped(
    images: list[list[tuple[str, str]] | None], name: str, blank: str
) -> None:
    """The field is removed; other bytes, and images without the field, are unchanged."""
    given_texts = [None if one is None else image(one, blank) for one in images]

    made = without_field(pa.array(given_texts, pa.string()), name).to_pylist()

    for one, before, text in zip(images, given_texts, made, strict=True):
        if one is None or name not in [key for key, _ in one]:
            assert text == before
        else:
            assert text is not None
            assert pieces(text) == [(key, old) for key, old in one if key != name]


@pytest.mark.parametrize(
    ("text", "with_a", "without_a"),
    [
        ('{"\\u0061":1,"b":1.10}', '{"\\u0061":9,"b":1.10}', '{"b":1.10}'),
        ('{"a":1,"a":2,"b":1.10}', '{"a":9,"a":9,"b":1.10}', '{"b":1.10}'),
        ('{"b":1,"a":1,"\\u0061":2}', '{"b":1,"a":9,"\\u0061":9}', '{"b":1}'),
        ('{"b\\n":1}', '{"b\\n":1,"a":9}', '{"b\\n":1}'),
        ('["a"]', '["a"]', '["a"]'),
        ("{ }", '{ "a":9}', "{ }"),
    ],
)
def test_unusual_images(text: str, with_a: str, without_a: str) -> None:
    """A name with escapes, or a duplicate one, is found at any position."""
    column = pa.array([text, '{"a":1}'])

    assert with_field(column, "a", pa.array(["9", "9"])).to_pylist() == [with_a, '{"a":9}']
    assert without_field(column, "a").to_pylist() == [without_a, "{}"]


def test_slices() -> None:
    """A sliced column is read from its offset."""
    column: Any = pa.array(['{"x":1}', '{"a":1}', None]).slice(1)

    assert with_field(column, "a", pa.array(["0", "2", "3"]).slice(1)).to_pylist() == [
        '{"a":2}', None
    ]  # fmt: skip
