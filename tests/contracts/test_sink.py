"""What every sink promises a deliverer, tried on all of them, bare and wrapped."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.sinks.base import SinkBatch, SinkPosition
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.testing.sinks import (
    ORIGIN,
    ExactlyOnceContract,
    SinkContract,
    Subject,
    allow,
    messages,
    numbered,
)
from deltaforge_lab.faulty_sink import FaultySink
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from tests.fix_kafka import read_topic
from tests.fix_nats import Admin


def file_subject(tmp_path: Path) -> Subject:
    """A file sink."""

    def read(name: str, suffix: str = "") -> list[str]:
        path = tmp_path / f"{name}.jsonl{suffix}"
        return path.read_text().splitlines() if path.exists() else []

    def make() -> FileSink:
        return FileSink("subject", compile_template(f"{tmp_path}/${{source.table}}.jsonl"))

    return Subject(
        sink=make(),
        another=make,
        destination=lambda name: f"{tmp_path}/{name}.jsonl",
        delivered=read,
        replayed=lambda name: read(name, ".replay-r1"),
    )


def redis_subject(request: pytest.FixtureRequest, position_key: str | None = None) -> Subject:
    """A Redis sink on a real server; it keeps its position when it is given a key."""
    client: redis.Redis = request.getfixturevalue("redis_client")
    uri: str = request.getfixturevalue("redis_server").uri

    def read(name: str, replay: str | None = None) -> list[str]:
        entries: Any = client.xrange(name)
        return [one["df-event"] for _, one in entries if one.get("df-replay") == replay]

    def make() -> RedisSink:
        return RedisSink("subject", uri, position_key=position_key)

    return Subject(
        sink=make(),
        another=make,
        destination=lambda name: name,
        delivered=read,
        replayed=lambda name: read(name, "r1"),
    )


def kafka_subject(request: pytest.FixtureRequest, *, exactly_once: bool) -> Subject:
    """A Kafka sink on a real broker; topics of its own."""
    server: KafkaServer = request.getfixturevalue("kafka_server")
    own = f"df_{secrets.token_hex(6)}"

    def read(name: str, *marks: tuple[str, bytes]) -> list[str]:
        records = read_topic(server.brokers, f"{own}.{name}")
        return [(one.value or b"").decode() for one in records if one.headers == marks]

    def make() -> KafkaSink:
        return KafkaSink("subject", server.brokers, transactional_id=own if exactly_once else None)

    return Subject(
        sink=make(),
        another=make,
        destination=lambda name: f"{own}.{name}",
        delivered=read,
        replayed=lambda name: read(name, ("df-replay", b"r1")),
    )


def nats_subject(request: pytest.FixtureRequest, *, exactly_once: bool) -> Subject:
    """A NATS sink on a real server; a stream of its own."""
    server: NatsServer = request.getfixturevalue("nats_server")
    admin: Admin = request.getfixturevalue("nats_admin")
    stream: str = request.getfixturevalue("nats_stream")

    def read(name: str, replay: str | None = None) -> list[str]:
        return [
            one.value.decode()
            for one in admin.read(stream, f"{stream}.{name}")
            if one.headers.get("df-replay") == replay
        ]

    def make() -> NatsSink:
        pattern = f"{stream}.>"
        return NatsSink("subject", server.url, pattern, stream=stream, exactly_once=exactly_once)

    return Subject(
        sink=make(),
        another=make,
        destination=lambda name: f"{stream}.{name}",
        delivered=read,
        replayed=lambda name: read(name, "r1"),
    )


KINDS = [
    "file",
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("kafka", marks=pytest.mark.kafka),
    pytest.param("nats", marks=pytest.mark.nats),
]
EXACT_KINDS = [
    pytest.param("redis exactly once", marks=pytest.mark.redis),
    pytest.param("kafka exactly once", marks=pytest.mark.kafka),
    pytest.param("nats exactly once", marks=pytest.mark.nats),
]


def make_subject(kind: str, request: pytest.FixtureRequest) -> Subject:
    """Return a sink of a kind, not open."""
    if kind == "file":
        return file_subject(request.getfixturevalue("tmp_path"))
    if kind == "redis":
        return redis_subject(request)
    if kind.startswith("nats"):
        return nats_subject(request, exactly_once=kind != "nats")
    if kind.startswith("kafka"):
        return kafka_subject(request, exactly_once=kind != "kafka")
    return redis_subject(request, "deltaforge:position:shop:subject")


@pytest.fixture(params=[*KINDS, *EXACT_KINDS])
def bare(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each sink in turn, not open."""
    made = make_subject(request.param, request)
    yield made
    made.sink.close()


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """The control file of a wrapped sink's faults; not there yet."""
    (tmp_path / "faults").mkdir()
    return tmp_path / "faults" / "subject"


