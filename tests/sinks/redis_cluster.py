"""A real Redis Cluster: servers in cluster mode, with slots, replicas and moving slots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.sinks.redis.cluster import slot_of
from deltaforge_lab.servers.redis import RedisServer

PASSWORD = "pw"
SLOTS = 16_384


class RedisCluster:
    """Masters that share the slots, and as many replicas; made by `start_cluster`."""

    def __init__(self, masters: Sequence[RedisServer], replicas: Sequence[RedisServer]) -> None:
        self.masters = masters
        self.replicas = replicas
        self._clients = {
            server: redis.Redis.from_url(server.uri, socket_timeout=None)
            for server in (*masters, *replicas)
        }
        self._ids = {server: self.command(server, "CLUSTER", "MYID").decode() for server in masters}

    @property
    def uri(self) -> str:
        """All masters, as a sink's URI has them."""
        hosts = ",".join(f"127.0.0.1:{port(server)}" for server in self.masters)
        return f"redis+cluster://:{PASSWORD}@{hosts}"

    def command(self, server: RedisServer, *command: str | int) -> Any:
        """Run a command on one node."""
        return self._clients[server].execute_command(*command)

    def form(self) -> None:
        """Let the servers become a cluster, and wait for it."""
        share = SLOTS // len(self.masters) + 1
        first = self.masters[0]
        for number, server in enumerate(self.masters):
            slots = range(number * share, min((number + 1) * share, SLOTS))
            self.command(server, "CLUSTER", "ADDSLOTS", *slots)
            self.command(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in (*self.masters[1:], *self.replicas):
            self.command(server, "CLUSTER", "MEET", "127.0.0.1", port(first))
        for server, master in zip(self.replicas, self.masters, strict=False):
            until(lambda: self._knows(server, master))  # noqa: B023
            self.command(server, "CLUSTER", "REPLICATE", self._ids[master])
            until(lambda: self._has_copied(server))  # noqa: B023 - or it could not take over
        for server in (*self.masters, *self.replicas):
            until(lambda: self._is_ready(server))  # noqa: B023

    def owner(self, stream: str) -> RedisServer:
        """Return the master that has a stream's slot now."""
        return next(server for server in self.masters if self._has(server, slot_of(stream)))

    def begin_move(self, stream: str) -> tuple[RedisServer, RedisServer]:
        """Begin to move a stream's slot to another master; return from where to where."""
        source = self.owner(stream)
        target = next(server for server in self.masters if server is not source)
        slot = slot_of(stream)
        self.command(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[source])
        self.command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[target])
        return source, target

    def end_move(self, stream: str, source: RedisServer, target: RedisServer) -> None:
        """Move what the slot still has, and the slot."""
        slot = slot_of(stream)
        for key in self.command(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.migrate(key.decode(), source, target)
        for server in (target, source):
            self.command(server, "CLUSTER", "SETSLOT", slot, "NODE", self._ids[target])

    def migrate(self, key: str, source: RedisServer, target: RedisServer) -> None:
        """Move one key."""
        place = ("127.0.0.1", port(target))
        self.command(source, "MIGRATE", *place, key, 0, 5000, "AUTH", PASSWORD)

    def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        """Return the fields of a stream's entries, wherever it is."""
        # Not by redis-py's client of clusters: it leaves connections open when slots have moved.
        found = self.command(self.owner(stream), "XRANGE", stream, "-", "+")
        return [fields for _, fields in found]

    def numbers(self, stream: str) -> list[int]:
        """Return the numbers of a stream's messages."""
        return [int(fields[b"df-event"]) for fields in self.entries(stream)]

    def close(self) -> None:
        """Stop all servers."""
        for client in self._clients.values():
            client.close()
        for server in (*self.masters, *self.replicas):
            server.close()

    def _has(self, server: RedisServer, slot: int) -> bool:
        for first, last, (_, owner, *_), *_ in self.command(server, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return bool(owner == port(server))
        return False

    def _knows(self, server: RedisServer, other: RedisServer) -> bool:
        nodes: bytes = self.command(server, "CLUSTER", "NODES")
        return self._ids[other] in nodes.decode()

    def _has_copied(self, replica: RedisServer) -> bool:
        return bool(self._clients[replica].info("replication")["master_link_status"] == "up")

    def _is_ready(self, server: RedisServer) -> bool:
        info: bytes = self.command(server, "CLUSTER", "INFO")
        known = len(self.masters) + len(self.replicas)
        return b"cluster_state:ok" in info and b"cluster_known_nodes:%d\r" % known in info


def port(server: RedisServer) -> int:
    """Return a server's port."""
    found = urlsplit(server.uri).port
    assert found is not None
    return found


def until(ready: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def start_cluster(
    masters: int = 3, replicas: int = 0, *, dead_after: float = 15
) -> Iterator[RedisCluster]:
    """Start a cluster, and end it.

    Args:
        masters: How many.
        replicas: How many, one for each master.
        dead_after: Seconds of silence after which the others take a node for dead: more than a slow
            machine lets it wait for a processor.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_node(dead_after)) for _ in range(masters + replicas)]
        cluster = RedisCluster(servers[:masters], servers[masters:])
        stack.callback(cluster.close)
        cluster.form()
        yield cluster


def start_node(dead_after: float) -> RedisServer:
    """Start a server in cluster mode; its bus needs port + 10000, which not every port leaves."""
    settings = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": f"{dead_after * 1000:.0f}",
        "cluster-require-full-coverage": "no",
        "requirepass": PASSWORD,
        "masterauth": PASSWORD,
        "appendonly": "no",
    }
    for _ in range(20):
        with contextlib.suppress(SettingsError):
            return RedisServer.start(settings=settings)
    pytest.fail("no port for a cluster")
