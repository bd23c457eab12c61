"""The Redis sink against a real server: what arrives, and in which order."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import (
    LeaseLost,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.redis import resp
from deltaforge_dagster.sinks.redis.link import RedisLink
from deltaforge_dagster.sinks.redis.resp import Verdict
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_lab.servers.redis import RedisServer
from tests.fix_redis import StartRedis
from tests.sinks.redis_cluster import until
from tests.sinks.redis_messages import (
    allow,
    batch,
    client_of,
    kernels,
    numbered,
    numbers,
    row,
    server,
    sink,
)

__all__ = ["kernels", "server", "sink"]

pytestmark = pytest.mark.redis


def test_entries_have_the_documented_fields(server: RedisServer, sink: RedisSink) -> None:
    """Names, order and bytes of the fields are as documented, for nulls and odd texts too."""
    odd = 'ä€😀\r\n"$3\r\n\x00*1'
    last = sink.send(
        batch(
            [
                row(0, odd, value=odd, event_id=odd, idempotency_key=odd, key=odd, headers=odd),
                row(1, key=None, headers='{"a":"b"}'),
                row(2, key=""),
            ]
        ),
        allow,
    )

    with client_of(server) as client:
        (first,) = [list(fields.items()) for _, fields in client.xrange(odd)]
        second, third = [list(fields.items()) for _, fields in client.xrange("s")]
    assert last == 20
    text = odd.encode()
    assert first == [
        (b"event_id", text),
        (b"idempotency_key", text),
        (b"df-event", text),
        (b"df-key", text),
        (b"df-headers", text),
    ]
    assert second == [
        (b"event_id", b"e1"),
        (b"idempotency_key", b"i1"),
        (b"df-event", b'{"n":1}'),
        (b"df-key", b"e1"),
        (b"df-headers", b'{"a":"b"}'),
    ]
    assert third == [
        (b"event_id", b"e2"),
        (b"idempotency_key", b"i2"),
        (b"df-event", b'{"n":2}'),
        (b"df-key", b""),
    ]


def test_a_replay_marks_every_entry(server: RedisServer, sink: RedisSink) -> None:
    """A replay differs in the field `df-replay` alone."""
    sink.send(batch([row(0)]), allow)
    sink.send(batch([row(0)], replay="run-7"), allow)

    with client_of(server) as client:
        live, replayed = [fields for _, fields in client.xrange("s")]
    assert replayed == {**live, b"df-replay": b"run-7"}


def test_many_blocks_of_a_sliced_batch_keep_order(server: RedisServer, sink: RedisSink) -> None:
    """A slice of a larger batch arrives whole, in order per stream, with a guard per block."""
    whole = numbered(12_000, streams=3)
    guards: list[None] = []
    last = sink.send(
        SinkBatch(1, "segment", whole.messages.slice(17, 11_000)), lambda: guards.append(None)
    )

    assert last == 10 * 11_016
    for stream in range(3):
        expected = [n for n in range(17, 11_017) if n % 3 == stream]
        assert numbers(server, f"s{stream}") == expected
    assert len(guards) == len(list(resp.pack_blocks(whole.messages.slice(17, 11_000)))) > 3


def test_a_block_is_queued_while_the_one_before_is_executed(
    server: RedisServer, sink: RedisSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has queued the next block before the answer to a block is read, and does not execute it until afterwards."""
    whole = numbered(5_000)
    blocks = list(resp.pack_blocks(whole.messages))
    receive = RedisLink.receive
    arrived: list[int] = []

    with client_of(server) as client:

        def queued() -> set[int]:
            return {int(one["multi"]) for one in client.client_list()}

        def after_the_next_is_queued(link: RedisLink, deadline: float) -> Verdict:
            following = blocks[len(arrived) + 1 :][:1]
            if following:
                until(lambda: following[0].rows in queued())
            verdict = receive(link, deadline)
            arrived.append(client.xlen("s0"))
            return verdict

        monkeypatch.setattr(RedisLink, "receive", after_the_next_is_queued)
        sink.send(whole, allow)

    assert arrived == [block.stop for block in blocks]
    assert len(blocks) > 2


def test_a_message_larger_than_a_block(server: RedisServer, sink: RedisSink) -> None:
    """One message of 20 MiB is a block of its own."""
    sink.send(batch([row(0), row(1, value="x" * (20 << 20)), row(2)]), allow)

    with client_of(server) as client:
        assert [len(fields[b"df-event"]) for _, fields in client.xrange("s")] == [7, 20 << 20, 7]


