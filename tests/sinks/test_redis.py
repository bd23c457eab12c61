"""The Redis sink against real servers: what arrives, what does not, and in which order."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
import redis.sentinel

from deltaforge_dagster.errors import (
    AuthFailed,
    LeaseLost,
    PermissionMissing,
    PositionMoved,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
    SpecError,
)
from deltaforge_dagster.servers.process import ServerProcess, free_port
from deltaforge_dagster.servers.redis import RedisServer
from deltaforge_dagster.sinks import redis as redis_sink
from deltaforge_dagster.sinks import resp
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from deltaforge_dagster.sinks.redis import RedisSink
from tests.fix_redis import StartRedis
from tests.sinks.messages import ORIGIN

pytestmark = pytest.mark.redis

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
    return redis.Redis.from_url(server.uri)


def numbers(server: RedisServer, stream: str = "s0") -> list[int]:
    """Return the numbers of the messages in a stream, in its order."""
    with client_of(server) as client:
        return [int(fields[b"df-event"]) for _, fields in client.xrange(stream)]


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

    arrived = numbers(server)
    first_two = list(resp.pack_blocks(numbered(10_000).messages))[1].stop
    assert arrived == list(range(first_two))
    sink.send(batch([row(1, "after")]), allow)


def test_position_and_reopening(server: RedisServer, sink: RedisSink) -> None:
    """The sink keeps no position, closes twice, refuses while closed, and opens again."""
    assert sink.position() is None
    sink.close()
    sink.close()
    with pytest.raises(SinkUnavailable, match="sink cache: closed"):
        sink.send(batch([row(0)]), allow)
    sink.open()
    assert sink.send(batch([row(1)]), allow) == 10


def test_wrong_password(server: RedisServer) -> None:
    """A wrong or missing password is terminal at open, and never in the message."""
    host = server.uri.rpartition("@")[2]
    for user in (":open-sesame@", "", "someone:open-sesame@"):
        with pytest.raises(AuthFailed) as caught:
            RedisSink("cache", f"redis://{user}{host}").open()
        assert "sink cache" in str(caught.value)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http://secret@host",
        "redis://:sec/ret@host:6379/0",
        "redis://host/0?socket_timeout=secret",
        "redis://host/0?secret=1",
        "redis+sentinel://host:secret/service",
        "redis+sentinel://host",
        "",
    ],
)
def test_uris_that_are_none(uri: str) -> None:
    """A URI that cannot be read is a mistake in the file; the message does not repeat it."""
    with pytest.raises(SpecError, match="sink cache: uri is not a Redis URI") as caught:
        RedisSink("cache", uri)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_nobody_listens(server: RedisServer) -> None:
    """An unreachable server is retryable, named by its address."""
    with pytest.raises(SinkUnavailable, match=r"sink cache: redis at 127\.0\.0\.1:1: "):
        RedisSink("cache", "redis://:secret@127.0.0.1:1/0").open()


def test_a_database_that_does_not_exist(server: RedisServer) -> None:
    """The server's own words say what is wrong with the database."""
    with pytest.raises(SinkRejected, match="DB index is out of range"):
        RedisSink("cache", server.uri.removesuffix("/0") + "/999").open()


def test_missing_permissions(start_redis: StartRedis) -> None:
    """A user who may not use transactions, a command or a stream gets the grant in the message."""
    server = start_redis()
    host = server.uri.rpartition("@")[2]
    with client_of(server) as client:
        acl = ["on", ">pw", "~s*", "+@connection", "-client"]
        client.execute_command("ACL", "SETUSER", "weak", *acl)
        uri = f"redis://weak:pw@{host}"
        sink = RedisSink("cache", uri)
        with pytest.raises(PermissionMissing, match=r"\+multi"):
            sink.open()
        client.execute_command("ACL", "SETUSER", "weak", "+multi", "+exec")
        sink.open()
        with pytest.raises(PermissionMissing, match=r"\+xadd"):
            sink.send(batch([row(0)]), allow)
        client.execute_command("ACL", "SETUSER", "weak", "+xadd")
        with pytest.raises(PermissionMissing, match="~other"):
            sink.send(batch([row(0), row(1, "other")]), allow)
        assert client.exists("s") == 0
        assert sink.send(batch([row(0)]), allow) == 0
        sink.close()


