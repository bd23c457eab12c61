"""Settings of the Kafka producer; what it does with them is tried on real brokers (test_kafka)."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sinks.kafka.client import Batching, Client, KafkaClientSettings


def settings(lease_seconds: float = 25, **client_conf: str) -> KafkaClientSettings:
    """Return settings; in names of properties `_` stands for a dot."""
    conf = {name.replace("_", "."): value for name, value in client_conf.items()}
    return KafkaClientSettings("out", "127.0.0.1:1", conf, 30, lease_seconds)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (settings(), ("25000", "25000")),
        (settings(90), ("60000", "30000")),
        (settings(message_timeout_ms="5000"), ("5000", "5000")),
        (settings(delivery_timeout_ms="300000"), ("25000", "25000")),
        (settings(90, delivery_timeout_ms="300000"), ("90000", "60000")),
        (settings(message_timeout_ms="0"), ("25000", "25000")),
        (settings(transaction_timeout_ms="9000"), ("9000", "9000")),
    ],
)
def test_no_message_outlives_the_lease(
    given: KafkaClientSettings, expected: tuple[str, str]
) -> None:
    """Whatever a file says, a message is dead when its sender may have lost its lease.

    In a transaction also no later than that.
    """
    found = [given.properties(name)["message.timeout.ms"] for name in (None, "orders-out")]

    assert tuple(found) == expected


def test_a_transactional_id_is_ours() -> None:
    """A transactional id in the file would make senders of different sinks end each other."""
    given = settings(transactional_id="mine")

    assert "transactional.id" not in given.properties(None)
    assert given.properties("orders-out")["transactional.id"] == "orders-out"
    assert "transactional.id" not in given.connection()


QUICK = settings(90, compression_type="zstd", linger_ms="50")
CARELESS = settings(enable_idempotence="false", acks="1")


@pytest.mark.parametrize(
    ("given", "transactional_id"),
    [(settings(), None), (settings(), "a"), (QUICK, None), (QUICK, "a"), (CARELESS, None)],
)
def test_the_library_accepts_them(given: KafkaClientSettings, transactional_id: str | None) -> None:
    """The combinations of properties that files ask for are ones that librdkafka takes."""
    Client(given, transactional_id).discard()


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (settings(), 2 << 20),
        (settings(compression_type="zstd"), 2 << 20),
        (settings(compression_type="none"), 1 << 20),
        (settings(compression_codec="none"), 1 << 20),
        (settings(batch_size="4194304"), 4 << 20),
    ],
)
def test_record_batches_are_large_if_they_are_compressed(
    given: KafkaClientSettings, size: int
) -> None:
    """A size in the file wins, and then there is none to fall back to."""
    assert given.properties(None, given.batching)["batch.size"] == str(size)
    assert (given.batching is Batching.LARGE) == (size == 2 << 20)
