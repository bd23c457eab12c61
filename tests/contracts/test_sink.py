"""What every sink promises a deliverer, tried on all of them, bare and wrapped."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import LeaseLost, PositionMoved, SinkUnavailable
from deltaforge_dagster.sinks.base import Sink, SinkBatch, SinkPosition
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_lab.faulty_sink import FaultySink
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from tests.fix_kafka import read_topic
from tests.fix_nats import Admin
from tests.sinks.messages import ORIGIN, allow, messages, refuse_from


@dataclass(frozen=True)
class Subject:
    """A sink, and how a consumer sees what it delivered.

    Attributes:
        sink: The sink; not open.
        another: Makes one more sink of the same configuration, as another process would.
        destination: Makes a destination of a short name.
        delivered: Values at a destination, in order.
        replayed: Values that replay `r1` delivered there, in order.
    """

    sink: Sink
    another: Callable[[], Sink]
    destination: Callable[[str], str]
    delivered: Callable[[str], list[str]]
    replayed: Callable[[str], list[str]]

    def rows(self, values: list[str], *names: str) -> list[tuple[str, str]]:
        """Return messages whose destinations take turns."""
        places = [self.destination(name) for name in names or ("a",)]
        return list(zip(itertools.cycle(places), values, strict=False))


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


def numbered(count: int, size: int = 1) -> list[str]:
    """Return values that say their number, `size` characters at least."""
    return [f'{{"n":{n},"pad":"{"x" * size}"}}' for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 7000])
def test_everything_arrives_in_order(subject: Subject, count: int) -> None:
    """Each destination has all of its values in order, and the last ordinal is acknowledged."""
    values = numbered(count)
    batch = messages(subject.rows(values, "a", "b", "c"), first=10)

    acknowledged = subject.sink.send(batch, allow)

    assert batch.messages.column("ordinal")[-1].as_py() == acknowledged
    for turn, name in enumerate("abc"):
        assert values[turn::3] == subject.delivered(name)


def test_values_are_untouched(subject: Subject) -> None:
    """Any text without a line break arrives as it is: empty, large, beyond ASCII."""
    values = ["", "ä€🜁", "a\tb\\n", "\x7f", "x" * 3_000_000, '{"n":1.10}']

    subject.sink.send(messages(subject.rows(values)), allow)

    assert values == subject.delivered("a")


def test_guard_refuses_at_once(subject: Subject) -> None:
    """A guard that raises before the first send lets nothing leave the process."""
    guard, _ = refuse_from(1, LeaseLost("gone"))

    with pytest.raises(LeaseLost):
        subject.sink.send(messages(subject.rows(numbered(100))), guard)

    assert subject.delivered("a") == []


def test_guard_refuses_on_the_way(subject: Subject) -> None:
    """A large batch asks its guard more than once; nothing is sent after the one that raised."""
    values = numbered(20_000, size=1000)
    guard, calls = refuse_from(2, LeaseLost("gone"))

    with pytest.raises(LeaseLost):
        subject.sink.send(messages(subject.rows(values)), guard)
    arrived = subject.delivered("a")
    time.sleep(0.1)

    assert len(calls) == 2
    assert 0 < len(arrived) < len(values)
    assert values[: len(arrived)] == arrived == subject.delivered("a")


def test_goes_on_after_a_guard_refused(subject: Subject) -> None:
    """The same sink can send again after its guard raised."""
    values = numbered(10)
    with pytest.raises(LeaseLost):
        subject.sink.send(messages(subject.rows(values)), refuse_from(1, LeaseLost("gone"))[0])

    subject.sink.send(messages(subject.rows(values)), allow)

    assert values == subject.delivered("a")


def test_reopen_after_close(subject: Subject) -> None:
    """A closed sink opens again and goes on after what it delivered."""
    values = numbered(20)

    for first, part in ((0, values[:10]), (10, values[10:])):
        subject.sink.open()
        subject.sink.send(messages(subject.rows(part), first=first), allow)
        subject.sink.close()

    assert values == subject.delivered("a")


def test_close_twice(subject: Subject) -> None:
    """Closing twice is safe."""
    subject.sink.close()
    subject.sink.close()


def test_nothing_is_sent_after_close(subject: Subject) -> None:
    """A closed sink refuses, and may be tried again later."""
    subject.sink.close()

    with pytest.raises(SinkUnavailable, match=r"subject.*closed"):
        subject.sink.send(messages(subject.rows(numbered(3))), allow)

    assert subject.delivered("a") == []


def test_close_during_a_send(subject: Subject) -> None:
    """Closing under a sending thread ends the send: what arrived is a prefix, nothing follows."""
    values = numbered(20_000, size=1000)
    batch = messages(subject.rows(values))
    sending = threading.Event()
    closed = threading.Event()
    errors: list[Exception] = []

    def guard() -> None:
        if sending.is_set():
            closed.wait(60)  # the second piece: closed in the middle
        sending.set()

    def work() -> None:
        try:
            subject.sink.send(batch, guard)
        except SinkUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert sending.wait(60)
    subject.sink.close()
    closed.set()
    thread.join(60)
    arrived = subject.delivered("a")

    assert (thread.is_alive(), len(errors)) == (False, 1)
    assert values[: len(arrived)] == arrived
    assert len(arrived) < len(values)


def test_replay_is_marked(subject: Subject) -> None:
    """A replay is told apart from live delivery, and its values are byte for byte the same."""
    values = [*numbered(5), '{"name":"ä"}']
    subject.sink.send(messages(subject.rows(values)), allow)

    subject.sink.send(messages(subject.rows(values), replay="r1"), allow)

    assert (values, values) == (subject.delivered("a"), subject.replayed("a"))


def test_position_is_optional(subject: Subject) -> None:
    """A batch without an origin stores no position, in whatever sink."""
    before = subject.sink.position()
    subject.sink.send(messages(subject.rows(numbered(3))), allow)

    assert (before, subject.sink.position()) == (None, None)


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


# Sinks that keep their position.


@pytest.fixture(params=EXACT_KINDS)
def exact(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each sink that keeps its position in turn, open."""
    made = make_subject(request.param, request)
    made.sink.open()
    yield made
    made.sink.close()


