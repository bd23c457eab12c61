"""Examples over a shop's orders in MySQL: redacted, fanned out, filtered, routed."""

from __future__ import annotations

import json

import pytest
import redis

from deltaforge_lab.servers.kafka import KafkaServer
from tests.examples.stage import Play, entries, events, records
from tests.fix_nats import Admin

pytestmark = [
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.redis,
    pytest.mark.kafka,
    pytest.mark.nats,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]

ORDERS = (
    "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, email varchar(99), phone varchar(20),"
    " total decimal(10,2), status varchar(20), deleted_at datetime)"
)
ITEMS = "CREATE TABLE order_items (id int PRIMARY KEY, order_id int, total decimal(10,2))"


def test_orders_mysql_to_redis(play: Play, redis_client: redis.Redis) -> None:
    """Entries have every field of the row but the address, in `before` as well."""
    example = play("orders-mysql-to-redis", ORDERS)
    example.change(
        "INSERT INTO orders (id, email, total, status)"
        " VALUES (1, 'alice@example.com', 99.99, 'pending')",
        "UPDATE orders SET status = 'paid', email = NULL",
    )
    example.deliver()

    found = entries(example, redis_client, "orders")
    created, paid = (json.loads(one["df-event"]) for one in found)
    assert (created["op"], created["before"]) == ("c", None)
    assert created["after"]["email"] == "[redacted]"
    assert (created["after"]["total"], created["after"]["status"]) == ("99.99", "pending")
    assert created["tenant_id"] == "acme"
    assert created["source"]["name"] == "orders-mysql"
    assert (paid["before"]["email"], paid["after"]["email"]) == ("[redacted]", None)


def test_orders_fan_out(
    play: Play, kafka_server: KafkaServer, redis_client: redis.Redis, nats_admin: Admin
) -> None:
    """The same three events at three sinks, each in its own envelope, with tags that fit the table."""
    example = play("orders-fan-out", ORDERS, ITEMS)
    stream = nats_admin.make(f"{example.own}_ORDERS", f"{example.own}_orders.>")
    example.change(
        "INSERT INTO orders (id, total) VALUES (1, 1200.00), (2, 99.99)",
        "INSERT INTO order_items VALUES (7, 1, 1200.00)",
    )
    example.deliver()

    tags = [
        ["entity:order", "priority:high", "enriched"],
        ["entity:order", "enriched"],
        ["enriched"],
    ]
    wrapped = events(records(example, kafka_server.brokers, "orders.cdc"))
    assert {tuple(one) for one in wrapped} == {("schema", "payload")}
    assert {one["schema"] for one in wrapped} == {None}
    assert [one["payload"]["tags"] for one in wrapped] == tags
    found = entries(example, redis_client, "orders:cache")
    native = [json.loads(one["df-event"]) for one in found]
    assert native == [one["payload"] for one in wrapped]
    cloud = [json.loads(one) for one in nats_admin.values(stream)]
    nats_admin.delete(stream)
    assert {one["type"] for one in cloud} == {"com.acme.orders.created"}
    assert [one["data"]["after"] for one in cloud] == [one["after"] for one in native]
    assert [one["id"] for one in cloud] == [one["event_id"] for one in native]


def test_filtered_orders(play: Play, kafka_server: KafkaServer) -> None:
    """Testers, deleted rows and the log's noise are gone; what passes is masked and tagged."""
    log = "CREATE TABLE audit_log (id int PRIMARY KEY, level varchar(9))"
    example = play("filtered-orders", ORDERS, ITEMS, log)
    example.change(
        "INSERT INTO orders (id, email, phone) VALUES (1, 'alice@example.com', '555-0100')",
        "INSERT INTO orders (id, email) VALUES (2, 'qa@test.local'), (3, 'nonsense')",
        "INSERT INTO orders (id, email, deleted_at) VALUES (4, 'bob@example.com', now())",
        "INSERT INTO audit_log VALUES (1, 'info'), (2, 'error')",
        "UPDATE orders SET deleted_at = now() WHERE id = 3",
        "DELETE FROM orders WHERE id = 1",
        "DELETE FROM audit_log",
    )
    example.deliver()

    found = events(records(example, kafka_server.brokers, "orders.filtered"))
    rows = [one["after"] or one["before"] for one in found]
    assert [(one["op"], one["source"]["table"]) for one in found] == [
        ("c", "orders"), ("c", "orders"), ("c", "audit_log"), ("d", "orders"),
    ]  # fmt: skip
    assert [row["id"] for row in rows] == [1, 3, 2, 1]
    assert [row.get("email") for row in rows] == [
        "a***e@example.com", "[invalid-email]", None, "a***e@example.com",
    ]  # fmt: skip
    assert [row.get("phone") for row in rows] == ["[redacted]", None, None, "[redacted]"]
    assert {tuple(one["tags"]) for one in found} == {("filtered",)}


def test_orders_priority_routing(play: Play, kafka_server: KafkaServer) -> None:
    """Large orders have their own topic, key and headers; other tables go where the sink says."""
    orders = "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, total_amount decimal(10,2))"
    example = play("orders-priority-routing", orders, ITEMS)
    example.change(
        "INSERT INTO orders VALUES (1, 42, 15000.00), (2, 43, 10000.00)",
        "INSERT INTO order_items VALUES (7, 1, 1.00)",
        "DELETE FROM orders WHERE id = 1",
    )
    example.deliver()

    large = records(example, kafka_server.brokers, "orders.priority")
    assert [one["op"] for one in events(large)] == ["c", "d"]
    assert {one.key for one in large} == {b"42"}
    headers = (("x-order-tier", b"high-value"), ("x-amount", b"15000.00"))
    assert {one.headers for one in large} == {headers}
    (standard,) = records(example, kafka_server.brokers, "orders.standard")
    assert (standard.key, standard.headers) == (b'{"id":2}', ())
    (item,) = records(example, kafka_server.brokers, "cdc.order_items")
    assert item.headers == ()


def test_per_table_routing(
    play: Play, kafka_server: KafkaServer, redis_client: redis.Redis, nats_admin: Admin
) -> None:
    """Each table is in its own topic, stream and subject, keyed by the row, deletes too."""
    example = play(
        "per-table-routing", ORDERS, "CREATE TABLE customers (id int PRIMARY KEY, name text)"
    )
    stream = nats_admin.make(f"{example.own}_CDC", f"{example.own}_cdc.>")
    example.change(
        "INSERT INTO customers VALUES (42, 'Alice')",
        "INSERT INTO orders (id, customer_id) VALUES (1, 42)",
        "DELETE FROM orders",
    )
    example.deliver()

    database = example.loaded.spec.spec.source.config.tables[0].split(".")[0]
    for table, keys in (("orders", ["1", "1"]), ("customers", ["42"])):
        found = records(example, kafka_server.brokers, f"cdc.{database}.{table}")
        assert [one.key for one in found] == [f"{table}-{key}".encode() for key in keys]
        streamed = entries(example, redis_client, f"cdc:{table}")
        assert [one["df-key"] for one in streamed] == keys
    stored = list(nats_admin.read(stream))
    nats_admin.delete(stream)
    words = [one.subject.removeprefix(f"{example.own}_cdc.") for one in stored]
    assert words == ["customers.c", "orders.c", "orders.d"]
    assert [one.headers["df-key"] for one in stored] == ["42", "1", "1"]