def test_a_lost_lease_stops_between_blocks(server: RedisServer, sink: RedisSink) -> None:
    """The guard's error passes through, and nothing is sent after it; the sink stays usable."""
    guards: list[None] = []

    def guard() -> None:
        if len(guards) == 2:
            raise LeaseLost("another run")
        guards.append(None)

    with pytest.raises(LeaseLost):
        sink.send(numbered(10_000), guard)

    arrived = numbers(server)  # nothing of the third block, which the server has already queued
    first_two = list(resp.pack_blocks(numbered(10_000).messages))[1].stop
    assert arrived == list(range(first_two))
    sink.send(batch([row(1, "after", value="1")]), allow)
    assert (numbers(server), numbers(server, "after")) == (arrived, [1])


def test_position_and_reopening(server: RedisServer, sink: RedisSink) -> None:
    """The sink keeps no position, closes twice, refuses while closed, and opens again."""
    assert sink.position() is None
    sink.close()
    sink.close()
    with pytest.raises(SinkUnavailable, match="sink cache: closed"):
        sink.send(batch([row(0)]), allow)
    sink.open()
    assert sink.send(batch([row(1)]), allow) == 10


def test_a_key_of_another_type(server: RedisServer, sink: RedisSink) -> None:
    """A stream whose name is taken is terminal and named; the sink stays usable."""
    with client_of(server) as client:
        client.set("taken", "x")
    with pytest.raises(SinkRejected, match="sink cache: stream 'taken'"):
        sink.send(batch([row(0), row(1, "taken"), row(2)]), allow)
    assert sink.send(batch([row(3, "free")]), allow) == 30


def test_a_replay_ends_nobody(server: RedisServer) -> None:
    """A live delivery's connection stays while somebody replays beside it."""
    live, replaying = (RedisSink("cache", server.uri, name="p:cache") for _ in range(2))
    live.open()
    live.send(numbered(1), allow)
    with client_of(server) as client:
        (before,) = [one["id"] for one in client.client_list() if one["name"] == "p:cache"]
        replaying.open()
        replaying.send(batch([row(1)], replay="run-7"), allow)
        live.send(numbered(1), allow)
        (after,) = [one["id"] for one in client.client_list() if one["name"] == "p:cache"]
    live.close()
    replaying.close()

    assert after == before


def test_the_field_that_sample_consumers_read(server: RedisServer) -> None:
    """`event` is the name of the message's field and its place the first; all else stays."""
    sink = RedisSink("cache", server.uri, event_field="event")
    sink.open()
    sink.send(batch([row(0, headers="{}")], replay="r"), allow)
    sink.close()

    with client_of(server) as client:
        ((_, fields),) = client.xrange("s")
    assert list(fields.items()) == [
        (b"event", b'{"n":0}'),
        (b"event_id", b"e0"),
        (b"idempotency_key", b"i0"),
        (b"df-key", b"k0"),
        (b"df-headers", b"{}"),
        (b"df-replay", b"r"),
    ]


@pytest.mark.parametrize("column", ["value", "key", "headers", "event_id"])
def test_a_message_that_the_server_will_never_take(start_redis: StartRedis, column: str) -> None:
    """What is above the server's limit is undeliverable, though the server just hangs up on it.

    All before it has arrived, and what comes after it can be sent.
    """
    server = start_redis({"proto-max-bulk-len": "1mb"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    rows = [row(n, "s0", value=str(n)) for n in range(5)]
    rows[3][column] = "x" * (2 << 20)
    with pytest.raises(Undeliverable, match="invalid bulk length") as caught:
        sink.send(batch(rows), allow)
    sink.send(batch(rows[4:]), allow)
    sink.close()

    assert (caught.value.ordinal, caught.value.cause) == (30, "too_large")
    assert numbers(server) == [0, 1, 2, 4]


def test_one_of_several_messages_is_too_large(start_redis: StartRedis) -> None:
    """Nothing arrives of a change that has a message too large, be it the last of them."""
    server = start_redis({"proto-max-bulk-len": "1mb"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    rows = [row(n, "s0", value=str(n)) for n in range(3)]
    rows[2] |= {"ordinal": 10, "value": "x" * (2 << 20)}
    with pytest.raises(Undeliverable) as caught:
        sink.send(batch(rows), allow)
    sink.close()

    assert caught.value.ordinal == 10
    assert numbers(server) == [0]


def test_entries_trimmed_by_somebody_else(server: RedisServer, sink: RedisSink) -> None:
    """A stream that its consumers trim goes on; the sink itself never trims."""
    sink.send(numbered(100), allow)
    with client_of(server) as client:
        client.xtrim("s0", maxlen=1, approximate=False)
        assert client.xlen("s0") == 1
    sink.send(numbered(100), allow)

    assert numbers(server) == [99, *range(100)]
