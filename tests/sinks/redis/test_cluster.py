"""The Redis sink on a real cluster: redirections, moving slots, a lost master, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SinkRejected, SinkUnavailable, Undeliverable
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.redis.cluster import common_tag, slot_of
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.testing.sinks import ORIGIN
from tests.sinks.messages import sent
from tests.sinks.redis_cluster import PASSWORD, RedisCluster, port, start_cluster, until
from tests.sinks.redis_messages import allow, batch, kernels, numbered, row

__all__ = ["kernels"]

pytestmark = pytest.mark.redis

STREAMS = 12
MakeSink = Callable[..., RedisSink]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters."""
    with start_cluster() as made:
        yield made


@pytest.fixture
def make_sink(cluster: RedisCluster) -> Iterator[MakeSink]:
    """Make an open sink of the cluster."""
    made: list[RedisSink] = []

    def make(uri: str | None = None, tag: str | None = None, **options: str | None) -> RedisSink:
        sink = RedisSink("cache", uri or cluster.uri, hash_tag=tag, **options)  # type: ignore[arg-type]
        made.append(sink)
        sink.open()
        return sink

    yield make
    for sink in made:
        sink.close()


@pytest.fixture(autouse=True)
def empty(cluster: RedisCluster) -> None:
    """Begin without streams."""
    for server in cluster.masters:
        cluster.command(server, "FLUSHALL")


def from_number(messages: SinkBatch, first: int) -> SinkBatch:
    """Return the rest of a batch."""
    return replace(messages, messages=messages.messages.slice(first))


@pytest.mark.parametrize(
    ("key", "tag"),
    [("123456789", None), ("{a}b", "a"), ("x{a}b{c}", "a"), ("{}a", None), ("{a", None)],
)
def test_slots_are_the_servers(cluster: RedisCluster, key: str, tag: str | None) -> None:
    """Every form of a key lies in the slot that the server says, a hash tag alone decides."""
    assert slot_of(key) == cluster.command(cluster.masters[0], "CLUSTER", "KEYSLOT", key)
    assert tag is None or slot_of(key) == slot_of(tag)


@pytest.mark.parametrize(
    ("stream", "tag"),
    [
        ("orders", "orders"),
        ("{shop}.${source.table}", "shop"),
        ("a{shop}b", "shop"),
        ("cdc.${source.table}", None),
        ("${source.table}.{shop}", None),
        ("cdc.{${source.table}}", None),
        ("a}b", None),
    ],
)
def test_the_hash_tag_of_a_template(stream: str, tag: str | None) -> None:
    """Only a tag before every variable is the same for all streams."""
    found = common_tag(compile_template(stream))
    assert found == tag
    if tag is not None:
        assert slot_of(f"deltaforge:position:p:s:{{{tag}}}") == slot_of(stream)


