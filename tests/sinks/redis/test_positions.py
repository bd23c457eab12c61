"""The Redis sink exactly once: what is particular to it; the rest is in the contract of all sinks."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from deltaforge_dagster.errors import (
    PermissionMissing,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.testing.sinks import ORIGIN
from deltaforge_lab.servers.redis import RedisServer
from tests.fix_redis import StartRedis
from tests.sinks.redis_messages import (
    Crash,
    allow,
    client_of,
    cut_connections,
    kernels,
    numbered,
    numbers,
    server,
    sink,
)

__all__ = ["kernels", "server", "sink"]

pytestmark = pytest.mark.redis


KEY = "deltaforge:position:shop:cache"


def exactly_once(server: RedisServer, **options: Any) -> RedisSink:
    """Return an open sink that keeps its position."""
    sink = RedisSink("cache", server.uri, position_key=KEY, **options)
    sink.open()
    return sink


def after(whole: SinkBatch, sink: RedisSink) -> SinkBatch:
    """Return what of a batch comes after the sink's position."""
    position = sink.position()
    start = 0 if position is None else position.ordinal // 10 + 1
    return replace(whole, messages=whole.messages.slice(start))


def test_the_position_is_readable(server: RedisServer) -> None:
    """The key holds one JSON object; a sink at least once leaves it alone."""
    sink = exactly_once(server)
    sink.send(replace(numbered(3), origin=ORIGIN), allow)
    sink.close()
    plain = RedisSink("cache", server.uri)
    plain.open()
    plain.send(numbered(5), allow)
    plain.close()

    with client_of(server) as client:
        held = client.get(KEY)
    assert isinstance(held, bytes)
    assert (
        json.loads(held).items()
        >= {
            "uid": "uid-1",
            "lineage": "lineage-1",
            "segment": 1,
            "segment_id": "segment",
            "ordinal": 20,
            "event_id": "e2",
            "start": ORIGIN.start,
            "end": ORIGIN.end,
            "source": "orders-db",
        }.items()
    )
    assert plain.position() is None


@pytest.mark.parametrize("held", ["garbage", "{}", '{"uid": 1}', None])
def test_what_is_no_position(server: RedisServer, held: str | None) -> None:
    """Anything else under the key is refused by name, and can be overwritten on purpose."""
    with client_of(server) as client:
        if held is None:
            client.rpush(KEY, "a list")
        else:
            client.set(KEY, held)
    sink = exactly_once(server)
    with pytest.raises(SinkRejected, match=rf"sink cache: key '{KEY}'.*not a position.*delete it"):
        sink.position()
    sink.send(replace(numbered(3), origin=ORIGIN), allow)
    sink.close()

    sink.open()
    position = sink.position()
    sink.close()
    assert position is not None
    assert position.event_id == "e2"


def test_lost_keys_are_noticed_at_once(server: RedisServer) -> None:
    """Data that vanishes under a connected sender stops it before anything more is stored."""
    sink = exactly_once(server)
    sink.send(replace(numbered(3), origin=ORIGIN), allow)
    with client_of(server) as client:
        client.flushdb()
    with pytest.raises(PositionMoved, match="the server has lost data"):
        sink.send(replace(numbered(3), origin=ORIGIN), allow)
    sink.close()

    assert numbers(server) == []


def test_connections_cut_amid_batches_repeat_nothing(start_redis: StartRedis) -> None:
    """A sink whose connection is cut learns from the key whether the block in flight arrived."""
    server = start_redis()
    sink = exactly_once(server)
    whole = replace(numbered(60_000), origin=ORIGIN)
    cuts: list[int] = []
    cutter = threading.Thread(target=cut_connections, args=(server, 5, cuts))
    cutter.start()
    sent = 0
    while cutter.is_alive():
        rest = replace(whole, origin=replace(ORIGIN, incarnation=f"l{sent}"))
        try:
            sink.send(rest, allow)
        except SinkUnavailable:  # a slow machine: cut in each of its attempts
            sink.close()
            sink.open()
            position = sink.position()
            if position is not None and position.incarnation == f"l{sent}":
                sink.send(after(rest, sink), allow)
            else:
                sink.send(rest, allow)
        sent += 1
    cutter.join()
    sink.close()

    assert sum(cuts) >= 5
    assert numbers(server) == list(range(60_000)) * sent


def test_a_crash_amid_a_batch_repeats_nothing(start_redis: StartRedis) -> None:
    """After a crash and a restart delivery goes on after the position, whatever was in flight."""
    server = start_redis({"appendfsync": "always"})
    sink = exactly_once(server)
    whole = replace(numbered(60_000), origin=ORIGIN)
    crash = Crash(server)
    errors = []

    for _ in range(5):
        try:
            sink.send(after(whole, sink), crash.guard)
            break
        except SinkUnavailable as error:
            errors.append(error)
            crash.over()
            server.restart()
            sink.open()
    sink.close()

    assert errors
    assert numbers(server) == list(range(60_000))


def test_a_paused_server_repeats_nothing(start_redis: StartRedis) -> None:
    """What a hanging server had got already is in the position once it answers again."""
    server = start_redis()
    sink = exactly_once(server, timeouts=SinkTimeouts(send=3))
    server.pause()
    whole = replace(numbered(40), origin=ORIGIN)
    with pytest.raises(SinkUnavailable, match="send_timeout_secs"):
        sink.send(replace(whole, messages=whole.messages.slice(0, 20)), allow)
    server.resume()
    sink.open()
    sink.send(after(whole, sink), allow)
    sink.close()

    assert numbers(server) == list(range(40))


def test_permissions_for_the_position(start_redis: StartRedis) -> None:
    """A user who may not use the key is told the grant when the sink opens."""
    server = start_redis()
    host = server.uri.rpartition("@")[2]
    with client_of(server) as client:
        acl = ["on", ">pw", "~s*", "+@all"]
        client.execute_command("ACL", "SETUSER", "weak", *acl)
        sink = RedisSink("cache", f"redis://weak:pw@{host}", position_key=KEY)
        with pytest.raises(PermissionMissing, match=r"~deltaforge:position:\*"):
            sink.open()
        client.execute_command("ACL", "SETUSER", "weak", "~deltaforge:position:*")
        sink.open()
        sink.send(replace(numbered(3), origin=ORIGIN), allow)
        sink.close()
