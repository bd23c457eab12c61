"""The producer on top of librdkafka's functions: what it passes, and what it reports."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Producer as ConfluentProducer
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.sinks.base import MESSAGES
from deltaforge_dagster.sinks.kafka.client import KafkaClientSettings
from deltaforge_dagster.sinks.kafka.librdkafka import LIBRARY, MESSAGE, MessageStruct
from deltaforge_dagster.sinks.kafka.producer import Producer, _messages
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.deployment import eventually
from tests.fix_kafka import read_topic
from tests.sinks.kafka.test_sink import Row, row

NOBODY = "127.0.0.1:1"


@dataclass
class Heard:
    """What a producer has reported."""

    refusals: list[tuple[int, int]] = field(default_factory=list)
    errors: list[KafkaError] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)


def started(brokers: str = NOBODY, **properties: str) -> tuple[Producer, Heard]:
    """Start a producer with the sink's properties; in names of others `_` stands for a dot."""
    conf = {name.replace("_", "."): value for name, value in properties.items()}
    heard = Heard()
    producer = Producer(
        KafkaClientSettings("out", brokers, conf, 30, 60).properties(None),
        on_refusal=lambda error, place: heard.refusals.append((error.code(), place)),
        on_error=heard.errors.append,
        on_statistics=heard.statistics.append,
    )
    return producer, heard


def messages(rows: list[Row]) -> pa.RecordBatch:
    """Return messages."""
    return pa.RecordBatch.from_pylist(rows, schema=MESSAGES)


def test_a_message_has_one_layout() -> None:
    """`MESSAGE` (numpy) and `MessageStruct` (ctypes) describe the same C structure: same offsets and sizes."""
    assert MESSAGE.itemsize == ctypes.sizeof(MessageStruct)
    assert MESSAGE.fields is not None
    described = [(one[1], one[0].itemsize) for one in MESSAGE.fields.values()]
    own: list[Any] = [getattr(MessageStruct, one[0]) for one in MessageStruct._fields_]
    assert described == [(one.offset, one.size) for one in own]


def at(address: int, size: int) -> bytes | None:
    """Return what is in memory, as the library does."""
    return ctypes.string_at(address, size) if address else None


TEXTS = st.lists(st.tuples(*[st.none() | st.text(max_size=8)] * 2), min_size=1, max_size=20)


@given(pairs=TEXTS, skip=st.integers(0, 19))
def test_addresses(pairs: list[tuple[str | None, str | None]], skip: int) -> None:
    """A message points to its own key and value; null and empty differ, in a slice as well."""
    skip = min(skip, len(pairs) - 1)
    rows = messages([row(n, "t", key=key, value=value) for n, (key, value) in enumerate(pairs)])
    found = _messages(rows.slice(skip), 100)
    assert [
        (at(int(one["key"]), int(one["key_len"])), at(int(one["payload"]), int(one["len"])))
        for one in found
    ] == [tuple(None if text is None else text.encode() for text in pair) for pair in pairs[skip:]]
    assert found["_private"].tolist() == list(range(100, 100 + len(pairs) - skip))


@pytest.mark.kafka
@pytest.mark.parametrize("replay", [None, "run-1"])
def test_the_same_as_with_confluent_s_producer(
    kafka_server: KafkaServer, kafka_topic: str, replay: str | None
) -> None:
    """Keys, values, headers, partitions and their order: of several topics whose messages take turns."""
    names = [f"{kafka_topic}-{n}" for n in range(3)]
    for name in (*names, *(f"{name}-theirs" for name in names)):
        kafka_server.create_topic(name, 3)
    rows = [
        row(
            n,
            names[n * n % 7 % 3],
            key=None if n % 50 == 0 else f"k{n % 40}",
            value=None if n % 9 == 0 else f"{n}-" * (n % 30),
            headers=orjson.dumps({"a": str(n), "b": ""}).decode() if replay and n % 3 else None,
        )
        for n in range(6_000)
    ]
    # Without a key the library chooses a partition at random, for some time the same.
    settled = {"partitioner": "consistent", "sticky_partitioning_linger_ms": "0"}
    ours, heard = started(kafka_server.brokers, **settled)
    theirs = ConfluentProducer(
        {"bootstrap.servers": kafka_server.brokers, "partitioner": "consistent"}
    )
    ours.produce(messages(rows).slice(100), replay)
    for one in rows[100:]:
        own = [*orjson.loads(str(one["headers"] or "{}")).items(), ("df-replay", replay)]
        theirs.produce(
            f"{one['destination']}-theirs",
            cast("str | None", one["value"]),
            cast("str | None", one["key"]),
            headers=own if replay else [],
        )
    while theirs.flush(1) + ours.flush(1):
        pass
    assert not heard.refusals

    def stored(name: str) -> list[tuple[Any, ...]]:
        found = read_topic(kafka_server.brokers, name)
        return sorted((one.partition, one.offset, one.key, one.value, one.headers) for one in found)

    for name in names:
        assert stored(name) == stored(f"{name}-theirs")
    assert sum(len(stored(name)) for name in names) == 5_900


