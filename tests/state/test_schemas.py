"""Fingerprints, keys and the stored form of table versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.database.primitives import Log
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.schemas import TableHistory, fingerprint, registry, table_key
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, ColumnChanges, TableSchema
from tests.state.make import NAME, held, position, table


def test_fingerprint_is_of_this_json() -> None:
    """The fingerprint is SHA-256 over exactly this text, so it can be recomputed elsewhere."""
    text = (
        '{"columns":[{"name":"id","data_type":"int4","type_oid":23,"nullable":false,'
        '"ordinal_position":1},{"name":"größe","data_type":"custom","nullable":true,'
        '"ordinal_position":2}],"primary_key":["id"]}'
    )
    of = TableSchema(
        "shop",
        "public",
        "orders",
        (Column("id", "int4", 23, False, 1), Column("größe", "custom", None, True, 2)),
        ("id",),
    )

    assert fingerprint(of) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_what_the_fingerprint_is_about() -> None:
    """Columns, their order and the primary key change it; the table's name does not."""
    base = table("id", "name")
    swapped = replace(base, columns=base.columns[::-1])
    nullable = replace(base, columns=(base.columns[0], replace(base.columns[1], nullable=False)))

    assert fingerprint(base) == fingerprint(table("id", "name", name="other"))
    different = {
        fingerprint(one)
        for one in (base, swapped, nullable, replace(base, primary_key=()), table("id"))
    }
    assert len(different) == 5


@pytest.mark.parametrize(
    ("schema", "name", "expected"),
    [
        ("public", "orders", "acme/shop/public.orders"),
        (None, "orders", "acme/shop/orders"),
        ("a.b", "c", "acme/shop/a%2Eb.c"),
        ("a", "b.c", "acme/shop/a.b%2Ec"),
        (None, "a.b", "acme/shop/a%2Eb"),
        ("x/y", "%2E", "acme/shop/x%2Fy.%252E"),
    ],
)
def test_keys(schema: str | None, name: str, expected: str) -> None:
    """Two tables never share a key, whatever their names contain."""
    assert table_key("acme", TableSchema("shop", schema, name, (), ())) == expected


def test_entry(sqlite_store: StateStore) -> None:
    """An entry holds fingerprint, numbers, the whole definition, time and position."""
    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        stamp = writer.schemas.register("acme", table("id"), position(7))

    (entry,) = Log(sqlite_store.database, registry(NAME)).entries("acme/shop/public.orders")
    fields = json.loads(entry.value)
    assert fields.pop("registered_at") == pytest.approx(sqlite_store.now(), abs=60)
    assert fields == {
        "hash": stamp.fingerprint,
        "version": 1,
        "sequence": 1,
        "schema": {
            "db": "shop",
            "schema": "public",
            "table": "orders",
            "columns": [
                {
                    "name": "id",
                    "data_type": "int4",
                    "type_oid": 23,
                    "nullable": False,
                    "ordinal_position": 1,
                }
            ],
            "primary_key": ["id"],
        },
        "checkpoint": json.loads(position(7)),
        "columns": {"identities": {"id": "id@1"}, "numbers": {}, "relation": None, "fills": {}},
    }


def history(store: StateStore, lease: Lease, *versions: tuple[str, ...]) -> TableHistory:
    """Return the history of a table with these versions: `new<old` is a column that was renamed, `+new` one that was added."""
    with store.fenced(lease) as writer:
        for number, columns in enumerate(versions, 1):
            names = [column.partition("<")[0].removeprefix("+") for column in columns]
            renamed = {new: old for new, _, old in (one.partition("<") for one in columns) if old}
            added = frozenset(one[1:] for one in columns if one.startswith("+"))
            changes = ColumnChanges(renamed, added, fills=dict.fromkeys(added, "7"))
            writer.schemas.alter("acme", table("id"), changes, position(10 * number - 5))
            writer.schemas.register("acme", table("id", *names), position(10 * number))
    return store.schemas.history(NAME, "public.orders")


