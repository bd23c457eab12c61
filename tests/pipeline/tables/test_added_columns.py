"""Columns that rows of a table did not have, or had with another type."""

from __future__ import annotations

import pytest

from deltaforge_dagster.pipeline.tables.columns import added_columns
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.schema import TypedSchema
from tests.state.make import NAME, held, position


@pytest.mark.parametrize(
    ("names", "start", "converted"),
    [
        (["c", "c", "c"], 0, {"c"}),
        (["c", "c", "c"], 3, set()),
        (["c", "d", "d"], 0, {"d"}),
        (["c", "c"], 0, set()),
    ],
    ids=["in the commit", "before it", "renamed too", "only widened"],
)
def test_types_that_convert_rows(
    sqlite_store: StateStore, names: list[str], start: int, converted: set[str]
) -> None:
    """A column is unfilled in the commit in which it gets a type that has not all of its values, under any name."""
    types = ["integer", "bigint", "smallint"][: len(names)]
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        for number, (name, type_) in enumerate(zip(names, types, strict=True), 1):
            columns = (
                Column("id", "bigint", None, False, 1, number=1),
                Column(name, type_, None, True, 2, number=2),
            )
            table = TableSchema("shop", "public", "orders", columns, ("id",), relation=7)
            writer.schemas.register("acme", table, position(number))
    history = sqlite_store.schemas.history(NAME, "public.orders")

    added = added_columns(
        history,
        history.newest,
        history.newest.columns.identities,
        TypedSchema(()),
        parse_position(position(start)),
        keeps_values=lambda old, new: (old.data_type, new.data_type) != ("bigint", "smallint"),
        processed=False,
    )
    assert added.unfilled == converted
