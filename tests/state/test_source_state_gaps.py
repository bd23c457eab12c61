"""Tables of which a log lacks a part, from what checks of the source say one after the other."""

from __future__ import annotations

from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import LoggedTable, TableFate

NAME = "shop"


def table(identity: str, *, whole: bool = False, empty: bool = False) -> LoggedTable:
    """Return a table; by default with rows, and in the log since somebody has added it."""
    return LoggedTable(identity, whole, empty)


def noted(store: StateStore, at: float, **tables: LoggedTable) -> list[tuple[object, ...]]:
    """Note what a check has found, after one at a time; return the gaps."""
    store.gaps.note(NAME, tables, at)
    return [(one.table, one.cause, one.since, one.whole) for one in store.gaps.read(NAME)]


def test_the_first_check(sqlite_store: StateStore) -> None:
    """What there is then is as it should be, and goes on being so."""
    assert noted(sqlite_store, 1.0, a=table("1")) == []
    assert noted(sqlite_store, 2.0, a=table("1")) == []


def test_a_table_that_was_away(sqlite_store: StateStore) -> None:
    """It was in the log until the check before the one that missed it."""
    noted(sqlite_store, 1.0, a=table("1"))
    assert noted(sqlite_store, 2.0) == []
    assert noted(sqlite_store, 3.0) == []
    assert noted(sqlite_store, 4.0, a=table("1")) == [("a", "away", 2.0, False)]
    assert noted(sqlite_store, 5.0, a=table("1")) == [("a", "away", 2.0, False)]


def test_another_table_of_the_name(sqlite_store: StateStore) -> None:
    """It is noticed even if no check has missed the former; an old identity that a check still meets is none."""
    noted(sqlite_store, 1.0, a=table("1"), b=table("2"))
    found = noted(sqlite_store, 2.0, a=table("3", whole=True), b=table("2"))
    assert found == [("a", "remade", 2.0, True)]
    assert noted(sqlite_store, 3.0, a=table("3", whole=True)) == [("a", "remade", 2.0, True)]
    found = noted(sqlite_store, 4.0, a=table("3", whole=True), b=table("4"))
    assert found == [("a", "remade", 2.0, True), ("b", "remade", 3.0, False)]


def test_a_second_gap(sqlite_store: StateStore) -> None:
    """It lasts from the beginning of the first to the end of the second."""
    noted(sqlite_store, 1.0, a=table("1"))
    noted(sqlite_store, 2.0, a=table("2"))
    (before,) = sqlite_store.gaps.read(NAME)
    noted(sqlite_store, 3.0)
    assert noted(sqlite_store, 4.0, a=table("2")) == [("a", "remade", 2.0, False)]
    (after,) = sqlite_store.gaps.read(NAME)
    assert after.until > before.until


def test_a_table_that_comes_later(sqlite_store: StateStore) -> None:
    """It lacks nothing if it has no rows yet, or if the log has had it since it was made."""
    noted(sqlite_store, 1.0, a=table("1"))
    more = {"b": table("2", empty=True), "c": table("3", whole=True), "d": table("4")}
    assert noted(sqlite_store, 2.0, a=table("1"), **more) == [("d", "new", None, False)]
    more["d"] = table("5", empty=True)
    assert noted(sqlite_store, 3.0, a=table("1"), **more) == [("d", "remade", None, False)]


def test_acknowledged(sqlite_store: StateStore) -> None:
    """Gaps end by table, or all; those of others stay."""
    noted(sqlite_store, 1.0, a=table("1"), b=table("2"), c=table("3"))
    noted(sqlite_store, 2.0, a=table("4"), b=table("5"), c=table("6"))
    assert sqlite_store.gaps.acknowledge(NAME, ["b", "z"]) == ["b"]
    assert [one.table for one in sqlite_store.gaps.read(NAME)] == ["a", "c"]
    assert sqlite_store.gaps.acknowledge(NAME) == ["a", "c"]
    assert noted(sqlite_store, 3.0, a=table("4"), b=table("5"), c=table("6")) == []


def told(store: StateStore, *fates: tuple[str, TableFate]) -> list[tuple[str, str, bool]]:
    """Note what a statement of the log does; return the gaps."""
    store.gaps.note_fates(NAME, fates)
    return [(one.table, one.cause, one.whole) for one in store.gaps.read(NAME)]


def test_a_log_of_statements(sqlite_store: StateStore) -> None:
    """A table that is made after another of its name was dropped is another; one that only gets another name is not."""
    assert told(sqlite_store, ("a", "made"), ("b", "made")) == [], "they may have been there before"
    assert told(sqlite_store, ("b", "dropped")) == []
    assert told(sqlite_store, ("a", "dropped"), ("b", "kept")) == [], "as tools that copy tables do"
    assert told(sqlite_store, ("b", "made")) == []
    assert told(sqlite_store, ("a", "made")) == [("a", "remade", True)]
    assert told(sqlite_store, ("b", "dropped"), ("b", "made")) == [
        ("a", "remade", True),
        ("b", "remade", True),
    ]
    assert sqlite_store.gaps.acknowledge(NAME) == ["a", "b"]
    assert told(sqlite_store, ("a", "made")) == []
