"""Patterns of names."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.globs import Globs, overlap, table_parts

NAMES = ["".join(one) for size in range(5) for one in itertools.product("a_", repeat=size)]
patterns = st.text("a_*%", max_size=4)


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        ("outbox", ["outbox"], ["Outbox", "outbox2", "my.outbox"]),
        ("outbox_%", ["outbox_", "outbox_eu"], ["outbox", "outboxes"]),
        ("*_outbox", ["_outbox", "orders_outbox"], ["outbox", "orders_outbox2"]),
        ("a*c%e", ["ace", "abcde"], ["ac", "aced"]),
        ("*", ["", "any\nthing"], []),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_what_fits(pattern: str, fits: list[str], others: list[str]) -> None:
    """Both wildcards match any text, even in the middle; everything else matches itself, case-sensitively."""
    globs = Globs(["nothing", pattern])

    assert all(globs.match([one]) for one in fits)
    assert globs.match(["else", *fits[:1]])
    assert not any(globs.match([one]) for one in others)


def test_no_pattern_fits_nothing() -> None:
    """An empty set of patterns matches nothing; its caller decides whether that means everything."""
    assert not Globs([])
    assert not Globs([]).match(["a"])


@given(patterns, patterns)
def test_patterns_overlap_where_a_name_fits_both(one: str, other: str) -> None:
    """Two patterns overlap exactly if some short name matches both."""
    common = any(Globs([one]).match([name]) and Globs([other]).match([name]) for name in NAMES)
    # If two patterns of four characters overlap, they have a common name of at most eight characters.
    longer = (
        "".join(name) for size in range(5, 9) for name in itertools.product("a_", repeat=size)
    )
    both = Globs([one]), Globs([other])
    common = common or any(all(glob.match([name]) for glob in both) for name in longer)

    assert overlap(one, other) == common


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [("shop.outbox", ("shop", "outbox")), ("*_outbox", ("*", "*_outbox")), ("a.b.c", ("a", "b.c"))],
)
def test_the_parts_of_a_table(pattern: str, parts: tuple[str, str]) -> None:
    """The first dot is the separator; a pattern without a dot means any database."""
    assert table_parts(pattern) == parts
