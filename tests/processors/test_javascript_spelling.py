"""Which numbers JavaScript would spell differently."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.processors.javascript import has_unusual_numbers
from tests.processors.test_exact_json import documents

_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*")


@pytest.mark.parametrize(
    ("text", "unusual"),
    [
        ('{"a":1,"b":-20,"c":[0,123456789012345]}', False),
        ('{"a":"1.10","2e3":"12345678901234567890"}', False),
        (r'{"a\"":"\\","b":5}', False),
        ('{"a":true,"b":false,"c":null}', False),
        ('{"a":1234567890123456}', True),
        ('{"a":1.5}', True),
        ("[1,2e3]", True),
        ('{"a":{"b":-0}}', True),
        ("1E5", True),
    ],
)
def test_kinds_of_numbers(text: str, unusual: bool) -> None:
    """Only integers of up to 15 digits are usual numbers; digits in texts and names do not matter."""
    assert has_unusual_numbers(pa.array([None, text])) is unusual


def test_no_documents() -> None:
    """A column of nulls has no numbers."""
    assert not has_unusual_numbers(pa.array([None, None], pa.string()))


@given(st.lists(documents, min_size=1, max_size=5))
def test_agrees_with_a_scanner(texts: list[str]) -> None:
    """In any documents, every number except an integer of at most 15 digits is unusual."""
    found: list[str] = []
    for text in texts:
        json.loads(text, parse_int=found.append, parse_float=found.append)
    unusual = any(not re.fullmatch(r"0|-?[1-9][0-9]{0,14}", one) for one in found)

    assert has_unusual_numbers(pa.array(texts)) is unusual