def test_a_key_of_another_type(server: RedisServer, sink: RedisSink) -> None:
    """A stream whose name is taken is terminal and named; the sink stays usable."""
    with client_of(server) as client:
        client.set("taken", "x")
    with pytest.raises(SinkRejected, match="sink cache: stream 'taken'"):
        sink.send(batch([row(0), row(1, "taken"), row(2)]), allow)
    assert sink.send(batch([row(3, "free")]), allow) == 30


def test_a_cluster_is_refused() -> None:
    """A Redis Cluster is refused at open, with the reason."""
    with start_cluster() as server, pytest.raises(SinkRejected, match="Redis Cluster"):
        RedisSink("cache", server.uri).open()


def start_cluster() -> RedisServer:
    """Start a cluster of one; its bus needs port + 10000, which not every free port leaves."""
    for _ in range(20):
        with contextlib.suppress(SettingsError):
            return RedisServer.start(settings={"cluster-enabled": "yes"})
    pytest.fail("no port for a cluster")


def test_a_replica_is_unavailable(start_redis: StartRedis) -> None:
    """A replica is retryable: it may become the master."""
    server = start_redis()
    with client_of(server) as client:
        client.replicaof("127.0.0.1", "1")
    with pytest.raises(SinkUnavailable, match="replica"):
        RedisSink("cache", server.uri).open()


def test_read_only_in_between(start_redis: StartRedis) -> None:
    """A master that becomes a replica refuses the whole block, and takes it once it is one again."""
    server = start_redis()
    sink = RedisSink("cache", server.uri)
    sink.open()
    with client_of(server) as client:
        client.replicaof("127.0.0.1", "1")
        with pytest.raises(SinkUnavailable, match="READONLY"):
            sink.send(numbered(10), allow)
        client.replicaof("NO", "ONE")
        sink.send(numbered(10), allow)
    sink.close()

    assert numbers(server) == list(range(10))


