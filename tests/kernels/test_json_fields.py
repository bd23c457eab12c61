"""Fields of JSON documents, compared with Python's own parser."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltaforge_dagster.kernels.json_fields import field_texts
from tests.processors.rows import dumps

names = st.sampled_from(["a", "b", "", 'q"', "back\\", "ä", "ab"])
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


def field(document: object, path: list[str]) -> object:
    """Return the value of a field with `json`; None if it is null or missing."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


@given(
    st.lists(st.none() | documents, min_size=1, max_size=20),
    st.lists(names, min_size=1, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
)
@example(
    given_documents=[{"a": ""}, {"a": "{"}, {"a": "["}], path=["a"], indent=None, ascii_only=False
)
def test_equals_the_parser(
    given_documents: list[object], path: list[str], indent: int | None, ascii_only: bool
) -> None:
    """Any document, with and without white space and escapes, gives the same field, even a nested one."""
    separators = None if indent else (",", ":")
    texts = [
        None if one is None else json.dumps(
            one, indent=indent, separators=separators, ensure_ascii=ascii_only
        )
        for one in given_documents
    ]  # fmt: skip

    found = field_texts(pa.array(texts, pa.string()), path).to_pylist()

    for text, value in zip(found, (field(one, path) for one in given_documents), strict=True):
        if isinstance(value, dict | list):  # unchanged, including white space
            assert text is not None
            assert dumps(json.loads(text)) == dumps(value)
        else:
            assert text == (value if value is None or isinstance(value, str) else dumps(value))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ('{"a":1.10}', "1.10"),
        ('{"b":{"a":1},"a":2}', "2"),
        ('{"a":"x","a":"y"}', "x"),
        (r'{"\u0061":7}', "7"),
        (r'{"b":"\"a\":1","a":"\ud83d\ude00"}', "😀"),
        ('{"a" : [1, {"a":2}] }', '[1, {"a":2}]'),
        ('{"a":"null"}', "null"),
        ("{}", None),
    ],
)
def test_text_of_a_field(document: str, text: str | None) -> None:
    """The value is unchanged, the first of duplicate names counts, and strings lose quotes and escapes."""
    assert field_texts(pa.array([document]), ["a"]).to_pylist() == [text]


def test_numbers_may_have_any_number_of_digits() -> None:
    """Also where Python's scanner is needed, which makes integers of no more than 4,300 digits."""
    digits = "1" * 5000
    document = f'{{"q\\"":{digits},"a":{digits}}}'

    assert field_texts(pa.array([document]), ["a"]).to_pylist() == [digits]
