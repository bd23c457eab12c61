"""Avro from PostgreSQL to Kafka: real runs, read with the deserializer of Confluent's client."""

from __future__ import annotations

import datetime as dt
import secrets
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from deltaforge_dagster.pipeline.encode.encoder import Encoder, RegisteredVersions
from deltaforge_dagster.pipeline.replay.replay import replay
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_kafka import Record, read_topic
from tests.fix_schema_registry import StartSchemaRegistry
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.kafka]

MakeFeed = Callable[..., Feed]


@pytest.fixture
def make_feed(
    shop: Shop, spark_server: SparkAddress, kafka_server: KafkaServer, tmp_path: Path
) -> Iterator[MakeFeed]:
    """Make a feed with a Kafka sink `avro`, exactly once and with tombstones, beside its Redis sink."""
    name = f"feed-{secrets.token_hex(4)}"
    with ExitStack() as stack:

        def make(registry: SchemaRegistryServer) -> Feed:
            sinks = (
                f"    - type: kafka\n      config: {{id: avro, brokers: '{kafka_server.brokers}', "
                f"topic: '{name}.${{source.table}}', exactly_once: true, tombstones: true, "
                f"encoding: {{type: avro, schema_registry_url: '{registry.url}'}}}}\n"
            )
            run = "{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}"
            text = shop.pipeline(name, run=run, range_="{max_seconds: 3}", more_sinks=sinks)
            text = text.replace("  engine:\n", "  journal: {enabled: true}\n  engine:\n")
            path = tmp_path / f"{name}.yaml"
            return stack.enter_context(opened_feed(shop, path, text, spark_server))

        yield make


def records(feed: Feed, server: KafkaServer, table: str) -> list[Record]:
    """Return what consumers of committed messages get of a table."""
    return read_topic(server.brokers, f"{feed.name}.{table}")


def read(registry: SchemaRegistryServer, topic: str, found: list[Record]) -> list[Any]:
    """Return what Confluent's deserializer makes of values."""
    with closing(SchemaRegistryClient({"url": registry.url})) as client:
        deserialize = AvroDeserializer(client)
        place = SerializationContext(topic, MessageField.VALUE)
        return [deserialize(one.value, place) for one in found]


def schema_ids(found: list[Record]) -> list[int | None]:
    """Return the ids of the schemas of values."""
    return [None if one.value is None else int.from_bytes(one.value[1:5], "big") for one in found]


def test_a_schema_change(
    make_feed: MakeFeed, kafka_server: KafkaServer, schema_registry: SchemaRegistryServer
) -> None:
    """Rows have the schema of their table version: earlier ones keep theirs, also in a replay. A delete has a tombstone."""
    feed = make_feed(schema_registry)
    feed.shop.execute("INSERT INTO orders VALUES (1, 7, 9.50), (2, NULL, -0.01)")
    feed.shop.execute(
        "ALTER TABLE orders ADD placed timestamptz, ADD tags text[]",
        "UPDATE orders SET total = 3, placed = '2026-03-01 12:00:00.000001+02', tags = '{a,NULL}' WHERE id = 1",
        "DELETE FROM orders WHERE id = 2",
        "INSERT INTO customers SELECT n, 'ä' FROM generate_series(1, 3000) n",
    )
    feed.catch_up()

    topic = f"{feed.name}.orders"
    found = records(feed, kafka_server, "orders")
    first, second = schema_registry.versions(f"{topic}-value")
    assert schema_ids(found) == [first, first, second, second, None]
    events = read(schema_registry, topic, found)
    assert [one["op"] if one else None for one in events] == ["c", "c", "u", "d", None]
    assert [one["after"] for one in events[:2]] == [
        {"id": 1, "customer": 7, "total": Decimal("9.50")},
        {"id": 2, "customer": None, "total": Decimal("-0.01")},
    ]
    placed = dt.datetime(2026, 3, 1, 10, 0, 0, 1, dt.UTC)
    assert events[2]["after"] == {
        "id": 1, "customer": 7, "total": Decimal("3.00"), "placed": placed, "tags": ["a", None],
    }  # fmt: skip
    assert events[3]["before"]["id"] == 2
    assert {one["source"]["table"] for one in events if one} == {"orders"}
    assert [one.key for one in found[-2:]] == [b'{"id":2}'] * 2
    many = read(schema_registry, f"{feed.name}.customers", records(feed, kafka_server, "customers"))
    assert [one["after"] for one in many] == [{"id": n, "name": "ä"} for n in range(1, 3001)]

    run_again(feed)
    again = [one for one in records(feed, kafka_server, "orders") if one.headers]
    assert [(one.key, one.value) for one in again] == [(one.key, one.value) for one in found]


