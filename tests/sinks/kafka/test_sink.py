"""The Kafka sink against real brokers: what arrives, what does not, and in which order."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import (
    LeaseLost,
    PermissionMissing,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
    SpecError,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from deltaforge_dagster.sinks.kafka import sink as kafka
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow, refuse_from
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.deployment import eventually
from tests.fix_kafka import Record, StartKafka, read_topic
from tests.sinks.messages import closed_during, sent

pytestmark = pytest.mark.kafka

Row = dict[str, str | int | None]


def row(number: int, topic: str, **changes: str | None) -> Row:
    """Return one message; its numbers say which it is."""
    return {
        "ordinal": 10 * number,
        "destination": topic,
        "key": f"k{number % 7}",
        "value": f"{number}",
        "event_id": f"e{number}",
        "idempotency_key": f"i{number}",
        "headers": None,
        **changes,
    }


def batch(rows: list[Row], replay: str | None = None) -> SinkBatch:
    """Return a batch of messages."""
    return SinkBatch(1, "segment", pa.RecordBatch.from_pylist(rows, schema=MESSAGES), replay)


def numbered(count: int, *topics: str, size: int = 300, first: int = 0) -> SinkBatch:
    """Return a batch of `count` messages whose topics take turns."""
    every = range(first, first + count)
    return batch([row(n, topics[n % len(topics)], value=str(n).ljust(size)) for n in every])


def numbers(records: list[Record]) -> list[int]:
    """Return the numbers of messages."""
    return [int(one.value or b"") for one in records]


def repeats_only(found: list[int], count: int) -> bool:
    """Whether 0 to `count` - 1 came in order, starting over any number of times on the way."""
    fresh = [n for place, n in enumerate(found) if n not in found[:place]]
    steps = itertools.pairwise(found)
    return fresh == [*range(count)] and all(b in (a + 1, 0) for a, b in steps)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    ends=st.lists(st.integers(1, 59)),
    most=st.integers(1, 400),
)
def test_client_chunks(sizes: list[int], ends: list[int], most: int) -> None:
    """They are the rows in order, through all parts, and none is larger than asked, unless a row is."""
    whole = batch([row(n, "t", value="x" * size) for n, size in enumerate(sizes)])
    rows = kafka._BatchRows(in_parts(whole, *sorted({one for one in ends if one < len(sizes)})))
    start, found = 0, []
    while start < len(sizes):
        chunk = rows.pieces(start, len(sizes), most)
        count = sum(map(len, chunk))
        found.append(sum(sizes[start : start + count]))
        assert [one for part in chunk for one in part.column("ordinal").to_pylist()] == [
            10 * n for n in range(start, start + count)
        ]
        start += count
    assert max(found) <= max(most, *sizes)


@pytest.fixture
def sink(kafka_server: KafkaServer) -> Iterator[KafkaSink]:
    """An open sink."""
    sink = KafkaSink("out", kafka_server.brokers)
    sink.open()
    yield sink
    sink.close()


class StrictServer(KafkaServer):
    """A broker that makes no topics by itself, knows ACLs and only small positions."""

    def _listen(self, port: int) -> None:
        super()._listen(port)
        self._settings |= {
            "auto.create.topics.enable": "false",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "offset.metadata.max.bytes": "300",
        }


@pytest.fixture(scope="module")
def strict() -> Iterator[StrictServer]:
    """A broker that refuses much."""
    with StrictServer.start() as server:
        yield server


def test_records_are_as_documented(
    kafka_server: KafkaServer, sink: KafkaSink, kafka_topic: str
) -> None:
    """Key, value and headers arrive byte for byte, for nulls and odd texts too."""
    odd = 'ä€😀\r\n"\x00'
    rows = [
        row(0, kafka_topic, key=odd, value=odd, headers=json.dumps({"a": odd, "b": ""})),
        row(1, kafka_topic, key=None, value=""),
        row(2, kafka_topic, key=""),
    ]
    assert sink.send(batch(rows), allow) == 20
    assert sink.send(batch(rows[:1], replay="run-1"), allow) == 0

    first, second, third, again = read_topic(kafka_server.brokers, kafka_topic)
    headers = (("a", odd.encode()), ("b", b""))
    assert (first.key, first.value, first.headers) == (odd.encode(), odd.encode(), headers)
    assert (second.key, second.value, second.headers) == (None, b"", ())
    assert (third.key, third.value) == (b"", b"2")
    assert again.headers == (*headers, ("df-replay", b"run-1"))


def test_a_key_stays_in_its_partition_and_order(kafka_server: KafkaServer, sink: KafkaSink) -> None:
    """Many pieces over many partitions and two topics: each key in one, in the batch's order."""
    topics = [f"{time.time_ns()}-{n}" for n in range(2)]
    for topic in topics:
        kafka_server.create_topic(topic, 4)
    count = 3 * kafka.PIECE_ROWS
    whole = numbered(count, *topics, size=10)
    sink.send(replace(whole, messages=whole.messages.slice(100)), allow)  # a slice has offsets

    for turn, topic in enumerate(topics):
        records = read_topic(kafka_server.brokers, topic)
        places: dict[bytes | None, set[int]] = {}
        for one in records:
            places.setdefault(one.key, set()).add(one.partition)
        assert sorted(numbers(records)) == [*range(100 + turn, count, 2)]
        assert all(len(one) == 1 for one in places.values())
        for key in places:
            of_key = numbers([one for one in records if one.key == key])
            assert of_key == sorted(of_key)


