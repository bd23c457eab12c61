"""The sinks of benchmarks: servers that the pipeline writes to and that the benchmark reads back.

What has arrived is read from the server itself, never from the pipeline.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    """A running server with the pipeline's destination, `DESTINATION`.

    Attributes:
        server: The server.
        address: What clients connect to.
        encoding: The sink's `encoding` in the pipeline file, in YAML's flow style.
    """

    server: Server
    address: str
    encoding: str = "json"

    @abstractmethod
    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's entry in the pipeline file, in YAML's flow style."""

    @abstractmethod
    def create(self, destination: str) -> None:
        """Create a further destination, like the pipeline's."""

    @abstractmethod
    def count(self, destination: str = DESTINATION) -> int:
        """Return how many messages a consumer can read."""

    @abstractmethod
    def sizes(self, destination: str) -> AbstractContextManager[Callable[[], int]]:
        """Yield a function that returns the number of messages within a millisecond or so.

        In Kafka it also counts the marks that end transactions.
        """

    def trim(self, destination: str) -> None:  # noqa: B027 - most servers keep messages on disk
        """Discard all but the last message if the server keeps them in memory."""

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
        self.address = self._redis.uri

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's block of a pipeline file, YAML."""
        return (
            f'{{type: redis, config: {{id: sink, uri: "{self._redis.uri}", stream: {DESTINATION}, '
            f"encoding: {self.encoding}, exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def create(self, destination: str) -> None:
        """Do nothing: the first XADD creates a stream."""

    def count(self, destination: str = DESTINATION) -> int:
        """Return the stream's length."""
        with self.sizes(destination) as size:
            return size()

    @contextmanager
    def sizes(self, destination: str) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the stream's length."""
        with redis.Redis.from_url(self._redis.uri, socket_timeout=120) as client:
            yield lambda: int(client.xlen(destination))

    def trim(self, destination: str) -> None:
        """Discard all entries but the last."""
        with redis.Redis.from_url(self._redis.uri, socket_timeout=120) as client:
            client.xtrim(destination, maxlen=1, approximate=False)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the stream's entries; the time is in their ids."""
        return read_redis(self._redis.uri, DESTINATION)


class KafkaBench(BenchSink):
    """Kafka: one topic of four partitions, whose records have the broker's timestamp."""

    def __init__(self) -> None:
        self._kafka = KafkaServer.start(quick=False)
        self.server = self._kafka
        self.address = self._kafka.brokers
        self._counted: dict[str, int] = {}
        self._next: dict[str, list[int]] = {}
        self.create(DESTINATION)

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's block of a pipeline file, YAML."""
        return (
            f'{{type: kafka, config: {{id: sink, brokers: "{self._kafka.brokers}", '
            f"topic: {DESTINATION}, encoding: {self.encoding}, "
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def create(self, destination: str) -> None:
        """Create the topic."""
        settings = {"message.timestamp.type": "LogAppendTime"}
        self._kafka.create_topic(destination, PARTITIONS, settings)

    def count(self, destination: str = DESTINATION) -> int:
        """Return how many records a consumer gets with isolation level read_committed.

        Each record is read once.
        """
        offsets = self._next.setdefault(destination, [0] * PARTITIONS)
        counted = self._counted.get(destination, 0)
        for message in self._records(destination, offsets):
            counted += 1
            offsets[message.partition()] = message.offset() + 1
        self._counted[destination] = counted
        return counted

    @contextmanager
    def sizes(self, destination: str) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the sum of the partitions' last stable offsets."""
        partitions = [TopicPartition(destination, n) for n in range(PARTITIONS)]
        consumer = self._consumer()
        try:
            yield lambda: sum(
                consumer.get_watermark_offsets(partition, _PATIENCE)[1] for partition in partitions
            )
        finally:
            consumer.close()

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the records.

        A transaction becomes visible slightly after the timestamps of its records.
        """
        for message in self._records(DESTINATION, [0] * PARTITIONS):
            yield Arrival(orjson.loads(message.value()), message.timestamp()[1])

    def _records(self, topic: str, offsets: list[int]) -> Iterator[Any]:
        consumer = self._consumer()
        try:
            consumer.assign([TopicPartition(topic, n, first) for n, first in enumerate(offsets)])
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

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._kafka.brokers,
                "group.id": secrets.token_hex(6),
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
            }
        )


class NatsBench(BenchSink):
    """NATS: one stream stored in files, which is JetStream's default."""

    def __init__(self) -> None:
        self._nats = NatsServer.start()
        self.server = self._nats
        self.address = self._nats.url
        self.create(DESTINATION)

    def block(self, *, exactly_once: bool) -> str:
        """Return the sink's block of a pipeline file, YAML."""
        return (
            f'{{type: nats, config: {{id: sink, url: "{self._nats.url}", subject: {DESTINATION}, '
            f"stream: {DESTINATION}, encoding: {self.encoding}, "
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def create(self, destination: str) -> None:
        """Create the stream, for the subject of the same name and those below it."""
        wanted = {
            "name": destination,
            "subjects": [destination, f"{destination}.>"],
            "storage": "file",
        }
        with NatsClient(self._nats.url) as client:
            answer = client.ask(f"STREAM.CREATE.{destination}", wanted)
        if "error" in answer:
            raise SettingsError(f"NATS makes no stream: {answer['error']}")

    def count(self, destination: str = DESTINATION) -> int:
        """Return how many messages the stream has."""
        with self.sizes(destination) as size:
            return size()

    @contextmanager
    def sizes(self, destination: str) -> Iterator[Callable[[], int]]:
        """Yield a function that returns how many messages the stream has."""
        with NatsClient(self._nats.url) as client:
            yield lambda: int(client.ask(f"STREAM.INFO.{destination}")["state"]["messages"])

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the stream's messages with the time at which they were stored."""
        with NatsClient(self._nats.url) as client:
            for message in client.read(DESTINATION):
                yield Arrival(orjson.loads(message.value), message.ms)


STARTS: dict[SinkKind, Callable[[], BenchSink]] = {
    "redis": RedisBench,
    "kafka": KafkaBench,
    "nats": NatsBench,
}
