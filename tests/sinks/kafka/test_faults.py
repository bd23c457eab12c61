"""The Kafka sink while networks, brokers and disks fail: nothing lost, nothing out of order."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deltaforge_dagster.errors import PositionMoved, SinkUnavailable
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.deployment import eventually
from tests.faulty_proxy import FaultyProxy
from tests.fix_kafka import StartKafka, read_topic
from tests.sinks.kafka.test_sink import numbered, numbers
from tests.sinks.messages import sent

pytestmark = pytest.mark.kafka


class DistantServer(KafkaServer):
    """A broker whose clients are sent to a port where a proxy is to listen.

    Attributes:
        behind: The port of the broker that the proxy carries connections to.
        before: The port of the proxy.
    """

    behind = before = 0

    def _listen(self, port: int) -> None:
        super()._listen(port)
        self.behind, self.before = free_port(), free_port()
        self._settings |= {
            "listeners": f"{self._settings['listeners']},DISTANT://127.0.0.1:{self.behind}",
            "advertised.listeners": (
                f"PLAINTEXT://{self.brokers},DISTANT://127.0.0.1:{self.before}"
            ),
            "listener.security.protocol.map": (
                "DISTANT:PLAINTEXT,PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
        }


@pytest.fixture(scope="module")
def distant() -> Iterator[DistantServer]:
    """A broker to be reached through a proxy."""
    with DistantServer.start() as server:
        yield server


def starts_over_only(found: list[int]) -> bool:
    """Whether each number is one that was there, or the next: what is repeated has no gaps."""
    newest = -1
    for before, number in itertools.pairwise([-1, *found]):
        if number > newest + 1 or number > before + 1:
            return False
        newest = max(newest, number)
    return True


def deliver(
    sink: KafkaSink, batches: list[SinkBatch], *, seconds: float = 240, guard: SendGuard = allow
) -> int:
    """Send batches as a deliverer does, with exactly once from what the sink has; count failures."""
    failures, done = 0, -1
    deadline = time.monotonic() + seconds
    opened = False
    while time.monotonic() < deadline:
        try:
            if not opened:
                sink.open()
                position = sink.position()
                done = position.ordinal if position else done
                opened = True
            for one in batches:
                ordinals = one.messages.column("ordinal").to_numpy()
                if ordinals[-1] > done:
                    start = int((ordinals <= done).sum()) if sink.exactly_once else 0
                    done = sink.send(replace(one, messages=one.messages.slice(start)), guard)
        except (SinkUnavailable, PositionMoved):
            failures += 1
            sink.close()
            opened = False
        else:
            sink.close()
            return failures
    raise AssertionError(f"not delivered within {seconds} s")


def opened(sink: KafkaSink) -> None:
    """Open a sink with a short time and read its position, though the machine be slow."""

    def ready() -> bool:
        try:
            sink.open()
            sink.position()
        except SinkUnavailable:
            sink.close()
            return False
        return True

    eventually(ready)


@pytest.mark.parametrize("transactional", [False, True])
def test_connections_that_break(distant: DistantServer, transactional: bool) -> None:
    """Connections reset, stalled and half-closed: all arrives in order; once, in transactions."""
    topic = f"cut-{transactional}"
    distant.create_topic(topic)
    sink = KafkaSink(
        "out",
        f"127.0.0.1:{distant.before}",
        {"reconnect.backoff.ms": "20", "reconnect.backoff.max.ms": "200"},
        send_timeout=5,
        transactional_id=topic if transactional else None,
    )
    batches = [numbered(500, topic, size=1000, first=first) for first in range(0, 4000, 500)]
    if transactional:
        batches = [replace(one, origin=ORIGIN) for one in batches]
    with FaultyProxy(
        ("127.0.0.1", distant.behind),
        5_000,
        10,
        seed=7,
        faults=["cut", "delay", "half-close"],
        port=distant.before,
    ) as proxy:
        deliver(sink, batches)
        assert proxy.faults > 3
    found = numbers(read_topic(distant.brokers, topic))
    if transactional:
        assert found == [*range(4000)]
    else:
        assert set(found) == {*range(4000)}
        assert starts_over_only(found)


def test_a_network_that_is_gone_for_a_while(distant: DistantServer) -> None:
    """While nothing gets through the sink fails in time, and can be tried again; then it goes on."""
    distant.create_topic("gone")
    sink = KafkaSink("out", f"127.0.0.1:{distant.before}", send_timeout=1.5, lease_seconds=4)
    with FaultyProxy(("127.0.0.1", distant.behind), 1, 0, seed=1, port=distant.before):
        sent(sink, numbered(10, "gone"))
    before = numbers(read_topic(distant.brokers, "gone"))
    with pytest.raises(SinkUnavailable, match=r"not acknowledged within 1\.5 s"):
        sink.send(numbered(10, "gone", first=10), allow)
    with FaultyProxy(("127.0.0.1", distant.behind), 1, 0, seed=1, port=distant.before):
        failures = deliver(sink, [numbered(10, "gone", first=10)])
    found = numbers(read_topic(distant.brokers, "gone"))
    assert starts_over_only(found)
    assert found[: len(before)] == before
    # Only what a slow machine let run out of its time again may have come more than once.
    assert set(found[len(before) :]) == {*range(10, 20)}
    assert failures or len(found) == len(before) + 10


@pytest.mark.parametrize(
    "transactional", [False, pytest.param(True, marks=pytest.mark.soak("faults"))]
)
def test_a_disk_that_is_full(start_kafka: StartKafka, transactional: bool) -> None:
    """A broker that can write no more ends itself; the sink waits, and goes on when it is back."""
    server = start_kafka()
    server.create_topic("t")
    name = "id" if transactional else None
    sink = KafkaSink(
        "out", server.brokers, {}, send_timeout=2, lease_seconds=4, transactional_id=name
    )
    batches = [numbered(1000, "t", size=1000, first=first) for first in range(0, 4000, 1000)]
    if transactional:
        batches = [replace(one, origin=ORIGIN) for one in batches]
    deliver(sink, batches[:1])
    opened(sink)
    # A file can grow no further than this: what a full disk answers, and a quota.
    assert server.pid is not None
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
    with pytest.raises(SinkUnavailable, match="sink out: kafka at"):
        sink.send(batches[1], allow)
    sink.close()
    eventually(lambda: not server._own().running)
    with pytest.raises(SinkUnavailable):
        sink.open()
    sink.close()
    server.stop(immediate=True)
    server.restart()
    deliver(sink, batches[1:])
    found = numbers(read_topic(server.brokers, "t"))
    assert set(found) == {*range(4000)}
    assert found == [*range(4000)] if transactional else starts_over_only(found)
