"""Tables as they are made again, from the newest table version."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.tables.changes import stager_here, table
from tests.state.make import held, position


def test_columns_and_key(tmp_path: Path, sqlite_store: StateStore) -> None:
    """Those of the newest version, or the declared key, also if only a processor adds its column."""
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        for number, columns in enumerate((("id", "a"), ("id", "b")), 1):
            writer.schemas.register("acme", table(*columns), position(number))
    journal = Journal((tmp_path / "journal").as_uri())
    destination = ("public", "orders")

    found = stager_here(tmp_path, journal, sqlite_store, "mode: current").without_changes(
        destination
    )
    assert ([one.name for one in found.columns.columns], found.key) == (["id", "b"], ("id",))
    assert (found.source, found.steps) == (("shop", "public", "orders"), ())

    options = "mode: current, keys: {public.orders: [b, added]}"
    stager = stager_here(tmp_path, journal, sqlite_store, options)
    found = stager.without_changes(destination)
    names = [one.name for one in found.columns.columns]
    assert (names, found.key) == (["id", "b", "added"], ("b", "added"))
    with pytest.raises(TableRejected, match=r"no table of the source is written to public\.other"):
        stager.without_changes(("public", "other"))
