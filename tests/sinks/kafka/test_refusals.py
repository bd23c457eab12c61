"""Messages that Kafka refuses: the sink finds them, and delivers everything before them."""

from __future__ import annotations

import random
import string
import time
from dataclasses import replace

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.kafka.client import Batching, Client, RefusedRecord
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow
from deltaforge_lab.servers.kafka import KafkaServer
from tests.fix_kafka import read_topic
from tests.sinks.kafka.test_sink import batch, in_parts, numbers, repeats_only, row

pytestmark = pytest.mark.kafka


def incompressible(size: int) -> str:
    """Return text that lz4 makes no smaller."""
    return "".join(random.Random(size).choices(string.printable[:90], k=size))


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("where", ["topic", "client"])
def test_a_message_too_large(kafka_server: KafkaServer, transactional: bool, where: str) -> None:
    """Everything before the change is there, nothing of it; in transactions nothing after it.

    The message is named without its value, and what comes later can be sent at once.
    """
    topic = f"small-{time.time_ns()}"
    kafka_server.create_topic(topic, 3, settings={"max.message.bytes": "200000"})
    conf = {"message.max.bytes": "200000"} if where == "client" else {}
    sink = KafkaSink(
        "out", kafka_server.brokers, conf, transactional_id=topic if transactional else None
    )
    sink.open()
    assert sink.position() is None
    secret = incompressible(900_000)
    rows = [row(n, topic, value=str(n).ljust(300)) for n in range(3000)]
    rows[2000] = row(2000, topic, value=secret)
    rows[1999] = {**row(1999, topic), "ordinal": rows[2000]["ordinal"]}  # of the same change
    given = batch(rows)
    given = replace(given, origin=ORIGIN) if transactional else given

    with pytest.raises(Undeliverable, match=r"segment 1, ordinal 20000, 900000 bytes") as caught:
        sink.send(given, allow)
    assert (caught.value.ordinal, caught.value.cause) == (20_000, "too_large")
    assert topic in str(caught.value)
    assert secret[:20] not in str(caught.value)
    arrived = set(numbers(read_topic(kafka_server.brokers, topic)))
    assert arrived >= {*range(1999)}
    if transactional:
        assert len(arrived) == 1999
        assert sink.position() == given.position_at(1998)
    rest = replace(given, messages=given.messages.slice(2001))
    assert sink.send(rest, allow) == 29_990
    sink.close()
    assert set(numbers(read_topic(kafka_server.brokers, topic))) >= {
        n for n in range(3000) if n not in {1999, 2000}
    }


@pytest.mark.parametrize("transactional", [False, True])
def test_the_first_message_too_large(
    kafka_server: KafkaServer, kafka_topic: str, transactional: bool
) -> None:
    """With nothing before it nothing arrives, and no position is stored; sending goes on."""
    name = kafka_topic if transactional else None
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=name)
    sink.open()
    assert sink.position() is None
    given = batch([row(0, kafka_topic, value=incompressible(2_000_000)), row(1, kafka_topic)])
    given = replace(given, origin=ORIGIN) if transactional else given
    with pytest.raises(Undeliverable):
        sink.send(given, allow)
    assert sink.position() is None
    assert sink.send(replace(given, messages=given.messages.slice(1)), allow) == 10
    sink.close()
    assert numbers(read_topic(kafka_server.brokers, kafka_topic))[-1] == 1


@pytest.mark.parametrize("transactional", [False, True])
def test_messages_that_are_too_large_only_together(
    kafka_server: KafkaServer, transactional: bool
) -> None:
    """A batch above the topic's limit whose messages are all below it is delivered."""
    topic = f"small-{time.time_ns()}"
    kafka_server.create_topic(topic, settings={"max.message.bytes": "20000"})
    name = topic if transactional else None
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=name)
    sink.open()
    assert sink.position() is None
    text = incompressible(1000)
    given = batch([row(n, topic, value=str(n).ljust(10) + text[n:]) for n in range(200)])
    given = replace(given, origin=ORIGIN) if transactional else given
    assert sink.send(given, allow) == 1990
    assert sink.send(given, allow) == 1990
    sink.close()
    found = [int((one.value or b"")[:10]) for one in read_topic(kafka_server.brokers, topic)]
    assert found[-200:] == [*range(200)]
    assert repeats_only(found, 200)


