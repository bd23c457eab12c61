"""Sets of GTIDs, against sets of Python."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.gtid import GtidSet

A = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
B = "0d2e11fa-71ca-11e1-9e33-c80aa9429562"

intervals = st.lists(
    st.tuples(st.sampled_from([A, B]), st.integers(1, 40), st.integers(0, 6)), max_size=20
)


def made(parts: list[tuple[str, int, int]]) -> GtidSet:
    """Return a set of these intervals: server, first, how many more."""
    whole = GtidSet()
    for server, first, more in parts:
        whole.add(server, first, first + more)
    return whole


def members(parts: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    """Return the same as a set of Python."""
    return {(s, number) for s, first, more in parts for number in range(first, first + more + 1)}


@given(intervals)
def test_a_set_holds_what_was_added(parts: list[tuple[str, int, int]]) -> None:
    """Intervals merge, whatever their order and overlap."""
    whole = made(parts)

    held = {(s, number) for s in (A, B) for number in range(60) if whole.contains(s, number)}
    assert held == members(parts)


@given(intervals, intervals)
def test_equal_and_part_of_are_those_of_sets(
    parts: list[tuple[str, int, int]], others: list[tuple[str, int, int]]
) -> None:
    """How a set was put together does not show."""
    assert (made(parts) <= made(others)) == (members(parts) <= members(others))
    assert (made(parts) == made(others)) == (members(parts) == members(others))


@given(intervals)
def test_a_set_is_read_back_from_its_text_and_its_bytes(parts: list[tuple[str, int, int]]) -> None:
    """Both forms say everything."""
    whole = made(parts)

    assert GtidSet.parse(str(whole)) == whole
    assert GtidSet.from_bytes(whole.to_bytes()) == whole


def test_the_text_is_that_of_mysql() -> None:
    """Servers in order, intervals that touch are one, a single number has no hyphen."""
    text = f"{A.upper()}:5:1-2:3-4:9,\n{B}:1"

    assert str(GtidSet.parse(text)) == f"{B}:1,{A}:1-5:9"


def test_a_copy_grows_by_itself() -> None:
    """What is added to a copy is not in the first."""
    first = GtidSet.parse(f"{A}:1-5")
    second = first.copy()
    second.add(A, 6, 6)

    assert str(first) == f"{A}:1-5"
    assert str(second) == f"{A}:1-6"


@pytest.mark.parametrize("text", [f"{A}", f"{A}:0", f"{A}:2-1", "x:1", f"{A}:1-", f"{A}:1;2"])
def test_other_text_is_refused(text: str) -> None:
    """What is not a GTID set says so."""
    with pytest.raises(CorruptLog, match="GTID"):
        GtidSet.parse(text)


def test_tags_are_refused() -> None:
    """A tagged GTID is neither dropped nor taken for an untagged one."""
    with pytest.raises(UnsupportedEvent, match="tags"):
        GtidSet.parse(f"{A}:daily:1-5")
    with pytest.raises(UnsupportedEvent, match="tags"):
        GtidSet.from_bytes(struct.pack("<Q", 1 << 56 | 1 << 8))


@pytest.mark.parametrize("cut", [3, 8, 30, 47])
def test_bytes_cut_short_are_refused(cut: int) -> None:
    """A set that ends too early is no set."""
    with pytest.raises(CorruptLog, match="shorter"):
        GtidSet.from_bytes(GtidSet.parse(f"{A}:1-5").to_bytes()[:cut])
