"""Every sink behind a network that cuts, delays and half-closes its connections: order, and no loss.

Batches are sent as a deliverer sends them: again after an error, and exactly once from where the sink
says that it is.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis

from deltaforge_dagster.errors import Retryable
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.http.client import ClientSettings
from deltaforge_dagster.sinks.http.requests import RequestForm
from deltaforge_dagster.sinks.http.sink import HttpSink
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow, messages
from deltaforge_lab.servers.http import HttpServer
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from deltaforge_lab.servers.redis import RedisServer
from tests.faulty_proxy import Fault, FaultyProxy
from tests.fix_kafka import read_topic
from tests.fix_nats import Admin

ROWS = 10_000
BATCH = 500
DESTINATIONS = ("a", "b", "c")
FAULTS: tuple[Fault, ...] = ("cut", "delay", "half-close")
SECONDS = 240


@dataclass(frozen=True)
class Far:
    """A sink behind a proxy.

    Attributes:
        proxy: Between the sink and its server.
        make: Makes a sink.
        destination: Makes a destination of a short name.
        delivered: Values at a destination, in order.
    """

    proxy: FaultyProxy
    make: Callable[[], Sink]
    destination: Callable[[str], str]
    delivered: Callable[[str], Iterable[str]]


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> int:
    """How many faults there are."""
    return int(getattr(request, "param", 15))


@pytest.fixture
def far_redis(
    redis_server: RedisServer, redis_client: redis.Redis, faults: int, seed: int
) -> Iterator[Callable[[bool], Far]]:
    """Make a Redis sink behind a proxy."""
    address = urlsplit(redis_server.uri)
    assert address.hostname
    assert address.port

    def read(name: str) -> list[str]:
        entries: Any = redis_client.xrange(name)
        return [one["df-event"] for _, one in entries]

    with ExitStack() as stack:

        def make(exactly_once: bool) -> Far:
            target = (str(address.hostname), int(address.port or 0))
            proxy = stack.enter_context(FaultyProxy(target, 100_000, faults, seed, faults=FAULTS))
            uri = proxy.through(redis_server.uri)
            key = "position" if exactly_once else None
            return Far(
                proxy,
                lambda: RedisSink("far", uri, SinkTimeouts(5, 5, 10), position_key=key, name="far"),
                lambda name: name,
                read,
            )

        yield make


@pytest.fixture(scope="module")
def proxied_kafka() -> Iterator[tuple[KafkaServer, int]]:
    """A broker that sends its clients to the port that comes with it."""
    port = free_port()
    listeners = f"PLAINTEXT://127.0.0.1:{port}"
    with KafkaServer.start(settings={"advertised.listeners": listeners}) as server:
        yield server, port


@pytest.fixture
def far_kafka(
    proxied_kafka: tuple[KafkaServer, int], faults: int, seed: int
) -> Iterator[Callable[[bool], Far]]:
    """Make a Kafka sink behind a proxy."""
    server, port = proxied_kafka
    host, _, real = server.brokers.partition(":")
    own = f"df_{secrets.token_hex(6)}"
    brokers = f"{host}:{port}"

    def read(name: str) -> list[str]:
        return [(one.value or b"").decode() for one in read_topic(brokers, f"{own}.{name}")]

    with ExitStack() as stack:

        def make(exactly_once: bool) -> Far:
            with FaultyProxy((host, int(real)), 1, 0, 0, port=port):
                for name in DESTINATIONS:
                    server.create_topic(f"{own}.{name}")
            proxy = stack.enter_context(
                FaultyProxy((host, int(real)), 50_000, faults, seed, faults=FAULTS, port=port)
            )
            return Far(
                proxy,
                lambda: KafkaSink("far", brokers, transactional_id=own if exactly_once else None),
                lambda name: f"{own}.{name}",
                read,
            )

        yield make


@pytest.fixture
def far_nats(
    nats_server: NatsServer, nats_admin: Admin, nats_stream: str, faults: int, seed: int
) -> Iterator[Callable[[bool], Far]]:
    """Make a NATS sink behind a proxy."""
    address = urlsplit(nats_server.url)
    target = (str(address.hostname), int(address.port or 0))
    with ExitStack() as stack:

        def make(exactly_once: bool) -> Far:
            proxy = stack.enter_context(FaultyProxy(target, 100_000, faults, seed, faults=FAULTS))
            return Far(
                proxy,
                lambda: NatsSink(
                    "far",
                    proxy.through(nats_server.url),
                    f"{nats_stream}.*",
                    stream=nats_stream,
                    exactly_once=exactly_once,
                    timeouts=SinkTimeouts(connect=5, batch=10),
                ),
                lambda name: f"{nats_stream}.{name}",
                lambda name: nats_admin.values(nats_stream, f"{nats_stream}.{name}"),
            )

        yield make


@pytest.fixture
def far_http(http_server: HttpServer, faults: int, seed: int) -> Iterator[Callable[[bool], Far]]:
    """Make an HTTP sink behind a proxy; all destinations are one URL, so that requests hold many messages."""

    def read(name: str) -> list[str]:
        lines = [line for body in http_server.received for line in body.body.decode().split()]
        turn = DESTINATIONS.index(name)
        return [one for one in lines if int(one.partition(":")[0]) % len(DESTINATIONS) == turn]

    with ExitStack() as stack:

        def make(_: bool) -> Far:
            address = urlsplit(http_server.url)
            target = (str(address.hostname), int(address.port or 0))
            proxy = stack.enter_context(FaultyProxy(target, 100_000, faults, seed, faults=FAULTS))
            form = RequestForm(batch=True, array=False, max_bytes=20_000)
            return Far(
                proxy,
                lambda: HttpSink("far", form, ClientSettings(timeout=10.0)),
                lambda _: proxy.through(http_server.url),
                read,
            )

        yield make


def deliver(far: Far) -> None:
    """Send `ROWS` messages as a deliverer does."""
    noise = random.Random(1)  # does not become smaller when it is compressed
    rows = [
        (far.destination(DESTINATIONS[n % len(DESTINATIONS)]), f"{n}:{noise.randbytes(150).hex()}")
        for n in range(ROWS)
    ]
    ordinals = cast("list[int]", messages(rows).messages.column("ordinal").to_pylist())
    sink = far.make()
    sent, is_open = -1, False  # the last ordinal
    deadline = time.monotonic() + SECONDS
    with closing(sink):
        while sent < ordinals[-1]:
            assert time.monotonic() < deadline
            try:
                if not is_open:
                    sink.open()
                    if sink.exactly_once:
                        position = sink.position()
                        sent = -1 if position is None else position.ordinal
                    is_open = True
                first = sum(ordinal <= sent for ordinal in ordinals)
                origin = ORIGIN if sink.exactly_once else None
                batch = messages(rows[first : first + BATCH], first=first, origin=origin)
                sent = sink.send(batch, allow)
            except Retryable as error:
                print(error)  # noqa: T201
                sink.close()
                is_open = False


def check(far: Far, *, exactly_once: bool) -> None:
    """Everything is there, in order; at least once whatever comes again begins no later."""
    for turn, name in enumerate(DESTINATIONS):
        expected = list(range(turn, ROWS, len(DESTINATIONS)))
        found = [int(value.partition(":")[0]) for value in far.delivered(name)]
        if exactly_once:
            assert found == expected
            continue
        assert list(dict.fromkeys(found)) == expected  # each arrives first after what precedes it
        for one, after in itertools.pairwise(found):  # goes on, or back; never ahead
            assert after <= one + len(DESTINATIONS)


@pytest.mark.parametrize(
    ("kind", "exactly_once"),
    [
        pytest.param("http", False, marks=pytest.mark.soak("faults")),
        pytest.param("redis", False, marks=pytest.mark.redis),
        pytest.param("redis", True, marks=pytest.mark.redis),
        pytest.param("kafka", False, marks=pytest.mark.kafka),
        # Calls that librdkafka does not end are given up after 12 seconds each.
        pytest.param("kafka", True, marks=[pytest.mark.kafka, pytest.mark.soak("faults")]),
        pytest.param("nats", False, marks=pytest.mark.nats),
        pytest.param("nats", True, marks=pytest.mark.nats),
    ],
)
def test_a_bad_network(request: pytest.FixtureRequest, kind: str, exactly_once: bool) -> None:
    """Nothing is lost or out of order, and exactly once nothing comes twice."""
    far: Far = request.getfixturevalue(f"far_{kind}")(exactly_once)
    deliver(far)

    assert far.proxy.faults > 5
    check(far, exactly_once=exactly_once)
