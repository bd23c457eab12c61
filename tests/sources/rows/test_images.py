"""Row images, member by member."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.sources.rows.images import UNCHANGED, is_partial, members, overlay

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
images = st.dictionaries(st.text(), values, max_size=5)


def text(image: dict[str, Any]) -> str:
    """Return an image as the sources write it."""
    return json.dumps(image, ensure_ascii=False, separators=(",", ":"))


@given(images)
def test_members_are_pieces_of_the_text(image: dict[str, Any]) -> None:
    """Whatever the names and values are, each member is found, as it is spelled."""
    assert {json.loads(n): json.loads(v) for n, v in members(text(image)).items()} == image
    assert overlay(text(image), []) == text(image)


@given(images, st.lists(images, max_size=3))
def test_the_newest_value_counts(image: dict[str, Any], newer: list[dict[str, Any]]) -> None:
    """Of each column the newest value stands there, and the order of the columns stays."""
    expected = dict(image)
    for one in newer:
        expected |= one
    assert json.loads(overlay(text(image), map(text, newer))) == expected
    assert list(members(overlay(text(image), map(text, newer))))[: len(image)] == list(
        members(text(image))
    )


def test_what_was_not_sent_stays() -> None:
    """What a later image marks as unchanged, or leaves out, stays; numbers keep their spelling."""
    first = '{"id":1,"a":"big","n":1.10,"doc":{"a":[1,",}"]}}'
    assert overlay(first, [f'{{"id":1,"a":{UNCHANGED},"n":2.00}}']) == (
        '{"id":1,"a":"big","n":2.00,"doc":{"a":[1,",}"]}}'
    )


def test_whether_an_image_is_partial() -> None:
    """A mark, and a column that is left out, make an image partial; null is a value."""
    assert not is_partial('{"id":1,"a":null}', ["id", "a"])
    assert is_partial(f'{{"id":1,"a":{UNCHANGED}}}', ["id", "a"])
    assert is_partial('{"id":1}', ["id", "a"])


def test_a_null_document_keeps_its_tab() -> None:
    """It is part of the value, and stays when later images are applied."""
    assert overlay('{"a":null\t,"b":1}', ['{"b":null\t}']) == '{"a":null\t,"b":null\t}'
    assert overlay('{"a":null\t,"b":1}', ['{"a":null}']) == '{"a":null,"b":1}'
