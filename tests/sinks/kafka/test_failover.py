"""The Kafka sink while another broker becomes the leader: nothing lost, nothing out of order."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.deployment import eventually
from tests.fix_kafka import read_topic
from tests.sinks.kafka.test_faults import deliver, starts_over_only
from tests.sinks.kafka.test_sink import numbered, numbers

pytestmark = pytest.mark.kafka

REPLICATED = {
    "offsets.topic.replication.factor": "2",
    "transaction.state.log.replication.factor": "2",
    "min.insync.replicas": "1",
}


class SecondBroker(KafkaServer):
    """A broker that joins the cluster of `first`, whose controller decides who leads."""

    first: KafkaServer

    def _listen(self, port: int) -> None:
        self._cluster = self.first._cluster
        self._brokers = f"127.0.0.1:{port}"
        self._settings |= {
            "process.roles": "broker",
            "node.id": "2",
            "listeners": f"PLAINTEXT://{self._brokers}",
            "controller.quorum.voters": self.first._settings["controller.quorum.voters"],
        }


@pytest.fixture(scope="module")
def brokers() -> Iterator[tuple[KafkaServer, SecondBroker]]:
    """Two brokers that have every partition, of which the first is the controller."""
    with KafkaServer.start(settings=REPLICATED) as first:
        SecondBroker.first = first
        with SecondBroker.start(settings=REPLICATED) as second:
            client = AdminClient({"bootstrap.servers": first.brokers})
            eventually(lambda: len(client.list_topics(timeout=90).brokers) == 2)
            yield first, second


def leader(server: KafkaServer, topic: str) -> tuple[int, int]:
    """Return which broker leads the topic's partition, and how many have all of it."""
    found = AdminClient({"bootstrap.servers": server.brokers}).list_topics(topic, timeout=90)
    known = found.topics[topic].partitions.get(0)
    return (known.leader, len(known.isrs)) if known else (-1, 0)


def led_by_second(first: KafkaServer, name: str) -> str:
    """Create a topic whose leader is the second broker."""
    deadline = time.monotonic() + 120
    for attempt in itertools.count():
        topic = f"{name}-{attempt}"
        # A broker that missed its heartbeats is out of the cluster until the next one.
        with contextlib.suppress(KafkaException):
            first.create_topic(topic, replicas=2)
            if leader(first, topic)[0] == 2:
                break
        assert time.monotonic() < deadline, "the second broker leads nothing"
        time.sleep(0.05)
    return topic


@pytest.mark.parametrize(
    "transactional", [pytest.param(False, marks=pytest.mark.soak("faults")), True]
)
def test_the_leader_dies(brokers: tuple[KafkaServer, SecondBroker], *, transactional: bool) -> None:
    """The other broker takes over in the middle: all is there, in order; once, in transactions."""
    first, second = brokers
    topic = led_by_second(first, f"led-{transactional}")
    sink = KafkaSink(
        "out",
        f"{first.brokers},{second.brokers}",
        {"reconnect.backoff.ms": "20", "reconnect.backoff.max.ms": "200"},
        send_timeout=20,
        transactional_id=topic if transactional else None,
    )
    batches = [
        numbered(500, topic, size=1000, first=first_one) for first_one in range(0, 4000, 500)
    ]
    if transactional:
        batches = [replace(one, origin=ORIGIN) for one in batches]
    calls = itertools.count()

    def kill_in_the_middle() -> None:
        if next(calls) == 3:
            second.stop(immediate=True)

    deliver(sink, batches, seconds=240, guard=kill_in_the_middle)

    eventually(lambda: leader(first, topic) == (1, 1))
    found = numbers(read_topic(first.brokers, topic))
    if transactional:
        assert found == [*range(4000)]
    else:
        assert set(found) == {*range(4000)}
        assert starts_over_only(found)
    second.restart()
    eventually(lambda: leader(first, topic)[1] == 2)
