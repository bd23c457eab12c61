"""Fingerprints, keys and the stored form of table versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from deltaforge_dagster.state.database.primitives import Log
from deltaforge_dagster.state.schemas import fingerprint, registry, table_key
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
