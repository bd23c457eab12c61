"""The Redis sink while its server fails, hangs or forgets: nothing arrives after a gap."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltaforge_dagster.errors import (
    SinkUnavailable,
)
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.redis import resp
from deltaforge_dagster.sinks.redis.sink import RedisSink
from tests.fix_redis import StartRedis
from tests.sinks.messages import closed_during
from tests.sinks.redis_cluster import until
from tests.sinks.redis_messages import (
    Crash,
    allow,
    batch,
    client_of,
    cut_connections,
    kernels,
    numbered,
    numbers,
    row,
)

__all__ = ["kernels"]

pytestmark = pytest.mark.redis


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


def test_no_room_for_a_dump(start_redis: StartRedis, tmp_path: Path) -> None:
    """MISCONF: while the server cannot save, nothing arrives; once it can, everything does."""
    folder = tmp_path / "data"
    folder.mkdir()
    server = start_redis({"appendonly": "no", "dir": str(folder)})
    sink = RedisSink("cache", server.uri)
    sink.open()
    sink.send(numbered(10), allow)
    with client_of(server) as client:
        client.config_set("save", "3600 1000000")
        folder.rmdir()
        client.bgsave()
        until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        with pytest.raises(SinkUnavailable, match="MISCONF"):
            sink.send(numbered(20), allow)
        client.config_set("stop-writes-on-bgsave-error", "no")
        client.config_set("save", "")  # or it would not end
    sink.send(numbered(20), allow)
    sink.close()

    assert numbers(server) == [*range(10), *range(20)]


def test_a_server_killed_amid_a_batch(start_redis: StartRedis) -> None:
    """After a crash and a restart the batch goes on: nothing lost, copies only, keys in order."""
    server = start_redis({"appendfsync": "always"})
    sink = RedisSink("cache", server.uri)
    sink.open()
    messages = numbered(60_000)
    crash = Crash(server)
    errors = []

    for _ in range(5):
        try:
            sink.send(messages, crash.guard)
            break
        except SinkUnavailable as error:
            errors.append(error)
            crash.over()
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
    cutter = threading.Thread(target=cut_connections, args=(server, 3, cuts))
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
    sink = RedisSink(
        "cache", f"redis://user:pw@{server.uri.rpartition('@')[2]}", SinkTimeouts(send=2)
    )
    sink.open()
    server.pause()
    started = time.monotonic()
    attempts: list[None] = []
    with pytest.raises(SinkUnavailable, match="send_timeout_secs"):
        sink.send(numbered(20), lambda: attempts.append(None))
    assert (len(attempts), 1.9 < time.monotonic() - started < 30) == (1, True)
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
    sink = RedisSink("cache", server.uri, SinkTimeouts(send=30, batch=0.3))
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
    sink = RedisSink("cache", server.uri, SinkTimeouts(send=60, batch=60))
    sink.open()
    server.pause()
    messages = batch([row(0, value="x" * size)])
    closed_during(sink, lambda: sink.send(messages, allow))
    server.resume()


STALLED = """
import sys, time
from deltaforge_dagster.errors import LeaseLost
from deltaforge_dagster.sinks.connections import SinkTimeouts
from deltaforge_dagster.sinks.redis.sink import RedisSink
from tests.sinks.redis.test_sink import batch, row
sink = RedisSink("cache", sys.argv[1], SinkTimeouts(send=60, batch=60), name="p:cache")
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
        cwd=Path(__file__).parents[3],
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
