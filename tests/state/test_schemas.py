"""Fingerprints, keys and the stored form of table versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from deltaforge_dagster.state.database.primitives import Log
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.schemas import TableHistory, fingerprint, registry, table_key
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
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
    }


def history(store: StateStore, lease: Lease, *versions: tuple[str, ...]) -> TableHistory:
    """Return the history of a table with these versions; `new<old` is a column that was renamed."""
    with store.fenced(lease) as writer:
        for number, columns in enumerate(versions, 1):
            pairs = [column.partition("<") for column in columns]
            former = {new: old or None for new, _, old in pairs}
            made = table("id", *former)
            known = tuple(replace(one, former=former.get(one.name)) for one in made.columns)
            writer.schemas.register("acme", replace(made, columns=known), position(number))
    return store.schemas.history(NAME, "public.orders")


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
    ],
)
def test_a_column_stays_the_same_when_it_is_renamed(
    sqlite_store: StateStore, versions: list[tuple[str, ...]], expected: list[dict[str, str]]
) -> None:
    """A version that was there before keeps what identified its columns; whatever is not known to be renamed is new."""
    found = history(sqlite_store, held(sqlite_store), *versions).identities()
    assert list(found.values()) == [{"id": "id@1"} | one for one in expected]


def test_what_a_snapshot_has_registered_is_not_renamed_later(sqlite_store: StateStore) -> None:
    """What identifies a column never changes: rows may have been delivered with it."""
    lease = held(sqlite_store)
    history(sqlite_store, lease, ("a",))
    newer = table("id", "b")
    with sqlite_store.fenced(lease) as writer:
        writer.schemas.register("acme", newer, position(1), streamed=False)
    before = sqlite_store.schemas.history(NAME, "public.orders").identities()
    again = history(sqlite_store, lease, ("a",), ("b<a",)).identities()
    assert again == before == {1: {"id": "id@1", "a": "a@1"}, 2: {"id": "id@1", "b": "b@2"}}