def test_a_broker_killed_in_the_middle(start_kafka: StartKafka) -> None:
    """A kill -9 of the broker during a batch loses nothing and reorders nothing."""
    server = start_kafka()
    server.create_topic("t")
    sink = KafkaSink("out", server.brokers)
    sink.open()
    whole = numbered(60_000, "t", size=1000)
    calls = 0

    def kill_and_restart() -> None:
        server.stop(immediate=True)
        server.restart()

    killer = threading.Thread(target=kill_and_restart)

    def kill_at_the_second_piece() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            killer.start()

    try:
        sink.send(whole, kill_at_the_second_piece)
    except SinkUnavailable:  # the restart took too long
        killer.join()
        sink.close()
        sink.open()
        sink.send(whole, allow)
    killer.join()
    sink.close()

    found = numbers(read_topic(server.brokers, "t"))
    first_try = found[:-60_000]
    assert found[-60_000:] == [*range(60_000)]
    assert first_try == [*range(len(first_try))]


def test_a_broker_that_hangs(start_kafka: StartKafka, capfd: pytest.CaptureFixture[str]) -> None:
    """Waiting ends in time; what the broker had taken is never mixed into what comes later."""
    server = start_kafka()
    server.create_topic("t")
    sink = KafkaSink("out", server.brokers, send_timeout=1, lease_seconds=3)
    sent(sink, numbered(500, "t"))
    server.pause()
    started = time.monotonic()
    with pytest.raises(
        SinkUnavailable, match=r"sink out: kafka at .*: not acknowledged within 1 s"
    ):
        sink.send(numbered(500, "t"), allow)
    assert 1 < time.monotonic() - started < 30
    sink.close()
    other = KafkaSink("out", server.brokers, send_timeout=0.5)
    with pytest.raises(SinkUnavailable):
        other.open()
    other.close()

    server.resume()
    for _ in range(3):
        sent(sink, numbered(500, "t"))
        sink.close()

    found = numbers(read_topic(server.brokers, "t"))
    assert found[-500:] == [*range(500)]
    assert repeats_only(found, 500)
    assert capfd.readouterr().err == ""  # nothing of the library's own log


def test_a_lease_lost_while_a_broker_hangs(start_kafka: StartKafka) -> None:
    """The guard is asked during a long wait, too; nothing that was queued leaves after its no."""
    server = start_kafka()
    server.create_topic("t")
    sink = KafkaSink("out", server.brokers)
    sink.open()
    sink.send(numbered(1, "t"), allow)
    server.pause()
    guard, calls = refuse_from(2, LeaseLost("gone"))
    started = time.monotonic()
    with pytest.raises(LeaseLost):
        sink.send(numbered(20_000, "t", size=800), guard)
    assert (len(calls), time.monotonic() - started < 25) == (2, True)  # 30 s without its no
    server.resume()
    sink.send(numbered(1, "t"), allow)
    sink.close()

    # What had left already is a prefix; the queue was far longer.
    found = numbers(read_topic(server.brokers, "t"))
    assert len(found) < 15_000


def test_close_ends_every_wait(start_kafka: StartKafka) -> None:
    """Closing from another thread ends a send, an open and a reading of the position at once."""
    server = start_kafka()
    server.create_topic("t")
    sinks = [KafkaSink("out", server.brokers, transactional_id=one) for one in (None, "a", "b")]
    for one in sinks:
        one.open()
    server.pause()
    sinks[2].close()
    calls: list[Callable[[], object]] = [
        lambda: sinks[0].send(numbered(10, "t"), allow),
        sinks[1].position,
        sinks[2].open,
    ]
    for one, call in zip(sinks, calls, strict=True):
        closed_during(one, call)


