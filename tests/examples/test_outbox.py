"""Examples of outboxes: in MySQL, in PostgreSQL's log, and two channels in one database."""

from __future__ import annotations

import json

import pytest

from deltaforge_lab.servers.kafka import KafkaServer
from tests.examples.stage import Play, records

pytestmark = [
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.postgres,
    pytest.mark.kafka,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]

HEADERS = {
    "df-aggregate-type": b"Order",
    "df-aggregate-id": b"1",
    "df-event-type": b"OrderCreated",
    "df-source-kind": b"outbox",
}
ORDERS = (
    "CREATE TABLE orders (id int PRIMARY KEY, customer varchar(20), total decimal(10,2),"
    " status varchar(20), created_at timestamp DEFAULT now())"
)


def outbox(name: str, payload: str = "payload") -> str:
    """Return the statement that makes an outbox in MySQL."""
    return (
        f"CREATE TABLE {name} (id int AUTO_INCREMENT PRIMARY KEY, aggregate_type varchar(64),"
        f" aggregate_id varchar(64), event_type varchar(64), {payload} json) ENGINE=BLACKHOLE"
    )


def test_orders_outbox(play: Play, kafka_server: KafkaServer) -> None:
    """The payload alone, with its headers, in a topic of its own; the row in Debezium's envelope."""
    example = play("orders-outbox", ORDERS, outbox("outbox"))
    example.change(
        "INSERT INTO orders (id, customer, total) VALUES (1, 'alice', 99.99)",
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)"
        """ VALUES ('Order', '1', 'OrderCreated', '{"total": 99.990}')""",
    )
    example.deliver()

    (message,) = records(example, kafka_server.brokers, "Order.OrderCreated")
    assert json.loads(message.value or b"") == {"total": 99.99}
    assert message.key == b"1"
    headers = dict(message.headers)
    assert headers.pop("df-event-id")
    assert headers == HEADERS
    database = example.loaded.spec.spec.source.config.tables[0].split(".")[0]
    (row,) = records(example, kafka_server.brokers, f"cdc.{database}.orders")
    event = json.loads(row.value or b"")
    assert list(event) == ["schema", "payload"]
    assert event["payload"]["after"]["total"] == "99.99"
    assert event["payload"]["op"] == "c"


def test_orders_outbox_postgres(play: Play, kafka_server: KafkaServer) -> None:
    """The same from a message in PostgreSQL's log, in the order of its transaction."""
    example = play("orders-outbox-postgres", ORDERS)
    message = {
        "aggregate_type": "Order", "aggregate_id": "1", "event_type": "OrderCreated",
        "payload": {"total": 99.99},
    }  # fmt: skip
    example.change(
        "INSERT INTO orders (id, customer, total) VALUES (1, 'alice', 99.99)",
        f"SELECT pg_logical_emit_message(true, 'outbox', '{json.dumps(message)}')",
        "SELECT pg_logical_emit_message(true, 'other', 'not for us')",
    )
    example.deliver()

    (found,) = records(example, kafka_server.brokers, "Order.OrderCreated")
    assert json.loads(found.value or b"") == {"total": 99.99}
    assert (found.key, dict(found.headers)) == (b"1", HEADERS)
    (row,) = records(example, kafka_server.brokers, "cdc.public.orders")
    assert json.loads(row.value or b"")["payload"]["source"]["table"] == "orders"


def test_outbox_two_channels(play: Play, kafka_server: KafkaServer) -> None:
    """Each outbox has its own topics, and its own column for the payload."""
    example = play(
        "outbox-two-channels", outbox("orders_outbox"), outbox("payments_outbox", "data")
    )
    columns = "(aggregate_type, aggregate_id, event_type"
    example.change(
        f"""INSERT INTO orders_outbox {columns}, payload) VALUES ('Order', '1', 'created', '[1]')""",
        f"""INSERT INTO payments_outbox {columns}, data) VALUES ('Payment', '7', 'taken', '[2]')""",
    )
    example.deliver()

    for topic, key, value in (("orders.created", b"1", b"[1]"), ("payments.taken", b"7", b"[2]")):
        (found,) = records(example, kafka_server.brokers, topic)
        assert (found.key, found.value) == (key, value)