@pytest.mark.parametrize("problem", ["too large", "name"])
def test_a_part_with_a_message_that_cannot_be_sent(kafka_server: KafkaServer, problem: str) -> None:
    """All messages before it arrive, those of earlier parts too; the error names it, and none after it arrives."""
    topic = f"parts-{time.time_ns()}"
    kafka_server.create_topic(topic, settings={"max.message.bytes": "200000"})
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=topic)
    sink.open()
    assert sink.position() is None
    rows = [row(n, topic) for n in range(300)]
    rows[170] |= {"destination": "a b"} if problem == "name" else {"value": incompressible(900_000)}
    whole = replace(batch(rows), origin=ORIGIN)

    with pytest.raises(Undeliverable, match=r"segment 1, ordinal 1700\b") as caught:
        sink.send(in_parts(whole, 100, 150, 200), allow)

    assert caught.value.ordinal == 1700
    assert numbers(read_topic(kafka_server.brokers, topic)) == [*range(170)]
    assert sink.position() == whole.position_at(169)
    sink.close()


@pytest.mark.parametrize("transactional", [False, True])
def test_only_what_was_refused_together_goes_alone(
    kafka_server: KafkaServer, transactional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large batch, the messages of one record batch are sent one by one; those before and after it are not."""
    topic = f"suspects-{time.time_ns()}"
    kafka_server.create_topic(topic, settings={"max.message.bytes": "200000"})
    conf = {"batch.num.messages": "500"}
    name = topic if transactional else None
    sink = KafkaSink("out", kafka_server.brokers, conf, transactional_id=name)
    sink.open()
    assert sink.position() is None
    sent: list[tuple[bool, int]] = []
    send = Client.send

    def listen(
        client: Client, pieces: list[pa.RecordBatch], replay: str | None, guard: SendGuard
    ) -> list[RefusedRecord]:
        sent.append((client.batching is Batching.ALONE, sum(map(len, pieces))))
        return send(client, pieces, replay, guard)

    monkeypatch.setattr(Client, "send", listen)
    # Together they are too large for the topic, although each of them is not.
    large = {n: incompressible(150_000 + n) for n in (4100, 4101)}
    rows = [row(n, topic, value=large.get(n, str(n))) for n in range(9000)]
    given = batch(rows)
    given = replace(given, origin=ORIGIN) if transactional else given

    assert sink.send(in_parts(given, 3000, 4101), allow) == 89_990

    alone = [count for one, count in sent if one]
    assert len(alone) == 1
    assert alone[0] <= 500
    first, *_, last = sent
    assert (first, last[0]) == ((False, 9000), False)
    sink.close()
    found = {one.value for one in read_topic(kafka_server.brokers, topic)}
    assert found == {str(one["value"]).encode() for one in rows}


@pytest.mark.parametrize("transactional", [False, True])
def test_record_batches_that_compression_does_not_make_small_enough(
    kafka_server: KafkaServer, transactional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first that brokers refuse they are smaller, also in later calls; no message is sent alone."""
    topic = f"incompressible-{time.time_ns()}"
    kafka_server.create_topic(topic)
    name = topic if transactional else None
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=name)
    sink.open()
    assert sink.position() is None
    used: list[Batching] = []
    send = Client.send

    def listen(
        client: Client, pieces: list[pa.RecordBatch], replay: str | None, guard: SendGuard
    ) -> list[RefusedRecord]:
        used.append(client.batching)
        return send(client, pieces, replay, guard)

    monkeypatch.setattr(Client, "send", listen)
    rows = [row(n, topic, value=f"{n:06}" + incompressible(1500 + n)) for n in range(2000)]
    given = batch(rows)
    given = replace(given, origin=ORIGIN) if transactional else given

    while Batching.USUAL not in used:  # a busy machine may fill no batch that brokers refuse
        assert sink.send(given, allow) == 19_990
    smaller = used.index(Batching.USUAL)
    assert sink.send(given, allow) == 19_990
    sink.close()

    assert set(used[:smaller]) == {Batching.LARGE}
    assert set(used[smaller:]) == {Batching.USUAL}
    found = [int((one.value or b"")[:6]) for one in read_topic(kafka_server.brokers, topic)]
    assert found[-2000:] == [*range(2000)]
    assert repeats_only(found, 2000)
