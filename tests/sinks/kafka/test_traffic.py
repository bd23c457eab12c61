"""What a Kafka sink's library does by itself is counted."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from deltaforge_dagster.errors import LeaseLost
from deltaforge_dagster.sinks.base import Traffic, traffic_of
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.sinks.kafka.client import Client, KafkaClientSettings
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow, refuse_from
from deltaforge_lab.faulty_sink import FaultySink
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.deployment import eventually
from tests.sinks.kafka.test_sink import numbered


@pytest.mark.kafka
def test_transactions_and_statistics(
    kafka_server: KafkaServer, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits and aborts count once each; what the library says of itself can be read."""
    said: list[str] = []
    read = Client._on_statistics

    def listen(client: Client, text: str) -> None:
        read(client, text)
        said.append(text)

    monkeypatch.setattr(Client, "_on_statistics", listen)
    often = {"statistics.interval.ms": "20"}
    sink = KafkaSink("out", kafka_server.brokers, often, transactional_id=kafka_topic)
    sink.open()
    assert sink.position() is None
    given = replace(numbered(10, kafka_topic), origin=ORIGIN)
    for _ in range(2):
        sink.send(given, allow)
    taken = sink.traffic.take()
    assert (taken.commits, taken.aborts) == (2, 0)
    assert taken.waiting in {None, *range(11)}  # as librdkafka last said, if it has

    guard, _ = refuse_from(2, LeaseLost("gone"))
    with pytest.raises(LeaseLost):
        sink.send(given, guard)
    taken = sink.traffic.take()
    assert (taken.commits, taken.aborts) == (0, 1)

    def spoke() -> bool:
        sink.open()
        assert sink.position() is not None
        sink.send(given, allow)
        return bool(said)

    eventually(spoke, seconds=120)
    sink.close()


def test_counters_of_one_producer_after_another() -> None:
    """Retries add up over brokers and producers; each counts from 0."""
    settings = KafkaClientSettings("out", "localhost:1", {}, 1, 5)
    for retries in ((1, 2), (4, 2)):
        client = Client(settings)
        for some in (0, *retries):
            brokers = {"a": {"txretries": some}, "b": {"txretries": 1}}
            text = orjson.dumps({"msg_cnt": 3, "msg_size": 30, "brokers": brokers}).decode()
            if some >= client._retries - 1:
                client._on_statistics(text)
        client.discard()
    assert settings.traffic == Traffic(retries=3 + 5, waiting=3, waiting_bytes=30)


def test_which_sinks_count(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A sink without such a library counts nothing; one with injected faults counts as its own."""
    folder = tmp_path_factory.mktemp("faults")
    kafka = KafkaSink("out", "localhost:1")
    assert traffic_of(FaultySink(kafka, "out", folder)) is kafka.traffic
    assert traffic_of(FileSink.__new__(FileSink)) is None
