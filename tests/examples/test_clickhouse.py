"""The example of ClickHouse's tables."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from tests.examples.stage import Play

pytestmark = [
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.clickhouse,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


@pytest.fixture
def audit_database(clickhouse_server: ClickhouseServer) -> Iterator[str]:
    """A second empty database."""
    clickhouse_server.query("CREATE DATABASE example_audit")
    yield "example_audit"
    clickhouse_server.query("DROP DATABASE example_audit")


def test_shop_mysql_to_clickhouse(
    play: Play, clickhouse_server: ClickhouseServer, clickhouse_database: str, audit_database: str
) -> None:
    """One database has the orders as they are, the other every change of them."""
    server = clickhouse_server

    def rows(query: str) -> list[list[object]]:
        answer = server.query(query, "JSONCompactEachRow")
        return [orjson.loads(line) for line in answer.splitlines()]

    example = play(
        "shop-mysql-to-clickhouse",
        "CREATE TABLE orders (id bigint unsigned PRIMARY KEY, customer int, total decimal(10,4))",
        "CREATE TABLE customers (id int PRIMARY KEY, name text, born date)",
        CLICKHOUSE_URL=server.url,
        CLICKHOUSE_USER=server.user,
        CLICKHOUSE_PASSWORD=server.password,
        CLICKHOUSE_DATABASE=clickhouse_database,
        CLICKHOUSE_AUDIT_DATABASE=audit_database,
    )
    example.change(
        "INSERT INTO orders VALUES (1, 1, 9.5), (18446744073709551615, 1, 1)",
        "INSERT INTO customers VALUES (1, 'Ada', '1915-12-10')",
        "UPDATE orders SET total = 10 WHERE id = 1",
        "DELETE FROM orders WHERE id > 1",
    )
    example.deliver()

    orders = f"SELECT toString(id), toString(total) FROM {clickhouse_database}.orders FINAL"
    assert rows(orders) == [["1", "10"]]
    customers = f"SELECT name, born FROM {clickhouse_database}.customers FINAL"
    assert rows(customers) == [["Ada", "1915-12-10"]]
    changes = f"SELECT _op, toString(id), _deleted FROM {audit_database}.orders ORDER BY _version"
    assert rows(changes) == [
        ["c", "1", 0],
        ["c", "18446744073709551615", 0],
        ["u", "1", 0],
        ["d", "18446744073709551615", 1],
    ]
