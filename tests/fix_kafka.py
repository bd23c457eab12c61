"""Kafka for tests: one broker per session, topics of their own for each test.

`DELTAFORGE_TEST_KAFKA_BROKERS` names a running cluster to use instead (`host:port,...`, without
passwords). Otherwise a broker from Maven Central is started.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from deltaforge_lab.servers.kafka import KafkaServer, installed_version
from tests.started import each_closed, or_fail

BROKERS_VARIABLE = "DELTAFORGE_TEST_KAFKA_BROKERS"

StartKafka = Callable[..., KafkaServer]


@dataclass(frozen=True, slots=True)
class Record:
    """A message as a consumer gets it."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    partition: int
    offset: int


def pytest_report_header() -> str:
    """Say which Kafka the tests use."""
    if os.environ.get(BROKERS_VARIABLE):
        return f"kafka: the cluster of {BROKERS_VARIABLE}"
    return f"kafka: {installed_version()}"


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """A broker with `.brokers` and `.create_topic()`; not to be stopped or changed."""
    brokers = os.environ.get(BROKERS_VARIABLE)
    with or_fail(lambda: KafkaServer.attach(brokers) if brokers else KafkaServer.start()) as server:
        yield server


@pytest.fixture
def kafka_topic(kafka_server: KafkaServer) -> str:
    """An empty topic of the session's broker, with one partition."""
    name = f"df_{secrets.token_hex(6)}"
    kafka_server.create_topic(name)
    return name


@pytest.fixture
def start_kafka() -> Iterator[StartKafka]:
    """Start a broker of the test's own, to stop, pause and configure: `start_kafka(settings)`.

    Always a new broker, whatever `DELTAFORGE_TEST_KAFKA_BROKERS` says.
    """
    with each_closed(KafkaServer.start) as start:
        yield start


SETTLE_SECONDS = 15.0
"""How long the brokers may take to show a transaction that was committed or aborted. Both are
answered before every partition has been told, and a busy machine takes its time for that."""


def read_topic(
    brokers: str, topic: str, *, isolation: str = "read_committed", seconds: float = 60
) -> list[Record]:
    """Return what a topic holds now, by partition and offset.

    Args:
        brokers: Where.
        topic: Its name; it must exist.
        isolation: `read_committed` leaves out what open and aborted transactions wrote,
            `read_uncommitted` does not. The first waits a moment for transactions to end.
        seconds: How long to wait for the end of every partition.
    """
    consumer, watcher = (_consumer(brokers, one) for one in (isolation, "read_uncommitted"))
    found: list[Record] = []
    try:
        partitions = consumer.list_topics(topic, timeout=seconds).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        settled = 0.0
        unread = set(partitions)
        while unread:
            message = consumer.poll(seconds)
            assert message is not None, f"{topic}: partitions {sorted(unread)} have no end"
            error, partition, offset = message.error(), message.partition(), message.offset()
            assert partition is not None
            assert offset is not None
            if error is None:
                headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
                found.append(
                    Record(message.key(), message.value(), tuple(headers), partition, offset)
                )
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            else:
                settled = settled or time.monotonic() + SETTLE_SECONDS  # not while it reads
                while True:
                    place = TopicPartition(topic, partition)
                    limits = [one.get_watermark_offsets(place) for one in (consumer, watcher)]
                    if limits[0] == limits[1] or time.monotonic() > settled:
                        break
                    time.sleep(0.02)
                if offset >= limits[0][1]:
                    unread.discard(partition)
    finally:
        consumer.close()
        watcher.close()
    return sorted(found, key=lambda record: (record.partition, record.offset))


def _consumer(brokers: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"test-{secrets.token_hex(6)}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            "isolation.level": isolation,
        }
    )
