"""Partial updates of JSON documents give the document that the row has."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.testing.sources import take, whole
from tests.sources.mysql.bench import MysqlBench

pytestmark = [pytest.mark.mysql]

LONG = "x" * 200
"""Documents must be long, or the server writes them whole."""


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A table with two documents, written in parts."""
    with MysqlBench(mysql_dsn) as made:
        made.run(
            "SET binlog_row_value_options = PARTIAL_JSON",
            "CREATE TABLE d (id int PRIMARY KEY, a json, n int, b json, t varchar(20))",
        )
        yield made


CHANGES = [
    "a = JSON_SET(a, '$.k', 1)",
    "a = JSON_REPLACE(a, '$.list[1]', CAST('{\"deep\": [1, 2.5, null]}' AS json)), n = 7",
    "a = JSON_SET(a, '$.list[1].deep[0]', 'ü'), b = JSON_SET(b, '$.\"a b\".c', true)",
    "a = JSON_REMOVE(a, '$.list[0]'), b = JSON_SET(b, '$.\"\"', JSON_ARRAY(1, 100000, -5))",
    r"""a = JSON_SET(a, '$."quote\\"d.[x]"', 18446744073709551615), t = 'x'""",
    "a = JSON_SET(a, '$.when', CAST('2024-02-29 12:34:56.5' AS datetime(6)), '$.k', 0.1e0)",
    "b = JSON_SET(b, '$.decimal', 12345678901234567890.10), a = JSON_REMOVE(a, '$.k', '$.when')",
    "a = JSON_ARRAY_INSERT(a, '$.list[0]', 'first')",
    "a = JSON_SET(a, '$.list[9]', 'last')",
    "b = NULL, a = JSON_SET(a, '$.list[0]', JSON_OBJECT())",
    "b = '[1]'",
    "n = 8",
]


def test_every_change_of_a_document(bench: MysqlBench) -> None:
    """After each kind of partial update the new image has the document that the server shows."""
    document = {"k": 0, "list": [LONG, LONG, 3], "s": LONG, "o": {"in": [1, 2, 3]}}
    other = {"a b": {"c": False, "long": LONG}}
    start = bench.source(tables=(f"{bench.database}.d",)).ensure_start()
    for number in (1, 2):
        bench.execute(
            f"INSERT INTO d VALUES ({number}, '{json.dumps(document)}', 1, '{json.dumps(other)}', 't')"
        )
    expected = []
    for change in CHANGES:
        bench.execute(f"UPDATE d SET {change}")
        expected += [
            {"a": json.loads(a), "b": b and json.loads(b), "n": n}
            for a, b, n in bench.rows("SELECT a, b, n FROM d ORDER BY id")
        ]
    events = bench.rows(f"SHOW BINLOG EVENTS IN '{start.file}' FROM {start.pos}")
    assert sum(event[2] == "Update_rows_partial" for event in events) >= len(CHANGES) - 3

    source = bench.source(tables=(f"{bench.database}.d",))
    taken = take(bench, start, whole(2 + 2 * len(CHANGES)), source=source)

    found = [json.loads(str(row["after"])) for row in taken.rows[2:]]
    assert [{name: row[name] for name in ("a", "b", "n")} for row in found] == expected
    before = [json.loads(str(row["before"])) for row in taken.rows[4:]]
    assert before == found[:-2]
    assert [row["key"] for row in taken.rows] == ['{"id":1}', '{"id":2}'] * (len(CHANGES) + 1)


def test_a_table_that_is_not_captured(bench: MysqlBench) -> None:
    """Partial updates of other tables are counted, whatever their old images lack."""
    start = bench.source().ensure_start()
    bench.run("SET SESSION binlog_row_image = MINIMAL")
    bench.execute(
        f"INSERT INTO d (id, a) VALUES (1, JSON_OBJECT('k', 1, 'l', '{LONG}'))",
        "UPDATE d SET a = JSON_SET(a, '$.k', 2)",
        "INSERT INTO orders VALUES (1, 'x')",
    )

    taken = take(bench, start, whole(1))

    assert [(row["table"], row["row"]) for row in taken.rows] == [("orders", 2)]


def test_an_old_image_without_the_document(bench: MysqlBench) -> None:
    """When the log does not have what was changed, the pipeline stops and names the remedy."""
    source = bench.source(tables=(f"{bench.database}.d",))
    start = source.ensure_start()
    bench.run("SET SESSION binlog_row_image = MINIMAL")
    bench.execute(
        f"INSERT INTO d (id, a) VALUES (1, JSON_OBJECT('k', 1, 'l', '{LONG}'))",
        "UPDATE d SET a = JSON_SET(a, '$.k', 2)",
    )

    with pytest.raises(UnsupportedEvent, match="set binlog_row_image to FULL"):
        take(bench, start, whole(2), source=source)
