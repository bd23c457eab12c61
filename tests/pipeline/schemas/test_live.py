"""What the catalog has now, compared with the versions that rows had last."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deltaforge_dagster.errors import NotAllowed, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.pipeline.schemas import views as schema_views
from deltaforge_dagster.pipeline.schemas.live import WarmStart, compare, named, reload
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import TableSchema
from tests.pipeline.changes import PlayedSource, eventually
from tests.state.make import NAME, held, position, table


class Catalog(PlayedSource):
    """A source of tables; None for one that it will not show."""

    def __init__(self, tables: Mapping[str, TableSchema | None]) -> None:
        super().__init__([])
        self._tables = tables

    def tables(self) -> list[str]:
        """Return the captured ones."""
        return list(self._tables)

    def schema(self, name: str) -> TableSchema:
        """Return one, unless it is gone, or cannot be had."""
        if name not in self._tables:
            raise SourceMisconfigured(name)
        found = self._tables[name]
        if found is None:
            raise SourceUnavailable("not now")
        return found


@pytest.fixture
def store(sqlite_store: StateStore) -> StateStore:
    """A store that knows `orders`, which had another column once, `items` and `old`."""
    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        for columns, at in (("ab", 1), ("a", 2)):
            writer.schemas.register("acme", table(*columns), position(at))
        writer.schemas.register("acme", table("x", name="items"), position(3))
        writer.schemas.register("acme", table("x", name="old"), position(4))
    return sqlite_store


CATALOG = Catalog(
    {
        "public.orders": table("a", "c"),
        "public.items": table("x", name="items"),
        "public.fresh": table("y", name="fresh"),
        "public.shy": None,
    }
)


def test_each_table_is_compared(store: StateStore) -> None:
    """Same, altered (and how), new, dropped, or an error of its own; nothing is registered."""
    before = store.schemas.histories(NAME)
    found = {one.name: one for one in compare(store, NAME, CATALOG)}

    assert {name: one.status for name, one in found.items()} == {
        "public.orders": "altered",
        "public.items": "same",
        "public.fresh": "new",
        "public.shy": "error",
        "public.old": "dropped",
    }
    assert found["public.orders"].differences == ("column_added c",)
    assert store.schemas.histories(NAME) == before


def test_the_version_of_now_counts(sqlite_store: StateStore) -> None:
    """A table that returned to an earlier form is compared with that one, not with its newest."""
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        for columns, at in (("a", 1), ("ab", 2), ("a", 3)):
            writer.schemas.register("acme", table(*columns), position(at))
    for columns, status in (("a", "same"), ("ab", "altered")):
        catalog = Catalog({"public.orders": table(*columns)})
        assert [one.status for one in compare(sqlite_store, NAME, catalog)] == [status]


def test_reload_is_for_programs(store: StateStore) -> None:
    """Counts, and a line for each table; one that is not captured is refused."""
    found = reload(store, NAME, CATALOG)
    assert (found["pipeline"], found["tables_reloaded"]) == (NAME, 4)
    changed = {one["table"] for one in found["tables"] if one["changed"]}
    assert changed == {"orders", "fresh", "old"}
    (only,) = reload(store, NAME, CATALOG, "public.items")["tables"]
    assert (only["status"], only["error"]) == ("same", None)
    place = ("shop", "public", "items", "public.items")
    assert tuple(only[one] for one in ("database", "schema", "table", "name")) == place
    with pytest.raises(NotAllowed, match="captures no table"):
        reload(store, NAME, CATALOG, "public.none")


def test_a_table_by_database_and_name(store: StateStore) -> None:
    """The database, or the schema in its place, as far as only one table is meant; then its full name."""
    catalog = Catalog(
        {f"{one}.orders": None for one in ("public", "sales", "shop")} | {"shop.x": None}
    )

    def name(database: str, bare: str) -> str:
        return named(store, NAME, catalog, database, bare)

    assert name("shop", "items") == name("shop", "public.items") == name("public", "items")
    assert name("sales", "orders") == name("shop", "sales.orders") == "sales.orders"
    assert name("shop", "x") == name("shop", "shop.x") == "shop.x"  # both mean this one
    assert name("shop", "public.orders") == name("public", "orders") == "public.orders"
    assert name("shop", "orders") == "public.orders"  # what was captured comes first
    for database, bare in (("shop", "none"), ("app", "public.items"), ("public", "public.items")):
        with pytest.raises(NotAllowed, match="captures no table"):
            name(database, bare)
    places = [("shop", "public", "orders"), ("shop", "sales", "orders")]
    with pytest.raises(NotAllowed, match=r"may be public\.orders or sales\.orders: say which"):
        schema_views.named(places, NAME, "shop", "orders")


def test_places() -> None:
    """A full name begins with the schema where every table is in one database, with the database elsewhere."""
    assert schema_views.place("shop", "public.a.b") == ("shop", "public", "a.b")
    assert schema_views.place(None, "shop.orders") == ("shop", None, "orders")
    places = [schema_views.place(None, "shop.orders")]
    for bare in ("orders", "shop.orders"):
        assert schema_views.named(places, NAME, "shop", bare) == "shop.orders"


def test_nobody_waits_any_more(store: StateStore) -> None:
    """What is raised between two tables ends the comparison."""
    looked: list[str] = []

    def proceed() -> None:
        looked.append("one")
        if len(looked) == 2:
            raise SourceUnavailable("enough")

    with pytest.raises(SourceUnavailable, match="enough"):
        reload(store, NAME, CATALOG, proceed=proceed)
    assert len(looked) == 2


def test_a_run_that_begins_warns(store: StateStore) -> None:
    """Of what was altered or dropped while nothing ran; a server that is down is no warning."""
    warnings: list[str] = []
    warm = WarmStart(store, NAME, lambda: CATALOG, warnings.append)
    eventually(lambda: len(warnings) == 2)
    warm.end()
    assert sorted(warnings) == [
        "table public.old is not in the database any more",
        (
            "table public.orders was altered (column_added c); its new version begins with its first"
            " change after that"
        ),
    ]

    def down() -> Catalog:
        raise SourceUnavailable("down")

    silent: list[str] = []
    WarmStart(store, NAME, down, silent.append).end()
    assert silent == []
