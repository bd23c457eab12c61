"""JSON that is read and written again without changing a byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.processors.exact_json import Number, as_json, dumps, loads
from tests.processors.rows import dumps as compact

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
documents = st.recursive(
    st.one_of(texts.map(compact), numbers, st.sampled_from(["true", "false", "null"])),
    lambda below: st.one_of(
        st.lists(below, max_size=4).map(lambda ones: f"[{','.join(ones)}]"),
        st.dictionaries(texts, below, max_size=4).map(
            lambda ones: "{" + ",".join(f"{compact(k)}:{v}" for k, v in ones.items()) + "}"
        ),
    ),
    max_leaves=20,
)


@given(documents)
def test_nothing_is_lost(text: str) -> None:
    """A compact text is unchanged after reading and writing: digits, order and every character."""
    assert dumps(loads(text)) == text


def test_half_a_character_stays_an_escape() -> None:
    """A lone surrogate, which UTF-8 cannot encode, stays an escape."""
    assert dumps(loads(r'{"a":"\ud83d"}')) == r'{"a":"\ud83d"}'


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("42", "42.0", True), ("1e2", "100", True), ("0.1", "0.10", True), ("1", "2", False)],
)
def test_numbers_compare_by_value(one: str, other: str, same: bool) -> None:
    """Two spellings of the same number are equal, and have the same hash."""
    assert (Number(one) == Number(other)) is same
    assert not same or hash(Number(one)) == hash(Number(other))


def test_a_number_is_no_text_and_no_flag() -> None:
    """`1` equals neither `"1"` nor `true`."""
    assert loads("1") != loads('"1"')
    assert loads("1") != loads("true")


def test_values_of_a_yaml_file() -> None:
    """Python's numbers become `Number`; lists and texts stay the same."""
    assert as_json((1, 2.5, "x", None, True)) == [Number("1"), Number("2.5"), "x", None, True]
