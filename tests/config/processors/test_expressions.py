"""Checks of SQL expressions without Spark."""

import pytest

from deltaforge_dagster.config.processors import problem, words


@pytest.mark.parametrize(
    "text",
    [
        "after:total::decimal(20, 2) > 1",
        "after:select.from = 'drop table x; -- no comment'",
        "extract(year from timestamp_micros(ts_us)) = 2026 -- a comment (",
        "table in ('a', 'b') and (table is not null) /* ( */",
        "`over` || r'\\' || \"it's\"",
        "trim(both ' ' from after:name::string)",
        "set = 1",
    ],
)
def test_what_may_be_an_expression(text: str) -> None:
    """Quotes, comments, paths and names that look like queries are accepted."""
    assert problem(text) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" -- nothing", "is empty"),
        ("after:name = 'x", "has an unclosed '"),
        ("`a", "has an unclosed `"),
        ("1 /* a", "has an unclosed /*"),
        ("f(a", "has an unclosed ("),
        ("f(a])", "has ] without an opening bracket"),
        ("1; 2", "contains `;` (only one expression is allowed)"),
        ("drop table x", "is a statement (drop), not an expression"),
        ("a in (SELECT 1)", "holds a subquery (SELECT), but only the row itself can be read"),
        ("(from x)", "holds a subquery (from), but only the row itself can be read"),
        ("exists((table x))", "holds a subquery (table), but only the row itself can be read"),
        ("a in (values 1)", "holds a subquery (values), but only the row itself can be read"),
        ("sum(1) over ()", "holds a window function (over), but only the row itself can be read"),
    ],
)
def test_what_can_be_none(text: str, said: str) -> None:
    """Unclosed text, and whatever reads more than one row or does more than compute, is rejected with the reason."""
    assert problem(text) == said


def test_words() -> None:
    """Every name that may be a column is found, whatever its case and quotes, but not in strings."""
    assert words("After:x > `ts_us` and 'before' <> /* key */ OP") == {
        "after", "x", "ts_us", "and", "op"
    }  # fmt: skip