@pytest.mark.parametrize("replay", [None, "run-1"])
@pytest.mark.parametrize("limit", ["1000", "1400"])
def test_a_message_that_the_library_refuses(replay: str | None, limit: str) -> None:
    """It is named by its row, and none behind it is in the queue; one that is just small enough is no end."""
    producer, heard = started(message_max_bytes=limit)
    sizes = [10, 900, 10, 1200, 10, 2000, 10]
    rows = [row(n, "t", value="x" * size) for n, size in enumerate(sizes)]
    producer.produce(messages(rows), replay)
    refused = {"1000": 3, "1400": 5}[limit]
    assert heard.refusals == [(KafkaError.MSG_SIZE_TOO_LARGE, refused)]

    heard.refusals.clear()
    producer.purge(blocking=False)
    eventually(lambda: producer.flush(0.1) == 0)
    purged = KafkaError._PURGE_QUEUE
    assert sorted(heard.refusals) == [(purged, n) for n in range(refused)]


def test_errors_and_statistics() -> None:
    """Nobody answers: it says so, and goes on to count; nothing is called before `poll`."""
    producer, heard = started(statistics_interval_ms="10")
    assert producer.cluster_id(0.05) is None
    with pytest.raises(KafkaException) as caught:
        producer.ask("t", 0.05)
    assert caught.value.args[0].code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}
    assert not heard.errors

    def both() -> bool:
        producer.poll(0.05)
        return bool(heard.errors and heard.statistics)

    eventually(both)
    assert heard.errors[0].code() in {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
    assert "127.0.0.1:1" in heard.errors[0].str()
    assert not any(one.fatal() for one in heard.errors)
    assert orjson.loads(heard.statistics[0])["msg_cnt"] == 0


def test_a_fatal_error() -> None:
    """It is reported with the code and text of its cause, and every later message is refused."""
    producer, heard = started()
    handle = ctypes.c_void_p(producer._handle)
    LIBRARY.rd_kafka_test_fatal_error(handle, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"a test")

    def fatal() -> list[tuple[int, bool]]:
        producer.poll(0.05)
        return [(one.code(), "a test" in one.str()) for one in heard.errors if one.fatal()]

    eventually(lambda: bool(fatal()))
    assert fatal() == [(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, True)]
    producer.produce(messages([row(0, "t"), row(1, "t")]), None)
    assert heard.refusals == [(KafkaError._FATAL, 0)]


def test_calls_out_of_order() -> None:
    """A transaction needs its id; the error says what is missing."""
    producer, _ = started()
    with pytest.raises(KafkaException, match=r"transactional\.id"):
        producer.begin_transaction()
    with pytest.raises(KafkaException, match=r"transactional\.id"):
        producer.send_offset_to_transaction("t", 1, "text", "group", 0.1)


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"no_such": "1"}, 'No such configuration property: "no.such"'),
        (
            {"linger_ms": "soon"},
            'Invalid value for configuration property "queue.buffering.max.ms"',
        ),
        ({"acks": "1"}, "acks"),
    ],
)
def test_properties_that_are_wrong(properties: dict[str, str], text: str) -> None:
    """The library's own words say which property it is."""
    with pytest.raises(KafkaException) as caught:
        started(**properties)
    assert text in caught.value.args[0].str()


def test_its_threads_end_with_it() -> None:
    """A sink makes a new producer after each failure: nothing is left of the old one."""

    def threads() -> set[str]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if (task / "comm").read_text().startswith("rdk:"):
                    found.add(task.name)
        return found

    gc.collect()
    before = threads()
    producer, _ = started()
    producer.produce(messages([row(0, "t")]), None)
    assert threads() > before
    del producer
    gc.collect()
    eventually(lambda: threads() <= before)


def test_tokens_without_a_signature_are_refused() -> None:
    """The library would make them in a callback, of which there are none."""
    producer, heard = started(
        security_protocol="sasl_plaintext",
        sasl_mechanisms="OAUTHBEARER",
        enable_sasl_oauthbearer_unsecure_jwt="true",
    )

    def refused() -> bool:
        producer.poll(0.05)
        return any("without a signature" in one.str() for one in heard.errors)

    eventually(refused)