def refused(conf: Mapping[str, str], brokers: str) -> str:
    """Return why a sink cannot be opened: what it learned in its time, more the longer that is.

    That of a slow machine is longer, until the library has tried to connect.
    """
    text = ""
    for seconds in (0.5, 4, 30):
        sink = KafkaSink("out", brokers, conf, send_timeout=seconds)
        with pytest.raises(SinkUnavailable) as caught:
            sink.open()
        sink.close()
        text = str(caught.value)
        if not text.endswith(f"no answer within {seconds:g} s"):
            break
    return text


def test_nobody_there(capfd: pytest.CaptureFixture[str]) -> None:
    """A broker that is not there is a reason to try again later, told once, by the error."""
    said = refused({}, "127.0.0.1:1")
    assert re.search(r"kafka at 127.0.0.1:1: no answer .*refused", said)
    assert capfd.readouterr().err == ""


def test_tombstones(kafka_server: KafkaServer, sink: KafkaSink) -> None:
    """A null value arrives as null, between others; without a key a compacted topic refuses it."""
    topic = f"compacted-{time.time_ns()}"
    kafka_server.create_topic(topic, settings={"cleanup.policy": "compact"})
    rows = [row(0, topic), {**row(0, topic), "value": None}, row(1, topic)]
    assert sink.send(batch(rows), allow) == 10
    found = [(one.key, one.value) for one in read_topic(kafka_server.brokers, topic)]
    assert found == [(b"k0", b"0"), (b"k0", None), (b"k1", b"1")]

    rows = [row(2, topic), row(3, topic, key=None), row(3, topic, value=None, key=None)]
    with pytest.raises(Undeliverable, match="ordinal 30") as caught:
        sink.send(batch(rows), allow)
    assert caught.value.cause == "serialization"
    assert [one.value for one in read_topic(kafka_server.brokers, topic)][-1] == b"2"


