"""Outboxes in real runs: what an application wrote beside its rows arrives as messages of its own."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.conftest import Shop, shop
from tests.fix_kafka import Record, read_topic
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import MysqlShop
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source:
    type: {source}
    config: {{id: {name}-db, dsn: "{dsn}", {config}}}
  processors:
    - type: outbox
      tables: [payments_%]
      topic: {name}.payments.${{event_type}}
      columns: {{payload: data}}
      additional_headers: {{x-trace-id: trace_id}}
      raw_payload: true
      id: payments
    - type: outbox
      topic: {name}.${{aggregate_type}}.${{event_type}}
      default_topic: {name}.unrouted
      raw_payload: true
  sinks:
    - type: kafka
      config: {{id: events, brokers: "{brokers}", topic: "{name}.cdc.${{source.table}}",
               envelope: debezium}}
  engine:
    run: {{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}}
"""


@pytest.fixture
def name() -> str:
    """A name for pipeline, slot, publication and topics, of this test only."""
    return f"outbox_{secrets.token_hex(4)}"


@pytest.fixture
def topics(name: str, kafka_server: KafkaServer) -> list[str]:
    """The topics that rows and events go to."""
    made = [f"{name}.{one}" for one in ("cdc.orders", "Order.OrderCreated", "payments.Paid")]
    for topic in made:
        kafka_server.create_topic(topic)
    return made


@pytest.fixture
def mysql_feed(
    mysql_dsn: str,
    kafka_server: KafkaServer,
    spark_server: SparkAddress,
    tmp_path: Path,
    name: str,
) -> Iterator[Feed]:
    """A pipeline over a table, an outbox that is in the log only, and one that keeps its rows."""
    made = MysqlShop(mysql_dsn, redis_uri="")
    made.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, total decimal(10,2))",
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregate_type varchar(64), aggregate_id int,"
        " event_type varchar(64), payload json) ENGINE=BLACKHOLE",
        "CREATE TABLE payments_outbox (id int PRIMARY KEY, event_type varchar(64), data text,"
        " trace_id varchar(64))",
    )
    db = urlsplit(mysql_dsn).path.strip("/")
    config = f'tables: ["{db}.*"], outbox: {{tables: ["{db}.outbox", "{db}.*_outbox"]}}'
    text = PIPELINE.format(
        name=name, source="mysql", dsn=mysql_dsn, config=config, brokers=kafka_server.brokers
    )
    with opened_feed(made, tmp_path / f"{name}.yaml", text, spark_server) as feed:
        yield feed


def records(server: KafkaServer, topics: list[str]) -> list[list[Record]]:
    """Return what each topic has."""
    return [read_topic(server.brokers, topic) for topic in topics]


@pytest.mark.mysql
def test_tables_of_mysql(mysql_feed: Feed, topics: list[str], kafka_server: KafkaServer) -> None:
    """One transaction, three tables: rows in their envelope, events as the application wrote them.

    Emptying an outbox sends nothing, and is counted.
    """
    mysql_feed.shop.execute(
        "INSERT INTO orders VALUES (1, 9.90)",
        """INSERT INTO outbox VALUES (7, 'Order', 1, 'OrderCreated', '{"total": 9.90, "n": 1}')""",
        """INSERT INTO payments_outbox VALUES (1, 'Paid', '{ "sum":  1.10 }', 't-1'),
           (2, 'Paid', 'thank you', NULL)""",
        "INSERT INTO orders VALUES (2, 5.00)",
    )
    mysql_feed.shop.execute("DELETE FROM payments_outbox")
    outcome = mysql_feed.catch_up()

    assert not outcome.behind
    orders, (created,), (paid, thanked) = records(kafka_server, topics)
    payloads = [json.loads(one.value or b"")["payload"] for one in orders]
    assert [(one["op"], one["after"]["id"], one["source"].get("schema")) for one in payloads] == [
        ("c", 1, None), ("c", 2, None),
    ]  # fmt: skip
    assert (created.key, created.value) == (b"1", b'{"n":1,"total":9.9}')
    assert dict(created.headers) == {
        "df-event-id": b"7", "df-aggregate-type": b"Order", "df-aggregate-id": b"1",
        "df-event-type": b"OrderCreated", "df-source-kind": b"outbox",
    }  # fmt: skip
    assert [paid.value, thanked.value] == [b'{ "sum":  1.10 }', b"thank you"]
    assert dict(paid.headers)["x-trace-id"] == b"t-1"
    assert "x-trace-id" not in dict(thanked.headers)
    counts = [one.processed_counts for one in mysql_feed.store.segments.read(mysql_feed.name)]
    assert sum((one or {})["payments"].get("outbox_dropped:non_insert", 0) for one in counts) == 2


@pytest.mark.postgres
def test_messages_of_postgres(  # noqa: PLR0917 - fixtures
    shop: Shop,
    kafka_server: KafkaServer,
    spark_server: SparkAddress,
    tmp_path: Path,
    name: str,
    topics: list[str],
) -> None:
    """Messages inside and outside of transactions are events; other prefixes are none of them."""
    config = (
        f"slot: {name}, publication: {name}, tables: [public.customers], "
        "outbox: {prefixes: [outbox, '%_outbox']}"
    )
    text = PIPELINE.format(
        name=name, source="postgres", dsn=shop.dsn, config=config, brokers=kafka_server.brokers
    )
    customers, others = f"{name}.cdc.customers", f"{name}.cdc.audit"
    for topic in (customers, others):
        kafka_server.create_topic(topic)
    created = '{"aggregate_type":"Order","aggregate_id":1,"event_type":"OrderCreated","payload":{"a":1.10}}'
    paid = '{"event_type":"Paid","data":"5"}'
    with opened_feed(shop, tmp_path / f"{name}.yaml", text, spark_server) as feed:
        shop.execute(
            "INSERT INTO customers VALUES (1, 'a')",
            f"SELECT pg_logical_emit_message(true, 'outbox', '{created}')",
            f"SELECT pg_logical_emit_message(false, 'payments_outbox', '{paid}')",
            "SELECT pg_logical_emit_message(true, 'outbox', 'no JSON')",
            "SELECT pg_logical_emit_message(true, 'outbox', '[1]')",
            """SELECT pg_logical_emit_message(true, 'audit', '{"id":5}')""",
        )
        with psycopg.connect(shop.dsn) as undone:  # its transaction goes, the message stays
            undone.execute(f"SELECT pg_logical_emit_message(true, 'outbox', '{created}')")
            undone.execute(f"SELECT pg_logical_emit_message(false, 'payments_outbox', '{paid}')")
            undone.rollback()
        outcome = feed.catch_up()

    assert not outcome.behind
    (row,), (audit,), (order,), payments = records(
        kafka_server, [customers, others, topics[1], topics[2]]
    )
    assert json.loads(row.value or b"")["payload"]["after"] == {"id": 1, "name": "a"}
    assert json.loads(audit.value or b"")["payload"]["source"]["schema"] == "__wal_message"
    assert (order.key, order.value) == (b"1", b'{"a":1.10}')
    assert [one.value for one in payments] == [b"5", b"5"]
