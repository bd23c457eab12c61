"""The sinks of benchmarks: servers that the pipeline writes to and that the benchmark reads back.

What has arrived is read from the server itself, never from the pipeline.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal

import orjson
import redis
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from deltaforge_dagster.errors import SettingsError
from deltaforge_lab.arrivals import Arrival, read_redis
from deltaforge_lab.servers.base import Server
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from deltaforge_lab.servers.nats_client import NatsClient
from deltaforge_lab.servers.redis import RedisServer

SinkKind = Literal["redis", "kafka", "nats"]

DESTINATION = "bench"
PARTITIONS = 4
_PATIENCE = 60.0


class BenchSink(ABC):
    """A running server with one destination.

    Attributes:
        server: The server.
    """

    server: Server

    @abstractmethod
    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's entry in the pipeline file, in YAML's flow style."""

    @abstractmethod
    def count(self) -> int:
        """Return how many messages a consumer can read."""

    @abstractmethod
    def arrivals(self) -> Iterator[Arrival]:
        """Yield every event with the time at which the server received it."""

    def close(self) -> None:
        """Stop the server."""
        self.server.close()


class RedisBench(BenchSink):
    """Redis: one stream, kept in memory only, which is Redis's default for appendonly."""

    def __init__(self) -> None:
        self._redis = RedisServer.start(
            settings={"appendonly": "no"}, origins=["package", "installed"]
        )
        self.server = self._redis

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's block of a pipeline file, YAML."""
        return (
            f'{{type: redis, config: {{id: sink, uri: "{self._redis.uri}", stream: {DESTINATION}, '
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def count(self) -> int:
        """Return the stream's length."""
        with redis.Redis.from_url(self._redis.uri, socket_timeout=120) as client:
            return int(client.xlen(DESTINATION))

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the stream's entries; the time is in their ids."""
        return read_redis(self._redis.uri, DESTINATION)


class KafkaBench(BenchSink):
    """Kafka: one topic of four partitions, whose records have the broker's timestamp."""

    def __init__(self) -> None:
        self._kafka = KafkaServer.start(quick=False)
        self.server = self._kafka
        self._kafka.create_topic(
            DESTINATION, PARTITIONS, {"message.timestamp.type": "LogAppendTime"}
        )

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's block of a pipeline file, YAML."""
        return (
            f'{{type: kafka, config: {{id: sink, brokers: "{self._kafka.brokers}", '
            f"topic: {DESTINATION}, exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def count(self) -> int:
        """Return how many records a consumer gets with isolation level read_committed."""
        return sum(1 for _ in self._records())

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the records; a transaction becomes visible slightly after the timestamps of its records."""
        for message in self._records():
            yield Arrival(orjson.loads(message.value()), message.timestamp()[1])

    def _records(self) -> Iterator[Any]:
        consumer = Consumer(
            {
                "bootstrap.servers": self._kafka.brokers,
                "group.id": secrets.token_hex(6),
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
            }
        )
        try:
            consumer.assign([TopicPartition(DESTINATION, n, 0) for n in range(PARTITIONS)])
            unread = set(range(PARTITIONS))
            while unread:
                message = consumer.poll(_PATIENCE)
                if message is None:
                    raise SettingsError("Kafka does not answer a consumer")
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                    unread.discard(message.partition())
                else:
                    raise SettingsError(f"Kafka refuses a consumer: {KafkaException(error)}")
        finally:
            consumer.close()


class NatsBench(BenchSink):
    """NATS: one stream stored in files, which is JetStream's default."""

    def __init__(self) -> None:
        self._nats = NatsServer.start()
        self.server = self._nats
        with NatsClient(self._nats.url) as client:
            wanted = {"name": DESTINATION, "subjects": [DESTINATION], "storage": "file"}
            answer = client.ask(f"STREAM.CREATE.{DESTINATION}", wanted)
            if "error" in answer:
                raise SettingsError(f"NATS makes no stream: {answer['error']}")

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's block of a pipeline file, YAML."""
        return (
            f'{{type: nats, config: {{id: sink, url: "{self._nats.url}", subject: {DESTINATION}, '
            f"stream: {DESTINATION}, exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def count(self) -> int:
        """Return how many messages the stream has."""
        with NatsClient(self._nats.url) as client:
            return int(client.ask(f"STREAM.INFO.{DESTINATION}")["state"]["messages"])

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the stream's messages with the time at which they were stored."""
        with NatsClient(self._nats.url) as client:
            for one in client.read(DESTINATION):
                yield Arrival(orjson.loads(one.value), one.ms)


STARTS: dict[SinkKind, Callable[[], BenchSink]] = {
    "redis": RedisBench,
    "kafka": KafkaBench,
    "nats": NatsBench,
}