def run_again(feed: Feed) -> None:
    """Replay every range to the sink."""
    context = build_run_context(feed.opened, feed.loaded)
    with context.replay_sessions() as sessions:
        run_id = str(uuid.uuid4())
        versions = RegisteredVersions(feed.store.schemas, feed.name)
        journal = feed.opened.journal
        replay(
            feed.store,
            feed.loaded.spec,
            "avro",
            [one.range for one in feed.store.ranges.read(feed.name)],
            encoder=Encoder(feed.loaded.spec, journal, sessions, run_id, versions=versions),
            build_sink=lambda: context.build_sink("avro"),
            run_id=run_id,
            progress=lambda _: None,
        )


def test_a_registry_that_is_down(
    make_feed: MakeFeed, kafka_server: KafkaServer, start_schema_registry: StartSchemaRegistry
) -> None:
    """Known schemas go on; a new one waits, the other sink does not, and nothing becomes a dead letter."""
    registry = start_schema_registry()
    feed = make_feed(registry)
    feed.begin()

    def ids(table: str) -> list[int]:
        found = records(feed, kafka_server, table)
        return [one["after"]["id"] for one in read(registry, f"{feed.name}.{table}", found)]

    def position() -> int:
        return feed.store.checkpoints.read(feed.name)["avro"].whole_segment

    feed.shop.execute("INSERT INTO customers VALUES (1, 'a')")
    eventually(lambda: position() > 0, what="the first delivery")
    registry.stop(immediate=True)
    before = position()
    feed.shop.execute("INSERT INTO customers VALUES (2, 'b')")
    eventually(lambda: position() > before, what="the delivery of a known schema")
    feed.shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    feed.shop.execute("INSERT INTO customers VALUES (3, 'c')")

    def error() -> str:
        return feed.store.checkpoints.read(feed.name)["avro"].last_error or ""

    eventually(lambda: "schema registry" in error(), what="the sink's failure")
    eventually(lambda: len(feed.delivered("customers")) == 3, what="the other sink")
    assert "cannot be reached" in error()
    registry.restart()
    eventually(lambda: not error(), what="the sink's recovery")
    feed.end_all()

    assert (ids("customers"), ids("orders")) == ([1, 2, 3], [1])
    assert feed.store.dead_letters.read(feed.name) == []


def test_an_incompatible_subject(
    make_feed: MakeFeed, kafka_server: KafkaServer, schema_registry: SchemaRegistryServer
) -> None:
    """The registry's refusal stops this sink with its reason; once it is allowed, nothing is missing."""
    feed = make_feed(schema_registry)
    subject = f"{feed.name}.customers-value"
    taken = {"type": "record", "name": "Other", "fields": []}
    schema_registry.ask(f"/subjects/{subject}/versions", {"schema": str(taken).replace("'", '"')}, "POST")  # fmt: skip
    feed.shop.execute("INSERT INTO customers VALUES (1, 'a')")
    outcome = feed.catch_up()

    (failed,) = outcome.sink_errors.items()
    assert failed[0] == "avro"
    assert "not compatible" in failed[1]
    assert "ns.Other" in failed[1] or "Other cannot be read" in failed[1]
    assert len(feed.delivered("customers")) == 1

    schema_registry.set_compatibility("NONE", subject)
    assert feed.catch_up().sink_errors == {}
    (found,) = records(feed, kafka_server, "customers")
    assert read(schema_registry, f"{feed.name}.customers", [found])[0]["after"]["id"] == 1
    assert feed.store.dead_letters.read(feed.name) == []


def test_a_value_that_does_not_fit(
    make_feed: MakeFeed, kafka_server: KafkaServer, schema_registry: SchemaRegistryServer
) -> None:
    """Its change becomes a dead letter of this sink alone, which names the column; the others arrive."""
    feed = make_feed(schema_registry)
    feed.shop.execute("ALTER TABLE customers ADD born date")
    feed.shop.execute("INSERT INTO customers VALUES (1, 'a', '2000-01-01'), (2, 'b', 'infinity'), (3, 'c', NULL)")  # fmt: skip
    feed.catch_up()

    found = records(feed, kafka_server, "customers")
    events = read(schema_registry, f"{feed.name}.customers", found)
    assert [one["after"]["id"] for one in events] == [1, 3]
    (letter,) = feed.store.dead_letters.read(feed.name)
    assert (letter.sink, letter.error_kind) == ("avro", "serialization")
    assert "its column 'born' does not fit" in letter.error_message
    assert "infinity" not in letter.error_message
    assert len(feed.delivered("customers")) == 3