def test_out_of_memory_aborts_the_block(start_redis: StartRedis) -> None:
    """A full server takes whole blocks or nothing of them, and the rest once there is room."""
    server = start_redis({"maxmemory": "16mb", "maxmemory-policy": "noeviction"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    messages = numbered(40_000, size=600)
    with pytest.raises(SinkUnavailable, match="OOM"):
        sink.send(messages, allow)
    arrived = numbers(server)
    stops = [block.stop for block in resp.pack_blocks(messages.messages)]
    assert arrived == list(range(len(arrived)))
    assert len(arrived) in stops[:-1]

    with client_of(server) as client:
        client.config_set("maxmemory", 0)
    rest = messages.messages.slice(len(arrived))
    sink.send(SinkBatch(1, "segment", rest), allow)
    sink.close()

    assert numbers(server) == list(range(40_000))


def test_out_of_memory_for_a_moment(start_redis: StartRedis) -> None:
    """A refusal that passes within the sink's own attempts leaves no gap and no copy."""
    server = start_redis({"maxmemory": "16mb", "maxmemory-policy": "noeviction"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    guards: list[float] = []

    def guard() -> None:
        """Make room when a block is tried for the second time."""
        guards.append(time.monotonic())
        if len(guards) > 1 and guards[-1] - guards[-2] > 0.1:
            with client_of(server) as client:
                client.config_set("maxmemory", 0)

    sink.send(numbered(40_000, size=600), guard)
    sink.close()

    assert numbers(server) == list(range(40_000))


def test_a_server_killed_amid_a_batch(start_redis: StartRedis) -> None:
    """After a crash and a restart the batch goes on: nothing lost, copies only, keys in order."""
    server = start_redis({"appendfsync": "always"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    messages = numbered(60_000)
    crash = threading.Timer(0.02, lambda: server.stop(immediate=True))
    guards: list[None] = []
    errors = []

    def guard() -> None:
        """Have the server killed a moment later, once the first two blocks have arrived."""
        guards.append(None)
        if len(guards) == 3:
            crash.start()

    for _ in range(5):
        try:
            sink.send(messages, guard)
            break
        except SinkUnavailable as error:
            errors.append(error)
            crash.join()
            server.restart()
            sink.open()
    sink.close()

    assert errors
    arrived = numbers(server)
    first_try = len(arrived) - 60_000
    assert 0 < first_try < 60_000
    assert arrived == [*range(first_try), *range(60_000)]


def test_a_connection_cut_amid_a_batch(start_redis: StartRedis) -> None:
    """The sink reconnects by itself; only the block in flight may come twice, in a row."""
    server = start_redis()
    sink = RedisSink("cache", server.uri)
    sink.open()
    messages = numbered(60_000)
    cuts: list[int] = []
    sent: list[int] = []

    def cut() -> None:
        with client_of(server) as client:
            for _ in range(3):
                time.sleep(0.25)
                cuts.append(client.client_kill_filter(_type="normal", skipme=True))

    cutter = threading.Thread(target=cut)
    cutter.start()
    while cutter.is_alive():
        sink.send(messages, allow)
        sent.append(messages.messages.num_rows)
    cutter.join()
    sink.close()

    assert sum(cuts) >= 3
    arrived = iter(numbers(server))
    block = next(resp.pack_blocks(messages.messages)).rows
    for _ in sent:
        expected = 0
        while expected < messages.messages.num_rows:
            number = next(arrived)
            assert expected - block <= number <= expected
            expected = number + 1
    assert next(arrived, None) is None


@pytest.mark.parametrize("permitted", [True, False])
def test_a_paused_server(start_redis: StartRedis, permitted: bool) -> None:
    """A server that hangs is a timeout; what it had got already never comes after what is newer."""
    server = start_redis()
    with client_of(server) as client:
        client.acl_setuser("user", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all"])
        if not permitted:
            client.execute_command("ACL", "SETUSER", "user", "-client", "-info")
    sink = RedisSink("cache", f"redis://user:pw@{server.uri.rpartition('@')[2]}", send_timeout=2)
    sink.open()
    server.pause()
    started = time.monotonic()
    with pytest.raises(SinkUnavailable, match="send_timeout_secs"):
        sink.send(numbered(20), allow)
    assert 1.9 < time.monotonic() - started < 5.9  # three attempts would take longer
    with pytest.raises(SinkUnavailable):
        sink.open()
    server.resume()
    sink.open()
    sink.send(numbered(40), allow)
    sink.close()

    arrived = numbers(server)
    assert arrived in ([*range(40)], [*range(20), *range(40)])


def test_a_batch_that_takes_too_long(start_redis: StartRedis) -> None:
    """The time for a block counts also while the server goes on to take bytes."""
    server = start_redis()
    sink = RedisSink("cache", server.uri, send_timeout=30, batch_timeout=0.3)
    sink.open()
    server.pause()
    with pytest.raises(SinkUnavailable, match="batch_timeout_secs"):
        sink.send(numbered(20), allow)
    server.resume()
    sink.close()


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_close_ends_a_blocked_send(start_redis: StartRedis, size: int) -> None:
    """Closing from another thread ends a send at once that waits for an answer, or for room."""
    server = start_redis()
    sink = RedisSink("cache", server.uri, send_timeout=60, batch_timeout=60)
    sink.open()
    server.pause()
    errors: list[Exception] = []

    def send() -> None:
        try:
            sink.send(batch([row(0, value="x" * size)]), allow)
        except SinkUnavailable as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.3)
    started = time.monotonic()
    sink.close()
    sender.join(5)
    assert time.monotonic() - started < 5
    assert len(errors) == 1
    server.resume()
    assert not sender.is_alive()


STALLED = """
import sys, time
from deltaforge_dagster.errors import LeaseLost
from deltaforge_dagster.sinks.redis import RedisSink
from tests.sinks.test_redis import batch, row
sink = RedisSink("cache", sys.argv[1], send_timeout=60, batch_timeout=60, name="p:cache")
sink.open()
sink.send(batch([row(0, "s0", value="0")]), lambda: None)
print("open", flush=True)
sys.stdin.readline()
deadline = time.monotonic() + 1
def guard():
    if time.monotonic() > deadline:
        raise LeaseLost("gone")
print("sending", flush=True)
try:
    sink.send(batch([row(1, "s0", value="1" * 50_000_000)]), guard)
except LeaseLost:
    print("lost", flush=True)
"""


def test_a_sender_stalled_amid_a_block_never_finishes_it(start_redis: StartRedis) -> None:
    """A process stopped amid a block, for longer than its lease, sends nothing of it afterwards."""
    server = start_redis()
    stalled = subprocess.Popen(
        [sys.executable, "-c", STALLED, server.uri],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stalled.stdin
    assert stalled.stdout
    assert stalled.stdout.readline() == "open\n"
    server.pause()  # so that the block gets stuck on its way
    stalled.stdin.write("go\n")
    stalled.stdin.flush()
    assert stalled.stdout.readline() == "sending\n"
    time.sleep(1.5)
    stalled.send_signal(signal.SIGSTOP)
    server.resume()
    successor = RedisSink("cache", server.uri, name="p:cache")
    successor.open()
    successor.send(batch([row(2, "s0", value="2")]), allow)
    stalled.send_signal(signal.SIGCONT)
    output, _ = stalled.communicate(timeout=60)
    successor.send(batch([row(3, "s0", value="3")]), allow)
    successor.close()

    assert output == "lost\n"
    assert numbers(server) == [0, 2, 3]


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


def test_close_ends_the_attempts(start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing from another thread ends the waits between attempts."""
    monkeypatch.setattr(redis_sink, "_CONNECT_WAITS", (60,))
    server = start_redis()
    server.stop()
    sink = RedisSink("cache", server.uri)
    closer = threading.Timer(0.05, sink.close)
    closer.start()
    started = time.monotonic()
    with pytest.raises(SinkUnavailable):
        sink.open()
    assert time.monotonic() - started < 30
    closer.join()


def test_attempts_to_connect_wait_for_a_restart(
    start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that comes up between two attempts is not an error."""
    monkeypatch.setattr(redis_sink, "_CONNECT_WAITS", (0.2,) * 100)
    server = start_redis()
    server.stop()
    restart = threading.Timer(0.3, server.restart)
    restart.start()
    sink = RedisSink("cache", server.uri)
    sink.open()
    restart.join()
    assert sink.send(batch([row(0)]), allow) == 0
    sink.close()


def test_a_message_that_the_server_will_never_take(start_redis: StartRedis) -> None:
    """A value above the server's limit is terminal, though the server just hangs up on it."""
    server = start_redis({"proto-max-bulk-len": "1mb"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    with pytest.raises(SinkRejected, match="invalid bulk length"):
        sink.send(batch([row(0, value="x" * (2 << 20))]), allow)
    sink.close()


def test_sentinel_names_the_master(start_redis: StartRedis, tmp_path: Path) -> None:
    """With a Sentinel URI the sink asks each time where the master is."""
    server = start_redis()
    host, _, port = server.uri.rpartition("@")[2].removesuffix("/0").partition(":")
    password = server.uri.removeprefix("redis://:").partition("@")[0]
    sentinel_port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {sentinel_port}\nbind 127.0.0.1\n"
        f"sentinel monitor orders {host} {port} 1\nsentinel auth-pass orders {password}\n"
    )
    program = Path(f"/proc/{server.pid}/exe").resolve()
    process = ServerProcess(
        "sentinel", [str(program), str(config), "--sentinel"], directory=tmp_path
    )
    try:
        process.wait_until(lambda: sentinel_knows(sentinel_port, "orders"), 30)
        uri = f"redis+sentinel://:{password}@127.0.0.1:1,127.0.0.1:{sentinel_port}/orders/0"
        sink = RedisSink("cache", uri)
        sink.open()
        sink.send(numbered(3), allow)
        sink.close()
        with pytest.raises(SinkUnavailable, match="No master found for 'unknown'"):
            RedisSink("cache", uri.replace("/orders/", "/unknown/")).open()
    finally:
        process.stop(signal.SIGTERM, 5)

    assert numbers(server) == [0, 1, 2]


def sentinel_knows(port: int, service: str) -> bool:
    """Say whether a Sentinel answers and believes its master to be there."""
    try:
        redis.sentinel.Sentinel([("127.0.0.1", port)]).discover_master(service)
    except redis.ConnectionError:
        return False
    return True


def test_unix_socket(start_redis: StartRedis, tmp_path: Path) -> None:
    """A server on a Unix socket is reached by `unix://`."""
    path = tmp_path / "r.sock"
    server = start_redis({"unixsocket": str(path)})
    password = server.uri.removeprefix("redis://:").partition("@")[0]
    sink = RedisSink("cache", f"unix://:{password}@{path}?db=0")
    sink.open()
    sink.send(numbered(3), allow)
    sink.close()

    assert numbers(server) == [0, 1, 2]


def test_tls(server: RedisServer, tmp_path: Path) -> None:
    """Over `rediss://` the same bytes arrive, and a certificate nobody signed is refused."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    subprocess.run(
        [*command.split(), "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    password, _, address = server.uri.removeprefix("redis://:").partition("@")
    with tls_proxy(tmp_path, int(address.partition(":")[2].partition("/")[0])) as port:
        uri = f"rediss://:{password}@127.0.0.1:{port}/0"
        sink = RedisSink("cache", f"{uri}?ssl_ca_certs={tmp_path / 'cert.pem'}")
        sink.open()
        sink.send(numbered(5_000), allow)
        sink.close()
        with pytest.raises(SinkUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            RedisSink("cache", uri).open()

    assert numbers(server) == list(range(5_000))


@contextlib.contextmanager
def tls_proxy(directory: Path, target: int) -> Iterator[int]:
    """Take TLS connections and pass their bytes on to a local port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")

    class Pump(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as client,
                socket.create_connection(("127.0.0.1", target)) as redis_side,
            ):
                client.setblocking(False)
                while True:
                    select.select([client, redis_side], [], [])
                    with contextlib.suppress(ssl.SSLWantReadError):
                        while data := client.recv(1 << 16):
                            redis_side.sendall(data)
                        return
                    if select.select([redis_side], [], [], 0)[0]:
                        client.setblocking(True)
                        client.sendall(redis_side.recv(1 << 16))
                        client.setblocking(False)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Pump) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield proxy.server_address[1]
        proxy.shutdown()
        thread.join()


# Exactly once: what is particular to Redis; the rest is in the contracts of all sinks.

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
    assert json.loads(held) == {
        "uid": "uid-1",
        "lineage": "lineage-1",
        "segment": 1,
        "segment_id": "segment",
        "ordinal": 20,
        "event_id": "e2",
        "start": ORIGIN.start,
        "end": ORIGIN.end,
        "source": "orders-db",
    }
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

    def cut() -> None:
        with client_of(server) as client:
            for _ in range(5):
                time.sleep(0.25)
                cuts.append(client.client_kill_filter(_type="normal", skipme=True))

    cutter = threading.Thread(target=cut)
    cutter.start()
    sent = 0
    while cutter.is_alive():
        rest = replace(whole, origin=replace(ORIGIN, lineage=f"l{sent}"))
        try:
            sink.send(rest, allow)
        except SinkUnavailable:  # a slow machine: cut in each of its attempts
            sink.close()
            sink.open()
            position = sink.position()
            if position is not None and position.lineage == f"l{sent}":
                sink.send(after(rest, sink), allow)
            else:
                sink.send(rest, allow)
        sent += 1
    cutter.join()
    sink.close()

    assert sum(cuts) >= 3
    assert numbers(server) == list(range(60_000)) * sent


def test_a_crash_amid_a_batch_repeats_nothing(start_redis: StartRedis) -> None:
    """After a crash and a restart delivery goes on after the position, whatever was in flight."""
    server = start_redis({"appendfsync": "always"})
    sink = exactly_once(server)
    whole = replace(numbered(60_000), origin=ORIGIN)
    crash = threading.Timer(0.02, lambda: server.stop(immediate=True))
    guards: list[None] = []
    errors = []

    def guard() -> None:
        """Have the server killed a moment later, once the first two blocks have arrived."""
        guards.append(None)
        if len(guards) == 3:
            crash.start()

    for _ in range(5):
        try:
            sink.send(after(whole, sink), guard)
            break
        except SinkUnavailable as error:
            errors.append(error)
            crash.join()
            server.restart()
            sink.open()
    sink.close()

    assert errors
    assert numbers(server) == list(range(60_000))


def test_a_paused_server_repeats_nothing(start_redis: StartRedis) -> None:
    """What a hanging server had got already is in the position once it answers again."""
    server = start_redis()
    sink = exactly_once(server, send_timeout=1)
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