def test_every_stream_in_order(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """Streams on all nodes get their messages in order, whichever node the URI names."""
    messages = numbered(9_000, streams=STREAMS)
    sink = make_sink(f"redis://:{PASSWORD}@127.0.0.1:{port(cluster.masters[1])}")

    assert sink.send(messages, allow) == 89_990
    assert sink.send(batch([row(1, "more")]), allow) == 10

    assert len({cluster.owner(f"s{n}") for n in range(STREAMS)}) == 3
    for n in range(STREAMS):
        assert cluster.numbers(f"s{n}") == list(range(n, 9_000, STREAMS))
    (fields,) = cluster.entries("more")
    assert fields[b"df-event"] == b'{"n":1}'


def test_writes_that_are_only_looked_at(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """Each node looks at its own streams, and at the position; nothing is there, and sending works."""
    sink = make_sink(tag="shop", position_key="deltaforge:position:p:cache")

    sink.rehearse(["{shop}.1", "orders", "customers", "items"])

    assert [cluster.command(server, "DBSIZE") for server in cluster.masters] == [0, 0, 0]
    sink.send(replace(batch([row(0, "{shop}.1", value="0")]), origin=ORIGIN), allow)
    assert cluster.numbers("{shop}.1") == [0]


def test_a_slot_that_moved(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """MOVED is followed: a sink that knows the old node goes on at the new one, nothing twice."""
    sink = make_sink()
    sink.send(numbered(50), allow)
    source, target = cluster.begin_move("s0")
    cluster.end_move("s0", source, target)

    sink.send(from_number(numbered(100), 50), allow)

    assert cluster.owner("s0") is target
    assert cluster.numbers("s0") == list(range(100))


def test_a_slot_on_its_way(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """ASK is followed for a stream that has moved, or is new, and not for one that has not."""
    old, new, moved = "{t}old", "{t}new", "{t}moved"
    sink = make_sink()
    sink.send(batch([row(0, old, value="0"), row(1, moved, value="1")]), allow)
    source, target = cluster.begin_move(old)
    cluster.migrate(moved, source, target)
    for number, stream in enumerate((old, moved, new), 2):
        sink.send(batch([row(number, stream, value=str(number))]), allow)
    assert cluster.command(source, "EXISTS", old) == 1
    cluster.end_move(old, source, target)

    assert [cluster.numbers(stream) for stream in (old, moved, new)] == [[0, 2], [1, 3], [4]]


def test_streams_divided_by_a_move(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """A transaction over streams on both sides of a move waits for its end, and loses nothing."""
    sink = make_sink()
    sink.send(batch([row(0, "{t}a", value="0"), row(1, "{t}b", value="1")]), allow)
    source, target = cluster.begin_move("{t}a")
    cluster.migrate("{t}b", source, target)
    both = batch([row(2, "{t}a", value="2"), row(3, "{t}b", value="3")])
    with pytest.raises(SinkUnavailable, match=r"TRYAGAIN|ASK"):
        sink.send(both, allow)
    cluster.end_move("{t}a", source, target)
    sink.send(both, allow)

    assert [cluster.numbers(f"{{t}}{n}") for n in "ab"] == [[0, 2], [1, 3]]


def test_exactly_once_in_one_slot(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """The position lies beside the streams, is kept over a move, and tells what has arrived."""
    options = {"tag": "shop", "position_key": "deltaforge:position:p:cache"}
    sink = make_sink(**options)
    assert sink.position() is None
    messages = [row(n, f"{{shop}}.{n % 3}", value=str(n)) for n in range(2_000)]
    whole = replace(batch(messages), origin=ORIGIN)
    first = replace(whole, messages=whole.messages.slice(0, 1_200))
    sink.send(first, allow)
    source, target = cluster.begin_move("{shop}")
    cluster.end_move("{shop}", source, target)
    sink.send(from_number(whole, 1_200), allow)

    assert make_sink(**options).position() == whole.position_at(1_999)
    assert cluster.command(target, "EXISTS", "deltaforge:position:p:cache:{shop}") == 1
    for n in range(3):
        assert cluster.numbers(f"{{shop}}.{n}") == list(range(n, 2_000, 3))


def test_exactly_once_needs_one_slot(make_sink: MakeSink) -> None:
    """Streams in many slots are refused at the start, with a name that would do."""
    with pytest.raises(SinkRejected, match=r"\{shop\}\.\$\{source\.table\}"):
        make_sink(position_key="deltaforge:position:p:cache")


def test_a_stream_in_another_slot(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """Exactly once, a message routed out of the slot is undeliverable; all before it has arrived."""
    sink = make_sink(tag="shop", position_key="deltaforge:position:p:cache")
    rows = [row(n, "{shop}", value=str(n)) for n in range(5)]
    rows[3]["destination"] = "elsewhere"
    whole = replace(batch(rows), origin=ORIGIN)
    with pytest.raises(Undeliverable, match=r"lacks \{shop\}") as caught:
        sink.send(whole, allow)

    assert (caught.value.ordinal, caught.value.cause) == (30, "routing")
    assert cluster.numbers("{shop}") == [0, 1, 2]
    assert sink.position() == whole.position_at(2)


def test_too_large_for_one_of_many_slots(cluster: RedisCluster, make_sink: MakeSink) -> None:
    """Everything before the message that is too large has arrived, in every slot."""
    owner = cluster.owner("s1")
    cluster.command(owner, "CONFIG", "SET", "proto-max-bulk-len", 1 << 20)
    rows = [row(n, f"s{n % STREAMS}", value=str(n)) for n in range(60)]
    rows[37]["value"] = "x" * (2 << 20)
    sink = make_sink()
    with pytest.raises(Undeliverable) as caught:
        sink.send(batch(rows), allow)
    cluster.command(owner, "CONFIG", "SET", "proto-max-bulk-len", 512 << 20)

    assert (caught.value.ordinal, caught.value.cause) == (370, "too_large")
    for n in range(STREAMS):
        assert [m for m in cluster.numbers(f"s{n}") if m < 37] == list(range(n, 37, STREAMS))


def test_a_lost_master(make_sink: MakeSink) -> None:
    """A master's death is a wait, and its replica goes on; also for a sink whose first node died."""
    with start_cluster(3, 3, dead_after=3) as cluster:
        sink = RedisSink("cache", cluster.uri)
        sent(sink, numbered(600, streams=STREAMS))
        owner = cluster.owner("s0")
        (replica,) = (
            replica
            for master, replica in zip(cluster.masters, cluster.replicas, strict=True)
            if master is owner
        )
        owner.stop(immediate=True)

        def gone_on() -> bool:
            try:
                sink.send(batch([row(600, "s0", value="600")]), allow)
            except SinkUnavailable:
                return False
            return True

        until(gone_on)
        sink.close()
        again = RedisSink("cache", cluster.uri)
        sent(again, batch([row(601, "s0", value="601")]))
        again.close()
        entries = cluster.command(replica, "XRANGE", "s0", "-", "+")

    numbers = [int(fields[b"df-event"]) for _, fields in entries]
    assert numbers[-2:] == [600, 601]
