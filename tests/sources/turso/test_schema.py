"""What a CREATE TABLE statement says."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import orjson
import pytest

from deltaforge_dagster.sources.turso.schema import definition


@pytest.mark.parametrize(
    ("column", "fill"),
    [
        ("int", "null"),
        ("INTEGER DEFAULT 7", "7"),
        ("int NOT NULL DEFAULT -7", "-7"),
        ("TEXT DEFAULT 'a, b {c}'", '"a, b {c}"'),
        ("varchar(3) DEFAULT ''", '""'),
        ("TEXT DEFAULT 'it''s'", None),
        ("TEXT DEFAULT 5", None),
        ("REAL DEFAULT 5", None),
        ("int DEFAULT '5'", None),
        ("int DEFAULT NULL", "null"),
        ("TEXT DEFAULT CURRENT_TIMESTAMP", None),
        ("BLOB DEFAULT x'00'", None),
    ],
)
def test_what_rows_have_in_an_added_column(column: str, fill: str | None) -> None:
    """What SQLite shows in rows that were there, or nothing."""
    (_, added) = definition(f"CREATE TABLE t (id int, c {column})").table.columns
    assert added.fill == fill
    if fill is not None:
        with closing(sqlite3.connect(":memory:")) as shop:
            shop.execute("CREATE TABLE t (id int)")
            shop.execute("INSERT INTO t VALUES (1)")
            shop.execute(f"ALTER TABLE t ADD COLUMN c {column}")
            assert shop.execute("SELECT c FROM t").fetchall() == [(orjson.loads(fill),)]