def wrapped(subject: Subject, control: Path) -> Subject:
    """Return the sink wrapped and open."""
    made = replace(subject, sink=FaultySink(subject.sink, "subject", control.parent))
    made.sink.open()
    return made


@pytest.fixture
def faulty(bare: Subject, control: Path) -> Subject:
    """Each sink in turn, wrapped and open."""
    return wrapped(bare, control)


@pytest.fixture(params=["bare", "wrapped"])
def subject(request: pytest.FixtureRequest, bare: Subject, control: Path) -> Subject:
    """Each sink in turn, open, bare and wrapped."""
    if request.param == "bare":
        bare.sink.open()
        return bare
    return wrapped(bare, control)


@pytest.fixture(params=EXACT_KINDS)
def exact(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each sink that keeps its position in turn, open."""
    made = make_subject(request.param, request)
    made.sink.open()
    yield made
    made.sink.close()


class TestSink(SinkContract):
    """Each of our sinks keeps the promises of every sink."""


class TestExactlyOnce(ExactlyOnceContract):
    """Each of our sinks that stores its position keeps the promises of such a sink."""


@pytest.mark.parametrize("fault", ["fail_before", "fail_during", "fail_after"])
def test_retry_never_reorders(faulty: Subject, control: Path, fault: str) -> None:
    """After a failure a prefix has arrived; the retry repeats it and goes on, in order."""
    values = numbered(1000)
    batch = messages(faulty.rows(values, "a", "b"))
    control.write_text(f"{fault} once")

    with pytest.raises(SinkUnavailable):
        faulty.sink.send(batch, allow)
    for name, expected in (("a", values[::2]), ("b", values[1::2])):
        prefix = faulty.delivered(name)
        assert expected[: len(prefix)] == prefix
    before = {name: faulty.delivered(name) for name in "ab"}
    faulty.sink.close()
    faulty.sink.open()
    faulty.sink.send(batch, allow)

    assert before["a"] + values[::2] == faulty.delivered("a")
    assert before["b"] + values[1::2] == faulty.delivered("b")


def test_close_ends_a_hanging_send(faulty: Subject, control: Path) -> None:
    """A sink that hangs is ended by closing it from another thread; it opens again afterwards."""
    values = numbered(10)
    control.write_text("hang")
    errors: list[Exception] = []

    def work() -> None:
        try:
            faulty.sink.send(messages(faulty.rows(values)), allow)
        except SinkUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    faulty.sink.close()
    thread.join(60)
    control.unlink()
    faulty.sink.open()
    faulty.sink.send(messages(faulty.rows(values)), allow)

    assert (False, 1, values) == (thread.is_alive(), len(errors), faulty.delivered("a"))


def test_exactly_once_is_said(exact: Subject, tmp_path: Path) -> None:
    """A sink says whether it keeps its position, wrapped too."""
    assert exact.sink.exactly_once
    assert FaultySink(exact.sink, "subject", tmp_path).exactly_once
    assert not file_subject(tmp_path).sink.exactly_once


def test_resuming_by_the_position_repeats_nothing(exact: Subject, tmp_path: Path) -> None:
    """After each kind of failure, going on after the position delivers everything once."""
    (tmp_path / "faults").mkdir()
    control = tmp_path / "faults" / "subject"
    faulty = wrapped(exact, control)
    values = numbered(1000)
    whole = messages(faulty.rows(values), origin=ORIGIN)
    sent = 0
    for fault in ("fail_before", "fail_during", "fail_after"):
        control.write_text(f"{fault} once")
        part = replace(whole, messages=whole.messages.slice(sent, min(400, 1000 - sent)))
        with pytest.raises(SinkUnavailable):
            faulty.sink.send(part, allow)
        faulty.sink.close()
        faulty.sink.open()
        sent = next_row(whole, faulty.sink.position())
    faulty.sink.send(replace(whole, messages=whole.messages.slice(sent)), allow)

    assert faulty.delivered("a") == values


def next_row(batch: SinkBatch, position: SinkPosition | None) -> int:
    """Return the first row of a batch after a position."""
    if position is None:
        return 0
    ordinals = batch.messages.column("ordinal").to_numpy()
    return int(ordinals.searchsorted(position.ordinal)) + 1