def test_exactly_once_is_said(exact: Subject, tmp_path: Path) -> None:
    """A sink says whether it keeps its position, wrapped too."""
    assert exact.sink.exactly_once
    assert FaultySink(exact.sink, "subject", tmp_path).exactly_once
    assert not file_subject(tmp_path).sink.exactly_once


def test_position_is_that_of_the_last_message(exact: Subject) -> None:
    """Whoever opens the sink next reads the origin and place of the last message that arrived."""
    assert exact.sink.position() is None
    first = messages(exact.rows(numbered(7000, size=300), "a", "b"), origin=ORIGIN)
    second = messages(exact.rows(numbered(1), "c"), first=7000, origin=ORIGIN)

    for batch, last in ((first, 6999), (second, 0)):
        exact.sink.send(batch, allow)
        exact.sink.close()
        exact.sink.open()
        assert exact.sink.position() == batch.position_at(last)
    assert second.position_at(0).event_id == "e7000"


def test_a_replay_leaves_the_position(exact: Subject) -> None:
    """A replay, also one beside a live sender, moves no position and stops nobody."""
    live = messages(exact.rows(numbered(3)), origin=ORIGIN)
    more = messages(exact.rows(numbered(3)), first=3, origin=ORIGIN)
    other = exact.another()
    other.open()
    exact.sink.send(live, allow)

    other.send(messages(exact.rows(numbered(9000, size=300)), replay="r1"), allow)
    exact.sink.send(more, allow)
    other.send(messages(exact.rows(numbered(1)), first=9000, replay="r1"), allow)
    exact.sink.send(messages(exact.rows(numbered(1)), first=9001, replay="r1"), allow)
    other.close()

    assert exact.sink.position() == more.position_at(2)
    assert exact.delivered("a") == numbered(3) * 2
    assert len(exact.replayed("a")) == 9002


def test_another_sender_is_noticed(exact: Subject) -> None:
    """After somebody else has moved the position a sender stores nothing, until it reads again."""
    stalled = exact.another()
    stalled.open()
    assert (stalled.position(), exact.sink.position()) == (None, None)
    exact.sink.send(messages(exact.rows(numbered(3)), origin=ORIGIN), allow)

    for _ in range(2):
        with pytest.raises(PositionMoved):
            stalled.send(messages(exact.rows(numbered(9000, size=300)), origin=ORIGIN), allow)
    assert exact.delivered("a") == numbered(3)
    stalled.close()
    stalled.open()
    assert stalled.position() == messages(exact.rows(numbered(3)), origin=ORIGIN).position_at(2)
    stalled.send(messages(exact.rows(numbered(3)), first=3, origin=ORIGIN), allow)
    stalled.close()

    assert exact.delivered("a") == numbered(3) * 2
    with pytest.raises(PositionMoved):
        exact.sink.send(messages(exact.rows(numbered(3)), first=3, origin=ORIGIN), allow)


def test_position_says_which_prefix_arrived(exact: Subject) -> None:
    """When a send stops on its way the position is that of the last change that arrived, whole."""
    values = numbered(20_000, size=1000)
    batch = messages(exact.rows(values), each=4, origin=ORIGIN)
    with pytest.raises(LeaseLost):
        exact.sink.send(batch, refuse_from(3, LeaseLost("gone"))[0])

    exact.sink.close()
    exact.sink.open()

    arrived = exact.delivered("a")
    found = exact.sink.position()
    assert values[: len(arrived)] == arrived
    assert found == (batch.position_at(len(arrived) - 1) if arrived else None)
    assert len(arrived) % 4 == 0


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
