"""Tests of the tables of benchmarks."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from deltaforge_lab.bench.shapes import SHAPES, Shape
from deltaforge_lab.servers.mysql import execute


def size(row: dict[str, Any]) -> int:
    """Return the approximate size of a row as JSON."""
    return len(json.dumps(row, default=str, separators=(",", ":")))


@pytest.mark.postgres
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_postgres_makes_the_rows(postgres_dsn: str, shape: Shape) -> None:
    """Rows have the documented size and the requested numbers."""
    with psycopg.connect(postgres_dsn, row_factory=psycopg.rows.dict_row) as connection:
        connection.execute(shape.create_table("postgres"))
        connection.execute(shape.insert("postgres", 500_000, 3))
        rows = connection.execute(f"SELECT * FROM {shape.name} ORDER BY id").fetchall()

    assert [row["id"] for row in rows] == [500_000, 500_001, 500_002]
    least, most = {"orders6": (110, 180), "wide10": (235, 285), "documents3": (100, 140)}[
        shape.name
    ]
    assert least < size(rows[0]) < most


@pytest.mark.mysql
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_mysql_makes_the_rows(mysql_dsn: str, shape: Shape) -> None:
    """MySQL has the same columns in the same order; times are valid in every time zone used."""
    execute(
        mysql_dsn,
        "CREATE TABLE numbers (i INT PRIMARY KEY)",
        "INSERT INTO numbers VALUES (0), (1), (2), (3)",
        shape.create_table("mysql"),
        shape.insert("mysql", 500_000, 3),
    )
    rows = execute(mysql_dsn, f"SELECT * FROM {shape.name} ORDER BY id")

    assert [row[0] for row in rows] == [500_000, 500_001, 500_002]
    assert len(rows[0]) == len(shape.columns)
