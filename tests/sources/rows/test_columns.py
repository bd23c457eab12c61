from __future__ import annotations

from typing import Any

import pytest

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.rows.columns import (
    EXCLUDE,
    HASH,
    KEEP,
    MASK,
    TRUNCATE,
    ColumnRules,
    Rule,
)
from deltaforge_dagster.tables import Column, TableSchema


def rules(**options: Any) -> ColumnRules:
    """Return the rules of a pipeline file."""
    if "hash" in options:
        options["hash"] = {"columns": options["hash"], "salt": "sixteen or more characters"}
    return ColumnRules(ColumnOptions.model_validate(options))


def table(*names: str, key: tuple[str, ...] = ("id",), schema: str | None = "public") -> TableSchema:  # fmt: skip
    """Return the table `users` with columns of these names."""
    columns = (
        Column(name, "character varying(20)", 1043, True, number)
        for number, name in enumerate(names, 1)
    )
    return TableSchema("shop", schema, "users", tuple(columns), key)


def actions(found: tuple[Rule, ...] | None) -> tuple[int, ...] | None:
    """Return the actions of rules."""
    return None if found is None else tuple(rule.action for rule in found)


@pytest.mark.parametrize(
    ("pattern", "hidden"),
    [
        ("public.users.ssn", ["SSN"]),
        ("users.ssn", ["SSN"]),
        ("*.ssn", ["SSN"]),
        ("%.s%", ["SSN", "street"]),
        ("public.us*.Street", ["street"]),
        ("*.users.*", ["id", "SSN", "street"]),
        ("shop.users.ssn", []),
        ("public.user.ssn", []),
        ("users.ss", []),
    ],
)
def test_a_pattern_names_columns_of_tables(pattern: str, hidden: list[str]) -> None:
    """Tables as in the source's patterns, columns without case; without a schema it is any."""
    found = rules(hash=(pattern,)).of(table("id", "SSN", "street"))

    names = ("id", "SSN", "street")
    assert [name for name, rule in zip(names, found or (), strict=bool(found)) if rule.action] == hidden  # fmt: skip


def test_mysqls_database_is_the_first_part() -> None:
    """Where tables have no schema a pattern names their database."""
    found = rules(exclude=("shop.users.ssn",)).of(table("id", "ssn", schema=None))

    assert actions(found) == (KEEP, EXCLUDE)


def test_of_several_actions_the_one_that_hides_most_counts() -> None:
    """Exclude before mask before hash before truncate, and the shortest beginning of all."""
    found = rules(
        truncate={"*.*": 9, "users.e": 3},
        hash=("*.d", "*.c", "*.b"),
        mask={"users.c": "c", "%.b": "b"},
        exclude=("users.b",),
    ).of(table("b", "c", "d", "e", "f", key=()))

    assert found == (
        Rule(EXCLUDE),
        Rule(MASK, text="c"),
        Rule(HASH),
        Rule(TRUNCATE, characters=3),
        Rule(TRUNCATE, characters=9),
    )


def test_include_leaves_the_key_and_what_it_names() -> None:
    """Of a table that it names only these columns and the key stay; other tables stay whole."""
    chosen = rules(include=("users.name", "users.mail"), mask={"users.mail": "@"})

    assert actions(chosen.of(table("id", "name", "mail", "ssn"))) == (KEEP, KEEP, MASK, EXCLUDE)
    other = TableSchema("shop", "public", "orders", table("id", "ssn").columns, ("id",))
    assert chosen.of(other) is None
    assert chosen.touches("public", "users")
    assert not chosen.touches("public", "orders")


@pytest.mark.parametrize(
    "options", [{"exclude": ("*.id",)}, {"mask": {"*.id": "x"}}, {"truncate": {"*.id": 3}}]
)
def test_a_key_column_is_hashed_or_stays(options: dict[str, Any]) -> None:
    """Everything else would make different rows one, which is refused by name."""
    with pytest.raises(SourceMisconfigured, match=r"column id of table public\.users"):
        rules(**options).of(table("id", "name"))
    assert actions(rules(hash=("*.id",)).of(table("id", "name"))) == (HASH, KEEP)
    assert rules(hash=("*.id",)).hides(table("id", "name"), ("id",))
    assert not rules(hash=("*.name",)).hides(table("id", "name"), ("id",))
    assert not rules().hides(table("id", "name"), ("id", "name"))


def test_a_version_is_what_rows_show() -> None:
    """Excluded columns are not in it, hashes and masks are text, and the rest is as it was."""
    before = table("id", "ssn", "card", "note")
    seen = rules(hash=("*.id",), exclude=("*.ssn",), mask={"*.card": "x"}, truncate={"*.note": 3})

    assert seen.visible(before).columns == (
        Column("id", "text", 25, True, 1),
        Column("card", "text", 25, True, 2),
        Column("note", "character varying(20)", 1043, True, 3),
    )
    assert rules().visible(before) is before


def test_preflight_names_rules_that_cannot_be_and_patterns_that_find_nothing() -> None:
    """A misspelt pattern would hide nothing in silence: a look at the tables says so."""
    tables = {"public.users": table("id", "ssn"), "public.orders": table("id", "ssn")}

    (good,) = rules(hash=("*.ssn",)).findings(["public.users"], tables.__getitem__)
    (typo,) = rules(hash=("users.snn",)).findings(tables, tables.__getitem__)
    (bad,) = rules(exclude=("users.id",)).findings(tables, tables.__getitem__)

    assert (good.level, typo.level, bad.level) == ("ok", "warning", "error")
    assert "users.snn" in typo.text
    assert "column id" in bad.text
    assert rules().findings(tables, tables.__getitem__) == []
