"""Changes of tables for the tests of lake sinks, and a pipeline with such a sink."""

from __future__ import annotations

from typing import Any

from deltaforge_dagster.tables import Column, TableSchema
from tests.processors.rows import Row, dumps, row

PIPELINE = """
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}
  sinks:
    - type: delta
      config: {id: lake, path: /nowhere, OPTIONS}
"""


def change(op: str, pos: int, version: str | None, **images: Any) -> Row:
    """Return a change of `public.orders` with its images as objects; its key is that of the newest image."""
    texts = {name: None if image is None else dumps(image) for name, image in images.items()}
    newest = images.get("after") or images.get("before") or {}
    texts.setdefault("key", dumps({"id": newest["id"]}) if "id" in newest else None)
    return row(
        **{
            "op": op,
            "pos": pos,
            "before": None,
            "after": None,
            "schema_version": version,
            "ts_us": pos,
            **texts,
        }
    )


def table(*columns: str, name: str = "orders", type_: str = "integer") -> TableSchema:
    """Return a table version with columns of one type, the first one its primary key."""
    numbered = enumerate(columns, 1)
    made = tuple(Column(one, type_, None, False, number) for number, one in numbered)
    return TableSchema("shop", "public", name, made, columns[:1])
