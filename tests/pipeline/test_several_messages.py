"""Changes that become several messages, or none: from both databases to Kafka and Redis."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.conftest import Shop, shop
from tests.fix_kafka import read_topic
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import Database, MysqlDatabase, PostgresDatabase
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.redis]

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source: {source}
  sinks:
    - type: kafka
      config: {{id: split, brokers: "{brokers}", topic: {name}-split, tombstones: true,
               key_updates: delete_insert, exactly_once: true}}
    - type: kafka
      config: {{id: whole, brokers: "{brokers}", topic: {name}-whole, tombstones: true,
               envelope: debezium}}
    - type: redis
      config: {{id: some, uri: "{redis}", stream: {name}, skipped_operations: "d",
               key_updates: delete_insert, key: "${{key.id}}", exactly_once: true}}
  engine:
    run: {{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}}
"""


@pytest.fixture(
    params=[
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("full", marks=pytest.mark.postgres),
        pytest.param("mysql", marks=pytest.mark.mysql),
    ]
)
def database(request: pytest.FixtureRequest) -> Database:
    """PostgreSQL with each kind of replica identity, MySQL."""
    if request.param == "mysql":
        return MysqlDatabase(request.getfixturevalue("mysql_dsn"))
    made: Shop = request.getfixturevalue("shop")
    if request.param == "full":
        made.execute("ALTER TABLE customers REPLICA IDENTITY FULL")
    return PostgresDatabase(made)


@pytest.fixture
def feed(  # noqa: PLR0917 - fixtures
    database: Database,
    kafka_server: KafkaServer,
    redis_server: RedisServer,
    spark_server: SparkAddress,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Feed]:
    """A pipeline with a sink of each kind."""
    request.getfixturevalue("redis_client")  # an empty server
    name = f"several_{secrets.token_hex(4)}"
    text = PIPELINE.format(
        name=name,
        source=database.source(name),
        brokers=kafka_server.brokers,
        redis=redis_server.uri,
    )
    for sink in ("split", "whole"):
        kafka_server.create_topic(f"{name}-{sink}")
    with opened_feed(database.shop, tmp_path / f"{name}.yaml", text, spark_server) as made:
        yield made


Message = tuple[str, dict[str, Any] | None]


def messages(feed: Feed, server: KafkaServer, sink: str) -> list[Message]:
    """Return the keys and values of a sink's topic."""
    records = read_topic(server.brokers, f"{feed.name}-{sink}")
    return [
        ((one.key or b"").decode(), None if one.value is None else json.loads(one.value))
        for one in records
    ]


def shown(message: Message) -> tuple[str, Any]:
    """Return a message's key, and of its value what a tombstone's reader looks at."""
    key, value = message
    event = value.get("payload", value) if value else None
    return key, event and (event["op"], id_of(event["before"]), id_of(event["after"]))


def id_of(image: dict[str, Any] | None) -> int | None:
    """Return the id in a row image."""
    return None if image is None else image["id"]


def test_keys_change_and_rows_go(
    feed: Feed, database: Database, kafka_server: KafkaServer, redis_server: RedisServer
) -> None:
    """Each sink has what it asks for, in order, whatever the log says of old rows.

    A sink that keeps its position goes on after changes that it does not get, and has lost nothing.
    """
    database.shop.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'b')")
    database.shop.execute("UPDATE customers SET id = 3, name = 'c' WHERE id = 1")
    database.shop.execute("UPDATE customers SET name = 'd' WHERE id = 3")
    database.shop.execute("DELETE FROM customers WHERE id = 3")
    feed.catch_up()
    database.shop.execute("INSERT INTO customers VALUES (4, 'e')")
    outcome = feed.catch_up()  # opens every sink again, behind a delete that `some` never got

    one, two, three, four = '{"id":1}', '{"id":2}', '{"id":3}', '{"id":4}'
    split = messages(feed, kafka_server, "split")
    plain = id_of(json.loads(json.dumps(split[5][1]))["before"])  # the log's old row, if any
    assert [shown(message) for message in split] == [
        (one, ("c", None, 1)),
        (two, ("c", None, 2)),
        (one, ("d", 1, None)),
        (one, None),
        (three, ("c", None, 3)),
        (three, ("u", plain, 3)),
        (three, ("d", 3, None)),
        (three, None),
        (four, ("c", None, 4)),
    ]
    ids = [value["event_id"] for _, value in split if value]
    assert len(set(ids)) == 7
    whole = messages(feed, kafka_server, "whole")
    assert [shown(message) for message in whole] == [
        (one, ("c", None, 1)),
        (two, ("c", None, 2)),
        (three, ("u", 1, 3)),
        (three, ("u", plain, 3)),
        (three, ("d", 3, None)),
        (three, None),
        (four, ("c", None, 4)),
    ]
    assert whole[2][1] is not None
    assert whole[2][1]["payload"]["event_id"] == ids[2]
    some = Shop(database.shop.dsn, redis_server.uri).entries(feed.name)
    found = [(entry["df-key"], json.loads(entry["df-event"])) for entry in some]
    assert [(key, event["op"], id_of(event["after"])) for key, event in found] == [
        ("1", "c", 1),
        ("2", "c", 2),
        ("3", "c", 3),
        ("3", "u", 3),
        ("4", "c", 4),
    ]
    assert [entry["event_id"] for entry in some][2:3] == ids[3:4]
    assert outcome.sink_errors == {}
    checkpoints = feed.store.checkpoints.read(feed.name).values()
    assert {checkpoint.notice for checkpoint in checkpoints} == {None}
    assert len({(row.segment, row.complete) for row in checkpoints}) == 1
