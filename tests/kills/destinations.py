"""Sinks that pipelines deliver to, each for one campaign alone."""

from __future__ import annotations

import uuid
from typing import cast

import redis
from confluent_kafka import Consumer, TopicPartition

from deltaforge_dagster.servers.kafka import KafkaServer
from tests.fix_kafka import read_topic
from tests.kills.checker import Arrived
from tests.kills.ends import parse, wait_until_still


class RedisDestination:
    """One stream on a Redis server that nobody else uses."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.stream = "kills"
        self._client = redis.Redis.from_url(uri, client_name="reader")

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: redis, config: {{id: sink, uri: "{self.uri}", stream: {self.stream}, '
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def settle(self) -> None:
        """Wait until the server has read what it was sent: from loopback, it is a moment."""
        wait_until_still(self.lengths, seconds=0.3)

    def lengths(self) -> tuple[int, ...]:
        """Return the length of the stream."""
        return (int(self._client.xlen(self.stream)),)

    def arrived(self) -> list[list[Arrived]]:
        """Return the stream's entries."""
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self.stream))
        return [[parse(fields[b"df-event"]) for _, fields in entries]]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class KafkaDestination:
    """A topic of three partitions."""

    PARTITIONS = 3

    def __init__(self, server: KafkaServer) -> None:
        self.topic = f"kills_{uuid.uuid4().hex[:12]}"
        server.create_topic(self.topic, self.PARTITIONS)
        self._brokers = server.brokers
        self._consumer = Consumer({"bootstrap.servers": server.brokers, "group.id": self.topic})

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        return (
            f'{{type: kafka, config: {{id: sink, brokers: "{self._brokers}", topic: {self.topic}, '
            f"exactly_once: {str(exactly_once).lower()}}}}}"
        )

    def settle(self) -> None:
        """Wait until the broker has handled what it was sent."""
        wait_until_still(self.lengths, seconds=0.5)

    def lengths(self) -> tuple[int, ...]:
        """Return the end of each partition; with transactions their markers count, too."""
        ends = []
        for number in range(self.PARTITIONS):
            partition = TopicPartition(self.topic, number)
            _, end = self._consumer.get_watermark_offsets(partition, timeout=30)
            ends.append(end)
        return tuple(ends)

    def arrived(self) -> list[list[Arrived]]:
        """Return what a consumer with `read_committed` gets."""
        found: list[list[Arrived]] = [[] for _ in range(self.PARTITIONS)]
        for record in read_topic(self._brokers, self.topic):
            assert record.value is not None
            found[record.partition].append(parse(record.value))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()
