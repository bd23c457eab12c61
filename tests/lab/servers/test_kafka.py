"""Our own Kafka broker."""

from __future__ import annotations

import secrets

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_lab.servers.kafka import KafkaServer
from tests.fix_kafka import StartKafka, read_topic
from tests.installation.test_process import gone

pytestmark = pytest.mark.kafka


def unused() -> str:
    """Return a name that nobody else uses on the session's broker."""
    return f"df_{secrets.token_hex(6)}"


def produce(brokers: str, topic: str, *values: str, transaction: str | None = None) -> None:
    """Write values and wait until they are there."""
    named = {"transactional.id": transaction} if transaction else {}
    producer = Producer({"bootstrap.servers": brokers, "log_level": 0, **named})
    if transaction:
        producer.init_transactions(120)
        producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(120) == 0
    if transaction:
        producer.commit_transaction(120)


def test_topics_appear_and_transactions_commit(kafka_server: KafkaServer) -> None:
    """One broker is enough for transactions, and a topic needs no preparation."""
    topic = unused()
    produce(kafka_server.brokers, topic, "1", "2", transaction=topic)

    assert [record.value for record in read_topic(kafka_server.brokers, topic)] == [b"1", b"2"]


def test_what_is_not_committed_is_not_read(kafka_server: KafkaServer) -> None:
    """`read_topic` sees what a consumer with read_committed sees, and ends."""
    topic = unused()
    kafka_server.create_topic(topic, 2)
    producer = Producer({"bootstrap.servers": kafka_server.brokers, "transactional.id": topic})
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(topic, "pending", "key", 1, headers=[("name", b"value")])
    producer.flush(120)

    assert read_topic(kafka_server.brokers, topic) == []
    [record] = read_topic(kafka_server.brokers, topic, isolation="read_uncommitted")
    assert (record.key, record.partition, record.offset) == (b"key", 1, 0)
    assert record.headers == (("name", b"value"),)
    producer.abort_transaction(120)


@pytest.mark.soak("faults")
def test_data_outlives_a_kill_and_a_pause(start_kafka: StartKafka) -> None:
    """After a kill and a restart the same address has what was acknowledged; settings can change.

    A paused broker hangs, goes on, and can be stopped.
    """
    server = start_kafka({"message.max.bytes": "2000000"})
    produce(server.brokers, "topic", "1")
    server.stop(immediate=True)
    server.restart({"auto.create.topics.enable": "false"})
    assert [record.value for record in read_topic(server.brokers, "topic")] == [b"1"]

    client = AdminClient({"bootstrap.servers": server.brokers, "log_level": 0})
    server.pause()
    with pytest.raises(KafkaException):
        client.list_topics(timeout=0.5)
    server.resume()
    assert "topic" in client.list_topics(timeout=120).topics

    server.pause()
    pid, directory = server.pid, server._temporary
    server.close()
    assert gone(pid)
    assert directory
    assert not directory.exists()


def test_a_wrong_setting_is_one_line() -> None:
    """What Kafka says about it comes out, without its stack."""
    with pytest.raises(SettingsError, match=r"Kafka .*num\.partitions") as caught:
        KafkaServer.start(settings={"num.partitions": "many"})

    assert "\n" not in str(caught.value)


def test_an_attached_broker_is_only_used(kafka_server: KafkaServer) -> None:
    """Somebody else's broker is neither paused nor stopped."""
    attached = KafkaServer.attach(kafka_server.brokers)
    with pytest.raises(NotAllowed):
        attached.pause()
    attached.close()
    topic = unused()
    attached.create_topic(topic)

    assert read_topic(kafka_server.brokers, topic) == []