def identities(history: TableHistory) -> list[dict[str, str]]:
    """What identifies the columns of each version, without the key."""
    found = [dict(one.columns.identities) for one in history.versions]
    assert all(one.pop("id") == "id@1" for one in found)
    return found


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([("a",), ("b<a",), ("c<b",)], [{"a": "a@1"}, {"b": "a@1"}, {"c": "a@1"}]),
        ([("a",), ("b<A",)], [{"a": "a@1"}, {"b": "a@1"}]),
        ([("a",), ("b",)], [{"a": "a@1"}, {"b": "b@2"}]),
        ([("a",), ("b<a", "a")], [{"a": "a@1"}, {"b": "a@1", "a": "a@2"}]),
        ([("a", "b"), ("b<a", "a<b")], [{"a": "a@1", "b": "b@1"}, {"b": "a@1", "a": "b@1"}]),
        ([("a", "b"), ("a<b",)], [{"a": "a@1", "b": "b@1"}, {"a": "b@1"}]),
        ([("a",), ("b<a",), ("a<b",), ("c<a",)], [{"a": "a@1"}, {"b": "a@1"}, {"c": "a@1"}]),
        ([("a",), (), ("a", "x")], [{"a": "a@1"}, {}, {"a": "a@3", "x": "x@3"}]),
        ([("a",), ("b<x",)], [{"a": "a@1"}, {"b": "b@2"}]),
        ([("a",), (), ("+a",)], [{"a": "a@1"}, {}, {"a": "a@3"}]),
        ([("a",), ("+a",)], [{"a": "a@1"}, {"a": "a@2"}]),
        ([("a",), (), ("+a",), (), ("+a",)], [{"a": "a@1"}, {}, {"a": "a@3"}, {"a": "a@4"}]),
        ([("a", "b"), ("b<a", "a<b"), ("a<b", "b<a")], [{"a": "a@1", "b": "b@1"}, {"b": "a@1", "a": "b@1"}]),
    ],
)  # fmt: skip
def test_which_columns_the_names_of_versions_stand_for(
    sqlite_store: StateStore, versions: list[tuple[str, ...]], expected: list[dict[str, str]]
) -> None:
    """A column keeps its identity under other names, and none gets that of another.

    The same form again is the same version only if its columns are the same.
    """
    lease = held(sqlite_store)
    found = history(sqlite_store, lease, *versions)
    assert identities(found) == expected
    assert len({one.stamp.fingerprint for one in found.versions}) == len(expected)
    assert history(sqlite_store, lease, *versions) == found  # the log is read again


def test_what_older_rows_have_in_new_columns(sqlite_store: StateStore) -> None:
    """It is stored with the version that has the column first."""
    found = history(sqlite_store, held(sqlite_store), ("a",), ("+b", "c"), ("b", "c", "d"))
    fills = [dict(one.columns.fills) for one in found.versions]
    assert fills == [{}, {"b": "7", "c": None}, {"d": None}]


def test_a_version_that_only_a_snapshot_has_met(sqlite_store: StateStore) -> None:
    """What statements have done before the snapshot counts for it, and for the same version in the log after it."""
    lease = held(sqlite_store)
    history(sqlite_store, lease, ("a",))
    renamed = ColumnChanges({"b": "a"})
    with sqlite_store.fenced(lease) as writer:
        writer.schemas.alter("acme", table("id"), renamed, position(12))
        read = writer.schemas.register("acme", table("id", "b"), position(14), streamed=False)
        logged = writer.schemas.register("acme", table("id", "b"), position(20))
    assert read == logged
    found = sqlite_store.schemas.history(NAME, "public.orders")
    assert identities(found) == [{"a": "a@1"}, {"b": "a@1"}]


def test_statements_that_are_not_understood(sqlite_store: StateStore) -> None:
    """All columns of the next version may be others than before, and say so; the version stays the same from then on."""
    lease = held(sqlite_store)
    history(sqlite_store, lease, ("a",))
    unknown = ColumnChanges(certain=False)
    with sqlite_store.fenced(lease) as writer:
        writer.schemas.alter("acme", table("id"), unknown, position(12))
        first = writer.schemas.register("acme", table("id", "a"), position(14))
        again = writer.schemas.register("acme", table("id", "a"), position(20))
    assert first == again
    newest = sqlite_store.schemas.history(NAME, "public.orders").versions[1]
    assert newest.columns.identities == {"id": "id@2?", "a": "a@2?"}


def numbered(relation: int, **numbers: int | None) -> TableSchema:
    """A version with these columns and their numbers in the catalog."""
    made = table(*numbers)
    columns = (replace(one, number=numbers[one.name], fill="5") for one in made.columns)
    return replace(made, columns=tuple(columns), relation=relation)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (numbered(1, id=1, a=3), {"a": "a@2"}),
        (numbered(1, id=1, b=2), {"b": "a@1"}),
        (numbered(1, id=1, b=2, a=3), {"b": "a@1", "a": "a@2"}),
        (numbered(2, id=1, a=7), {"a": "a@1"}),
        (numbered(1, id=None, a=None), {"a": "a@1"}),
        (numbered(1, id=None, a=None, b=None), {"a": "a@1", "b": "b@2"}),
        (numbered(1, id=None, b=None), {"id": "id@2?", "b": "b@2?"}),
    ],
)
def test_columns_with_numbers(
    sqlite_store: StateStore, after: TableSchema, expected: dict[str, str]
) -> None:
    """A number is one column's for ever; without numbers names must suffice, and a table that was made again goes by names."""
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        # A snapshot knows the numbers before the log has described the table.
        writer.schemas.register("acme", numbered(1, id=1, a=2), position(1), streamed=False)
        writer.schemas.register("acme", after, position(2))
    newest = sqlite_store.schemas.history(NAME, "public.orders").at_position(
        parse_position(position(2))
    )
    assert newest is not None
    assert newest.columns.identities == {"id": "id@1"} | expected
