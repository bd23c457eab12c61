from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.kernels.json_text import (
    BYTEA,
    INTEGER,
    INVALID,
    JSON,
    MAX_DEPTH,
    STRING,
    TIMESTAMP,
)
from deltaforge_dagster.sources.postgres.decode.array_text import (
    ARRAY_GROWTH,
    ARRAY_OVERHEAD,
    write_array,
)
from tests.strategies import array_element

GUARD = 0xEE


def write(element: int, text: str, delimiter: str = ",") -> object:
    """Write an array with exactly the room it may ask for; return its value, or the code."""
    raw = text.encode()
    bound = len(raw) * ARRAY_GROWTH + ARRAY_OVERHEAD
    out = np.full(bound + 16, GUARD, np.uint8)
    stack = np.empty(MAX_DEPTH, np.uint8)
    source = np.frombuffer(b"{" + raw + b"}", np.uint8)
    end = write_array(element, ord(delimiter), source, 1, 1 + len(raw), out, 0, stack)
    assert set(out[bound:].tolist()) == {GUARD}
    return end if end < 0 else json.loads(out[:end].tobytes())


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]))))
def test_text_arrays(elements: list[str | None]) -> None:
    """Whatever text an element holds, it comes back; NULL and the text "NULL" are kept apart."""
    text = "{" + ",".join(map(array_element, elements)) + "}"

    assert write(STRING, text) == elements


@pytest.mark.parametrize(
    ("element", "text", "value"),
    [
        (INTEGER, "{}", []),
        (INTEGER, "{1,NULL,-3}", [1, None, -3]),
        (INTEGER, "{{1,2},{3,4}}", [[1, 2], [3, 4]]),
        (INTEGER, "[0:1][-2:-1]={{1,2},{3,4}}", [[1, 2], [3, 4]]),
        (STRING, '{42,null,"NULL",""}', ["42", "null", "NULL", ""]),
        (JSON, '{"{\\"a\\": [1, \\"x\\\\ty\\"]}",5}', [{"a": [1, "x\ty"]}, 5]),
        (BYTEA, '{"\\\\x00ff"}', [{"_base64": "AP8="}]),
        (BYTEA, "{" + ",".join("a" * 99) + "}", [{"_base64": "YQ=="}] * 99),
        (BYTEA, '{"","\\\\000"}', [{"_base64": ""}, {"_base64": "AA=="}]),
        (
            TIMESTAMP,
            '{{"2026-03-01 12:00:00+00",NULL},{infinity,-infinity}}',
            [["2026-03-01T12:00:00+00:00", None], ["infinity", "-infinity"]],
        ),
    ],
)
def test_arrays(element: int, text: str, value: object) -> None:
    """Elements take their own type's form; dimensions nest; bounds go."""
    assert write(element, text) == value


def test_other_delimiters() -> None:
    """Between boxes stands a semicolon; then commas are part of an element."""
    boxes = "{(3,4),(1,2);(5,6),(0,0);NULL}"

    assert write(STRING, boxes, ";") == ["(3,4),(1,2)", "(5,6),(0,0)", None]
    assert write(INTEGER, "{1;2}") == INVALID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "{",
        "{1",
        "{1,",
        "{1,}",
        "{,1}",
        "{1}}",
        "{1}x",
        "{{1}",
        "{1}{2}",
        "[0:1]",
        "[0:1={1}",
        "[0;1]={1}",
        '{"1}',
        '{1"2"}',
        "{1{2}}",
        '{"1"2}',
        "{x}",
        "{1\\2}",
        '{"\\',
        '{"1\\"}',
        "{{1}2}",
    ],
)
def test_bad_arrays_are_refused(text: str) -> None:
    """What `array_out` cannot have printed is refused, wherever it is cut."""
    assert write(INTEGER, text) == INVALID
