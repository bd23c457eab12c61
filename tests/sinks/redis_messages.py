"""Messages for the Redis sink, and looks at what has arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
import redis
import redis.sentinel

from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from deltaforge_dagster.sinks.redis import resp
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_lab.servers.redis import RedisServer

Row = dict[str, str | int | None]


def row(number: int, stream: str = "s", **changes: str | None) -> Row:
    """Return one message; its numbers say which it is."""
    return {
        "ordinal": 10 * number,
        "destination": stream,
        "key": f"k{number % 7}",
        "value": f'{{"n":{number}}}',
        "event_id": f"e{number}",
        "idempotency_key": f"i{number}",
        "headers": None,
        **changes,
    }


def batch(rows: list[Row], replay: str | None = None) -> SinkBatch:
    """Return a batch of messages."""
    return SinkBatch(1, "segment", pa.RecordBatch.from_pylist(rows, schema=MESSAGES), replay)


def numbered(count: int, size: int = 300, streams: int = 1) -> SinkBatch:
    """Return a batch of `count` large messages."""
    return batch([row(n, f"s{n % streams}", value=str(n).ljust(size)) for n in range(count)])


def allow() -> None:
    """A guard that lets everything pass."""


def client_of(server: RedisServer) -> redis.Redis:
    """Return a client that sees bytes."""
    return redis.Redis.from_url(server.uri, socket_timeout=None)  # 5 s by itself: too short


def numbers(server: RedisServer, stream: str = "s0") -> list[int]:
    """Return the numbers of the messages in a stream, in its order."""
    with client_of(server) as client:
        return [int(fields[b"df-event"]) for _, fields in client.xrange(stream)]


def cut_connections(server: RedisServer, times: int, cuts: list[int]) -> None:
    """Cut all connections so often, each time once some blocks have arrived since the last time.

    Args:
        server: Whose.
        times: How often.
        cuts: Gets how many were cut each time.
    """
    enough = 5 * next(resp.pack_blocks(numbered(60_000).messages)).rows
    with client_of(server) as client:
        for _ in range(times):
            before = client.xlen("s0")
            while client.xlen("s0") < before + enough:
                time.sleep(0.01)
            while not (cut := client.client_kill_filter(_type="normal", skipme=True)):
                time.sleep(0.001)  # between two connections
            cuts.append(cut)


class Crash:
    """A server that is killed amid a batch of eight blocks at least.

    Args:
        server: Which one.
    """

    def __init__(self, server: RedisServer) -> None:
        self._timer = threading.Timer(0.02, lambda: server.stop(immediate=True))
        self._guards = 0

    def guard(self) -> None:
        """Have it killed a moment later, once the first two blocks have arrived.

        That moment comes before the last block, however late the thread begins.
        """
        self._guards += 1
        if self._guards == 3:
            self._timer.start()
        if self._guards == 8:
            self._timer.join()

    def over(self) -> None:
        """Wait until it has been killed."""
        self._timer.join()


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Have machine code ready: these tests look at the clock."""
    resp.warm()


@pytest.fixture
def server(redis_server: RedisServer, redis_client: redis.Redis) -> RedisServer:
    """The session's server, empty."""
    return redis_server


@pytest.fixture
def sink(server: RedisServer) -> Iterator[RedisSink]:
    """An open sink."""
    sink = RedisSink("cache", server.uri)
    sink.open()
    yield sink
    sink.close()
