"""The matcher of table patterns."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.tables import TablePatterns


def patterns(*given: str, unqualified: str = "public") -> TablePatterns:
    """Return the matcher of some patterns."""
    return TablePatterns(given, unqualified=unqualified, system=("pg_catalog", "pg_toast*"))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("shop.orders", ("shop", "orders"), ("shop", "orders2")),
        ("shop.*", ("shop", "anything"), ("shop2", "anything")),
        ("shop.%", ("shop", "anything"), ("shop2", "anything")),
        ("shop.order_%", ("shop", "order_items"), ("shop", "orderXitems")),
        ("shop.order*", ("shop", "order"), ("shop", "orde")),
        ("*.orders", ("any", "orders"), ("any", "Orders")),
        ("%.orders", ("any", "orders"), ("any", "orders_old")),
        ("shop%.orders", ("shop_eu", "orders"), ("eu_shop", "orders")),
        ("orders", ("public", "orders"), ("shop", "orders")),
        ("shop.a.b", ("shop", "a.b"), ("shop", "a")),
    ],
)
def test_each_form_matches_what_its_row_says(
    pattern: str, matching: tuple[str, str], other: tuple[str, str]
) -> None:
    """Exact names, prefixes and wildcards match as documented; `_` and case are literal."""
    matcher = patterns(pattern)

    assert matcher.matches(*matching)
    assert not matcher.matches(*other)


def test_no_pattern_matches_every_table_of_users() -> None:
    """An empty list captures everything but system schemas."""
    matcher = patterns()

    assert matcher.matches("any", "table")
    assert not matcher.matches("pg_catalog", "pg_class")
    assert not matcher.matches("pg_toast_temp_1", "x")


def test_system_schemas_are_never_captured() -> None:
    """A pattern that names a system table does not capture it."""
    assert not patterns("pg_catalog.pg_class", "*.*").matches("pg_catalog", "pg_class")


def test_an_unqualified_name_may_mean_any_database() -> None:
    """MySQL reads `orders` as that table of any database."""
    assert patterns("orders", unqualified="*").matches("any", "orders")


def test_exact_names_are_known() -> None:
    """Names without wildcards are listed in the file's order: those tables must exist."""
    assert patterns("b.x", "a.*", "a").exact == (("b", "x"), ("public", "a"))


@pytest.mark.parametrize("pattern", ["", ".", "shop.", ".orders", "sh*p.orders", "shop.o%s", "**"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    """A part that is empty or has a wildcard inside stops with one error that quotes it."""
    with pytest.raises(SpecError, match="is not a table pattern"):
        patterns(pattern)