def test_a_topic_that_is_not_there(strict: StrictServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where brokers make no topics the missing one is named; once it is made, sending goes on."""
    monkeypatch.setattr("deltaforge_dagster.sinks.kafka.client._TOPIC_SECONDS", 0.5)
    for transactional_id in (None, "missing"):
        topic = f"missing-{transactional_id}"
        sink = KafkaSink("out", strict.brokers, transactional_id=transactional_id)
        sink.open()
        given = numbered(3, topic)
        given = replace(given, origin=ORIGIN) if transactional_id else given
        with pytest.raises(SinkUnavailable, match=f"topic '{topic}' does not exist"):
            sink.send(given, allow)
        strict.create_topic(topic)
        sink.close()
        sink.open()
        sink.send(given, allow)
        sink.close()
        assert numbers(read_topic(strict.brokers, topic)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a b", "", ".", "x" * 250])
def test_a_name_that_no_topic_can_have(
    kafka_server: KafkaServer, sink: KafkaSink, kafka_topic: str, name: str
) -> None:
    """What comes before a message for an impossible topic is sent, and that message is named."""
    rows = [row(0, kafka_topic), row(1, kafka_topic), row(2, name), row(3, kafka_topic)]
    rows[1]["ordinal"] = rows[2]["ordinal"]
    with pytest.raises(
        Undeliverable, match=r"cannot be the name of a topic .*ordinal 20"
    ) as caught:
        sink.send(batch(rows), allow)
    assert (caught.value.ordinal, caught.value.cause) == (20, "routing")
    assert numbers(read_topic(kafka_server.brokers, kafka_topic)) == [0]


@contextlib.contextmanager
def denied(server: KafkaServer, kind: str, name: str) -> Iterator[None]:
    """Forbid everybody to write something."""
    admin = AdminClient({"bootstrap.servers": server.brokers})
    acl = AclBinding(
        ResourceType[kind], name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
        AclOperation.WRITE, AclPermissionType.DENY,
    )  # fmt: skip
    admin.create_acls([acl])[acl].result()
    wanted = AclBindingFilter(
        ResourceType[kind], name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
        AclOperation.WRITE, AclPermissionType.DENY,
    )  # fmt: skip
    # The controller has it, and soon the broker that is to obey it.
    eventually(lambda: admin.describe_acls(wanted).result())
    yield


def test_missing_permissions(strict: StrictServer) -> None:
    """A refused topic, and a refused transactional id, are named with what to grant."""
    strict.create_topic("forbidden")
    sink = KafkaSink("out", strict.brokers, transactional_id="forbidden-id")
    sink.open()
    with (
        denied(strict, "TOPIC", "forbidden"),
        pytest.raises(PermissionMissing, match=r"'forbidden'.* ACL that allows Write"),
    ):
        sink.send(numbered(3, "forbidden"), allow)
    with (
        denied(strict, "TRANSACTIONAL_ID", "forbidden-id"),
        pytest.raises(PermissionMissing, match=r"on the transactional id"),
    ):
        sink.position()
    sink.close()


def test_the_client_s_properties_win(kafka_server: KafkaServer, kafka_topic: str) -> None:
    """What `client_conf` says is what the library gets; what it does not know is named."""
    for conf, said in (
        ({"acks": "1"}, "`acks` must be set to `all`"),
        ({"ackz": "geheim"}, 'No such configuration property: "ackz"'),
        ({"security.protocol": "geheim"}, "Invalid value its value"),
        ({"message.timeout.ms": "geheim"}, "message.timeout.ms must be a whole number"),
    ):
        with pytest.raises(SpecError, match="client_conf") as caught:
            KafkaSink("out", kafka_server.brokers, conf).open()
        assert said in str(caught.value)
        assert "geheim" not in str(caught.value)

    conf = {"acks": "1", "enable.idempotence": "false", "queue.buffering.max.messages": "5"}
    sink = KafkaSink("out", kafka_server.brokers, conf)
    sink.open()
    sink.send(numbered(100, kafka_topic), allow)
    sink.close()
    assert numbers(read_topic(kafka_server.brokers, kafka_topic)) == [*range(100)]


KILLED_SENDER = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from deltaforge_dagster.sinks.kafka import client as kafka_client
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow
from tests.sinks.kafka.test_sink import numbered

kafka_client._GUARD_SECONDS = 1e9  # only pieces and commits count
brokers, topic = sys.argv[1:]
sink = KafkaSink("out", brokers, transactional_id=topic)
sink.open()
assert sink.position() is None
sink.send(replace(numbered(1000, topic), origin=ORIGIN), allow)
calls = 0

def die_at_the_third_piece():
    global calls
    calls += 1
    if calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)

small = numbered(60_000, topic, first=1000, size=10)
sink.send(replace(small, origin=ORIGIN), die_at_the_third_piece)
"""


def test_a_killed_sender_is_seen_by_nobody(kafka_server: KafkaServer, kafka_topic: str) -> None:
    """A consumer of committed messages sees each once, though kill -9 broke a transaction off."""
    command = [sys.executable, "-c", KILLED_SENDER, kafka_server.brokers, kafka_topic]
    killed = subprocess.run(command, check=False, timeout=240, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=kafka_topic)
    sink.open()
    position = sink.position()
    assert position is not None
    assert (position.ordinal, position.event_id) == (9990, "e999")
    small = numbered(60_000, kafka_topic, first=1000, size=10)
    sink.send(replace(small, origin=ORIGIN), allow)
    sink.close()

    written = read_topic(kafka_server.brokers, kafka_topic, isolation="read_uncommitted")
    assert numbers(read_topic(kafka_server.brokers, kafka_topic)) == [*range(61_000)]
    assert len(written) == 61_000 + 2 * kafka.PIECE_ROWS


def test_an_overtaken_sender_writes_nothing(kafka_server: KafkaServer, kafka_topic: str) -> None:
    """A sender overtaken in the middle of its transaction is told so; nothing of it counts."""
    old, new = (KafkaSink("out", kafka_server.brokers, transactional_id=kafka_topic) for _ in "ab")
    old.open()
    assert old.position() is None
    whole = replace(numbered(60_000, kafka_topic, size=10), origin=ORIGIN)
    calls = 0

    def overtake_at_the_second_piece() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            new.open()
            assert new.position() is None
            new.send(replace(numbered(10, kafka_topic, size=10), origin=ORIGIN), allow)

    with pytest.raises(PositionMoved, match="another sender"):
        old.send(whole, overtake_at_the_second_piece)
    old.close()
    new.send(replace(numbered(10, kafka_topic, size=10, first=10), origin=ORIGIN), allow)
    new.close()

    assert numbers(read_topic(kafka_server.brokers, kafka_topic)) == [*range(20)]


def test_a_long_transaction_is_divided(
    kafka_server: KafkaServer, kafka_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before brokers could end a slow transaction it is committed with its own position."""
    monkeypatch.setattr("deltaforge_dagster.sinks.kafka.transactions._TIMEOUT_DIVISOR", 1e9)
    monkeypatch.setattr("deltaforge_dagster.sinks.kafka.client._GUARD_SECONDS", 1e9)
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=kafka_topic)
    sink.open()
    whole = replace(numbered(60_000, kafka_topic, size=10), origin=ORIGIN)
    with pytest.raises(LeaseLost):
        sink.send(whole, refuse_from(4, LeaseLost("gone"))[0])

    # Calls: piece, commit, piece, commit, ... and none in a long wait.
    assert sink.position() == whole.position_at(kafka.PIECE_ROWS - 1)
    assert len(read_topic(kafka_server.brokers, kafka_topic)) == kafka.PIECE_ROWS
    sink.close()


def in_parts(whole: SinkBatch, *ends: int) -> SinkBatch:
    """Return a batch in parts that end before these rows, and at its end."""
    *earlier, last = (
        whole.messages.slice(start, stop - start)
        for start, stop in itertools.pairwise([0, *ends, len(whole.messages)])
    )
    return replace(whole, messages=last, earlier=tuple(earlier))


def test_parts_of_a_transaction(kafka_server: KafkaServer, kafka_topic: str) -> None:
    """They are committed together; a slow transaction is divided in any part, with the right position."""
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=kafka_topic)
    sink.open()
    assert sink.position() is None
    whole = replace(numbered(60_000, kafka_topic, size=10), origin=ORIGIN)
    assert sink.send(in_parts(whole, 25_000, 25_001), allow) == 599_990
    assert sink.traffic.take().commits == 1
    assert sink.position() == whole.position_at(59_999)
    assert numbers(read_topic(kafka_server.brokers, kafka_topic)) == [*range(60_000)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deltaforge_dagster.sinks.kafka.sink.PIECE_ROWS", 15_000)
        patched.setattr("deltaforge_dagster.sinks.kafka.transactions._TIMEOUT_DIVISOR", 1e9)
        patched.setattr("deltaforge_dagster.sinks.kafka.client._GUARD_SECONDS", 1e9)
        guard, _ = refuse_from(6, LeaseLost("gone"))  # piece, commit, piece, commit, piece
        with pytest.raises(LeaseLost):
            sink.send(in_parts(whole, 14_000, 31_000), guard)
    sink.close()
    sink.open()
    assert sink.position() == whole.position_at(29_999)
    sink.close()


def test_a_long_position(kafka_server: KafkaServer, strict: StrictServer) -> None:
    """Positions with many GTIDs fit by compression; where they do not, the limit is named."""
    numbers_of_servers = random.Random(2)
    gtids = ",".join(f"{numbers_of_servers.getrandbits(128):032x}:1-77" for _ in range(100))
    origin = replace(ORIGIN, start=json.dumps({"gtids": gtids}), end=json.dumps({"gtids": gtids}))
    for server in (kafka_server, strict):
        topic = f"gtids-{time.time_ns()}"
        server.create_topic(topic)
        sink = KafkaSink("out", server.brokers, transactional_id=topic)
        sink.open()
        given = replace(numbered(3, topic), origin=origin)
        if server is strict:
            with pytest.raises(SinkRejected, match=r"offset.metadata.max.bytes"):
                sink.send(given, allow)
        else:
            sink.send(given, allow)
            sink.close()
            sink.open()
            assert sink.position() == given.position_at(2)
        sink.close()


def test_something_else_in_place_of_the_position(
    kafka_server: KafkaServer, kafka_topic: str
) -> None:
    """A foreign offset in the sink's group is told, with what to do; the next delivery replaces it."""
    consumer = Consumer({"bootstrap.servers": kafka_server.brokers, "group.id": kafka_topic})
    consumer.commit(offsets=[TopicPartition(kafka_topic, 0, 40, "foreign")], asynchronous=False)
    consumer.close()
    sink = KafkaSink("out", kafka_server.brokers, transactional_id=kafka_topic)
    sink.open()
    with pytest.raises(SinkRejected, match=r"--delete-offsets"):
        sink.position()
    given = replace(numbered(3, kafka_topic), origin=ORIGIN)
    sink.send(given, allow)
    sink.close()
    sink.open()
    assert sink.position() == given.position_at(2)
    sink.close()
